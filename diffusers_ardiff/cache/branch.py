"""A branch: one K/V namespace of a session. Its pages, its history, its text.

H, O and E belong to a branch. A branch is open for at most one forward at a time.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ..rope import Rotary
from ..transfer import download, upload
from .allocator import PageRun
from .layout import ForwardSpan
from .ledger import PageHold, PageLedger
from .merged import MergedSpans, begin_merged, finish_merged
from .sink import SinkKeys
from .storage import KVStorage, StagingKey

if TYPE_CHECKING:
    from .text import TextKV


class Branch:
    """One K/V namespace: ring state, pages, text K/V.

    ``history`` counts every event after which previously gathered keys may be wrong (commit, recache, reset, flush,
    failure, restore); it never goes back.
    """

    def __init__(self, name: str, hold: PageHold, storage: KVStorage, ledger: PageLedger) -> None:
        self.name = name
        self.ring = hold.ring
        self.session_id = -1
        self.text: TextKV | None = None
        self.sink = SinkKeys()
        self.history = 0
        self.closed = False
        self._hold: PageHold | None = hold
        self._host: list[torch.Tensor] = []
        self._storage = storage
        self._ledger = ledger
        self._open_span: ForwardSpan | None = None

    @property
    def storage(self) -> KVStorage:
        """The pools that hold this branch's pages."""
        return self._storage

    @property
    def hold(self) -> PageHold:
        """The branch's pages: owned, borrowed, staging row.

        Raises:
            RuntimeError: the session is offloaded, so there are none.
        """
        if self._hold is None:
            raise RuntimeError(self._offloaded_message("a look at the pages"))
        return self._hold

    @property
    def run(self) -> PageRun:
        """Pages that hold the branch's tokens now; another branch's as long as this one borrows."""
        return self.hold.run

    @property
    def staging_row(self) -> int | None:
        """Row of the staging pools, where the branch's own run is fragmented and the pool has staging."""
        return self.hold.staging_row

    @property
    def offloaded(self) -> bool:
        """Whether the tokens are in host memory."""
        return self._hold is None

    @property
    def is_idle(self) -> bool:
        """Whether the branch has pages and no forward is open on it."""
        return not self.closed and self._hold is not None and self._open_span is None

    @property
    def host_bytes(self) -> int:
        """Bytes of offloaded keys and values."""
        return sum(tensor.nbytes for tensor in self._host) + (self.sink.num_bytes if self._host else 0)

    @property
    def staging_key(self) -> StagingKey:
        """Names the history that a gathered window belongs to."""
        return (self.session_id, self.name, self.history)

    @property
    def committed_tokens(self) -> int:
        """H: absolute position of the next token; grows for ever, whatever the window keeps."""
        return self.ring.committed_end

    def prepare_write(self) -> None:
        """Copy what the next write would spoil: to this branch's own run if it borrows, else to its borrowers'.

        Calling it again copies nothing. A copy that fails leaves every branch as it was.
        """
        hold = self.hold
        for other in self._ledger.copies_before_write(hold):
            self._storage.copy(other.run, other.own, other.num_written)
            self._ledger.stop_borrowing(other)
        self._ledger.touch([hold])

    def turn_sink(self, offset: int, rotary: Rotary | None) -> None:
        """Move the sink's keys to another rotary position, ``offset`` frames from where they were written.

        For forwards to come; no-op where they are there already, or where there is no sink. Changes nothing that is
        committed, and costs a copy of the sink's keys from the first turn on.

        Args:
            offset: names the position.
            rotary: of ``VideoRope.turn(offset)``; None with offset 0.

        Raises:
            ValueError: the sink is not committed yet, or an offset without its rotation.
            RuntimeError: closed, offloaded, or a forward is open.
        """
        self.check_idle("a turn of the sink")
        num_tokens = self.ring.geometry.sink_tokens
        if num_tokens == 0 or offset == self.sink.offset:
            return
        if self.committed_tokens < num_tokens or (rotary is None) is not (offset == 0):
            raise ValueError(
                f"the sink of branch {self.name!r} can't be turned by {offset} frames: {self.committed_tokens} of its "
                f"{num_tokens} tokens are committed. Commit the sink first, and give the rotation of the offset."
            )
        self.prepare_write()
        self._turn_to(offset, rotary, self._storage.keep_sink(self.run, self.sink, num_tokens))

    def _turn_to(self, offset: int, rotary: Rotary | None, sink: SinkKeys) -> None:
        """Overwrite the sink's keys; ``sink`` has them as they were written."""
        # Kept before a layer is touched, and the offset known only when every layer is done: a turn that fails half-way
        # is then made good by the next one.
        self.sink = replace(sink, offset=None)
        self.history += 1
        self._storage.turn_sink(self.run, sink, rotary)
        self.sink = replace(sink, offset=offset)

    def _rewrite_sink(self) -> None:
        """A forward is about to write rows of the sink, so those it leaves alone have to be as written."""
        if self.sink.offset != 0:
            self._turn_to(0, None, self.sink)
        self.sink = SinkKeys()

    def open_forward(self, span: ForwardSpan) -> None:
        """Claim the branch for one forward that is about to write.

        Raises:
            RuntimeError: closed, offloaded, or another forward context is open on it.
        """
        self.check_idle("a forward")
        self.prepare_write()
        if span.start < self.ring.geometry.sink_tokens:
            self._rewrite_sink()
        self.ring.begin(span)
        self._open_span = span

    def close_forward(self, *, succeeded: bool) -> None:
        """End the open forward; a failed one leaves nothing to commit."""
        span, self._open_span = self._open_span, None
        if span is None:
            raise RuntimeError(f"branch {self.name!r} has no open forward to close.")
        self.ring.finish(span, succeeded=succeeded)
        if span.is_recache or not succeeded:
            self.history += 1

    def open_merged(self, spans: MergedSpans) -> None:
        """Claim the branch for a merged forward; raises like ``open_forward``."""
        self.check_idle("a merged forward")
        self.prepare_write()
        begin_merged(self.ring, spans)
        self._open_span = spans.upcoming

    def close_merged(self, spans: MergedSpans, *, succeeded: bool) -> None:
        """End the open merged forward: its first rows are committed, or, after a failure, the branch is stale."""
        self._open_span = None
        finish_merged(self.ring, spans, succeeded=succeeded)
        self.history += 1

    def check_commit(self, span: ForwardSpan | None = None) -> None:
        """Raise RuntimeError if ``commit`` would: closed, stale, a forward is open, or another one ran after ``span``."""
        self.check_idle("a commit")
        self.ring.check_commit(span)

    def commit(self, span: ForwardSpan | None = None) -> int:
        """Advance past the last successful forward (``span``, if given); returns the tokens committed.

        0 means that nothing was pending. Raises RuntimeError as ``check_commit``.
        """
        self.check_commit(span)
        advanced = self.ring.commit(span)
        self.history += advanced > 0
        return advanced

    def check_flush(self, keep_tokens: int) -> None:
        """Raise if ``flush`` would: closed, a forward is open, stale (RuntimeError), or a negative count (ValueError)."""
        self.check_idle("a flush")
        self.ring.check_flush(keep_tokens)

    def flush(self, keep_tokens: int) -> None:
        """Keep the sink and the last ``keep_tokens`` tokens; 0 is a reset at a boundary. Position H stays.

        If the copy fails, some layers have moved and others not: the branch is stale until a recache succeeds.
        """
        self.check_flush(keep_tokens)
        if keep_tokens > 0:
            self.prepare_write()
        move = self.ring.flush(keep_tokens)
        self.history += 1
        try:
            self._storage.move(self.run, move)
        except BaseException:
            self.ring.mark_stale()
            raise

    def reset(self) -> None:
        """Forget all video tokens: position 0, empty history. Pages and text stay."""
        self.check_idle("a reset")
        self.ring.reset()
        self.sink = SinkKeys()
        self._ledger.stop_borrowing(self.hold)
        self.history += 1

    def check_fork(self, action: str = "a fork") -> None:
        """Raise RuntimeError where the history can't be handed on: closed, offloaded, a forward is open, or stale."""
        self.check_idle(action)
        if self.ring.stale:
            raise RuntimeError(self.ring.stale_message(action))

    def restore(self, source: Branch) -> None:
        """Take over history, position and text of a branch of the same pool; what was uncommitted is gone.

        One copy, or none where both still read the same pages. If the copy fails, the branch is left empty.
        """
        mine, theirs = self.hold, source.hold
        if mine.run != theirs.run:
            if mine.borrowed is None:
                self.prepare_write()
            self.ring.reset()
            self.sink = SinkKeys()
            self._storage.copy(theirs.run, mine.own, theirs.num_written)
            self._ledger.stop_borrowing(mine)
        self.ring.take(source.ring)
        self.text, self.sink = source.text, source.sink
        self.history += 1

    def read_back(self) -> tuple[list[torch.Tensor], TextKV | None]:
        """Copies of the written K/V and of the text K/V in host memory."""
        text = None if self.text is None else self.text.apply(download)
        self.sink = self.sink.apply(download)
        return self._storage.read(self.run, self.hold.num_written), text

    def leave_pages(self, host: list[torch.Tensor], text: TextKV | None) -> None:
        """Keep what ``read_back`` returned in place of the pages, which the caller releases."""
        self._host, self.text, self._hold = host, text, None

    def put_back(self, hold: PageHold) -> TextKV | None:
        """Copy the offloaded K/V into pages that the caller reserved; returns the text K/V on the pool's device."""
        device = self._storage.device
        self._storage.write(hold.own, self._host)
        self.sink = self.sink.apply(lambda tensor: upload(tensor, device))
        return None if self.text is None else self.text.apply(lambda tensor: upload(tensor, device))

    def enter_pages(self, hold: PageHold, text: TextKV | None) -> None:
        """Use pages and text that ``put_back`` filled."""
        self._host, self.text, self._hold = [], text, hold

    def close(self) -> None:
        """Let go of text and offloaded bytes; every later use is refused. The caller releases the pages."""
        self.closed, self.text, self._host, self.sink = True, None, [], SinkKeys()

    def check_idle(self, action: str) -> None:
        """Raise RuntimeError if the branch is closed or offloaded, or a forward is open on it."""
        if self.closed:
            raise RuntimeError(f"{action} on branch {self.name!r} of a closed session. Open a new session.")
        if self._hold is None:
            raise RuntimeError(self._offloaded_message(action))
        if self._open_span is not None:
            raise RuntimeError(
                f"{action} on branch {self.name!r} while a forward context is open on it. Finish that one first: a "
                "branch takes one forward at a time."
            )

    def _offloaded_message(self, action: str) -> str:
        return f"{action} on branch {self.name!r} of an offloaded session. Call onload() on the session first."
