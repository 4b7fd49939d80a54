"""Flash attention through the block table in Triton, on CUDA and ROCm; triton is imported when it is first used.

Lengths stay on the device, so one launch serves a filling window, rows of different length and a captured graph. A
graph captured while every row was contiguous must be replayed with contiguous rows. Float8 pools are converted in
registers.
"""

from __future__ import annotations

import importlib.util
from functools import cache

import torch

from ...cache.float8 import FLOAT8
from ...context import LaunchPlan, PagedLayerInputs
from ..masked import attend_masked
from ..registry import AttentionBackend, AttentionRequest, register_backend


def attend(query: torch.Tensor, inputs: PagedLayerInputs, plan: LaunchPlan, softmax_scale: float) -> torch.Tensor:
    """Query (R, L, H, D) over each row's exact number of keys: one launch for all rows, fragmented or not, or one a
    segment of a mask."""
    from ..kernels.key_views import attend_keys
    from ..kernels.paged_attention import attend_pages

    if plan.mask is not None:
        return attend_masked(attend_keys, query, inputs, plan, plan.mask, softmax_scale)
    return attend_pages(
        query,
        inputs,
        page_size=plan.page_size,
        softmax_scale=softmax_scale,
        contiguous=all(row.base_slot is not None for row in plan.rows),
    ).out


@cache
def unavailable() -> str | None:
    """Why the kernels cannot run on this machine; None: they can."""
    if importlib.util.find_spec("triton") is None:
        return "needs the triton package, which is not installed"
    if not torch.cuda.is_available():
        return "needs a CUDA or ROCm device, and torch sees none"
    if torch.version.hip is None and torch.cuda.get_device_capability() < (8, 0):
        return f"needs compute capability 8.0, this device has {torch.cuda.get_device_capability()}"
    return None


def refuses(request: AttentionRequest) -> str | None:
    """Why this device cannot convert a float8 pool; None: it can, or the pool is not float8."""
    return no_float8(is_hip=request.is_hip) if request.dtype == FLOAT8 else None


def no_float8(*, is_hip: bool) -> str | None:
    """Why kernels can neither read nor write float8 pools here; None: they can, or there is no device to ask."""
    if is_hip:
        return "takes no float8 pool on ROCm"
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9):
        return f"takes a float8 pool on compute capability 8.9, this device has {torch.cuda.get_device_capability()}"
    return None


BACKEND = register_backend(
    AttentionBackend(
        name="triton",
        attend=attend,
        rank=110,
        device_types=frozenset({"cuda"}),
        dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16, FLOAT8}),
        on_hip=True,
        page_multiple=16,
        head_dims=frozenset(range(1, 257)),
        masks=True,
        lse=True,
        device_lengths=True,
        refuses=refuses,
        unavailable=unavailable,
    )
)
