"""ROCm: keys staged or packed first, then AITER, else flash-attn, else SDPA.

Paged kernels want pages of 128 tokens there, or fault the GPU (flash-attention#1579), and some are wrong at a single
query (aiter#4455). So no block table ever reaches a kernel, and a single query goes to SDPA.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...context import LaunchPlan, PagedLayerInputs
from ..registry import AttentionBackend, register_backend
from . import sdpa
from .libraries import AttentionFn, find_aiter, find_flash2
from .packing import attend_packed


class VarlenRoute(NamedTuple):
    """The library that serves ROCm: ``varlen`` is None where it is SDPA."""

    library: str
    varlen: AttentionFn | None


def choose_route() -> VarlenRoute:
    """AITER where it is installed, else flash-attn, else SDPA."""
    aiter = find_aiter()
    if aiter is not None:
        return VarlenRoute("aiter", aiter)
    flash2 = find_flash2()
    return VarlenRoute("flash-attn", flash2.varlen) if flash2 is not None else VarlenRoute("sdpa", None)


def attend(query: torch.Tensor, inputs: PagedLayerInputs, plan: LaunchPlan, softmax_scale: float) -> torch.Tensor:
    """One call for all rows: query (R, L, H, D) over each row's exact number of keys."""
    varlen = choose_route().varlen
    if varlen is None or query.shape[1] == 1:
        return sdpa.attend(query, inputs, plan, softmax_scale)
    return attend_packed(varlen, query, inputs, plan, softmax_scale)


def unavailable() -> str | None:
    """Why this backend cannot run here: a torch that was not built for ROCm."""
    return None if torch.version.hip is not None else f"torch {torch.__version__} is not a ROCm build"


BACKEND = register_backend(
    AttentionBackend(
        name="rocm",
        attend=attend,
        rank=50,
        device_types=frozenset({"cuda"}),
        on_hip=True,
        dtypes=frozenset({torch.bfloat16, torch.float16}),
        head_dims=frozenset(range(8, 257, 8)),
        unavailable=unavailable,
    )
)
