"""Every family of published checkpoints: loads, has its recipe, survives a conversion, and agrees with the oracles."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLWan, WanPipeline, WanTransformer3DModel
from published_layouts import LORA_RANK, make_lora, rename_class, write_file, write_lora
from safetensors.torch import load_file, save_file
from test_checkpoints import to_original
from test_oracle_rollout import FILES, MAX_RELATIVE_ERROR, oracle_recipe, read_oracle, run_oracle
from tiny_components import QUICK, latents_of, make_components, make_transformer

from diffusers_ardiff import ARDiffusionPipeline, load_ar_checkpoint
from diffusers_ardiff.checkpoints import FAMILIES, CheckpointFamily, ar_lora_state_dict, infer_transformer_config
from diffusers_ardiff.checkpoints.lora import read_lora
from diffusers_ardiff.conversion import ConvertOptions, convert_checkpoint
from diffusers_ardiff.recipes import list_recipes

BY_NAME = {family.name: family for family in FAMILIES}
FILE_FAMILIES = [family for family in FAMILIES if family.suffix and not family.refused]
FOLDERS = [family for family in FAMILIES if not family.suffix]
ORACLE_FILES = {path.stem: path for path in FILES}
DOCS = Path(__file__).parents[1] / "docs" / "checkpoints.md"
AWAITED = {"krea", "rolling-forcing"}
WITH_ORACLE = [(f, name) for f in FAMILIES for name in f.oracle if name in ORACLE_FILES]


def ids(values: Any) -> list[str]:
    return [value.name if isinstance(value, CheckpointFamily) else f"{value[0].name}-{value[1]}" for value in values]


def channels(family: CheckpointFamily) -> int:
    return 48 if "5B" in family.name else 16


def components(family: CheckpointFamily) -> dict[str, Any]:
    if channels(family) == 16:
        return make_components()
    torch.manual_seed(2)
    vae = AutoencoderKLWan(
        base_dim=3,
        z_dim=48,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        latents_mean=[0.0] * 48,
        latents_std=[1.0] * 48,
    )
    return make_components(vae=vae.eval(), transformer=make_transformer(in_channels=48, out_channels=48))


def base_folder(family: CheckpointFamily, folder: Path) -> Path:
    WanPipeline(**components(family)).save_pretrained(folder / "base")
    return folder / "base"


def trained_weights(family: CheckpointFamily) -> dict[str, torch.Tensor]:
    size = {"in_channels": channels(family), "out_channels": channels(family)}
    random = torch.Generator().manual_seed(11)
    weights = make_transformer(**size).state_dict()
    return {name: w + 0.05 * torch.randn(w.shape, generator=random) for name, w in weights.items()}


def load(folder: Any, **kwargs: Any) -> ARDiffusionPipeline:
    pipe = ARDiffusionPipeline.from_pretrained(folder, **kwargs)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def assert_weights(pipe: ARDiffusionPipeline, expected: dict[str, torch.Tensor], atol: float = 0.0) -> None:
    found = pipe.transformer.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.allclose(found[n], w.float(), rtol=0, atol=atol) for n, w in expected.items())


class Published:
    """A family's files on disk, and the weights that a pipeline must have after loading them."""

    def __init__(self, family: CheckpointFamily, folder: Path) -> None:
        self.base = base_folder(family, folder)
        weights = trained_weights(family)
        self.checkpoint = write_file(family, folder, weights)
        self.lora: Path | None = None
        self.expected = {name: weight.to(getattr(torch, family.dtype)).float() for name, weight in weights.items()}
        if family.lora_file:
            pairs = make_lora(weights)
            self.lora = write_lora(folder / "lora.pt", pairs)
            self.expected |= {name: self.expected[name] + up @ down for name, (down, up) in pairs.items()}

    def load(self, **kwargs: Any) -> ARDiffusionPipeline:
        return load(self.base, ar_checkpoint=self.checkpoint, ar_lora=self.lora, **kwargs)


@pytest.mark.parametrize("family", FILE_FAMILIES, ids=ids(FILE_FAMILIES))
def test_loads(family: CheckpointFamily, tmp_path: Path) -> None:
    published = Published(family, tmp_path)
    pipe = published.load(recipe=QUICK)
    assert_weights(pipe, published.expected, atol=1e-6 if family.lora_file else 0.0)
    assert not torch.equal(latents_of(pipe), latents_of(load(published.base, recipe=QUICK)))


@pytest.mark.parametrize("family", FILE_FAMILIES, ids=ids(FILE_FAMILIES))
def test_round_trip(family: CheckpointFamily, tmp_path: Path) -> None:
    """File to folder to pipeline to folder: the video of the file loaded over its base, every time."""
    published = Published(family, tmp_path)
    options = ConvertOptions(lora=published.lora, max_shard_bytes=60_000)
    convert_checkpoint(published.checkpoint, tmp_path / "first", base=published.base, recipe=QUICK, options=options)
    first = load(tmp_path / "first")
    assert first.recipe == QUICK
    assert torch.equal(latents_of(first, recipe=None), latents_of(published.load()))
    first.save_pretrained(tmp_path / "second")
    assert torch.equal(latents_of(load(tmp_path / "second"), recipe=None), latents_of(first))


@pytest.mark.parametrize("family", FILE_FAMILIES, ids=ids(FILE_FAMILIES))
def test_reference_weights_of_a_file_with_both(family: CheckpointFamily, tmp_path: Path) -> None:
    """Where averaged and raw weights lie in one file, the family says which ones its authors show."""
    weights = {f"{family.prefix}{to_original(n)}": w for n, w in make_transformer().state_dict().items()}
    torch.save({"generator": weights, "generator_ema": weights}, tmp_path / "both.pt")
    report = load_ar_checkpoint(make_transformer(), tmp_path / "both.pt", use_ema=family.use_ema)
    assert report.wrapper_key == ("generator_ema" if family.use_ema else "generator")


@pytest.mark.parametrize("family", FAMILIES, ids=ids(FAMILIES))
def test_recipe(family: CheckpointFamily) -> None:
    if family.recipe in AWAITED - set(list_recipes()):
        pytest.skip(f"the recipe {family.recipe!r} is not in this tree yet")
    if family.recipe is None:
        assert family.note or family.refused, "say why there is none"
    else:
        assert family.recipe in list_recipes()
    assert family.files


def test_every_recipe_is_that_of_a_family() -> None:
    assert set(list_recipes()) <= {family.recipe for family in FAMILIES}


@pytest.mark.parametrize(("family", "oracle"), WITH_ORACLE, ids=ids(WITH_ORACLE))
def test_parity(family: CheckpointFamily, oracle: str, tmp_path: Path) -> None:
    """The reference's own rollout, its weights published in the family's layout, converted, and loaded by name."""
    config, tensors = read_oracle(ORACLE_FILES[oracle])
    original = {n.removeprefix("model."): t for n, t in tensors.items() if n.startswith("model.")}
    sizes = infer_transformer_config(original, attention_head_dim=config["head_dim"])
    transformer = WanTransformer3DModel(**sizes)
    save_file({f"model.{name}": tensor for name, tensor in original.items()}, tmp_path / "oracle.safetensors")
    load_ar_checkpoint(transformer, tmp_path / "oracle.safetensors")
    weights = {name: weight.clone() for name, weight in transformer.state_dict().items()}
    WanPipeline(**make_components(transformer=transformer)).save_pretrained(tmp_path / "base")
    options = ConvertOptions()
    if family.lora_file:
        pairs = make_lora(weights)
        options = ConvertOptions(lora=write_lora(tmp_path / "lora.pt", pairs))
        weights |= {name: weights[name] - up @ down for name, (down, up) in pairs.items()}
    checkpoint = write_file(family, tmp_path, weights)
    convert_checkpoint(
        checkpoint, tmp_path / "folder", base=tmp_path / "base", recipe=oracle_recipe(config), options=options
    )
    latents = run_oracle(load(tmp_path / "folder", vae=None), config, tensors)
    error = (latents - tensors["latents"]).norm() / tensors["latents"].norm()
    assert error <= MAX_RELATIVE_ERROR


def test_families_with_an_oracle_are_run() -> None:
    assert {family.name for family, _ in WITH_ORACLE} == {family.name for family in FAMILIES if family.oracle}


# -- refused ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("entries", "what"),
    [
        (
            {"blocks.0.ffn.0.weight": (128, 32, torch.float8_e4m3fn), "blocks.0.ffn.0.weight_scale": (1, 1, None)},
            "fp8:",
        ),
        ({"blocks.0.ffn.0.weight": (128, 16, torch.uint8), "blocks.0.ffn.0.weight_scale": (8, 2, None)}, "nvfp4:"),
        ({"blocks.0.ffn.0._extra_state": (1, 1, None)}, "TransformerEngine"),
        (
            {"blocks.0.ffn.0.weight": (128, 32, torch.int8), "blocks.0.ffn.0.weight_scale": (1, 1, None)},
            "int8 weights",
        ),
    ],
)
def test_packed_files_are_told_apart(entries: dict[str, Any], what: str, tmp_path: Path) -> None:
    family = BY_NAME["Self-Forcing in fp8 or nvfp4"]
    assert family.refused and BY_NAME["LongLive 2, NVFP4"].refused
    weights = {
        f"model.{n}": torch.ones(rows, cols).to(dtype or torch.float32) for n, (rows, cols, dtype) in entries.items()
    }
    save_file(weights, tmp_path / "packed.safetensors")
    with pytest.raises(ValueError, match=rf"packed for other kernels \(.*{what}.*use the unquantized file"):
        convert_checkpoint(
            tmp_path / "packed.safetensors", tmp_path / "out", base=base_folder(family, tmp_path), recipe=QUICK
        )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "packed.safetensors"]


def test_transformer_engine_states_in_a_torch_file(tmp_path: Path) -> None:
    import io

    torch.save({"generator": {"model.blocks.0.ffn.0._extra_state": io.BytesIO(b"x")}}, tmp_path / "model_te.pt")
    with pytest.raises(ValueError, match=r"TransformerEngine keeps packed fp8 or nvfp4 weights"):
        load(base_folder(FAMILIES[0], tmp_path), ar_checkpoint=tmp_path / "model_te.pt")


# -- LoRA ---------------------------------------------------------------------------------------------------------------


class TestLora:
    """LongLive's LoRA, merged or as an adapter."""

    @pytest.fixture
    def published(self, tmp_path: Path) -> Published:
        return Published(BY_NAME["LongLive"], tmp_path)

    def test_rank_256(self, tmp_path: Path) -> None:
        weights = {"blocks.0.attn1.to_q.weight": torch.zeros(300, 300)}
        pairs = make_lora(weights, rank=256)
        pair = read_lora(write_lora(tmp_path / "lora.pt", pairs))["blocks.0.attn1.to_q.weight"]
        assert (pair.down.shape, pair.scale) == ((256, 300), 1.0)
        down, up = pairs["blocks.0.attn1.to_q.weight"]
        assert torch.equal(pair.delta(), up @ down)

    @pytest.mark.parametrize("style", ["peft", "adapter name", "kohya", "diffusers"])
    def test_names(self, style: str, tmp_path: Path) -> None:
        down, up = torch.randn(4, 24), torch.randn(24, 4)
        stem = {"diffusers": "transformer.blocks.0.attn1.to_q"}.get(style, "base_model.model.blocks.0.self_attn.q")
        a, b = {"kohya": ("lora_down", "lora_up"), "adapter name": ("lora_A.default", "lora_B.default")}.get(
            style, ("lora_A", "lora_B")
        )
        entries = {f"{stem}.{a}.weight": down, f"{stem}.{b}.weight": up}
        if style == "kohya":
            entries[f"{stem}.alpha"] = torch.tensor(8.0)
        save_file(entries, tmp_path / "lora.safetensors")
        pair = read_lora(tmp_path / "lora.safetensors")["blocks.0.attn1.to_q.weight"]
        factor = 2.0 if style == "kohya" else 1.0
        assert torch.allclose(pair.delta(), factor * up @ down)
        assert read_lora(tmp_path / "lora.safetensors", alpha=12)["blocks.0.attn1.to_q.weight"].alpha == (
            8 if style == "kohya" else 12
        )

    def test_adapter_equals_merged(self, published: Published) -> None:
        merged = latents_of(published.load())
        pipe = load(published.base, ar_checkpoint=published.checkpoint)
        plain = latents_of(pipe)
        pipe.load_lora_weights(ar_lora_state_dict(published.lora))
        assert (latents_of(pipe) - merged).abs().max() < 1e-4 < (plain - merged).abs().max()
        pipe.unload_lora_weights()
        assert torch.equal(latents_of(pipe), plain)

    def test_without_its_base(self, published: Published) -> None:
        with pytest.raises(ValueError, match=r"`ar_lora` is merged into `ar_checkpoint`.*load_lora_weights"):
            load(published.base, ar_lora=published.lora)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda e: e | {"x.weight": torch.ones(1)}, r"'x\.weight' is no part of a LoRA"),
            (lambda e: {n: t for n, t in e.items() if "lora_A" in n}, r"have one side of a pair only"),
            (lambda e: {}, "it holds no tensors"),
            (
                lambda e: {n: t[:, :3] if "lora_A" in n else t for n, t in e.items()},
                r"of another shape \(first: \['blocks\.0\.attn1\.to_q\.weight \(24, 24\) by \(24, 3\)'",
            ),
            (
                lambda e: {n.replace("blocks.0", "blocks.9"): t for n, t in e.items()},
                r"weights that the transformer lacks \(first: \['blocks\.9\.",
            ),
            (lambda e: {n: t[:2] if "lora_A" in n else t for n, t in e.items()}, r"allowed are \[rank, in\] and"),
        ],
    )
    def test_files_that_do_not_fit(self, published: Published, change: Any, message: str) -> None:
        content = torch.load(published.lora, weights_only=True)["generator_lora"]
        torch.save({"generator_lora": change(content)}, published.lora)
        with pytest.raises(ValueError, match=message):
            published.load()

    def test_rank_in_the_tests_is_not_full(self) -> None:
        assert LORA_RANK < 24


# -- diffusers folders of classes that diffusers lacks -------------------------------------------------------------------


class TestUnknownClass:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        folder = base_folder(FAMILIES[0], tmp_path)
        rename_class(folder, "CausalWanTransformer3DModel")
        return folder

    def test_loads_as_wan(self, folder: Path, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="has no class `CausalWanTransformer3DModel`"):
            WanPipeline.from_pretrained(folder)
        pipe = load(folder, recipe=QUICK)
        assert type(pipe.transformer) is WanTransformer3DModel
        assert_weights(pipe, make_transformer().state_dict())
        pipe.save_pretrained(tmp_path / "saved")
        assert torch.equal(latents_of(load(tmp_path / "saved")), latents_of(pipe))

    @pytest.mark.parametrize("dtype", [torch.bfloat16, {"transformer": torch.bfloat16}, {"default": torch.bfloat16}])
    def test_dtype(self, folder: Path, dtype: Any) -> None:
        pipe = load(folder, dtype=dtype)
        assert pipe.transformer.dtype == torch.bfloat16
        assert pipe.transformer.scale_shift_table.dtype == torch.float32

    def test_own_transformer(self, folder: Path) -> None:
        transformer = make_transformer(num_layers=1)
        assert load(folder, transformer=transformer).transformer is transformer

    @pytest.mark.parametrize("kind", ["missing", "unexpected", "shape"])
    def test_weights_of_another_architecture(self, folder: Path, kind: str) -> None:
        file = folder / "transformer" / "diffusion_pytorch_model.safetensors"
        weights = load_file(file)
        if kind == "missing":
            del weights["proj_out.bias"]
        elif kind == "unexpected":
            weights["condition_embedder.delta_embedder.linear_1.weight"] = torch.ones(2)
        else:
            weights["proj_out.bias"] = torch.ones(3)
        save_file(weights, file, metadata={"format": "pt"})
        with pytest.raises(ValueError, match=r"CausalWanTransformer3DModel\) is no stock Wan transformer.*"):
            load(folder)

    @pytest.mark.parametrize("name", ["CausalLingBotWorldTransformer3DModel", "MatrixGameTransformer3DModel"])
    def test_other_unknown_classes(self, folder: Path, name: str) -> None:
        rename_class(folder, name)
        with pytest.raises(ValueError, match=rf"names the transformer class '{name}', which diffusers"):
            load(folder)

    @pytest.mark.parametrize("name", ["AnyFlowFARTransformer3DModel", "AnyFlowTransformer3DModel"])
    def test_anyflow_belongs_to_diffusers(self, folder: Path, name: str) -> None:
        """diffusers has the class, so without a word the first call would fail on a missing method."""
        rename_class(folder, name)
        with pytest.raises(ValueError, match=rf"holds an {name}, .*AnyFlowFARPipeline"):
            load(folder)

    def test_classes_of_other_libraries_are_left_to_diffusers(self, folder: Path) -> None:
        index = json.loads((folder / "model_index.json").read_text(encoding="utf-8"))
        index["transformer"] = ["their_package", "CausalWanTransformer3DModel"]
        (folder / "model_index.json").write_text(json.dumps(index), encoding="utf-8")
        with pytest.raises((ValueError, ImportError, AttributeError), match="their_package"):
            load(folder)

    @pytest.mark.parametrize("argument", ["device_map", "quantization_config"])
    def test_arguments_that_need_the_class(self, folder: Path, argument: str) -> None:
        with pytest.raises(ValueError, match=rf"does not go with {argument}=: save the pipeline"):
            load(folder, **{argument: "cpu"})

    def test_two_experts_are_refused(self, tmp_path: Path) -> None:
        assert BY_NAME["two experts"].refused
        parts = make_components() | {"transformer_2": make_transformer(), "boundary_ratio": 0.9}
        WanPipeline(**parts).save_pretrained(tmp_path / "two")
        rename_class(tmp_path / "two", "CausalWanTransformer3DModel")
        with pytest.raises(ValueError, match="two experts"):
            load(tmp_path / "two")


# -- the table in the docs -----------------------------------------------------------------------------------------------


def table_row(family: CheckpointFamily) -> str:
    """What docs/checkpoints.md says of a family."""
    loads = f"refused: {family.refused}" if family.refused else "yes"
    recipe = f"`{family.recipe}`" if family.recipe else "-"
    trip = "-" if family.refused else "yes"
    oracle = ", ".join(family.oracle) or "-"
    return f"| {family.name} | {'<br>'.join(family.files)} | {loads} | {recipe} | {trip} | {oracle} | {family.note or '-'} |"


def test_table_in_the_docs() -> None:
    """One row a family, and each of its cells is one of the tests above."""
    rows = [line for line in DOCS.read_text(encoding="utf-8").splitlines() if re.match(r"\| (?!family|-)", line)]
    expected = [table_row(family) for family in FAMILIES]
    if os.environ.get("ARDIFF_PRINT_TABLE"):
        print("\n".join(expected))
    assert rows[: len(expected)] == expected


def test_folder_of_a_conversion_has_the_index_of_a_pipeline(tmp_path: Path) -> None:
    published = Published(FAMILIES[0], tmp_path)
    convert_checkpoint(published.checkpoint, tmp_path / "out", base=published.base, recipe="longlive")
    load(published.base, recipe="longlive").save_pretrained(tmp_path / "saved")
    ours, saved = (
        json.loads((tmp_path / name / "model_index.json").read_text(encoding="utf-8")) for name in ("out", "saved")
    )
    saved.pop("_name_or_path", None)
    assert ours == saved
