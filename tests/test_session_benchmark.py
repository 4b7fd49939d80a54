"""The session benchmark at sizes a CPU can take; its numbers are the timer's, so only what they say of is tested."""

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from recorders import FunctionRecorder
from tiny_components import record_forwards

from diffusers_ardiff.benchmarks.sessions import (
    MODES,
    TogetherCase,
    eager,
    measure_fork,
    measure_together,
    tiny_cases,
    warm_manager,
)
from diffusers_ardiff.cache import KVManager
from diffusers_ardiff.pipelines import ARDiffusionPipeline
from diffusers_ardiff.pipelines.warmup import run_warmup

CPU = torch.device("cpu")
SCRIPT = Path(__file__).parents[1] / "scripts" / "benchmark.py"


def test_both_ways_make_the_same_chunks_with_half_the_forwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round is a chunk of each stream: five forwards of two rows, or ten of one."""
    case, _ = tiny_cases()
    pipe = case.pipeline(CPU)
    monkeypatch.setattr(TogetherCase, "pipeline", lambda self, device: pipe)
    pools = []

    def noted(*arguments: Any) -> KVManager:
        pools.append(eager(*arguments))
        return pools[0]

    with record_forwards(pipe.transformer) as seen:
        result = measure_together(case, device=CPU, repeats=3, modes={"noted": noted})
    rows = [len(latents) for latents in seen.inputs]
    # 4 rounds fill the window; the first of them has no commit.
    warm = [2] * 4 + [2] * 15 + [1] * 10 + [2] * 5
    assert rows == warm + ([1] * 10 + [2] * 5) * 3
    entry = result["together"]["noted"]
    assert entry["throughput_ratio"] == entry["one_by_one"]["median_ms"] / entry["together"]["median_ms"]
    assert pools[0].allocator.num_used == 0


def test_the_modes_of_a_device() -> None:
    """Graphs need a GPU; a CPU is measured without them."""
    case, _ = tiny_cases()
    together = measure_together(case, device=CPU, repeats=1)["together"]
    assert (list(together), list(MODES)) == (["eager"], ["eager", "replayed"])
    assert together["eager"]["replayed_forwards"] == 0
    with pytest.raises(RuntimeError, match="CUDA graphs need a CUDA device"):
        measure_together(case, device=CPU, repeats=1, modes=MODES)


def test_every_measured_forward_is_replayed() -> None:
    """The warm-up that the mode asks for, with a recorder for the CPU; one launched forward would spoil the ratio."""
    case, _ = tiny_cases()

    def record(pipeline: ARDiffusionPipeline, case: TogetherCase) -> KVManager:
        run_warmup(pipeline, None, None, compile=False, recorder=FunctionRecorder(), **case.warmup_call())
        return warm_manager(pipeline)

    entry = measure_together(case, device=CPU, repeats=2, modes={"recorded": record})["together"]["recorded"]
    # As in the first test, with two repeats.
    assert entry["replayed_forwards"] == 4 + 15 + 10 + 5 + 2 * 15


def test_fork_copies_one_window_at_the_first_write() -> None:
    _, case = tiny_cases()
    fork = measure_fork(case, device=CPU, repeats=2)["fork"]
    window = 4 * 24 * 2 * 2 * 2 * 8 * 4
    assert (fork["fork_bytes"], fork["first_write_bytes"], fork["next_write_bytes"]) == (0, window, 0)
    assert fork["gb_per_s"] == pytest.approx(2 * window / fork["first_write_ms"]["median_ms"] / 1e6)


def test_shapes_of_the_published_models() -> None:
    """1.3 billion parameters; 23 GB of keys and values."""
    with torch.device("meta"):
        pipe = TogetherCase(dtype=torch.float32).pipeline(torch.device("meta"))
    assert isinstance(pipe, ARDiffusionPipeline)
    assert 1.4e9 < sum(p.numel() for p in pipe.transformer.parameters()) < 1.45e9
    pool = TogetherCase().recipe()
    assert (pool.chunk_frames, pool.num_window_frames) == (1, 21)


@pytest.mark.parametrize("only", [[], ["--only", "together"], ["--only", "fork"]])
def test_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], only: list[str]
) -> None:
    output = tmp_path / "sessions.json"
    arguments = ["sessions", "--tiny", *only, "--repeats", "1", "--device", "cpu", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *arguments])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    printed = capsys.readouterr().out
    results = json.loads(output.read_text())["results"]
    assert len(results) == (1 if only else 2)
    assert all(result["label"] in printed for result in results)
    assert ("x the throughput" in printed, "bytes copied" in printed) == (
        only != ["--only", "fork"],
        only != ["--only", "together"],
    )
