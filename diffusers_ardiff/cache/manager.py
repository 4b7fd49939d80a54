"""The K/V manager: one pool, its sessions, admission by the memory plan."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .allocator import PageAllocator
from .plan import KVShape, MemoryPlan, SideState, plan_memory
from .ring import RingGeometry
from .session import Branch, Session
from .storage import KVStorage

DEFAULT_BRANCH = "positive"


class KVManager:
    """Owns the pages of one pool and the sessions that hold them.

    Args:
        geometry: window policy of every branch of this pool.
        kv_shape: layers, heads, head size and bytes an element.
        max_sessions, branches_per_session: how many branches the pool holds.
        dtype, device: of the pools.
        limit_bytes: refuse to allocate if the plan is larger; None: no limit.
        side_state: bytes of a session beside its pages, counted in the plan.
        shuffle_seed: hand out pages in a seeded random order (tests of fragmented pools).

    Raises:
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
        limit_bytes: int | None = None,
        side_state: SideState | None = None,
        shuffle_seed: int | None = None,
    ) -> None:
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
        self.storage = KVStorage(
            kv_shape,
            num_pages=self.plan.num_pages,
            page_size=geometry.page_size,
            dtype=dtype,
            device=device,
            num_staging_rows=self.plan.num_sessions * self.plan.num_branches if self.plan.staging_bytes else 0,
            staging_len=geometry.max_seq_len,
        )
        self._free_staging_rows = set(range(self.plan.num_sessions * self.plan.num_branches))
        self._sessions: dict[int, Session] = {}
        self._next_session_id = 0

    @property
    def sessions(self) -> tuple[Session, ...]:
        """Open sessions, oldest first."""
        return tuple(self._sessions.values())

    def open_session(self, branches: Sequence[str] = (DEFAULT_BRANCH,)) -> Session:
        """Open a session; its pages are taken whole, now.

        Raises:
            ValueError: no branch, or one named twice.
            OutOfPagesError: too few free pages; nothing is taken.
        """
        if not branches or len(set(branches)) != len(branches):
            raise ValueError(f"a session needs branches with different names, got {list(branches)}.")
        runs = self.allocator.allocate(len(branches), self.geometry.num_pages)
        session = Session(
            self._next_session_id,
            [Branch(name, run, self.geometry, self.storage) for name, run in zip(branches, runs, strict=True)],
            self._release,
        )
        self._next_session_id += 1
        for branch in session.branches:
            if self.storage.staging is not None and not branch.run.is_contiguous:
                # Lowest first: rows of one session then follow each other, as a batched view of them has to.
                branch.staging_row = min(self._free_staging_rows)
                self._free_staging_rows.remove(branch.staging_row)
        self._sessions[session.session_id] = session
        return session

    def _release(self, session: Session) -> None:
        for branch in session.branches:
            self.allocator.release(branch.run)
            if branch.staging_row is not None:
                self._free_staging_rows.add(branch.staging_row)
        del self._sessions[session.session_id]

    def close(self) -> None:
        """Close every session."""
        for session in self.sessions:
            session.close()

    def check_integrity(self) -> None:
        """Compare page counts with the open sessions.

        Raises:
            RuntimeError: a page's count is wrong.
        """
        self.allocator.check_integrity([branch.run for session in self.sessions for branch in session.branches])
