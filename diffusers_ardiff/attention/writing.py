"""Who normalises, rotates and writes a layer's new rows: torch, or one Triton kernel inside the op.

torch's version is three kinds of kernels in eager; under ``torch.compile`` Inductor fuses norm and rotation, and the
write stays inside the op. Both give the same numbers but for the order of the norm's sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import torch

from ..cache.float8 import FLOAT8
from .backends import triton_paged

WriteName = Literal["fused", "torch"]
EAGER_WRITE: WriteName = "fused"
"""Where nothing is named, by measurement on one H200 (40 x 128, 4680 tokens): torch 1.066 ms, fused 0.086 ms."""
COMPILED_WRITE: WriteName = "fused"
"""The same inside a compiled region: a replayed chunk of Wan 1.3B's shape takes 0.2707 s with "torch", 0.2589 s so."""
FUSED_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})


class QKNorm(NamedTuple):
    """RMS norms across heads: ``query_weight``, ``key_weight`` (H * D,), as in ``torch.nn.RMSNorm(H * D, eps)``."""

    query_weight: torch.Tensor
    key_weight: torch.Tensor
    eps: float


class WriteChoice(NamedTuple):
    """Whether the fused kernel is used, in eager and in compiled regions."""

    eager: bool
    compiled: bool


TORCH_WRITE = WriteChoice(eager=False, compiled=False)


def fused_write_refusals(device_type: str, dtype: torch.dtype, head_dim: int) -> list[str]:
    """Why the fused kernel cannot take rows, or pools, of this dtype and head size here, a phrase each; empty: it can."""
    missing = triton_paged.unavailable()
    if missing is None and dtype == FLOAT8:
        missing = triton_paged.no_float8(is_hip=torch.version.hip is not None)
    dtypes = FUSED_DTYPES | {FLOAT8}
    checks = [
        (device_type == "cuda", f"runs on cuda, not {device_type}"),
        (dtype in dtypes, f"takes {sorted(str(d) for d in dtypes)}, not {dtype}"),
        (head_dim % 2 == 0, f"wants an even head size, not {head_dim}"),
    ]
    return [reason for ok, reason in checks if not ok] + ([missing] if missing is not None else [])


def check_write_name(name: str | None) -> WriteName | None:
    """The name, if it is one.

    Raises:
        ValueError: unknown; the message has the known names.
    """
    for known in get_args(WriteName):
        if name == known:
            return known
    if name is not None:
        raise ValueError(f"unknown way to write {name!r}; known: {list(get_args(WriteName))}, None: by measurement.")
    return None


def choose_write(name: WriteName | None, refusals: Sequence[str]) -> WriteChoice:
    """The named way, or the measured one where the fused kernel can do the call (``refusals`` is empty).

    Raises:
        ValueError: "fused" is named and cannot do the call; the message says why.
    """
    if name == "fused" and refusals:
        raise ValueError("the fused write is named, but " + "; ".join(refusals) + ".")
    if refusals:
        return TORCH_WRITE
    return WriteChoice(eager=(name or EAGER_WRITE) == "fused", compiled=(name or COMPILED_WRITE) == "fused")
