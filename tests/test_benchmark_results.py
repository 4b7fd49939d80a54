"""Figures are kept as soon as they are measured, whatever becomes of the command afterwards."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from diffusers_ardiff.benchmarks import results as results_module
from diffusers_ardiff.benchmarks.decode import VARIANTS
from diffusers_ardiff.benchmarks.models import build_pipeline
from diffusers_ardiff.benchmarks.results import Results, time_limit

SCRIPTS = Path(__file__).parents[1] / "scripts"


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def test_the_file_has_what_was_added_so_far(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = Results(tmp_path / "out" / "figures.json")
    results.add({"a": 1}, "a is one")
    assert read(results.path)["results"] == [{"a": 1}]
    results.add({"a": 2}, "a is two")
    results.extend("b", 3)
    report = read(results.path)
    assert report["results"] == [{"a": 1}, {"a": 2, "b": 3}] and report["errors"] == []
    assert report["machine"]["versions"]["torch"]
    assert capsys.readouterr().out == "a is one\na is two\n"
    assert [path.name for path in results.path.parent.iterdir()] == ["figures.json"]


def test_a_failure_is_kept_and_the_next_one_runs(tmp_path: Path) -> None:
    results = Results(tmp_path / "figures.json")
    assert not results.attempt("first", lambda: 1 / 0)
    assert results.attempt("second", lambda: results.add({"a": 1}, "fine"))
    report = read(results.path)
    assert report["errors"] == [{"name": "first", "error": "ZeroDivisionError: division by zero"}]
    assert report["results"] == [{"a": 1}]


def test_time_limit() -> None:
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(TimeoutError, match=r"took longer than 0\.05 s"), time_limit(0.05):
        time.sleep(5)
    with time_limit(0.05), time_limit(None):
        pass
    time.sleep(0.1)
    assert signal.getsignal(signal.SIGALRM) == before


def _sleep_and_try_again() -> None:
    try:
        time.sleep(5)
    except Exception:
        time.sleep(5)


class _Finalized:
    def __del__(self) -> None:
        time.sleep(0.2)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_time_limit_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """The alarm came inside an ``except Exception`` or a finalizer once, and the family ran on without a limit."""
    with pytest.raises(TimeoutError), time_limit(0.05):
        _sleep_and_try_again()
    monkeypatch.setattr(results_module, "ALARM_SECONDS", 0.3)
    with pytest.raises(TimeoutError), time_limit(0.05):
        _Finalized()
        time.sleep(5)


def test_a_killed_command_keeps_its_figures(tmp_path: Path) -> None:
    """Figures were printed and written at the end, so a run stopped within its minute had none."""
    output = tmp_path / "op.json"
    sizes = ["--heads", "2", "--head-dim", "8", "--queries", "24", "--keys", "96", "120000", "--repeats", "200"]
    command = [sys.executable, str(SCRIPTS / "benchmark.py"), "op", *sizes, "--device", "cpu", "--output", str(output)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        while not output.exists():
            time.sleep(0.05)
        process.terminate()
        assert process.wait(timeout=30) == -signal.SIGTERM
    (result,) = read(output)["results"]
    assert result["label"] in first


def test_quick_decoders_come_first() -> None:
    """Compiling the Wan decoder takes a minute, so it must not keep the others waiting."""
    compiled = [options.compile for _, options in VARIANTS.values()]
    assert compiled == sorted(compiled)
    slow = [not is_light for is_light, options in VARIANTS.values() if options.compile]
    assert slow == sorted(slow)


def test_blocks_that_share_their_weights() -> None:
    """Twenty-eight gigabytes of random numbers on the host took longer than the GPU was lent for."""
    transformer = build_pipeline("toy", torch.device("cpu"), share_blocks=True).transformer
    first, second = (list(block.parameters()) for block in transformer.blocks)
    assert transformer.config["num_layers"] == len(transformer.blocks) == 2
    for one, other in zip(first, second, strict=True):
        assert one is not other and one.data_ptr() == other.data_ptr() and not other.requires_grad
    plain = build_pipeline("toy", torch.device("cpu")).transformer
    dtypes = [{name: weight.dtype for name, weight in model.named_parameters()} for model in (transformer, plain)]
    assert dtypes[0] == dtypes[1]


def test_small_cards_at_a_tiny_size(tmp_path: Path) -> None:
    """The command had never run whole: `plan_memory` asks for the text's length where there is no tokenizer."""
    output = tmp_path / "cards.json"
    command = [
        sys.executable,
        str(SCRIPTS / "small_cards.py"),
        "--tiny",
        "--num-frames",
        "45",
        "--output",
        str(output),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr
    results = {result["card_gb"]: result for result in read(output)["results"]}
    assert list(results) == [24, 16, 48]
    assert [(r["frames"], r["decoder"], r["offload"]) for r in results.values()] == [
        (45, "vae", False),
        (45, "light", False),
        (45, "vae", True),
    ]
    assert done.stdout.count("s a chunk") == 3


def test_a_card_that_takes_too_long_leaves_the_others(tmp_path: Path) -> None:
    """A limit of a second passed or failed by the speed of the machine; nothing is done in a hundredth of one."""
    output = tmp_path / "cards.json"
    command = [sys.executable, str(SCRIPTS / "small_cards.py"), "24", "16", "--tiny", "--limit", "0.01"]
    done = subprocess.run(
        [*command, "--output", str(output)], capture_output=True, text=True, check=False, timeout=280
    )
    assert done.returncode == 1
    assert [error["name"] for error in read(output)["errors"]] == ["24 GB", "16 GB"]
    assert "24 GB: TimeoutError" in done.stderr
    unknown = subprocess.run([*command[:2], "20"], capture_output=True, text=True, check=False, timeout=280)
    assert unknown.returncode == 2 and "no way is known for cards of [20] GB" in unknown.stderr
