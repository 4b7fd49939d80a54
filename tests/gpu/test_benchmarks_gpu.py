"""The benchmarks that run many models in one process, at tiny sizes on the GPU: none fails, and memory comes back."""

from __future__ import annotations

import argparse
import gc
from pathlib import Path

import pytest
import torch

from diffusers_ardiff.benchmarks.family import add_family_command, run_family
from diffusers_ardiff.benchmarks.family_shapes import FAMILY_SHAPES
from diffusers_ardiff.benchmarks.models import build_pipeline
from diffusers_ardiff.benchmarks.results import Results

pytestmark = pytest.mark.gpu


def test_every_family_runs_and_gives_its_memory_back(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    add_family_command(parser.add_subparsers())
    options = ["family", "--tiny", "--repeats", "1", "--steps", "1"]
    results = Results(tmp_path / "families.json")
    run_family(parser.parse_args([*options, "--families", "wan"]), results)
    before = torch.cuda.memory_allocated()
    run_family(parser.parse_args(options), results)
    gc.collect()
    assert results.errors == []
    assert {figure["family"] for figure in results.figures} == set(FAMILY_SHAPES)
    assert {figure["dtype"] for figure in results.figures} == {"bfloat16"}
    # Workspaces of libraries are of this order; one family's weights and pool are too, so a leak of all is seen.
    assert torch.cuda.memory_allocated() - before < 64 * 2**20


def test_shared_blocks_are_pinned_once() -> None:
    transformer = build_pipeline("toy", torch.device("cpu"), share_blocks=True).transformer
    weights = [block.ffn.net[0].proj.weight for block in transformer.blocks]
    assert weights[0].data.is_pinned() and weights[0].data.pin_memory().data_ptr() == weights[1].data_ptr()
