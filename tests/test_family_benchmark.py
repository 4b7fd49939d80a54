"""The benchmark of the families, at a toy size."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from diffusers_ardiff.benchmarks.family_shapes import FAMILY_SHAPES
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
