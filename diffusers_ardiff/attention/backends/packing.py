"""Keys in the layouts that flash kernels take: a dense view where there is one, else packed one row after the other.

Shapes: R rows, L queries, H heads, D head size, B page size, T keys of all rows together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from ...context import LaunchPlan, PagedLayerInputs
from ..keys import staged_view
from ..merge import PartialResult
from .libraries import AttentionFn, accepts, one_split, output_of


class PackedKeys(NamedTuple):
    """Keys and values of all rows without padding, so that no kernel can touch a slot that nobody wrote.

    Attributes:
        keys, values: (T, H, D).
        cu_seqlens: (R + 1,) int32 on the device, where each row begins and the last one ends.
        max_len: the longest row.
    """

    keys: torch.Tensor
    values: torch.Tensor
    cu_seqlens: torch.Tensor
    max_len: int


def pack_keys(inputs: PagedLayerInputs, plan: LaunchPlan) -> PackedKeys:
    """All rows' keys end to end: the dense view itself where it has no gaps, else one gather for all rows."""
    view = staged_view(inputs, plan)
    if view is None:
        return _gather_packed(inputs, plan)
    keys, values = view
    num_rows, num_keys = keys.shape[:2]
    ends = _uniform_offsets(num_rows, num_keys, keys.device)
    return PackedKeys(keys.flatten(0, 1), values.flatten(0, 1), ends, num_keys)


def query_offsets(query: torch.Tensor) -> torch.Tensor:
    """(R + 1,) int32 offsets of the rows of a query (R, L, H, D) flattened to (R * L, H, D)."""
    return _uniform_offsets(query.shape[0], query.shape[1], query.device)


def attend_packed(
    varlen: AttentionFn,
    query: torch.Tensor,
    inputs: PagedLayerInputs,
    plan: LaunchPlan,
    softmax_scale: float,
    options: Mapping[str, Any] | None = None,
) -> torch.Tensor:
    """Call a ``flash_attn_varlen_func`` (FlashAttention 2 and 3, AITER) once for all rows: (R, L, H, D)."""
    packed = pack_keys(inputs, plan)
    out = varlen(
        query.flatten(0, 1),
        packed.keys,
        packed.values,
        cu_seqlens_q=query_offsets(query),
        cu_seqlens_k=packed.cu_seqlens,
        max_seqlen_q=query.shape[1],
        max_seqlen_k=packed.max_len,
        softmax_scale=softmax_scale,
        causal=False,
        **(options or {}),
    )
    return output_of(out).view_as(query)


def attend_with_lse(
    dense: AttentionFn,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    causal: bool,
    softmax_scale: float,
) -> PartialResult:
    """A ``flash_attn_func`` (FlashAttention 2 and 3) as a ``PartialAttention``; their causal mask is bottom-right.

    Some versions return the log-sum-exp only when asked by ``return_attn_probs``, the others always do.
    """
    options = {"return_attn_probs": True} if accepts(dense, "return_attn_probs") else {}
    out, lse, *_ = dense(
        query, keys, values, softmax_scale=softmax_scale, causal=causal, **one_split(dense), **options
    )
    return PartialResult(out, lse)


def paged_pools(inputs: PagedLayerInputs, page_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Both pools as (num_pages, B, H, D) views, the layout that a block table indexes."""
    return inputs.key_pool.unflatten(0, (-1, page_size)), inputs.value_pool.unflatten(0, (-1, page_size))


def _uniform_offsets(num_rows: int, length: int, device: torch.device) -> torch.Tensor:
    return torch.arange(0, (num_rows + 1) * length, length, dtype=torch.int32, device=device)


def _gather_packed(inputs: PagedLayerInputs, plan: LaunchPlan) -> PackedKeys:
    """One gather for all rows; host lengths give the sizes, device lengths the offsets, so nothing is read back."""
    lengths = [row.seq_len for row in plan.rows]
    ends = inputs.seq_lens.cumsum(0, dtype=torch.int32)
    offsets = torch.nn.functional.pad(ends, (1, 0))
    token = torch.arange(sum(lengths), device=ends.device, dtype=torch.int32)
    row = torch.searchsorted(ends, token, right=True)
    index = token - offsets[row]
    page = inputs.block_table[row, index // plan.page_size].to(torch.int64)
    slots = page * plan.page_size + index % plan.page_size
    keys, values = inputs.key_pool.index_select(0, slots), inputs.value_pool.index_select(0, slots)
    return PackedKeys(keys, values, offsets, max(lengths))
