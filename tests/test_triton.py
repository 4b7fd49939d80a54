"""The Triton backend on a machine without a GPU: its kernels by Triton's interpreter, and why it refuses to run."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from diffusers_ardiff.attention import AttentionRequest, select_backend
from diffusers_ardiff.attention.backends import triton_paged


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("name", ["interpreted_triton.py", "interpreted_fused_write.py"])
def test_kernels_under_the_interpreter(name: str) -> None:
    """In a process of their own: Triton decides to interpret when it is imported, for good."""
    cases = Path(__file__).with_name(name)
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(cases)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=cases.parent.parent,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout[-5000:] + result.stderr[-2000:]
    assert " passed" in result.stdout and "skipped" not in result.stdout


REQUEST = AttentionRequest(device_type="cuda", dtype=torch.bfloat16, head_dim=128, page_size=16, needs_lse=True)


@pytest.fixture
def forget_availability() -> None:
    triton_paged.unavailable.cache_clear()
    yield
    triton_paged.unavailable.cache_clear()


@pytest.mark.usefixtures("forget_availability")
def test_refuses_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="triton: needs the triton package"):
        select_backend(REQUEST, "triton")


@pytest.mark.usefixtures("forget_availability")
def test_refuses_without_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="needs a CUDA or ROCm device"):
        select_backend(REQUEST, "triton")


@pytest.mark.usefixtures("forget_availability")
def test_serves_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert select_backend(REQUEST, "triton") is triton_paged.BACKEND


def test_backend_is_registered_without_importing_triton() -> None:
    code = (
        "import sys, diffusers_ardiff.attention.backends.triton_paged; "
        "sys.exit('diffusers_ardiff.attention.kernels.paged_attention' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
