"""Who holds which pages of a pool: runs owned, runs borrowed after a fork, staging rows. Integers only, no tensors.

Every hold owns a run. A fork reads its parent's run instead, until a write would make the two differ: then whoever
would lose by it gets bytes of its own first. A run whose owner left lives until its last borrower has left too.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .allocator import PageAllocator, PageRun
from .ring import RingState


@dataclass(eq=False, kw_only=True)
class PageHold:
    """Pages of one branch.

    Args:
        own: run reserved for this branch alone.
        ring: where the branch stands; says how much of a run holds tokens.
        borrowed: run read instead of its own, as long as nothing was written since the fork.
        staging_row: row of the staging pools, where ``own`` is fragmented and the pool has staging.
        last_use: the ledger's count at the last fork or write.
    """

    own: PageRun
    ring: RingState
    borrowed: PageRun | None = None
    staging_row: int | None = None
    last_use: int = 0

    @property
    def run(self) -> PageRun:
        """Where the branch's tokens are now."""
        return self.own if self.borrowed is None else self.borrowed

    @property
    def runs(self) -> tuple[PageRun, ...]:
        """All runs that this hold keeps from being freed."""
        return (self.own,) if self.borrowed is None else (self.own, self.borrowed)

    @property
    def num_written(self) -> int:
        """Storage indices, counted from 0, that may hold tokens of this branch; those awaiting a commit included."""
        return self.ring.geometry.kv_len(self.ring.written_end, self.ring.origin)


class PageLedger:
    """Reserves, lends and takes back the runs of one pool.

    Args:
        allocator: pages of the pool.
        pages_per_run: pages of one branch.
        num_staging_rows: rows of the staging pools; 0: the pool has none.
    """

    def __init__(self, allocator: PageAllocator, pages_per_run: int, *, num_staging_rows: int = 0) -> None:
        self.allocator = allocator
        self.pages_per_run = pages_per_run
        self.num_staging_rows = num_staging_rows
        self._free_staging_rows = set(range(num_staging_rows))
        self._holds: list[PageHold] = []
        self._clock = itertools.count(1)

    @property
    def holds(self) -> tuple[PageHold, ...]:
        """All holds, oldest first."""
        return tuple(self._holds)

    def reserve(self, rings: Sequence[RingState]) -> list[PageHold]:
        """Take one run a ring, all or none; side by side if the pool has the room.

        Raises:
            OutOfPagesError: too few free pages; nothing is taken.
        """
        holds = [
            PageHold(own=run, ring=ring)
            for run, ring in zip(self.allocator.allocate(len(rings), self.pages_per_run), rings, strict=True)
        ]
        for hold in holds:
            if self.num_staging_rows > 0 and not hold.own.is_contiguous:
                # Lowest first: rows of one session then follow each other, as a batched view of them has to.
                hold.staging_row = min(self._free_staging_rows)
                self._free_staging_rows.remove(hold.staging_row)
        self._holds += holds
        self.touch(holds)
        return holds

    def fork(self, parents: Sequence[PageHold], rings: Sequence[RingState]) -> list[PageHold]:
        """Holds that borrow what ``parents`` read now, each with a run of its own in reserve.

        Raises:
            OutOfPagesError: too few free pages; nothing is taken or shared.
        """
        children = self.reserve(rings)
        for parent, child in zip(parents, children, strict=True):
            self.allocator.share(parent.run)
            child.borrowed = parent.run
        self.touch([*parents, *children])
        return children

    def copies_before_write(self, hold: PageHold) -> list[PageHold]:
        """Holds that need the first ``num_written`` tokens of ``run`` in their ``own`` before ``hold`` writes.

        That is ``hold`` itself where it borrows, else everybody who borrows from it. Changes nothing: the caller
        copies for each in turn, then calls ``stop_borrowing``.
        """
        if hold.borrowed is not None:
            return [hold]
        return [other for other in self._holds if other.borrowed == hold.own]

    def stop_borrowing(self, hold: PageHold) -> None:
        """Read its own run from now on; no-op where it does so already."""
        if hold.borrowed is not None:
            self.allocator.release(hold.borrowed)
            hold.borrowed = None

    def release(self, holds: Iterable[PageHold]) -> None:
        """Give up own runs, borrows and staging rows. Pages that somebody still borrows stay in use."""
        for hold in holds:
            self._holds.remove(hold)
            for run in hold.runs:
                self.allocator.release(run)
            if hold.staging_row is not None:
                self._free_staging_rows.add(hold.staging_row)

    def touch(self, holds: Iterable[PageHold]) -> None:
        """Note that these holds were used just now."""
        now = next(self._clock)
        for hold in holds:
            hold.last_use = now

    def num_free_without(self, holds: Iterable[PageHold]) -> int:
        """Free pages there would be if these holds were released."""
        given_up = Counter(page for hold in holds for run in hold.runs for page in run.pages)
        freed = sum(self.allocator.ref_count(page) == count for page, count in given_up.items())
        return self.allocator.num_free + freed

    # -- integrity -----------------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Compare page counts, owners, borrowers and staging rows with each other.

        Raises:
            RuntimeError: they contradict each other; the message has the pages or rows.
        """
        self.allocator.check_integrity([run for hold in self._holds for run in hold.runs])
        owners: dict[int, PageHold] = {}
        for hold in self._holds:
            for page in hold.own.pages:
                if page in owners:
                    raise RuntimeError(f"page {page} is owned by two branches.")
                owners[page] = hold
        for hold in self._holds:
            self._check_borrow(hold, owners)
        self._check_staging_rows()

    def _check_borrow(self, hold: PageHold, owners: dict[int, PageHold]) -> None:
        if hold.borrowed is None:
            return
        lenders = {owners.get(page) for page in hold.borrowed.pages}
        lender = lenders.pop()
        if lenders or (lender is not None and lender.own != hold.borrowed):
            raise RuntimeError(f"the pages {hold.borrowed.pages} are borrowed as one run, but are not owned as one.")
        if lender is not None and lender.borrowed is not None:
            raise RuntimeError(f"the pages {hold.borrowed.pages} are borrowed from a branch that never wrote them.")

    def _check_staging_rows(self) -> None:
        rows = [hold.staging_row for hold in self._holds if hold.staging_row is not None]
        if sorted([*rows, *self._free_staging_rows]) != list(range(self.num_staging_rows)):
            raise RuntimeError(
                f"staging rows {sorted(rows)} are in use and {sorted(self._free_staging_rows)} are free, of "
                f"{self.num_staging_rows}; each row must be exactly one of the two."
            )
        for hold in self._holds:
            needs_row = self.num_staging_rows > 0 and not hold.own.is_contiguous
            if needs_row is not (hold.staging_row is not None):
                raise RuntimeError(f"the run {hold.own.pages} has staging row {hold.staging_row}.")
