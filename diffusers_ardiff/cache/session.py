"""Sessions and branches: whose pages, which history, which text.

A session is one rollout; a branch is one K/V namespace of it (``"positive"``, ``"negative"`` under guidance). H, O and
E belong to a branch. A branch is open for at most one forward at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from .allocator import PageRun
from .ring import ForwardSpan, RingGeometry, RingState
from .storage import KVStorage, StagingKey

if TYPE_CHECKING:
    from .text import TextKV


class Branch:
    """One K/V namespace: ring state, pages, text K/V.

    ``history`` counts every event after which previously gathered keys may be wrong (commit, recache, reset, flush,
    failure); it never goes back. ``staging_row`` is this branch's row of the staging pools where its run is
    fragmented and the pool has staging.
    """

    def __init__(self, name: str, run: PageRun, geometry: RingGeometry, storage: KVStorage) -> None:
        self.name = name
        self.run = run
        self.ring = RingState(geometry)
        self.session_id = -1
        self.staging_row: int | None = None
        self.text: TextKV | None = None
        self.history = 0
        self.closed = False
        self._storage = storage
        self._open_span: ForwardSpan | None = None

    @property
    def storage(self) -> KVStorage:
        """The pools that hold this branch's pages."""
        return self._storage

    @property
    def staging_key(self) -> StagingKey:
        """Names the history that a gathered window belongs to."""
        return (self.session_id, self.name, self.history)

    @property
    def committed_tokens(self) -> int:
        """H: absolute position of the next token; grows for ever, whatever the window keeps."""
        return self.ring.committed_end

    def open_forward(self, span: ForwardSpan) -> None:
        """Claim the branch for one forward that is about to write.

        Raises:
            RuntimeError: closed, or another forward context is open on it.
        """
        self.check_idle("a forward")
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
        """Keep the sink and the last ``keep_tokens`` tokens; 0 is a reset at a boundary. Position H stays."""
        self.check_flush(keep_tokens)
        move = self.ring.flush(keep_tokens)
        self._storage.move(self.run, move)
        self.history += 1

    def reset(self) -> None:
        """Forget all video tokens: position 0, empty history. Pages and text stay."""
        self.check_idle("a reset")
        self.ring.reset()
        self.history += 1

    def check_idle(self, action: str) -> None:
        """Raise RuntimeError if the branch is closed or a forward is open on it."""
        if self.closed:
            raise RuntimeError(f"{action} on branch {self.name!r} of a closed session. Open a new session.")
        if self._open_span is not None:
            raise RuntimeError(
                f"{action} on branch {self.name!r} while a forward context is open on it. Finish that one first: a "
                "branch takes one forward at a time."
            )


class Session:
    """One rollout's branches; opened by ``KVManager.open_session``, a context manager that closes itself."""

    def __init__(self, session_id: int, branches: Sequence[Branch], on_close: Callable[[Session], None]) -> None:
        self.session_id = session_id
        self._branches = {branch.name: branch for branch in branches}
        for branch in branches:
            branch.session_id = session_id
        self._on_close = on_close
        self.closed = False

    @property
    def branches(self) -> tuple[Branch, ...]:
        """All branches, in the order they were opened."""
        return tuple(self._branches.values())

    def branch(self, name: str = "positive") -> Branch:
        """The branch of that name.

        Raises:
            KeyError: no such branch; the message names the known ones.
        """
        if name not in self._branches:
            raise KeyError(f"unknown branch {name!r}; this session has {sorted(self._branches)}.")
        return self._branches[name]

    def commit(self) -> None:
        """Commit every branch's last successful forward; all branches or, where one refuses, none."""
        for branch in self.branches:
            branch.check_commit()
        for branch in self.branches:
            branch.commit()

    def flush(self, keep_tokens: int) -> None:
        """Keep the sink and the last ``keep_tokens`` tokens in every branch, or in none where one refuses."""
        for branch in self.branches:
            branch.check_flush(keep_tokens)
        for branch in self.branches:
            branch.flush(keep_tokens)

    def reset(self, *, keep_text: bool = True) -> None:
        """Empty the video history of every branch; the text K/V goes only if asked."""
        for branch in self.branches:
            branch.check_idle("a reset")
        for branch in self.branches:
            branch.reset()
            if not keep_text:
                branch.text = None

    def close(self) -> None:
        """Give all pages back; calling it again does nothing."""
        if self.closed:
            return
        self.closed = True
        self._on_close(self)
        for branch in self.branches:
            branch.closed = True
            branch.text = None

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
