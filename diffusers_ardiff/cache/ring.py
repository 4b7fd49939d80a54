"""The window policy: which forwards of a branch are legal, and where it stands after them. Integers only, no tensors.

``layout.py`` has the vocabulary (``S``, ``W``, ``A``, ``B``) and says where a position lies.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..validation import check_int
from .layout import ForwardSpan, RingGeometry


@dataclass(frozen=True, kw_only=True)
class FlushMove:
    """The one copy the cache ever makes: ``num_tokens`` from ``sources`` to the first indices after the sink."""

    sources: tuple[int, ...]
    targets: tuple[int, ...]


class RingState:
    """Where a branch stands: committed end H, origin O, furthest written end E and the stale mark.

    A forward goes ``plan_forward`` (legality, changes nothing) -> ``begin`` -> ``finish(succeeded)``; ``commit`` then
    advances H to the end of the last forward if that one succeeded.
    """

    def __init__(self, geometry: RingGeometry) -> None:
        self.geometry = geometry
        self.committed_end = 0
        self.origin = geometry.sink_tokens
        self.written_end = 0
        self._stale_start: int | None = None
        self._pending: ForwardSpan | None = None
        self._committed: ForwardSpan | None = None

    @property
    def stale(self) -> bool:
        """Whether a recache failed and left keys of two prompts mixed."""
        return self._stale_start is not None

    # -- forwards ------------------------------------------------------------------------------------------------

    def plan_forward(self, num_tokens: int, num_extra: int = 0, start: int | None = None) -> ForwardSpan:
        """Check one forward against the rules and say what it would write and read. Changes nothing.

        Args:
            num_tokens: L, rows of the forward.
            num_extra: rows that live for this forward only, at most A.
            start: position of the first row; None means the committed end (the next tokens). ``start + L`` equal to
                the committed end rewrites committed tokens (a recache).

        Raises:
            ValueError: the forward is not legal; the message names the numbers.
            RuntimeError: the branch is stale (a recache failed) and this is not a recache.
        """
        check_int("num_tokens", num_tokens, minimum=1)
        check_int("num_extra", num_extra, minimum=0, maximum=self.geometry.max_extra_tokens)
        begin = self.committed_end if start is None else check_int("start", start, minimum=0)
        is_recache = begin != self.committed_end
        self._check_continues(begin, num_tokens, is_recache)
        self._check_fits(begin, num_tokens)
        if self._stale_start is not None and not (is_recache and begin <= self._stale_start):
            raise RuntimeError(self.stale_message(f"a forward at position {begin}"))
        self._check_nothing_lost(begin, num_tokens)
        return ForwardSpan(
            start=begin,
            num_tokens=num_tokens,
            num_extra=num_extra,
            origin=self.origin,
            kv_len=self.geometry.kv_len(begin + num_tokens, self.origin),
            is_recache=is_recache,
        )

    def stale_message(self, refused: str) -> str:
        """What to say where ``refused`` is impossible on a stale branch, and how to heal it."""
        return (
            f"{refused} is refused: this branch is stale, a recache from position {self._stale_start} failed and left "
            f"mixed keys behind. Run that recache again (from position {self._stale_start} or earlier), or reset the "
            "session."
        )

    def _check_continues(self, start: int, num_tokens: int, is_recache: bool) -> None:
        if not is_recache:
            return
        end = start + num_tokens
        reaches_sink = self.origin == self.geometry.sink_tokens
        if end != self.committed_end or not (start >= self.origin or reaches_sink):
            oldest = 0 if reaches_sink else self.origin
            raise ValueError(
                f"a forward of {num_tokens} tokens at position {start} neither continues at the committed end "
                f"{self.committed_end} nor rewrites the tokens up to it. Legal: start = {self.committed_end}, or "
                f"start >= {oldest} with start + num_tokens = {self.committed_end}."
            )

    def _check_fits(self, start: int, num_tokens: int) -> None:
        geometry = self.geometry
        end = start + num_tokens
        after_sink = end - max(start, geometry.sink_tokens)
        if after_sink > geometry.window_tokens:
            raise ValueError(
                f"a forward of {num_tokens} tokens at position {start} brings {after_sink} tokens after the sink, but "
                f"the window holds {geometry.window_tokens} (sink {geometry.sink_tokens}). Use a larger window or a "
                "smaller chunk."
            )
        if geometry.full_history and end - self.origin > geometry.window_tokens:
            limit = geometry.window_tokens + self.origin
            raise ValueError(
                f"full history holds {limit} tokens; a forward of {num_tokens} at position {start} would need {end}. "
                "Ask for fewer frames, raise max_latent_frames, or set a window."
            )

    def _check_nothing_lost(self, start: int, num_tokens: int) -> None:
        window = self.geometry.window_tokens
        covers_overwritten = start + num_tokens >= self.written_end
        if not (
            self.written_end - window <= self.origin
            or start <= self.origin
            or covers_overwritten
            or num_tokens >= window
        ):
            raise ValueError(
                f"a forward of {num_tokens} tokens at position {start} ends before {self.written_end}, the furthest "
                f"token written: an earlier forward already overwrote tokens this one would still have to see "
                f"(window {window}). Retry with at least {self.written_end - start} tokens."
            )

    def begin(self, span: ForwardSpan) -> None:
        """Record that ``span`` is about to write; called before the first layer writes and never rolled back."""
        rewrites_window = span.start <= self.origin or span.num_tokens >= self.geometry.window_tokens
        self.written_end = span.end if rewrites_window else max(self.written_end, span.end)
        self._pending = None

    def finish(self, span: ForwardSpan, *, succeeded: bool) -> None:
        """Record how the forward ended: what can be committed, and whether a recache left the branch stale."""
        if span.is_recache:
            self._stale_start = None if succeeded else span.start
        elif succeeded:
            self._pending = span

    def mark_stale(self) -> None:
        """Refuse everything but a recache of the whole window; nothing where there is no history."""
        span = self.recache_span()
        self._stale_start = None if span is None else span[0]

    def check_commit(self, span: ForwardSpan | None = None) -> None:
        """Say whether ``commit`` would be refused. Changes nothing.

        Raises:
            RuntimeError: the branch is stale, or ``span`` failed or was overtaken by another forward.
        """
        if self.stale:
            raise RuntimeError(self.stale_message("a commit"))
        last = self._pending or self._committed
        if span and span is not last and (self._pending or not span.is_recache):
            raise RuntimeError(
                f"the forward {span.start}..{span.end} can't be committed: it failed, or its keys were overwritten or "
                f"dropped since. The last one: {f'{last.start}..{last.end}' if last else 'none'}. Run this one again."
            )

    def commit(self, span: ForwardSpan | None = None) -> int:
        """Advance the committed end to the end of the last successful forward; no-op if there is none.

        Args:
            span: the forward meant; None: the last one.

        Returns: tokens newly committed.

        Raises:
            RuntimeError: as ``check_commit``.
        """
        self.check_commit(span)
        if self._pending is None:
            return 0
        advanced = self._pending.end - self.committed_end
        self.committed_end = self._pending.end
        self._committed, self._pending = self._pending, None
        return advanced

    @property
    def has_pending(self) -> bool:
        """Whether a successful forward waits for ``commit``."""
        return self._pending is not None

    # -- window changes ------------------------------------------------------------------------------------------

    def check_flush(self, keep_tokens: int) -> None:
        """Say whether ``flush`` would be refused. Changes nothing.

        Raises:
            ValueError: ``keep_tokens`` is negative.
            RuntimeError: the branch is stale and this flush cannot heal it.
        """
        check_int("keep_tokens", keep_tokens, minimum=0)
        sink_is_intact = self._stale_start is None or self._stale_start >= self.geometry.sink_tokens
        if self.stale and (keep_tokens > 0 or not sink_is_intact):
            raise RuntimeError(self.stale_message(f"a flush to sink + {keep_tokens} tokens"))

    def flush(self, keep_tokens: int) -> FlushMove:
        """Keep the sink and the last ``keep_tokens`` tokens; 0 is a reset at a boundary.

        Returns: the copy the caller has to make in every layer, through a buffer, since source and target overlap.

        Raises:
            ValueError, RuntimeError: as ``check_flush``.
        """
        self.check_flush(keep_tokens)
        geometry = self.geometry
        origin = max(self.origin, self.committed_end - min(keep_tokens, geometry.window_tokens))
        kept = range(origin, self.committed_end)
        move = FlushMove(
            sources=tuple(geometry.storage_index(p, self.origin) for p in kept),
            targets=tuple(geometry.sink_tokens + p - origin for p in kept),
        )
        self.origin = origin
        self._stale_start = None
        self._pending = None
        return move

    def recache_span(self) -> tuple[int, int] | None:
        """``(start, num_tokens)`` of the forward that rewrites the window under a new prompt; None: nothing to do.

        While nothing has left the window it starts at position 0 and rewrites the sink too; later it covers the last
        ``min(W, H - O)`` tokens and leaves the sink alone.
        """
        geometry, end = self.geometry, self.committed_end
        reaches_sink = self.origin == geometry.sink_tokens
        if end == 0:
            return None
        if reaches_sink and end <= geometry.sink_tokens + geometry.window_tokens:
            return 0, end
        num_tokens = min(geometry.window_tokens, end - self.origin)
        return (end - num_tokens, num_tokens) if num_tokens > 0 else None

    def reset(self) -> None:
        """Session reset: an empty history at position 0."""
        self.committed_end = 0
        self.origin = self.geometry.sink_tokens
        self.written_end = 0
        self._stale_start = self._pending = None

    def take(self, other: RingState) -> None:
        """Stand where ``other`` stands; what waits for a commit there is not taken."""
        self.committed_end, self.origin, self.written_end = other.committed_end, other.origin, other.written_end
        self._stale_start = other._stale_start
        self._pending = None
