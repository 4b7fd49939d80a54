"""Piecewise plans for a batch of rows with different histories: validated once, then run by every layer.

The queries of all rows lie end to end in one tensor (T, H, D), row after row, T the sum of ``query_lens``. Row i of
those is *packed* index i; a *local* index counts from the first query of its own row.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..validation import check_int
from .segments import Segment, SegmentMode, Span, build_segments, check_spans


@dataclass(frozen=True, eq=False)
class PagedPiecewiseSegment:
    """The n-th segment of every row, served by one attention call.

    Attributes:
        row_segments: one segment a row, in that row's global positions; equal modes.
        query_indices: (num_query_tokens,) int64, packed indices of its queries, row after row.
        query_range: the same as half-open packed range where they are contiguous, else None.
        local_query_range: its half-open local range where that is the same in every row, else None.
    """

    row_segments: tuple[Segment, ...]
    query_indices: torch.Tensor
    query_range: tuple[int, int] | None
    local_query_range: tuple[int, int] | None = None

    @property
    def mode(self) -> SegmentMode:
        """Mode of all of its row segments."""
        return self.row_segments[0].mode

    @property
    def num_query_tokens(self) -> int:
        """Queries of all rows together."""
        return sum(segment.q_end - segment.q_start for segment in self.row_segments)


@dataclass(frozen=True, eq=False)
class PagedPiecewisePlan:
    """How one packed query of several rows is cut into segments.

    Attributes:
        num_query_tokens: T, queries of all rows.
        segments: in the order of each row's queries; together they cover every query once.
        segments_cover_query_contiguously: whether each is a slice of the packed query, so that their outputs end to
            end are the result.
        spans: the full spans of each row.
        homogeneous_batch_shape: (rows, query_len) where several rows have equal local ranges in every segment, so
            that the packed query is also a batch; else None.
    """

    num_query_tokens: int
    segments: tuple[PagedPiecewiseSegment, ...]
    segments_cover_query_contiguously: bool
    spans: tuple[tuple[Span, ...], ...]
    homogeneous_batch_shape: tuple[int, int] | None = None


class _Row(NamedTuple):
    spans: tuple[Span, ...]
    query_offset: int
    query_len: int
    packed_start: int


def build_paged_piecewise_plan(
    full_attn_spans: Sequence[Sequence[Span]],
    query_offsets: Sequence[int],
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    *,
    device: torch.device | str | None = None,
) -> PagedPiecewisePlan:
    """Cut the queries of every row into segments and match the segments of all rows one to one.

    Args:
        full_attn_spans: half-open full spans of each row, in its global positions.
        query_offsets: global position of each row's first query.
        query_lens: number of queries of each row, at least 1.
        seq_lens: number of keys of each row, its queries included.
        device: where ``query_indices`` are made.

    Raises:
        ValueError: the lists differ in length or are empty; a row's spans are unsorted, overlap, are empty or leave
            the sequence; its queries leave the sequence; rows differ in number or modes of their segments.

    Example: two rows with histories of 33 and 37 tokens, whose 17 new tokens see each other::

        plan = build_paged_piecewise_plan([[(33, 50)], [(37, 54)]], [33, 37], [17, 17], [50, 54])
        plan.num_query_tokens, plan.segments[0].query_range, plan.homogeneous_batch_shape
        # 34, (0, 34), (2, 17)
    """
    rows = _check_rows(full_attn_spans, query_offsets, query_lens, seq_lens)
    segments_by_row = [build_segments(row.spans, row.query_offset, row.query_len) for row in rows]
    _check_aligned(segments_by_row)
    segments = tuple(_match_rows(parts, rows, device) for parts in zip(*segments_by_row, strict=True))
    is_homogeneous = len(rows) > 1 and all(segment.local_query_range is not None for segment in segments)
    return PagedPiecewisePlan(
        num_query_tokens=sum(row.query_len for row in rows),
        segments=segments,
        # The segments of a row cover it in order, so slices can only follow one another.
        segments_cover_query_contiguously=all(segment.query_range is not None for segment in segments),
        spans=tuple(row.spans for row in rows),
        homogeneous_batch_shape=(len(rows), rows[0].query_len) if is_homogeneous else None,
    )


def _check_rows(
    full_attn_spans: Sequence[Sequence[Span]],
    query_offsets: Sequence[int],
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
) -> list[_Row]:
    lengths = [len(entries) for entries in (full_attn_spans, query_offsets, query_lens, seq_lens)]
    if lengths[0] == 0 or len(set(lengths)) != 1:
        raise ValueError(
            "full_attn_spans, query_offsets, query_lens and seq_lens need one entry for each of one or more rows, got "
            "{}, {}, {} and {} entries. A row without full spans has an empty list of them.".format(*lengths)
        )
    rows: list[_Row] = []
    for index in range(lengths[0]):
        seq_len = check_int(f"row {index}: seq_len", seq_lens[index], minimum=1)
        offset = check_int(f"row {index}: query_offset", query_offsets[index], minimum=0)
        query_len = check_int(f"row {index}: query_len", query_lens[index], minimum=1)
        if offset + query_len > seq_len:
            raise ValueError(
                f"row {index}: the queries must lie within its {seq_len} keys, got [{offset}, {offset + query_len}). "
                f"seq_len counts the queries' own keys as well."
            )
        spans = check_spans(full_attn_spans[index], seq_len=seq_len, name=f"row {index}: full_attn_spans")
        rows.append(
            _Row(spans, offset, query_len, packed_start=rows[-1].packed_start + rows[-1].query_len if rows else 0)
        )
    return rows


def _check_aligned(segments_by_row: Sequence[Sequence[Segment]]) -> None:
    modes = [[segment.mode for segment in segments] for segments in segments_by_row]
    for row, row_modes in enumerate(modes):
        if row_modes != modes[0]:
            raise ValueError(
                f"all rows must be cut into the same sequence of segments, got {modes[0]} for row 0 and {row_modes} "
                f"for row {row}. Run rows whose segments differ in plans of their own."
            )


def _match_rows(
    row_segments: tuple[Segment, ...], rows: Sequence[_Row], device: torch.device | str | None
) -> PagedPiecewiseSegment:
    local = [
        (segment.q_start - row.query_offset, segment.q_end - row.query_offset)
        for segment, row in zip(row_segments, rows, strict=True)
    ]
    packed = [
        (row.packed_start + start, row.packed_start + end) for (start, end), row in zip(local, rows, strict=True)
    ]
    is_contiguous = all(before[1] == after[0] for before, after in itertools.pairwise(packed))
    return PagedPiecewiseSegment(
        row_segments=row_segments,
        # Made on the device: nothing to copy, nothing to wait for.
        query_indices=torch.cat([torch.arange(start, end, device=device) for start, end in packed]),
        query_range=(packed[0][0], packed[-1][1]) if is_contiguous else None,
        local_query_range=local[0] if len(set(local)) == 1 else None,
    )
