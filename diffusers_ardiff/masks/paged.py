"""The piecewise mask of one paged forward: which of its own tokens its queries see, and where those are stored.

Three coordinates. *Absolute* positions count from the first token of the session; users speak in them. *Visible* ones
count the tokens that a row sees: h of history, then the L new ones, so absolute position p of a new token is visible
position ``p - P + h``. *Storage indices* say where a key lies; in them the history is a set of at most two ranges.

    ring that has wrapped      [ sink | new | history ]          new = 1 range, history = 2
    new tokens that wrap       [ sink | new | history | new ]    new = 2 ranges, history = 2
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from ..cache.layout import ForwardSpan, RingGeometry
from .plan import PagedPiecewisePlan, build_paged_piecewise_plan
from .segments import Span, check_spans, dense_mask

FullAttnSpans = Sequence[Span] | Sequence[Sequence[Span]]
"""Half-open spans in absolute positions: one list for all rows, or a list of them, one a row."""


@dataclass(frozen=True, kw_only=True)
class MaskedRow:
    """Where the keys of one row lie, in storage indices.

    Attributes:
        num_history: tokens visible before the forward's own.
        seq_len: storage indices read, extra rows included.
        new: ranges of the forward's own tokens, in their order.
        shared: the other ranges: history and extra rows, which every query sees.
    """

    num_history: int
    seq_len: int
    new: tuple[range, ...]
    shared: tuple[range, ...]

    @property
    def in_order(self) -> bool:
        """Whether visible positions are storage indices: history first, then the new tokens, nothing after them."""
        return len(self.new) == 1 and self.new[0].stop == self.seq_len


@dataclass(frozen=True, kw_only=True, eq=False)
class PagedMask:
    """The mask of all rows of a forward, built once and shared by its layers.

    Attributes:
        plan: segments of each row, in its visible positions.
        rows: where each row's keys lie.
        num_tokens: L, the queries that the mask is for.
        num_extra: A, extra rows, visible to all of them.
    """

    plan: PagedPiecewisePlan
    rows: tuple[MaskedRow, ...]
    num_tokens: int
    num_extra: int
    _dense: dict[torch.device, torch.Tensor] = field(default_factory=dict, repr=False)

    @cached_property
    def is_batch(self) -> bool:
        """Whether every row has its keys at the same storage indices and is cut at the same places."""
        cuts = [set(segment.row_segments) for segment in self.plan.segments]
        return len(set(self.rows)) == 1 and all(len(cut) == 1 for cut in cuts)

    def dense(self, device: torch.device) -> torch.Tensor:
        """(R, L, longest row) bool in storage order, true where a key is visible; made once a device."""
        if device not in self._dense:
            longest = max(row.seq_len for row in self.rows)
            rows = [
                self._dense_row(row, spans, longest, device)
                for row, spans in zip(self.rows, self.plan.spans, strict=True)
            ]
            self._dense[device] = torch.stack(rows)
        return self._dense[device]

    def _dense_row(self, row: MaskedRow, spans: tuple[Span, ...], longest: int, device: torch.device) -> torch.Tensor:
        own_spans = [(max(start - row.num_history, 0), end - row.num_history) for start, end in spans]
        own = dense_mask(own_spans, 0, self.num_tokens, self.num_tokens, device)
        mask = torch.zeros(self.num_tokens, longest, dtype=torch.bool, device=device)
        for part in row.shared:
            mask[:, part.start : part.stop] = True
        done = 0
        for part in row.new:
            mask[:, part.start : part.stop] = own[:, done : done + len(part)]
            done += len(part)
        return mask


def build_paged_mask(
    full_attn_spans: FullAttnSpans,
    forwards: Sequence[ForwardSpan],
    geometry: RingGeometry,
    *,
    device: torch.device | str | None = None,
) -> PagedMask:
    """The mask of a forward whose tokens are causal among themselves but for full spans; history is visible to all.

    Args:
        full_attn_spans: see ``FullAttnSpans``. Spans that end before the forward or begin after it do nothing.
        forwards: what each row writes and reads.
        geometry: of all rows.
        device: where the plan's indices are made.

    Raises:
        ValueError: spans are malformed, unsorted or overlap, or one begins within its row's forward and ends after it;
            another number of lists than rows; rows whose segments differ in number or mode.
    """
    spans_by_row = _spans_by_row(full_attn_spans, len(forwards))
    plan = build_paged_piecewise_plan(
        [_visible_spans(spans, forward) for spans, forward in zip(spans_by_row, forwards, strict=True)],
        [forward.kv_len - forward.num_tokens for forward in forwards],
        [forward.num_tokens for forward in forwards],
        [forward.kv_len for forward in forwards],
        device=device,
    )
    return PagedMask(
        plan=plan,
        rows=tuple(_masked_row(forward, geometry) for forward in forwards),
        num_tokens=forwards[0].num_tokens,
        num_extra=forwards[0].num_extra,
    )


def _spans_by_row(full_attn_spans: FullAttnSpans, num_rows: int) -> list[tuple[Span, ...]]:
    if not isinstance(full_attn_spans, Sequence):
        # Anything else might be empty at a second look.
        raise ValueError(
            f"full_attn_spans must be a list of spans (start, end), or a list of such lists, one a row, got "
            f"{full_attn_spans!r}. None is no mask at all."
        )
    entries: Sequence[Any] = full_attn_spans
    has_row_lists = any(isinstance(e, Sequence) and (len(e) == 0 or isinstance(e[0], Sequence)) for e in entries)
    if not has_row_lists:
        return [check_spans(entries)] * num_rows
    if len(entries) != num_rows:
        raise ValueError(
            f"full_attn_spans must be one list of spans for all rows, or one for each of the {num_rows} rows, got "
            f"{len(entries)} lists."
        )
    return [check_spans(spans, name=f"full_attn_spans[{row}]") for row, spans in enumerate(entries)]


def _visible_spans(spans: tuple[Span, ...], forward: ForwardSpan) -> list[Span]:
    shift = forward.kv_len - forward.end
    met = [(start, end) for start, end in spans if end > forward.start and start < forward.end]
    if met and met[-1][1] > forward.end:
        raise ValueError(
            f"the full span {met[-1]} ends after this forward, whose tokens are [{forward.start}, {forward.end}): its "
            "last keys do not exist yet. End the span with the forward, or bring all of its tokens in one forward."
        )
    # What a span has in common with the history is visible anyway, and the window may have lost some of it.
    return [(max(start + shift, 0), end + shift) for start, end in met]


def _masked_row(forward: ForwardSpan, geometry: RingGeometry) -> MaskedRow:
    written = [part for part in forward.written_ranges(geometry) if part.start < forward.kv_len]
    new = list(written[:1])
    for part in written[1:]:
        if part.start == new[-1].stop:
            new[-1] = range(new[-1].start, part.stop)
        else:
            new.append(part)
    edges = [0, *(edge for part in sorted(new, key=lambda r: r.start) for edge in (part.start, part.stop))]
    gaps = zip(edges[::2], [*edges[1::2], forward.seq_len], strict=True)
    return MaskedRow(
        num_history=forward.kv_len - forward.num_tokens,
        seq_len=forward.seq_len,
        new=tuple(new),
        shared=tuple(range(start, end) for start, end in gaps if start < end),
    )
