"""The doctor's report: what is chosen here, why not the others, what to install."""

import json
from dataclasses import replace

import pytest
import torch

from diffusers_ardiff import doctor
from diffusers_ardiff.attention import get_backend, list_backends, registry, writing


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("no_gpu")
def test_report_covers_every_backend() -> None:
    report = doctor.examine()
    assert [verdict.backend for verdict in report.backends] == [backend.name for backend in list_backends()]
    assert report.chosen == "sdpa"
    refused = {verdict.backend: verdict.refusals for verdict in report.backends}
    assert not refused["sdpa"] and not refused["reference"]
    assert "this machine has no CUDA device" in refused["flash3"]
    text = doctor.to_text(report)
    assert "chosen: sdpa" in text and "a GPU" in text
    assert all(verdict.backend in text for verdict in report.backends)
    assert report.chosen_for == dict.fromkeys(["dense", "fragmented", "ragged", "masked"], "sdpa")
    assert "other rows: the same" in text
    assert report.write.eager == report.write.compiled == "torch"
    assert "norm, rotation and write: torch; in compiled regions: torch (the fused kernel runs on cuda" in text


def test_report_says_where_the_fused_write_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "fused_write_refusals", lambda *args: [])
    report = doctor.examine()
    assert (report.write.eager, report.write.compiled) == (writing.EAGER_WRITE, writing.COMPILED_WRITE)


def test_report_says_what_serves_other_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    first = replace(get_backend("reference"), rank_for={"ragged": -1})
    monkeypatch.setattr(registry, "_backends", {**registry._backends, "reference": first})
    report = doctor.examine()
    assert (report.chosen, report.chosen_for["ragged"], report.chosen_for["masked"]) == ("sdpa", "reference", "sdpa")
    assert "other rows: ragged: reference" in doctor.to_text(report)


def test_hopper_without_flash3_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "missing_cuda", lambda *bounds: None)
    monkeypatch.setattr(doctor, "find_flash3", lambda: None)
    request = doctor.AttentionRequest(device_type="cuda", dtype=torch.float32, head_dim=128, page_size=16)
    advice = doctor._advice(request)
    assert any("pip install fa3-fwd" in line for line in advice)
    assert any("bfloat16" in line for line in advice)


def test_call_that_nothing_serves_is_an_error() -> None:
    with pytest.raises(ValueError, match="no attention backend"):
        doctor.examine(dtype=torch.int8)


def test_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    doctor.main(["--json", "--dtype", "float32", "--head-dim", "64"])
    report = json.loads(capsys.readouterr().out)
    assert report["call"] == {"dtype": "float32", "head_dim": 64, "page_size": 16}
    assert report["versions"]["torch"] == torch.__version__
