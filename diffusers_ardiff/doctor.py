"""What this machine has for attention, what would be chosen, and what to install to be faster.

python -m diffusers_ardiff.doctor [--json] [--dtype bfloat16] [--head-dim 128] [--page-size 16]
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import get_args

import torch

from .attention import AttentionRequest, choose_write, fused_write_refusals, list_backends, select_backend
from .attention.backends import rocm
from .attention.backends.libraries import find_flash3, missing_cuda
from .attention.registry import Work

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.bfloat16, torch.float16, torch.float32)}
PACKAGES = (
    "torch",
    "triton",
    "diffusers",
    "transformers",
    "fa3-fwd",
    "flash-attn-3",
    "flash-attn",
    "aiter",
    "kernels",
)
"""Distributions whose versions are reported; a missing one is reported as such."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """The device that the pools would live on."""

    kind: str
    name: str
    capability: str | None
    memory_bytes: int | None
    toolkit: str | None


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One backend: whether it would serve the call, and why not."""

    backend: str
    rank: int
    refusals: list[str]


@dataclass(frozen=True, kw_only=True)
class WriteVerdict:
    """Who normalises, rotates and writes a Wan model's rows, and why the fused kernel cannot."""

    eager: str
    compiled: str
    refusals: list[str]


@dataclass(frozen=True, kw_only=True)
class Report:
    """All that the doctor found, for one kind of call.

    ``versions``: None where a package is not installed. ``chosen_for``: the backend of each kind of work.
    """

    python: str
    versions: dict[str, str | None]
    device: Device
    call: dict[str, str | int]
    chosen: str
    reason: str
    chosen_for: dict[str, str]
    backends: list[Verdict]
    write: WriteVerdict
    advice: list[str]


def examine(*, dtype: torch.dtype = torch.bfloat16, head_dim: int = 128, page_size: int = 16) -> Report:
    """Look at this machine and decide as the op would for K/V of ``dtype``, ``head_dim`` and ``page_size``.

    Raises:
        ValueError: no backend can serve such a call here.
    """
    request = AttentionRequest(
        device_type="cuda" if torch.cuda.is_available() else "cpu",
        dtype=dtype,
        head_dim=head_dim,
        page_size=page_size,
        is_hip=torch.cuda.is_available() and torch.version.hip is not None,
    )
    verdicts = [Verdict(backend=b.name, rank=b.rank, refusals=b.refusals(request)) for b in list_backends()]
    chosen = select_backend(request).name
    return Report(
        python=platform.python_version(),
        versions={name: _version(name) for name in PACKAGES},
        device=_device(),
        call={"dtype": str(dtype).removeprefix("torch."), "head_dim": head_dim, "page_size": page_size},
        chosen=chosen,
        reason=_reason(chosen, verdicts),
        chosen_for={work: _choice_for(request, work) for work in get_args(Work)},
        backends=verdicts,
        write=_write(request),
        advice=_advice(request),
    )


def _choice_for(request: AttentionRequest, work: Work) -> str:
    return select_backend(replace(request, work=work, needs_mask=work == "masked")).name


def _write(request: AttentionRequest) -> WriteVerdict:
    refusals = fused_write_refusals(request.device_type, request.dtype, request.head_dim)
    eager, compiled = ("fused" if is_fused else "torch" for is_fused in choose_write(None, refusals))
    return WriteVerdict(eager=eager, compiled=compiled, refusals=refusals)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _device() -> Device:
    if not torch.cuda.is_available():
        return Device(kind="cpu", name=platform.machine(), capability=None, memory_bytes=None, toolkit=None)
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    toolkit = f"ROCm {torch.version.hip}" if torch.version.hip is not None else f"CUDA {torch.version.cuda}"
    return Device(
        kind="cuda",
        name=properties.name,
        capability=f"{properties.major}.{properties.minor}",
        memory_bytes=properties.total_memory,
        toolkit=toolkit,
    )


def _reason(chosen: str, verdicts: Sequence[Verdict]) -> str:
    faster = [verdict.backend for verdict in verdicts[: [v.backend for v in verdicts].index(chosen)]]
    reason = "first in measured order that can serve the call"
    if faster:
        reason += f"; ahead of it, where usable: {', '.join(faster)}"
    if chosen == rocm.BACKEND.name:
        reason += f"; through {rocm.choose_route().library}"
    elif chosen == "flash3":
        library = find_flash3()
        reason += f"; from {library.name}" if library is not None else ""
    return reason


def _advice(request: AttentionRequest) -> list[str]:
    """What to install or use to be faster here."""
    if request.device_type == "cpu":
        return ["a GPU: attention runs on the CPU here"]
    advice = []
    if request.dtype == torch.float32:
        advice.append("K/V in bfloat16: no flash kernel takes float32")
    if request.is_hip:
        if rocm.choose_route().library != "aiter":
            advice.append("AITER (https://github.com/ROCm/aiter), built for this GPU")
    elif missing_cuda((9, 0), (9, 9)) is None and find_flash3() is None:
        advice.append("FlashAttention 3: pip install fa3-fwd (1.2 times as fast as cuDNN attention on an H200)")
    return advice


def to_text(report: Report) -> str:
    """The report as plain text."""
    device = report.device
    memory = "" if device.memory_bytes is None else f", {device.memory_bytes / 2**30:.0f} GiB"
    capability = "" if device.capability is None else f", compute capability {device.capability}"
    toolkit = "" if device.toolkit is None else f", {device.toolkit}"
    lines = [f"device     {device.kind}: {device.name}{capability}{memory}{toolkit}", f"python     {report.python}"]
    lines += [f"{name:<16} {version or 'not installed'}" for name, version in report.versions.items()]
    call = report.call
    lines += [
        "",
        f"attention over {call['dtype']} K/V, head size {call['head_dim']}, pages of {call['page_size']}:",
        f"chosen: {report.chosen} ({report.reason})",
        "",
        "backends in measured order:",
    ]
    for verdict in report.backends:
        state = "can serve it" if not verdict.refusals else "; ".join(verdict.refusals)
        lines.append(f"  {verdict.backend:<14} {state}")
    other = [f"{work}: {name}" for work, name in report.chosen_for.items() if name != report.chosen]
    lines += ["", f"other rows: {', '.join(other) or 'the same'}", _write_line(report.write)]
    lines += ["", "to be faster:" if report.advice else "nothing to install: the fastest backend is in use"]
    return "\n".join([*lines, *(f"  {advice}" for advice in report.advice)])


def _write_line(write: WriteVerdict) -> str:
    line = f"norm, rotation and write: {write.eager}; in compiled regions: {write.compiled}"
    return line + (f" (the fused kernel {'; '.join(write.refusals)})" if write.refusals else "")


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line of the doctor."""
    parser = argparse.ArgumentParser(
        prog="python -m diffusers_ardiff.doctor", description="What this machine has for attention."
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bfloat16", help="of keys and values")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--page-size", type=int, default=16)
    options = parser.parse_args(arguments)
    report = examine(dtype=DTYPES[options.dtype], head_dim=options.head_dim, page_size=options.page_size)
    print(json.dumps(asdict(report), indent=2) if options.json else to_text(report))


if __name__ == "__main__":
    main()
