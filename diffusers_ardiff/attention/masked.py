"""Piecewise masks over the pages, for kernels that know no mask but causal and can return a log-sum-exp.

The history is a set, so its order in the ring does not matter: all queries attend to it once, unmasked, and each
segment attends to the new rows up to its own end; the two are merged by log-sum-exp. While storage is in order, a
segment is one call over all keys up to its end.

Shapes: R rows, B rows of one call, L queries, N keys, H heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ..cache.float8 import as_bytes
from ..context import LaunchPlan, PagedLayerInputs
from ..masks import MaskedRow, PagedMask, PagedPiecewiseSegment, Segment
from .keys import padded_gather, staged_view
from .merge import PartialAttention, PartialResult, merge_partial_attention
from .piecewise import run_paged_piecewise_plan


def attend_masked(
    partial: PartialAttention,
    query: torch.Tensor,
    inputs: PagedLayerInputs,
    plan: LaunchPlan,
    mask: PagedMask,
    softmax_scale: float,
) -> torch.Tensor:
    """Attend under a piecewise mask through a kernel that returns a log-sum-exp.

    Rows that lie alike and are cut alike are one call a segment; other rows take turns.

    Args:
        partial: the kernel.
        query: (R, L, H, D), one query a new token.
        inputs, plan: of a forward whose new rows were written.
        mask: the plan's.
        softmax_scale: factor on the scores.

    Returns: (R, L, H, D).
    """
    runner = _SegmentRunner(partial, softmax_scale)
    for keys, values, first_row in _key_batches(inputs, plan, mask):
        rows = query[first_row : first_row + len(keys)]
        runner.add_rows(rows, keys, values, mask.rows[first_row])
    out = run_paged_piecewise_plan(
        query.flatten(0, 1), None, None, mask.plan, mask.plan.segments, runner, use_homogeneous_batch=True
    )
    return out.view_as(query)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Batch:
    """Rows that one call serves, all laid out like ``layout``.

    Attributes:
        keys, values: (B, N, H, D) in storage order.
        new_keys, new_values: (B, L, H, D), the forward's own, in their order.
        shared: attention of all queries to what is not new, a result for each range; empty where storage is in order.
    """

    layout: MaskedRow
    keys: torch.Tensor
    values: torch.Tensor
    new_keys: torch.Tensor
    new_values: torch.Tensor
    shared: tuple[PartialResult, ...]


class _SegmentRunner:
    """Attention of one segment of all rows; a ``PagedPiecewiseRunner`` whose metadata is the segment."""

    def __init__(self, partial: PartialAttention, softmax_scale: float) -> None:
        self._partial = partial
        self._scale = softmax_scale
        self._batches: list[_Batch] = []

    def add_rows(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layout: MaskedRow) -> None:
        """Take the next B rows: query (B, L, H, D), keys and values (B, N, H, D)."""
        shared = () if layout.in_order else layout.shared
        self._batches.append(
            _Batch(
                layout=layout,
                keys=keys,
                values=values,
                new_keys=_join(keys, layout.new),
                new_values=_join(values, layout.new),
                shared=tuple(self._attend(query, keys[:, _slice(p)], values[:, _slice(p)]) for p in shared),
            )
        )

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        metadata: PagedPiecewiseSegment,
        output_buffer: torch.Tensor | None,
        /,
    ) -> torch.Tensor:
        outputs, row, done = [], 0, 0
        for batch in self._batches:
            segment = metadata.row_segments[row]
            num_rows, num_queries = len(batch.keys), segment.q_end - segment.q_start
            part = query[done : done + num_rows * num_queries].unflatten(0, (num_rows, num_queries))
            outputs.append(self._attend_segment(part, batch, segment).flatten(0, 1))
            row, done = row + num_rows, done + num_rows * num_queries
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _attend_segment(self, query: torch.Tensor, batch: _Batch, segment: Segment) -> torch.Tensor:
        causal, history = segment.mode == "causal", batch.layout.num_history
        if batch.layout.in_order:
            visible = slice(segment.kv_end)
            return self._attend(query, batch.keys[:, visible], batch.values[:, visible], causal=causal).out
        visible = slice(segment.kv_end - history)
        own = self._attend(query, batch.new_keys[:, visible], batch.new_values[:, visible], causal=causal)
        rows = slice(segment.q_start - history, segment.q_end - history)
        return merge_partial_attention(
            [own.out, *(part.out[:, rows] for part in batch.shared)],
            [own.lse, *(part.lse[:, :, rows] for part in batch.shared)],
        )

    def _attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *, causal: bool = False
    ) -> PartialResult:
        return self._partial(query, keys, values, causal=causal, softmax_scale=self._scale)


def _key_batches(
    inputs: PagedLayerInputs, plan: LaunchPlan, mask: PagedMask
) -> list[tuple[torch.Tensor, torch.Tensor, int]]:
    """Keys and values (B, N, H, D) in storage order, and the first of the B rows they belong to."""
    view = staged_view(inputs, plan) if mask.is_batch else None
    if view is not None:
        return [(*view, 0)]
    return [(*_row_keys(inputs, plan, row), row) for row in range(len(plan.rows))]


def _row_keys(inputs: PagedLayerInputs, plan: LaunchPlan, row: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One row's keys and values (1, N, H, D): a view, else staged, else gathered."""
    alone = slice(row, row + 1)
    row_inputs = inputs._replace(block_table=inputs.block_table[alone], seq_lens=inputs.seq_lens[alone])
    row_plan = replace(plan, rows=plan.rows[alone])
    return staged_view(row_inputs, row_plan) or padded_gather(row_inputs, row_plan)[:2]


def _join(tokens: torch.Tensor, ranges: Sequence[range]) -> torch.Tensor:
    parts = [tokens[:, _slice(part)] for part in ranges]
    if len(parts) == 1:
        return parts[0]
    return torch.cat([as_bytes(part) for part in parts], dim=1).view(tokens.dtype)


def _slice(part: range) -> slice:
    return slice(part.start, part.stop)
