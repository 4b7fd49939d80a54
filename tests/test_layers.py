"""Imports go one way: cache, context, attention, processors, graphs, pipelines; each knows only those before it."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import diffusers_ardiff

ROOT = Path(diffusers_ardiff.__file__).parent
LAYERS = [
    "cache",
    "masks",
    "launch",
    "layer_inputs",
    "context",
    "merged",
    "attention",
    "parallel",
    "processors",
    "graphs",
    "pipelines",
]
INTEGERS_ONLY = [
    "cache/layout.py",
    "cache/ring.py",
    "cache/merged.py",
    "cache/allocator.py",
    "cache/plan.py",
    "validation.py",
]


def runtime_imports(path: Path) -> set[str]:
    """Full names of all modules that a file imports, ``TYPE_CHECKING`` blocks included, relative ones resolved."""
    package = ["diffusers_ardiff", *path.relative_to(ROOT).parent.parts]
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            module = [*base, *([node.module] if node.module else [])]
            names |= {".".join([*module, alias.name]) for alias in node.names}
    return names


def layer_of(name: str) -> str | None:
    parts = name.split(".")
    return parts[1] if parts[0] == "diffusers_ardiff" and len(parts) > 1 and parts[1] in LAYERS else None


def files_of(layer: str) -> list[Path]:
    return sorted((ROOT / layer).rglob("*.py")) or [ROOT / f"{layer}.py"]


def module_of(path: Path) -> str:
    return ".".join(["diffusers_ardiff", *path.relative_to(ROOT).with_suffix("").parts])


def test_no_files_import_each_other_in_a_circle() -> None:
    """Nineteen files of pipelines named the pipeline's class for their annotations, which imports all of them."""
    paths = [path for path in ROOT.rglob("*.py") if path.name not in ("__init__.py", "__main__.py")]
    modules = {module_of(path): path for path in paths}
    graph = {
        module: {
            target for name in runtime_imports(path) for target in (name, name.rpartition(".")[0]) if target in modules
        }
        for module, path in modules.items()
    }
    assert len(list(TopologicalSorter(graph).static_order())) == len(modules)  # CycleError names the circle


@pytest.mark.parametrize("layer", LAYERS)
def test_imports_go_one_way(layer: str) -> None:
    above = set(LAYERS[: LAYERS.index(layer) + 1])
    for path in files_of(layer):
        for name in runtime_imports(path):
            assert layer_of(name) in {None, *above}, f"{path.relative_to(ROOT)} imports {name}"


@pytest.mark.parametrize("name", INTEGERS_ONLY)
def test_policy_has_no_tensors(name: str) -> None:
    roots = {imported.split(".")[0] for imported in runtime_imports(ROOT / name)}
    assert not roots & {"torch", "numpy", "diffusers"}


@pytest.mark.parametrize("name", INTEGERS_ONLY)
def test_policy_imports_only_policy(name: str) -> None:
    """A module without tensors that imports one with tensors has them too."""
    own = {n.rsplit(".", 1)[0] for n in runtime_imports(ROOT / name) if n.startswith("diffusers_ardiff.")}
    allowed = {"diffusers_ardiff." + n.removesuffix(".py").replace("/", ".") for n in INTEGERS_ONLY}
    assert own <= allowed


@pytest.mark.parametrize(
    "layer", ["cache", "launch", "layer_inputs", "context", "merged", "attention", "parallel", "graphs"]
)
def test_core_does_not_know_the_host_library(layer: str) -> None:
    for path in files_of(layer):
        roots = {imported.split(".")[0] for imported in runtime_imports(path)}
        assert not roots & {"diffusers", "transformers", "accelerate"}, path


@pytest.mark.parametrize("layer", ["cache", "launch", "layer_inputs", "context", "merged"])
def test_storage_and_contexts_know_no_kernels(layer: str) -> None:
    for path in files_of(layer):
        assert not any(n.startswith(("torch.nn", "triton", "flash_attn")) for n in runtime_imports(path)), path


def test_the_walker_sees_relative_imports() -> None:
    """The rules above would hold for ever if names were resolved wrongly."""
    names = runtime_imports(ROOT / "attention" / "backends" / "sdpa.py")
    assert {"diffusers_ardiff.context.LaunchPlan", "diffusers_ardiff.attention.keys.dense_view"} <= names
    assert layer_of("diffusers_ardiff.attention.keys.dense_view") == "attention"
    assert "diffusers_ardiff.cache.layout.RingGeometry" in runtime_imports(ROOT / "cache" / "plan.py")
