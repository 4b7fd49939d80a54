"""Where a position lies: storage indices of a ring after a fixed sink. Integers only, no tensors.

Vocabulary (all lengths in tokens): ``S`` sink, ``W`` window (the current forward's own tokens included), ``A`` most
extra rows a forward may bring, ``B`` page size. A *position* is the absolute token index since the session began and
never wraps; a *storage index* says where that position lives in the branch:

    r(p) = p                      for p < S
         = S + (p - O) mod W      otherwise, O = origin, S at first

In the steady state the storage indices a forward writes hold exactly the tokens that leave the window with it, so
nothing is ever moved, and the keys to read are the first ``kv_len`` storage indices, whatever their order.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..validation import check_int


@dataclass(frozen=True, kw_only=True)
class RingGeometry:
    """Token counts of one branch of the cache.

    Args:
        sink_tokens: S, tokens kept for ever.
        window_tokens: W, most recent tokens after the sink, the current forward's own included.
        page_size: B, slots a page; must be one the attention kernel accepts.
        max_extra_tokens: A, most rows (action or state tokens) that live for one forward.
        full_history: the window never slides: ``W = limit - S`` and a forward beyond it is refused.

    Raises:
        ValueError: a count is out of range.

    Example: ``RingGeometry(sink_tokens=24, window_tokens=48, page_size=16).num_pages == 5``
    """

    sink_tokens: int
    window_tokens: int
    page_size: int
    max_extra_tokens: int = 0
    full_history: bool = False

    def __post_init__(self) -> None:
        check_int("sink_tokens", self.sink_tokens, minimum=0)
        check_int("window_tokens", self.window_tokens, minimum=1)
        check_int("page_size", self.page_size, minimum=1)
        check_int("max_extra_tokens", self.max_extra_tokens, minimum=0)

    @property
    def max_seq_len(self) -> int:
        """Most storage indices that a forward reads: S + W + A."""
        return self.sink_tokens + self.window_tokens + self.max_extra_tokens

    @property
    def num_pages(self) -> int:
        """Pages of one branch, all of its life: ceil((S + W + A) / B)."""
        return -(-self.max_seq_len // self.page_size)

    def storage_index(self, position: int, origin: int) -> int:
        """Storage index r(p) of an absolute token position."""
        if position < self.sink_tokens:
            return position
        return self.sink_tokens + (position - origin) % self.window_tokens

    def kv_len(self, end: int, origin: int) -> int:
        """Storage indices that a forward ending at position ``end`` reads, its extra rows not counted."""
        return min(self.sink_tokens + end - origin, self.sink_tokens + self.window_tokens)


@dataclass(frozen=True, kw_only=True)
class ForwardSpan:
    """What one legal forward writes and reads: rows at positions ``start .. start + num_tokens - 1``."""

    start: int
    num_tokens: int
    num_extra: int
    origin: int
    kv_len: int
    is_recache: bool

    @property
    def end(self) -> int:
        """Position after the last row."""
        return self.start + self.num_tokens

    @property
    def seq_len(self) -> int:
        """Storage indices read: the video keys, then the extra rows."""
        return self.kv_len + self.num_extra

    def oldest(self, geometry: RingGeometry, max_past: int | None = None) -> int:
        """Oldest visible position after the sink, where the forward sees ``max_past`` tokens after it; None: all stored."""
        stored = max(self.end - geometry.window_tokens, self.origin)
        return stored if max_past is None else max(stored, self.start - max_past)

    def visible_ranges(self, geometry: RingGeometry, max_past: int) -> tuple[range, ...] | None:
        """Storage indices of the sink, of ``max_past`` tokens after it, and of the forward's rows; None: of all stored."""
        oldest = self.oldest(geometry, max_past)
        if oldest == self.oldest(geometry):
            return None
        parts = (range(geometry.sink_tokens), *self._window_ranges(geometry, oldest), range(self.kv_len, self.seq_len))
        return tuple(part for part in parts if len(part) > 0)

    def written_ranges(self, geometry: RingGeometry) -> tuple[range, ...]:
        """Storage indices of the rows, in row order, as at most four ranges: sink, window, window wrapped, extra."""
        sink = range(self.start, min(self.end, geometry.sink_tokens))
        window = self._window_ranges(geometry, max(self.start, geometry.sink_tokens))
        parts = (sink, *window, range(self.kv_len, self.seq_len))
        return tuple(part for part in parts if len(part) > 0)

    def _window_ranges(self, geometry: RingGeometry, position: int) -> tuple[range, range]:
        """Storage indices of the window from ``position`` to the end, in order; the second range has wrapped."""
        count = max(self.end - position, 0)
        first = geometry.storage_index(position, self.origin)
        num_first = min(count, geometry.sink_tokens + geometry.window_tokens - first)
        return range(first, first + num_first), range(geometry.sink_tokens, geometry.sink_tokens + count - num_first)
