"""The K/V manager: one pool, its sessions, admission by the memory plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from ..validation import check_int
from .allocator import PageAllocator
from .branch import Branch
from .float8 import UNSCALED, KVScales
from .layout import RingGeometry
from .ledger import PageHold, PageLedger
from .plan import KVShape, MemoryPlan, SideState, plan_memory
from .ring import RingState
from .session import Session
from .storage import KVStorage

DEFAULT_BRANCH = "positive"


class KVManager:
    """Owns the pages of one pool and the sessions that hold them.

    Args:
        geometry: window policy of every branch of this pool.
        kv_shape: layers, heads, head size and bytes an element.
        max_sessions, branches_per_session: how many branches the pool holds; a fork takes as many as its parent.
        dtype, device: of the pools; float8_e4m3fn takes half the bytes of bfloat16.
        scales: of the values in a float8 pool.
        limit_bytes: refuse to allocate if the plan is larger; None: no limit.
        side_state: bytes of a session beside its pages, counted in the plan.
        shuffle_seed: hand out pages in a seeded random order (tests of fragmented pools).
        backend: name of the attention backend that calls with this pool use; None: chosen by capability. Only kept.
        write: name of who writes in calls with this pool; None: by measurement. Only kept.
        evict: what to do where an open, a fork or an onload finds the pool full. None: refuse. "offload": offload the
            least recently used idle sessions; each has to be onloaded before its next forward.

    Raises:
        ValueError: unknown ``evict``, or scales of another pool than a float8 one.
        MemoryLimitError: before anything is allocated.
    """

    def __init__(
        self,
        geometry: RingGeometry,
        kv_shape: KVShape,
        *,
        max_sessions: int = 1,
        branches_per_session: int = 1,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        scales: KVScales = UNSCALED,
        limit_bytes: int | None = None,
        side_state: SideState | None = None,
        shuffle_seed: int | None = None,
        backend: str | None = None,
        write: str | None = None,
        evict: Literal["offload"] | None = None,
    ) -> None:
        if evict not in ("offload", None):
            raise ValueError(f'evict must be "offload" or None, got {evict!r}.')
        scales.check_dtype(dtype)
        self.evict = evict
        self.backend = backend
        self.write = write
        self.geometry = geometry
        self.plan: MemoryPlan = plan_memory(
            geometry,
            kv_shape,
            num_sessions=max_sessions,
            num_branches=branches_per_session,
            side_state=side_state,
            fragmented=shuffle_seed is not None,
        )
        self.plan.check_limit(limit_bytes)
        self.allocator = PageAllocator(self.plan.num_pages, shuffle_seed=shuffle_seed)
        num_staging_rows = self.plan.num_sessions * self.plan.num_branches if self.plan.staging_bytes else 0
        self.ledger = PageLedger(self.allocator, geometry.num_pages, num_staging_rows=num_staging_rows)
        self.storage = KVStorage(
            kv_shape,
            num_pages=self.plan.num_pages,
            page_size=geometry.page_size,
            dtype=dtype,
            device=device,
            scales=scales,
            staging=(num_staging_rows, geometry.max_seq_len),
        )
        self._sessions: dict[int, Session] = {}
        self._next_session_id = 0

    @property
    def sessions(self) -> tuple[Session, ...]:
        """Open sessions, offloaded ones included, oldest first."""
        return tuple(self._sessions.values())

    def open_session(self, branches: Sequence[str] = (DEFAULT_BRANCH,)) -> Session:
        """Open a session; its pages are taken whole, now.

        Raises:
            ValueError: no branch, or one named twice.
            OutOfPagesError: too few free pages; nothing is taken.
        """
        if not branches or len(set(branches)) != len(branches):
            raise ValueError(f"a session needs branches with different names, got {list(branches)}.")
        return self._add(branches, self.reserve([RingState(self.geometry) for _ in branches]))

    def add_fork(self, parent: Session) -> Session:
        """A session that borrows the pages of ``parent``; see ``Session.fork``, which checks first."""
        rings = [RingState(self.geometry) for _ in parent.branches]
        for branch, ring in zip(parent.branches, rings, strict=True):
            ring.take(branch.ring)
        self._make_room(len(rings), keep=parent)
        holds = self.ledger.fork([branch.hold for branch in parent.branches], rings)
        child = self._add([branch.name for branch in parent.branches], holds)
        for branch in parent.branches:
            child.branch(branch.name).text, child.branch(branch.name).sink = branch.text, branch.sink
        return child

    def _add(self, names: Sequence[str], holds: Sequence[PageHold]) -> Session:
        branches = [Branch(name, hold, self.storage, self.ledger) for name, hold in zip(names, holds, strict=True)]
        session = Session(self._next_session_id, branches, self)
        self._next_session_id += 1
        self._sessions[session.session_id] = session
        return session

    def reserve(self, rings: Sequence[RingState]) -> list[PageHold]:
        """One run of pages a ring, evicting others if that is allowed.

        Raises:
            OutOfPagesError: too few free pages; nothing is taken and nobody evicted.
        """
        self._make_room(len(rings))
        return self.ledger.reserve(rings)

    def remove(self, session: Session) -> None:
        """Take the pages of a session back and forget it; ``Session.close`` calls this."""
        if not session.offloaded:
            self.ledger.release(branch.hold for branch in session.branches)
        del self._sessions[session.session_id]

    # -- eviction ------------------------------------------------------------------------------------------------

    def evict_idle(self, num_sessions: int = 1) -> tuple[Session, ...]:
        """Offload up to ``num_sessions`` idle sessions, the least recently used first; returns them.

        Idle is a session on the device on which no forward is open. Works whatever ``evict`` says.

        Raises:
            ValueError: ``num_sessions`` is not positive.
        """
        check_int("num_sessions", num_sessions, minimum=1)
        evicted = self._idle_sessions()[:num_sessions]
        for session in evicted:
            session.offload()
        return tuple(evicted)

    def _idle_sessions(self) -> list[Session]:
        return sorted((s for s in self.sessions if s.is_idle), key=lambda session: session.last_use)

    def _make_room(self, num_branches: int, keep: Session | None = None) -> None:
        """Evict until this many branches fit, least recently used first; nobody where even all would not do."""
        if self.evict is None:
            return
        wanted = num_branches * self.geometry.num_pages
        victims: list[Session] = []
        candidates = (session for session in self._idle_sessions() if session is not keep)
        while self.ledger.num_free_without(b.hold for s in victims for b in s.branches) < wanted:
            victim = next(candidates, None)
            if victim is None:
                return
            victims.append(victim)
        for session in victims:
            session.offload()

    # -- end and checks ------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close every session."""
        for session in self.sessions:
            session.close()

    def check_integrity(self) -> None:
        """Compare page counts, owners, borrowers and staging rows with each other and with the open sessions.

        Raises:
            RuntimeError: they contradict each other.
        """
        self.ledger.check_integrity()
        branches = [branch for session in self.sessions for branch in session.branches if not branch.offloaded]
        if {branch.hold for branch in branches} != set(self.ledger.holds) or len(branches) != len(self.ledger.holds):
            raise RuntimeError(
                f"the pool counts {len(self.ledger.holds)} branches with pages, its open sessions have {len(branches)}."
            )
