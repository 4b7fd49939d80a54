"""Which keys a query sees where causal tokens and fully visible spans mix. Coordinates only, no attention.

Positions are *global*: token indices of one sequence, counted from its first key. Every range is half-open.

    position   0 1 2 3 4 5 6 7 8        full span [2, 6)
    sees up to 1 2 6 6 6 6 7 8 9        exclusive: a token of a span sees the whole span and all before it
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch

from ..validation import check_int

Span = tuple[int, int]
SegmentMode = Literal["causal", "full"]


class Segment(NamedTuple):
    """Queries that one attention call serves, in global positions.

    Attributes:
        q_start, q_end: the queries [q_start, q_end).
        kv_end: they attend to keys [0, kv_end).
        mode: "causal": bottom-right aligned, so the last query sees the last key; "full": no mask.
    """

    q_start: int
    q_end: int
    kv_end: int
    mode: SegmentMode


class QueryRange(NamedTuple):
    """A run of local query rows and where it begins in the sequence, for a query that holds only a shard of it.

    Attributes:
        local_start, local_end: rows [local_start, local_end) of the local query.
        global_start: global position of row ``local_start``.
    """

    local_start: int
    local_end: int
    global_start: int


def build_segments(full_attn_spans: Sequence[Span], query_offset: int, query_len: int) -> list[Segment]:
    """Cut the queries [query_offset, query_offset + query_len) into segments, in order and without gaps.

    A span that the queries meet gives a full segment whose keys end where the *span* ends, also when the queries end
    before it. Everything else is causal. Spans that no query lies in do nothing.

    Args:
        full_attn_spans: spans of one sample, sorted, disjoint, not empty; neighbours may touch.
        query_offset: global position of the first query.
        query_len: number of queries; none give no segments.

    Raises:
        ValueError: a span is malformed, empty, unsorted or overlaps its predecessor; a negative offset or length.

    Example: ``build_segments([(2, 7)], query_offset=4, query_len=4)`` gives
    ``[Segment(4, 7, 7, "full"), Segment(7, 8, 8, "causal")]``
    """
    spans = check_spans(full_attn_spans)
    first = check_int("query_offset", query_offset, minimum=0)
    last = first + check_int("query_len", query_len, minimum=0)
    full = [
        Segment(max(start, first), min(end, last), end, "full")
        for start, end in spans
        if max(start, first) < min(end, last)
    ]
    edges = [first, *(edge for segment in full for edge in (segment.q_start, segment.q_end)), last]
    gaps = zip(edges[::2], edges[1::2], strict=True)
    return sorted([*full, *(Segment(start, end, end, "causal") for start, end in gaps if start < end)])


def dense_mask(
    full_attn_spans: Sequence[Span],
    query_offset: int,
    query_len: int,
    kv_len: int,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """The same rule as one boolean mask (query_len, kv_len), true where a key is visible.

    Args:
        full_attn_spans: spans of one sample; see ``build_segments``.
        query_offset: global position of the first query.
        query_len: number of queries.
        kv_len: number of keys, from position 0 on.
        device: where the mask is made.

    Raises:
        ValueError: as ``build_segments``, or a query would see keys beyond ``kv_len``.

    Example: ``dense_mask([(0, 2)], 0, 3, 3).int()`` is ``[[1, 1, 0], [1, 1, 0], [1, 1, 1]]``
    """
    segments = build_segments(full_attn_spans, query_offset, query_len)
    check_keys(segments, check_int("kv_len", kv_len, minimum=0))
    visible_end = torch.arange(query_offset + 1, query_offset + query_len + 1, device=device)
    for segment in segments:
        if segment.mode == "full":
            visible_end[segment.q_start - query_offset : segment.q_end - query_offset] = segment.kv_end
    return torch.arange(kv_len, device=device) < visible_end[:, None]


def check_spans(
    spans: Sequence[Span], *, seq_len: int | None = None, name: str = "full_attn_spans"
) -> tuple[Span, ...]:
    """Return the spans as tuples if they are sorted, disjoint, not empty and within a sequence of ``seq_len`` tokens.

    Raises:
        ValueError: they are not; the message begins with ``name``.
    """
    checked: list[Span] = []
    for index, span in enumerate(spans):
        start, end = _check_pair(span, f"{name}[{index}]")
        earliest = checked[-1][1] if checked else 0
        if not earliest <= start < end or (seq_len is not None and end > seq_len):
            limit = "" if seq_len is None else f" <= {seq_len}"
            raise ValueError(
                f"{name}[{index}] must be a span (start, end) with {earliest} <= start < end{limit}, got "
                f"({start}, {end}). Sort the spans, merge those that overlap, drop empty ones, stay in the sequence."
            )
        checked.append((start, end))
    return tuple(checked)


def check_keys(segments: Sequence[Segment], kv_len: int) -> None:
    """Refuse segments that need keys beyond the ``kv_len`` there are.

    Raises:
        ValueError: names the first such segment.
    """
    for segment in segments:
        if segment.kv_end > kv_len:
            raise ValueError(
                f"queries [{segment.q_start}, {segment.q_end}) need the keys [0, {segment.kv_end}), got {kv_len} keys. "
                f"Pass all keys up to the end of every span that a query lies in."
            )


def _check_pair(span: Span, name: str) -> Span:
    if not isinstance(span, Sequence) or len(span) != 2:
        raise ValueError(f"{name} must be a pair (start, end), got {span!r}. Give each sample a list of such pairs.")
    return check_int(f"{name} start", span[0]), check_int(f"{name} end", span[1])
