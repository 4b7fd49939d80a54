"""FlashAttention 3 (Hopper): dense on the contiguous or staged view, else its page table, else packed keys.

FlashAttention 3 loads whole tiles of V by TMA up to the end of the tensor it is given, and a weight of 0 times NaN is
NaN (flash-attention#2374). So it is never given a tensor whose tail is unwritten: views end at the last key, packed
keys have no gaps, and the page table is used at page sizes only where V is loaded row by row and cleared.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import torch

from ...context import LaunchPlan, PagedLayerInputs
from ..keys import staged_view
from ..masked import attend_masked
from ..registry import AttentionBackend, register_backend
from .libraries import (
    FLASH3_HEAD_DIMS,
    Flash3Library,
    accepts,
    find_flash3,
    flash3_build_flags,
    missing_cuda,
    one_split,
    output_of,
    why_not_loaded,
)
from .packing import attend_packed, attend_with_lse, paged_pools
from .splits import choose_splits

INSTALL = "FlashAttention 3 is not installed: pip install fa3-fwd"
MAX_TABLE_PAGE_SIZE = 63
"""The smallest tile is 64 keys; pages that a tile divides are loaded whole."""


def attend(query: torch.Tensor, inputs: PagedLayerInputs, plan: LaunchPlan, softmax_scale: float) -> torch.Tensor:
    """Query (R, L, H, D) over each row's exact number of keys: one call for all rows, or one a segment of a mask.

    Raises:
        RuntimeError: FlashAttention 3 is not installed.
    """
    library = _library()
    if plan.mask is not None:
        kernel = partial(attend_with_lse, library.dense)
        return attend_masked(kernel, query, inputs, plan, plan.mask, softmax_scale)
    view = staged_view(inputs, plan)
    if view is None:
        return _attend_pages(library, query, inputs, plan, softmax_scale)
    splits = one_split(library.dense)
    return output_of(library.dense(query, *view, softmax_scale=softmax_scale, causal=False, **splits))


def attend_split(
    query: torch.Tensor, inputs: PagedLayerInputs, plan: LaunchPlan, softmax_scale: float
) -> torch.Tensor:
    """As ``attend``, without masks; the keys of a dense call are cut into the parts that ``choose_splits`` says.

    Partial results are float32 and merged by log-sum-exp, so it differs from one part by rounding.

    Raises:
        RuntimeError: FlashAttention 3 is not installed.
    """
    library = _library()
    view = staged_view(inputs, plan)
    if view is None:
        return _attend_pages(library, query, inputs, plan, softmax_scale)
    splits = choose_splits(tuple(query.shape), view[0].shape[1], count_multiprocessors(query.device))
    out = library.dense(query, *view, softmax_scale=softmax_scale, causal=False, num_splits=splits)
    return output_of(out)


@cache
def count_multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a GPU."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _library() -> Flash3Library:
    library = find_flash3()
    if library is None:
        raise RuntimeError(INSTALL)
    return library


def _attend_pages(
    library: Flash3Library,
    query: torch.Tensor,
    inputs: PagedLayerInputs,
    plan: LaunchPlan,
    softmax_scale: float,
) -> torch.Tensor:
    """Where there is no dense view: the page table, or packed keys."""
    if library.paged is not None and plan.page_size <= MAX_TABLE_PAGE_SIZE:
        keys, values = paged_pools(inputs, plan.page_size)
        out = library.paged(
            query,
            keys,
            values,
            cache_seqlens=inputs.seq_lens,
            page_table=inputs.block_table,
            softmax_scale=softmax_scale,
            causal=False,
            **one_split(library.paged),
        )
        return output_of(out)
    return attend_packed(library.varlen, query, inputs, plan, softmax_scale, one_split(library.varlen))


def unavailable() -> str | None:
    """Why FlashAttention 3 cannot run here: no library, or no Hopper GPU."""
    return missing_cuda((9, 0), (9, 9)) or why_not_loaded(find_flash3, INSTALL)


def make_backend() -> AttentionBackend:
    """The backend of the installed build: wheels leave out fp16 or head sizes."""
    flags = flash3_build_flags()
    largest = max((dim for dim in FLASH3_HEAD_DIMS if not flags.get(f"FLASHATTENTION_DISABLE_HDIM{dim}")), default=0)
    half = () if flags.get("FLASHATTENTION_DISABLE_FP16") else (torch.float16,)
    return AttentionBackend(
        name="flash3",
        attend=attend,
        rank=10,
        device_types=frozenset({"cuda"}),
        dtypes=frozenset({torch.bfloat16, *half}),
        head_dims=frozenset(range(8, largest + 1, 8)),
        masks=True,
        lse=True,
        unavailable=unavailable,
    )


def split_unavailable() -> str | None:
    """Why keys can't be cut into parts here: no FlashAttention 3, or one whose dense function takes no ``num_splits``."""
    missing = unavailable()
    if missing is not None:
        return missing
    is_built = not flash3_build_flags().get("FLASHATTENTION_DISABLE_SPLIT")
    return None if is_built and accepts(_library().dense, "num_splits") else "this build can't split keys"


def make_split_backend() -> AttentionBackend:
    """FlashAttention 3 with the keys cut into parts where that pays; masks are left to ``flash3``.

    On one H200 its op takes 0.70 to 0.99 of the time of that of ``flash3`` (``benchmark.py op --preset anchors``).
    """
    return replace(
        make_backend(),
        name="flash3_split",
        attend=attend_split,
        rank=9,
        masks=False,
        lse=False,
        unavailable=split_unavailable,
    )


BACKEND = register_backend(make_backend())
SPLIT_BACKEND = register_backend(make_split_backend())
