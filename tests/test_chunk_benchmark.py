"""The chunk benchmark, at a toy size: what it builds and reports."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from diffusers_ardiff import ARDiffusionPipeline
from diffusers_ardiff.benchmarks.chunk import (
    ChunkBenchmark,
    add_chunk_command,
    chunk_recipe,
    random_pipeline,
)
from diffusers_ardiff.benchmarks.results import Results

CPU = torch.device("cpu")
SCRIPT = Path(__file__).parent.parent / "scripts" / "benchmark.py"


def test_the_layers_that_the_model_wants_in_float32_are() -> None:
    """As after from_pretrained: modulation tables, time embedding and norms of a bfloat16 model."""
    transformer = random_pipeline("toy", CPU, torch.bfloat16).transformer
    block = transformer.blocks[0]
    assert block.attn1.to_q.weight.dtype == block.attn1.norm_q.weight.dtype == torch.bfloat16
    assert block.scale_shift_table.dtype == block.norm2.weight.dtype == torch.float32
    assert transformer.condition_embedder.time_embedder.linear_1.weight.dtype == torch.float32
    assert torch.get_default_dtype() == torch.float32


def test_windows_are_written_as_sink_plus_recent() -> None:
    recipe = chunk_recipe("3+9", 64, 96)
    assert (recipe.num_sink_frames, recipe.num_window_frames, recipe.max_latent_frames) == (3, 9, None)
    assert (recipe.height, recipe.width, len(recipe.denoising_steps)) == (64, 96, 4)


def test_the_same_video_is_timed_every_time() -> None:
    """The error of a variant is that of its arithmetic: the eager one against itself has none."""
    benchmark = ChunkBenchmark(random_pipeline("toy", CPU, torch.float32), chunk_recipe("1+5", 64, 96), num_chunks=2)
    first, second = benchmark.measure("eager"), benchmark.measure("eager")
    assert first.relative_error is None and second.relative_error == 0
    assert first.window == "6 (1+5)" and first.warmup is None and first.peak_bytes is None
    assert first.latency_seconds > 0 and first.chunk_seconds > 0
    assert str(second).startswith("window 6 (1+5)")


def test_command(tmp_path: Path) -> None:
    output = tmp_path / "chunk.json"
    options = ["--preset", "toy", "--height", "64", "--width", "96", "--windows", "1+5", "0+3"]
    options += ["--variants", "eager", "--chunks", "1", "--device", "cpu", "--output", str(output)]
    done = subprocess.run([sys.executable, SCRIPT, "chunk", *options], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [line.split()[:3] for line in done.stdout.splitlines()] == [
        ["window", "6", "(1+5)"],
        ["window", "3", "(0+3)"],
    ]
    results = json.loads(output.read_text())["results"]
    assert [result["window"] for result in results] == ["6 (1+5)", "3 (0+3)"]


def test_merged_commits_of_one_frame_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What merging is for could not be measured: every chunk had three frames."""
    output = tmp_path / "chunk.json"
    parser = argparse.ArgumentParser()
    add_chunk_command(parser.add_subparsers())
    options = ["chunk", "--preset", "toy", "--height", "64", "--width", "96", "--windows", "1+5", "--chunks", "1"]
    options += ["--chunk-frames", "1", "--variants", "eager", "merged", "--device", "cpu"]
    parsed, warmup = parser.parse_args(options), ARDiffusionPipeline.warmup
    frames = []

    def plainly(pipe: ARDiffusionPipeline, **call: Any) -> Any:
        frames.append(call["recipe"].chunk_frames)
        return warmup(pipe, **call | {"compile": False})

    monkeypatch.setattr(ARDiffusionPipeline, "warmup", plainly)
    results = Results(output)
    parsed.run(parsed, results)
    eager, merged = results.figures
    assert frames == [1] and (eager["variant"], merged["variant"]) == ("eager", "merged")
    assert merged["relative_error"] < 1e-4


def test_unknown_variant() -> None:
    parser = argparse.ArgumentParser()
    add_chunk_command(parser.add_subparsers())
    with pytest.raises(SystemExit):
        parser.parse_args(["chunk", "--variants", "fast"])
