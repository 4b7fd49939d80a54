"""flash-attn 2: dense on the contiguous or staged view, else its block table, else packed keys.

Its block table takes page sizes that are multiples of 256 only.
"""

from __future__ import annotations

from functools import partial

import torch

from ...context import LaunchPlan, PagedLayerInputs
from ..keys import staged_view
from ..masked import attend_masked
from ..registry import AttentionBackend, register_backend
from .libraries import find_flash2, missing_cuda, one_split, output_of, why_not_loaded
from .packing import attend_packed, attend_with_lse, paged_pools

INSTALL = "flash-attn is not installed: pip install flash-attn"
TABLE_PAGE_MULTIPLE = 256


def attend(query: torch.Tensor, inputs: PagedLayerInputs, plan: LaunchPlan, softmax_scale: float) -> torch.Tensor:
    """Query (R, L, H, D) over each row's exact number of keys: one call for all rows, or one a segment of a mask.

    Raises:
        RuntimeError: flash-attn is not installed.
    """
    library = find_flash2()
    if library is None:
        raise RuntimeError(INSTALL)
    if plan.mask is not None:
        kernel = partial(attend_with_lse, library.dense)
        return attend_masked(kernel, query, inputs, plan, plan.mask, softmax_scale)
    view = staged_view(inputs, plan)
    if view is not None:
        splits = one_split(library.dense)
        return output_of(library.dense(query, *view, softmax_scale=softmax_scale, causal=False, **splits))
    if plan.page_size % TABLE_PAGE_MULTIPLE == 0:
        keys, values = paged_pools(inputs, plan.page_size)
        out = library.paged(
            query,
            keys,
            values,
            cache_seqlens=inputs.seq_lens,
            block_table=inputs.block_table,
            softmax_scale=softmax_scale,
            causal=False,
            **one_split(library.paged),
        )
        return output_of(out)
    return attend_packed(library.varlen, query, inputs, plan, softmax_scale, one_split(library.varlen))


def unavailable() -> str | None:
    """Why flash-attn 2 cannot run here: no library, or a GPU before Ampere."""
    return missing_cuda((8, 0)) or why_not_loaded(find_flash2, INSTALL)


BACKEND = register_backend(
    AttentionBackend(
        name="flash2",
        attend=attend,
        rank=115,
        device_types=frozenset({"cuda"}),
        dtypes=frozenset({torch.bfloat16, torch.float16}),
        head_dims=frozenset(range(8, 257, 8)),
        masks=True,
        lse=True,
        unavailable=unavailable,
    )
)
