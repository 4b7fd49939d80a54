"""The benchmark of several ranks: every case runs on the ranks it needs, and makes the video of one rank."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from accelerate import PartialState
from ranks import run_ranks

from diffusers_ardiff.benchmarks.parallel import choose_cases
from diffusers_ardiff.benchmarks.parallel_report import Case, ParallelResult, RankTimes
from diffusers_ardiff.benchmarks.sizing import size_model

SCRIPT = Path(__file__).parent.parent / "scripts" / "benchmark.py"
TINY = ("parallel", "--preset", "toy-12", "--windows", "1+5", "--height", "48", "--width", "80", "--chunks", "1")


def run_script(rank: int, arguments: tuple[str, ...], num_ranks: int) -> str:
    """The script in a process of a group that exists; what it printed."""
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}
    os.environ.update({name: str(value) for name, value in places.items()})
    PartialState._reset_state()
    printed = io.StringIO()
    with patch.object(sys, "argv", ["benchmark.py", *arguments]), contextlib.redirect_stdout(printed):
        runpy.run_path(str(SCRIPT), run_name="__main__")
    return printed.getvalue()


@pytest.mark.parametrize(
    ("num_ranks", "wanted", "num_cases"),
    [
        (2, ("--guided", "--decode"), 5),
        (4, ("--guided", "--decode", "--degrees", "2"), 7),
        (4, ("--degrees", "3", "4"), 2),
    ],
    ids=["two ranks", "four ranks", "other degrees"],
)
def test_all_cases_make_the_video_of_one_rank(
    tmp_path: Path, num_ranks: int, wanted: tuple[str, ...], num_cases: int
) -> None:
    output = tmp_path / "out" / "parallel.json"
    arguments = (*TINY, "--device", "cpu", *wanted, "--output", str(output))
    printed = run_ranks(num_ranks, tmp_path, run_script, arguments, num_ranks)
    results = json.loads(output.read_text())["results"]
    assert len(printed[0].splitlines()) == len(results) == num_cases
    assert not any(printed[1:])
    for result in results:
        case = result["case"]
        share = case["ulysses_degree"] * (2 if case["guidance_parallel"] else 1)
        assert result["relative_error"] <= 1e-4
        assert result["pool_share"] == 1 / share and len(result["ranks"]) == share + case["decode_rank"]
        measured = result["communication_share"]
        assert measured is None if case["ulysses_degree"] == 1 else 0 < measured < 1
        assert result["speedup"] > 0


def options(**values: Any) -> argparse.Namespace:
    return argparse.Namespace(**{"degrees": None, "guided": False, "decode": False} | values)


def test_cases_of_the_real_models() -> None:
    degrees = {heads: [case.ulysses_degree for case in choose_cases(heads, 8, options())] for heads in (12, 40)}
    assert degrees == {12: [2, 3, 4, 6], 40: [2, 4, 5, 8]}
    apart = [case for case in choose_cases(40, 8, options(guided=True)) if case.guidance_parallel]
    assert [(case.ulysses_degree, case.num_ranks) for case in apart] == [(1, 2), (2, 4), (4, 8)]
    decoded = [case for case in choose_cases(40, 4, options(decode=True)) if case.decodes]
    assert [(case.ulysses_degree, case.num_ranks) for case in decoded] == [(2, 2), (4, 4), (1, 2), (2, 3)]
    with pytest.raises(ValueError, match=r"\[5\].*12 heads.*\[1, 2, 3, 4, 6\]"):
        choose_cases(12, 8, options(degrees=[5]))


def test_shares_of_a_result() -> None:
    def times(seconds: float, exchange: float | None, pool: int) -> RankTimes:
        return RankTimes(
            chunk_seconds=seconds, exchange_seconds=exchange, pool_bytes=pool, planned_bytes=pool, peak_bytes=None
        )

    result = ParallelResult(
        window="12 (3+9)",
        variant="eager",
        case=Case(ulysses_degree=2),
        ranks=(times(1.0, 0.1, 50), times(1.25, 0.5, 50)),
        single=times(2.0, None, 100),
        relative_error=0.0,
    )
    assert result.speedup == 1.6 and result.communication_share == 0.1 and result.pool_share == 0.5
    assert "1.60 x, 10.0% in exchanges" in str(result)


def sizing_rows() -> list[list[str]]:
    """The computed table of the docs: both windows of a way side by side."""
    rows = []
    for model in ("wan-1.3b", "wan-14b"):
        for short, full in zip(*(size_model(model, window, 480, 832) for window in ("3+9", "0+21")), strict=True):
            guidance = "parallel" if short.guidance_parallel else "yes" if short.guided else "no"
            degree = f"{short.ulysses_degree}" + (" x 2" if short.guidance_parallel else "")
            sizes = [size for s in (short, full) for size in (s.plan.pool_bytes, s.total_bytes)]
            cells = [model, guidance, f"{short.num_ranks}", degree, *(f"{size / 1e9:.1f}" for size in sizes)]
            rows.append(cells)
    return rows


def test_the_docs_table_is_what_the_plan_computes() -> None:
    """It had been copied by hand, and the plan goes on changing. Measured columns may follow the computed ones."""
    lines = (SCRIPT.parents[1] / "docs" / "several_gpus.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:9]] for line in lines if line.startswith("| wan-")]
    assert rows == sizing_rows()


def test_sizes_of_the_real_models() -> None:
    """Window 12 of the 14B shape: 15.3 GB of keys and values, a share of the heads each; every rank has the weights."""
    sizes = list(size_model("wan-14b", "3+9", 480, 832))
    plain = {size.ulysses_degree: size for size in sizes if not size.guided}
    assert sorted(plain) == [1, 2, 4, 5, 8]
    assert plain[1].plan.pool_bytes == 12 * 1560 * 40 * 40 * 128 * 2 * 2
    for degree, size in plain.items():
        assert size.plan.pool_bytes * degree == plain[1].plan.pool_bytes
        assert size.plan.text_bytes == plain[1].plan.text_bytes
        assert size.total_bytes > size.weights_bytes > 28e9
    apart = {size.num_ranks: size for size in sizes if size.guidance_parallel}
    assert sorted(apart) == [2, 4, 8] and apart[2].plan.pool_bytes == plain[1].plan.pool_bytes
