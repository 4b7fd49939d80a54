"""scripts/convert_checkpoint.py and what is behind it: sharded, whole or not at all, one shard in memory."""

from __future__ import annotations

import re
import runpy
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanPipeline, WanTransformer3DModel
from published_layouts import write_file
from safetensors.torch import load_file
from test_checkpoint_families import BY_NAME, Published, assert_weights, base_folder, load
from tiny_components import QUICK, make_components, make_transformer

from diffusers_ardiff import conversion
from diffusers_ardiff.conversion import ConvertOptions, convert_checkpoint, plan_shards
from diffusers_ardiff.pipelines.loading import fetch_base

SCRIPT = Path(__file__).parents[1] / "scripts" / "convert_checkpoint.py"
SELF_FORCING = BY_NAME["Self-Forcing"]


@pytest.fixture
def published(tmp_path: Path) -> Published:
    return Published(SELF_FORCING, tmp_path)


def convert(published: Published, output: Path, **options: Any) -> None:
    convert_checkpoint(
        published.checkpoint, output, base=published.base, recipe=QUICK, options=ConvertOptions(**options)
    )


def run_script(*arguments: object) -> int:
    main = runpy.run_path(str(SCRIPT))["main"]
    return main([str(argument) for argument in arguments])


def test_shards(published: Published, tmp_path: Path) -> None:
    convert(published, tmp_path / "out", max_shard_bytes=30_000)
    shards = sorted((tmp_path / "out" / "transformer").glob("*.safetensors"))
    assert len(shards) > 2
    assert all(sum(t.nbytes for t in load_file(shard).values()) <= 30_000 for shard in shards)
    assert_weights(load(tmp_path / "out"), published.expected)


@pytest.mark.parametrize(
    ("sizes", "shards"),
    [
        ([3, 3, 3], [["0", "1"], ["2"]]),
        ([9, 1, 6], [["0"], ["1", "2"]]),
        ([7], [["0"]]),
        ([], []),
        ([1, 9, 1], [["0"], ["1"], ["2"]]),
    ],
)
def test_plan_shards(sizes: list[int], shards: list[list[str]]) -> None:
    assert plan_shards({str(index): size for index, size in enumerate(sizes)}, 7) == shards


def test_wan_pipeline_reads_it(published: Published, tmp_path: Path) -> None:
    convert(published, tmp_path / "out")
    weights = WanPipeline.from_pretrained(tmp_path / "out").transformer.state_dict()
    assert all(torch.equal(weights[name], weight) for name, weight in published.expected.items())


def test_dtype_keeps_what_diffusers_keeps_in_float32(published: Published, tmp_path: Path) -> None:
    convert(published, tmp_path / "out", dtype=torch.bfloat16)
    stored = load_file(tmp_path / "out" / "transformer" / "diffusion_pytorch_model.safetensors")
    assert stored["proj_out.weight"].dtype == torch.bfloat16
    assert stored["blocks.0.scale_shift_table"].dtype == torch.float32
    loaded, direct = load(tmp_path / "out", dtype=torch.bfloat16), published.load(dtype=torch.bfloat16)
    for name, weight in direct.transformer.state_dict().items():
        assert torch.equal(loaded.transformer.state_dict()[name], weight), name


def test_raw_weights(published: Published, tmp_path: Path) -> None:
    convert(published, tmp_path / "out", use_ema=False)
    assert_weights(load(tmp_path / "out"), {name: weight + 1 for name, weight in published.expected.items()})


def test_failed_run_leaves_nothing(published: Published, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = sorted(tmp_path.iterdir())
    save, calls = conversion.save_file, []

    def fail_second(*args: Any, **kwargs: Any) -> None:
        calls.append(args)
        if len(calls) == 2:
            raise OSError("no space left on device")
        save(*args, **kwargs)

    monkeypatch.setattr(conversion, "save_file", fail_second)
    with pytest.raises(OSError, match="no space left"):
        convert(published, tmp_path / "out", max_shard_bytes=30_000)
    assert len(calls) == 2 and sorted(tmp_path.iterdir()) == before
    monkeypatch.undo()
    convert(published, tmp_path / "out")
    assert_weights(load(tmp_path / "out"), published.expected)


def test_name_appears_at_the_end_only(published: Published, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy, seen = conversion.shutil.copytree, []

    def note(*args: Any, **kwargs: Any) -> Any:
        seen.append((tmp_path / "out").exists())
        return copy(*args, **kwargs)

    monkeypatch.setattr(conversion.shutil, "copytree", note)
    convert(published, tmp_path / "out")
    assert seen == [False] * 4 and (tmp_path / "out").is_dir()


def test_existing_output_is_kept(published: Published, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("x")
    with pytest.raises(FileExistsError, match=r"out' exists: give the name of a folder that is to be made"):
        convert(published, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]


def test_base_of_another_size(published: Published, tmp_path: Path) -> None:
    big = make_components(transformer=make_transformer(num_layers=3))
    WanPipeline(**big).save_pretrained(tmp_path / "big")
    published.base = tmp_path / "big"
    with pytest.raises(ValueError, match="file is 2 layers x 24, the base is 3 x 24: use a base folder"):
        convert(published, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def anonymous_bytes() -> int:
    """Memory of this process that no file is behind, and that it could not give back."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return 1024 * int(re.search(r"RssAnon:\s+(\d+)", status)[1])


class PeakMemory:
    """Largest ``anonymous_bytes`` above those at the start, sampled while the block runs."""

    def __enter__(self) -> PeakMemory:
        self.start, self.peak, self.done = anonymous_bytes(), 0, threading.Event()
        self.thread = threading.Thread(target=self._sample)
        self.thread.start()
        return self

    def _sample(self) -> None:
        while not self.done.wait(0.001):
            self.peak = max(self.peak, anonymous_bytes() - self.start)

    def __exit__(self, *_: object) -> None:
        self.done.set()
        self.thread.join()


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_one_shard_in_memory(suffix: str, tmp_path: Path) -> None:
    """100 MB of weights in shards of 8 MB: a 14B file never needs its own size in memory, and surely not twice."""
    base = base_folder(SELF_FORCING, tmp_path)
    (base / "transformer" / "config.json").unlink()
    family = BY_NAME["Krea Realtime 14B"] if suffix == ".safetensors" else SELF_FORCING
    config = {"num_attention_heads": 2, "attention_head_dim": 128, "ffn_dim": 1024, "num_layers": 24, "text_dim": 32}
    weights = WanTransformer3DModel(**config).state_dict()
    checkpoint = write_file(family, tmp_path, weights)
    expected = weights["blocks.7.ffn.net.2.weight"].to(getattr(torch, family.dtype)).clone()
    size = sum(weight.numel() for weight in weights.values()) * (2 if suffix == ".safetensors" else 4)
    del weights
    options = ConvertOptions(max_shard_bytes=8_000_000)
    with PeakMemory() as memory:
        convert_checkpoint(checkpoint, tmp_path / "out", base=base, recipe=QUICK, options=options)
    assert size > 45e6 and memory.peak < 24e6, (size, memory.peak)
    index = load_index(tmp_path / "out")
    assert torch.equal(load_file(index["blocks.7.ffn.net.2.weight"])["blocks.7.ffn.net.2.weight"], expected)


def load_index(folder: Path) -> dict[str, Path]:
    import json

    file = folder / "transformer" / "diffusion_pytorch_model.safetensors.index.json"
    return {
        name: file.parent / shard for name, shard in json.loads(file.read_text(encoding="utf-8"))["weight_map"].items()
    }


def test_script(published: Published, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    arguments = ("--base", published.base, "--recipe", "longlive", "--output", tmp_path / "deep" / "out")
    assert run_script(published.checkpoint, *arguments, "--dtype", "bfloat16", "--max-shard-bytes", 50_000) == 0
    assert re.search(r"out: \d+ weights of generator_ema \(original names\)", capsys.readouterr().out)
    assert load(tmp_path / "deep" / "out").recipe.name == "longlive"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"recipe": "sora"}, "unknown recipe 'sora'"),
        ({"base": "/no/folder"}, "is not a folder"),
        ({"checkpoint": "none.pt"}, "does not exist"),
        ({"max-shard-bytes": 0}, "max_shard_bytes = 0"),
    ],
)
def test_script_with_bad_input(
    change: dict[str, Any], message: str, published: Published, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    given = {"checkpoint": published.checkpoint, "base": published.base, "recipe": "longlive"} | change
    checkpoint = given.pop("checkpoint")
    options = [part for name, value in given.items() for part in (f"--{name}", value)]
    assert run_script(checkpoint, *options, "--output", tmp_path / "out") == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_script_names_what_is_missing(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        run_script("model.pt", "--recipe", "longlive")
    assert "missing: ['--base', '--output']" in capsys.readouterr().err


def test_script_lists_families(capsys: pytest.CaptureFixture) -> None:
    assert run_script("--list-families") == 0
    out = capsys.readouterr().out
    assert all(family.name in out for family in BY_NAME.values())


def test_base_from_the_hub_leaves_its_transformer_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    seen: dict[str, Any] = {}
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda name, **kwargs: seen.update(kwargs) or f"/hub/{name}"
    )
    assert fetch_base("Wan-AI/Wan2.1-T2V-1.3B-Diffusers") == "/hub/Wan-AI/Wan2.1-T2V-1.3B-Diffusers"
    assert "transformer*/*.safetensors" in seen["ignore_patterns"]
    assert fetch_base("./a/b") == "./a/b" and fetch_base("tiny").endswith("builtin/tiny")
    assert sys.modules["huggingface_hub"] is huggingface_hub


def test_generate_script_takes_checkpoint_and_lora(tmp_path: Path) -> None:
    published = Published(BY_NAME["LongLive"], tmp_path)
    main = runpy.run_path(str(SCRIPT.with_name("generate.py")))["main"]
    options = ["--model", published.base, "--checkpoint", published.checkpoint, "--num-frames", "5"]
    options += ["--height", "32", "--width", "48", "--recipe", "longlive"]
    for name, lora in (("with", ["--lora", published.lora]), ("without", [])):
        command = ["a circle", *options, *lora, "--output", tmp_path / f"{name}.mp4"]
        assert main([str(part) for part in command]) == 0
    assert (tmp_path / "with.mp4").read_bytes() != (tmp_path / "without.mp4").read_bytes()
