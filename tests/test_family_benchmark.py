"""The benchmark of the families, at a toy size."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from diffusers_ardiff.benchmarks.family import UnmaskedAttention, add_family_command, run_family
from diffusers_ardiff.benchmarks.family_shapes import FAMILY_SHAPES
from diffusers_ardiff.benchmarks.results import Results
from diffusers_ardiff.processors import find_family, list_families

SCRIPT = Path(__file__).parent.parent / "scripts" / "benchmark.py"


def test_every_family_has_a_shape() -> None:
    found = {find_family(shape.build(tiny=True)).name for shape in FAMILY_SHAPES.values()}
    assert found == {family.name for family in list_families()}


def test_it_runs_every_family_from_the_command_line(tmp_path: Path) -> None:
    output = tmp_path / "families.json"
    sizes = ["--chunk-frames", "2", "--sink-frames", "1", "--window-frames", "3", "--steps", "2"]
    command = [sys.executable, str(SCRIPT), "family", "--tiny", "--device", "cpu", "--warmup", "0", "--repeats", "1"]
    subprocess.run([*command, *sizes, "--output", str(output)], check=True, timeout=280, cwd=SCRIPT.parents[1])
    results = {result["family"]: result for result in json.loads(output.read_text())["results"]}
    assert set(results) == set(FAMILY_SHAPES)
    for name, result in results.items():
        assert result["paged_ms"] > 0 and result["recompute_ms"] > 0 and result["window"] == "4 (1+3)", name
    # 4 frames of 6 tokens and 226 text rows are 16 pages of 16; K and V of 2 layers, 2 heads x 16, float32.
    assert results["cogvideox"]["kv_bytes"] == 2 * 2 * 16 * 16 * 2 * 16 * 4


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), "family", "--tiny", "--device", "cpu", "--warmup", "0", "--repeats", "1"]
    return subprocess.run([*command, *arguments], capture_output=True, text=True, check=False, timeout=280)


def test_published_sizes() -> None:
    """Billions of parameters, and layers of the cache; the defaults of the classes are those of other models."""
    expected = {
        "wan": (1.42, 30), "skyreels-v2": (1.42, 30), "wan-vace": (2.15, 45), "wan-animate": (17.3, 40),
        "chronoedit": (16.4, 40), "ltx": (1.92, 28), "ltx2": (18.9, 48), "cosmos": (1.96, 28), "cogvideox": (5.57, 42),
        "hunyuan-video": (12.8, 60), "hunyuan-video-1.5": (8.33, 54), "kandinsky5": (2.01, 32),
    }  # fmt: skip
    found = {}
    for name, shape in FAMILY_SHAPES.items():
        with torch.device("meta"):
            model = shape.build(tiny=False)
        layers = find_family(model).geometry(model).num_layers
        found[name] = (sum(weight.numel() for weight in model.parameters()) / 1e9, layers)
    assert {name: layers for name, (_, layers) in found.items()} == {n: layers for n, (_, layers) in expected.items()}
    for name, (billions, _) in expected.items():
        assert found[name][0] == pytest.approx(billions, rel=0.02), name


@pytest.mark.parametrize("name", list(FAMILY_SHAPES))
def test_fewer_layers(name: str) -> None:
    """Every family can be shortened, and keeps a legal config."""
    shape = FAMILY_SHAPES[name]
    with torch.device("meta"):
        whole, short = shape.build(tiny=False), shape.build(tiny=False, layers=12)
    family = find_family(whole)
    assert 0 < family.geometry(short).num_layers < family.geometry(whole).num_layers


def test_fewer_layers_are_said(tmp_path: Path) -> None:
    """In bfloat16, as on a GPU: the tiny models ran in float32 only."""
    output = tmp_path / "families.json"
    done = _run("--layers", "1", "--dtype", "bfloat16", "--families", "wan", "hunyuan-video", "--output", str(output))
    assert done.returncode == 0, done.stderr
    assert "wan: 1 of 2 layers" in done.stdout and "hunyuan-video: 2 of 4 layers" in done.stdout
    wan, _ = json.loads(output.read_text())["results"]
    assert (wan["layers"], wan["layers_in_all"], wan["dtype"], wan["backend"]) == (1, 2, "bfloat16", "sdpa")


def test_a_family_that_fails_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Once, one bad shape would have cost the figures of all families of a run on a lent GPU."""
    monkeypatch.setitem(FAMILY_SHAPES, "wan", replace(FAMILY_SHAPES["wan"], tiny_size=(5, 7)))
    parser = argparse.ArgumentParser()
    add_family_command(parser.add_subparsers())
    arguments = ["--families", "wan", "cosmos", "--warmup", "0", "--repeats", "1", "--device", "cpu"]
    results = Results(tmp_path / "families.json")
    run_family(parser.parse_args(["family", "--tiny", *arguments]), results)
    report = json.loads((tmp_path / "families.json").read_text())
    assert [result["family"] for result in report["results"]] == ["cosmos"]
    (error,) = report["errors"]
    assert error["name"] == "wan" and "can't be cut into patches" in error["error"]
    assert "error: wan: ValueError" in capsys.readouterr().err


def test_a_family_that_takes_too_long(tmp_path: Path) -> None:
    output = tmp_path / "families.json"
    done = _run("--families", "wan", "--limit", "1", "--repeats", "1000000", "--output", str(output))
    assert done.returncode == 1
    assert json.loads(output.read_text())["errors"] == [{"name": "wan", "error": "TimeoutError: took longer than 1 s"}]


def test_stock_attention_runs_without_masks_that_mask_nothing() -> None:
    """A mask of a joint family keeps SDPA from its fastest kernel, so the two sides would not run the same one."""
    query = torch.randn(1, 2, 3, 8)
    everything = torch.ones(1, 1, 1, 3, dtype=torch.bool)
    bias = torch.tensor([0.0, 0.0, -100.0])[None, None, None]
    attend = torch.nn.functional.scaled_dot_product_attention
    with UnmaskedAttention():
        nothing = attend(query, query, query, attn_mask=everything.logical_not())
        biased = attend(query, query, query, attn_mask=bias)
    assert torch.equal(nothing, attend(query, query, query))
    assert torch.equal(biased, attend(query, query, query, attn_mask=bias))
