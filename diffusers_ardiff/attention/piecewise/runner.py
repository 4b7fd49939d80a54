"""Runs a piecewise plan: hands each segment's rows to an attention function and puts its output where it belongs.

Shapes: T packed queries of all rows, n queries of one segment, H heads, D head size, B rows, L queries a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from ...masks.plan import PagedPiecewisePlan, PagedPiecewiseSegment


class PagedPiecewiseRunner(Protocol):
    """Attention for one segment of all rows.

    Called with the segment's queries (n, H, D), row after row; its new keys and values in the same order, or None; the
    segment's metadata; and a buffer (n, H, D) it may write to, or None. Returns the output (n, H, D): the buffer
    itself, or a tensor that later calls leave alone.
    """

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        metadata: Any,
        output_buffer: torch.Tensor | None,
        /,
    ) -> torch.Tensor: ...


def run_paged_piecewise_plan(
    query: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    plan: PagedPiecewisePlan,
    segment_metadata: Sequence[Any],
    segment_runner: PagedPiecewiseRunner,
    output_buffer: torch.Tensor | None = None,
    *,
    use_homogeneous_batch: bool = False,
) -> torch.Tensor:
    """Call ``segment_runner`` once a segment and join the outputs in the order of the queries.

    Args:
        query: (T, H, D), the rows of the batch end to end.
        key, value: (T, H', D), new keys and values of the same tokens, or None where the runner has them elsewhere.
        plan: from ``build_paged_piecewise_plan``.
        segment_metadata: one entry a segment, handed to the runner as it is.
        segment_runner: see ``PagedPiecewiseRunner``; gets a slice of the buffer where the segment is contiguous.
        output_buffer: (T, H, D), written in place and returned; None: a new tensor. The last size may differ from
            the query's, as the values' head size may.
        use_homogeneous_batch: where the plan has a ``homogeneous_batch_shape``, view the packed tensors as
            (B, L, H, D) and slice them, instead of gathering and scattering by index. The runner sees no difference.

    Returns: (T, H, D).

    Raises:
        ValueError: tensors, metadata or buffer do not fit the plan (before the first call), or a runner's output does
            not fit its segment.
    """
    _check_inputs(query, key, value, plan, segment_metadata, output_buffer)
    batch_shape = plan.homogeneous_batch_shape if use_homogeneous_batch else None
    join_slices = output_buffer is None and plan.segments_cover_query_contiguously
    output, like, parts = output_buffer, output_buffer, list[torch.Tensor]()
    for index, (segment, metadata) in enumerate(zip(plan.segments, segment_metadata, strict=True)):
        new_keys = None if key is None else _take(key, segment, batch_shape)
        new_values = None if value is None else _take(value, segment, batch_shape)
        target = None if output_buffer is None else _slice(output_buffer, segment)
        part = segment_runner(_take(query, segment, batch_shape), new_keys, new_values, metadata, target)
        like = part if like is None else like
        _check_output(part, (segment.num_query_tokens, *query.shape[1:-1], like.shape[-1]), index)
        if join_slices:
            parts.append(part)
            continue
        if output is None:
            output = part.new_empty(*query.shape[:-1], part.shape[-1])
        if part is not target:
            _put(output, part, segment, batch_shape)
    if output is not None:
        return output
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _slice(tensor: torch.Tensor, segment: PagedPiecewiseSegment) -> torch.Tensor | None:
    return None if segment.query_range is None else tensor[slice(*segment.query_range)]


def _view(
    tensor: torch.Tensor, segment: PagedPiecewiseSegment, batch_shape: tuple[int, int] | None
) -> torch.Tensor | None:
    """The segment's rows without a copy: (n, ...), or (B, n / B, ...) of a batch; None where they are scattered."""
    if batch_shape is not None and segment.local_query_range is not None:
        return tensor.unflatten(0, batch_shape)[:, slice(*segment.local_query_range)]
    return _slice(tensor, segment)


def _take(tensor: torch.Tensor, segment: PagedPiecewiseSegment, batch_shape: tuple[int, int] | None) -> torch.Tensor:
    view = _view(tensor, segment, batch_shape)
    if view is None:
        return tensor.index_select(0, segment.query_indices)
    return view.reshape(-1, *tensor.shape[1:])


def _put(
    output: torch.Tensor, part: torch.Tensor, segment: PagedPiecewiseSegment, batch_shape: tuple[int, int] | None
) -> None:
    view = _view(output, segment, batch_shape)
    if view is None:
        output.index_copy_(0, segment.query_indices, part.to(output.dtype))
    else:
        view.copy_(part.reshape(view.shape))


def _check_inputs(
    query: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    plan: PagedPiecewisePlan,
    segment_metadata: Sequence[Any],
    output_buffer: torch.Tensor | None,
) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor is not None and tensor.shape[0] != plan.num_query_tokens:
            raise ValueError(
                f"{name} must hold the plan's {plan.num_query_tokens} tokens, rows end to end, got {tensor.shape[0]}."
            )
    if len(segment_metadata) != len(plan.segments):
        raise ValueError(
            f"segment_metadata needs one entry for each of the plan's {len(plan.segments)} segments, got "
            f"{len(segment_metadata)}."
        )
    if output_buffer is not None and output_buffer.shape[:-1] != query.shape[:-1]:
        raise ValueError(
            f"output_buffer must have the tokens and heads of the query, {tuple(query.shape[:-1])}, got shape "
            f"{tuple(output_buffer.shape)}."
        )


def _check_output(part: torch.Tensor, expected: tuple[int, ...], index: int) -> None:
    if part.shape != expected:
        raise ValueError(
            f"the runner must return {expected} for segment {index}: its queries, their heads, one head size; got "
            f"{tuple(part.shape)}."
        )
