"""torch's own variable-length attention: a block table where torch takes one, else packed keys.

torch 2.10 has no softmax scale, 2.12 and later have a block table, at page sizes that are multiples of 256.
"""

from __future__ import annotations

import torch

from ...context import LaunchPlan, PagedLayerInputs
from ..keys import staged_view
from ..registry import AttentionBackend, register_backend
from .libraries import AttentionFn, accepts, find_torch_varlen, missing_cuda, one_split, output_of
from .packing import pack_keys, paged_pools, query_offsets

TABLE_PAGE_MULTIPLE = 256


def attend(query: torch.Tensor, inputs: PagedLayerInputs, plan: LaunchPlan, softmax_scale: float) -> torch.Tensor:
    """One call for all rows: query (R, L, H, D) over each row's exact number of keys.

    Raises:
        RuntimeError: this torch has no variable-length attention.
    """
    function = find_torch_varlen()
    if function is None:
        raise RuntimeError(f"torch {torch.__version__} has no torch.nn.attention.varlen")
    has_table = accepts(function, "block_table") and plan.page_size % TABLE_PAGE_MULTIPLE == 0
    if has_table and staged_view(inputs, plan) is None:
        return _attend_paged(function, query, inputs, plan, softmax_scale)
    packed = pack_keys(inputs, plan)
    out = function(
        query.flatten(0, 1),
        packed.keys,
        packed.values,
        query_offsets(query),
        packed.cu_seqlens,
        query.shape[1],
        packed.max_len,
        scale=softmax_scale,
        **one_split(function),
    )
    return output_of(out).view_as(query)


def _attend_paged(
    function: AttentionFn, query: torch.Tensor, inputs: PagedLayerInputs, plan: LaunchPlan, softmax_scale: float
) -> torch.Tensor:
    keys, values = paged_pools(inputs, plan.page_size)
    out = function(
        query.flatten(0, 1),
        keys,
        values,
        query_offsets(query),
        None,
        query.shape[1],
        max(row.seq_len for row in plan.rows),
        scale=softmax_scale,
        seqused_k=inputs.seq_lens,
        block_table=inputs.block_table,
        **one_split(function),
    )
    return output_of(out).view_as(query)


def unavailable() -> str | None:
    """Why torch's variable-length attention cannot run here: a torch without it, or a GPU before Ampere."""
    function = find_torch_varlen()
    if function is None or not accepts(function, "scale"):
        return f"torch {torch.__version__} has no variable-length attention with a softmax scale: use 2.11 or later"
    return missing_cuda((8, 0))


BACKEND = register_backend(
    AttentionBackend(
        name="varlen",
        attend=attend,
        rank=120,
        device_types=frozenset({"cuda"}),
        dtypes=frozenset({torch.bfloat16, torch.float16}),
        head_dims=frozenset(range(8, 257, 8)),
        unavailable=unavailable,
    )
)
