"""A session: one rollout, with a branch for each K/V namespace (``"positive"``, ``"negative"`` under guidance).

What concerns all branches happens in all of them or, where one refuses, in none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from .branch import Branch
from .ledger import PageHold, PageLedger
from .ring import RingState


class SessionOwner(Protocol):
    """What a session asks of the ``KVManager`` that opened it."""

    ledger: PageLedger

    def add_fork(self, parent: Session) -> Session: ...
    def reserve(self, rings: Sequence[RingState]) -> list[PageHold]: ...
    def remove(self, session: Session) -> None: ...


class Session:
    """One rollout's branches; opened by ``KVManager.open_session``, a context manager that closes itself."""

    def __init__(self, session_id: int, branches: Sequence[Branch], manager: SessionOwner) -> None:
        self.session_id = session_id
        self._branches = {branch.name: branch for branch in branches}
        for branch in branches:
            branch.session_id = session_id
        self._manager = manager
        self.closed = False

    @property
    def branches(self) -> tuple[Branch, ...]:
        """All branches, in the order they were opened."""
        return tuple(self._branches.values())

    @property
    def offloaded(self) -> bool:
        """Whether keys, values and text are in host memory and the pages are given back."""
        return self.branches[0].offloaded

    @property
    def is_idle(self) -> bool:
        """Whether it has pages and no forward is open on it."""
        return all(branch.is_idle for branch in self.branches)

    @property
    def last_use(self) -> int:
        """The pool's count at the last open, fork, onload or write; 0 while offloaded. Larger is more recent."""
        return max(0 if branch.offloaded else branch.hold.last_use for branch in self.branches)

    def check_idle(self, action: str) -> None:
        """Raise RuntimeError if the session is closed or offloaded, or a forward is open on a branch."""
        for branch in self.branches:
            branch.check_idle(action)

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
        self.check_idle("a reset")
        for branch in self.branches:
            branch.reset()
            if not keep_text:
                branch.text = None

    # -- futures and pasts ---------------------------------------------------------------------------------------

    def fork(self) -> Session:
        """A second session that goes on from the same history, position and text; moves no bytes.

        The child reserves pages of its own at once and gets its copy at the first write, of either session, that
        would make the two differ; a forward that waits for its commit is not handed on.

        Raises:
            OutOfPagesError: the pool has no session free; nothing changes.
            RuntimeError: closed, offloaded, stale, or a forward is open.
        """
        for branch in self.branches:
            branch.check_fork()
        return self._manager.add_fork(self)

    def snapshot(self) -> Session:
        """A fork to keep aside for ``restore``; close it when it is no longer needed. Raises like ``fork``."""
        return self.fork()

    def restore(self, snapshot: Session) -> None:
        """Go back to where ``snapshot`` stands: history, position, text. The snapshot stays as it is.

        Pages stay this session's own. Heals a stale session. If a copy fails, every branch is left empty: restore again.

        Raises:
            ValueError: a session of another pool, or with other branches.
            RuntimeError: either is closed, offloaded or has a forward open, or the snapshot is stale.
        """
        if snapshot._manager is not self._manager or list(snapshot._branches) != list(self._branches):
            raise ValueError(
                "a session is restored from one of the same pool with the same branches, such as its fork."
            )
        self.check_idle("a restore")
        for branch in snapshot.branches:
            branch.check_fork("a restore")
        try:
            for branch in self.branches:
                branch.restore(snapshot.branch(branch.name))
        except BaseException:
            # Branches at different positions would go on as if nothing had been.
            for branch in self.branches:
                branch.reset()
            raise

    # -- host memory ---------------------------------------------------------------------------------------------

    def offload(self) -> None:
        """Move written K/V and text K/V to host memory and give the pages back; no-op where they are there already.

        Pages that forks still borrow stay in use until the last of these has written or closed.

        Raises:
            RuntimeError: closed, or a forward is open.
        """
        if self.offloaded and not self.closed:
            return
        self.check_idle("an offload")
        copies = [branch.read_back() for branch in self.branches]
        self._manager.ledger.release(branch.hold for branch in self.branches)
        for branch, (host, text) in zip(self.branches, copies, strict=True):
            branch.leave_pages(host, text)

    def onload(self) -> None:
        """Take pages again and put every byte back; no-op where the session is not offloaded.

        Raises:
            OutOfPagesError: the pool has no session free; the session stays offloaded.
            RuntimeError: closed.
        """
        if self.closed or not self.offloaded:
            self.check_idle("an onload")
            return
        holds = self._manager.reserve([branch.ring for branch in self.branches])
        try:
            texts = [branch.put_back(hold) for branch, hold in zip(self.branches, holds, strict=True)]
        except BaseException:
            self._manager.ledger.release(holds)
            raise
        for branch, hold, text in zip(self.branches, holds, texts, strict=True):
            branch.enter_pages(hold, text)

    def close(self) -> None:
        """Give all pages back; calling it again does nothing."""
        if self.closed:
            return
        self.closed = True
        self._manager.remove(self)
        for branch in self.branches:
            branch.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
