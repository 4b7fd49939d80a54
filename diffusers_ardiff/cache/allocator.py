"""The page allocator: page ids and reference counts. Integers only, no tensors.

There is no null page and no page is ever special: every id from 0 to ``num_pages - 1`` is handed out.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from ..validation import check_int


class OutOfPagesError(RuntimeError):
    """The pool has too few free pages for a request; the message has both numbers."""


@dataclass(frozen=True)
class PageRun:
    """Pages of one branch, in storage order."""

    pages: tuple[int, ...]

    @cached_property
    def is_contiguous(self) -> bool:
        """Whether the pages follow each other in the pool, so that the keys are a plain view of it."""
        return all(b == a + 1 for a, b in zip(self.pages, self.pages[1:], strict=False))


def slot_of(storage_index: int, page_table: list[int] | tuple[int, ...], page_size: int) -> int:
    """Row of the flat pool that holds a storage index: ``table[r // B] * B + r % B``.

    Example: ``slot_of(47, [7, 3, 9], 16) == 159``

    Raises:
        ValueError: the page size is not positive, or the index lies outside the table.
    """
    check_int("page_size", page_size, minimum=1)
    if not 0 <= storage_index < len(page_table) * page_size:
        raise ValueError(
            f"storage index {storage_index} is outside the page table: {len(page_table)} pages of {page_size} slots "
            f"hold the indices 0 to {len(page_table) * page_size - 1}."
        )
    return page_table[storage_index // page_size] * page_size + storage_index % page_size


class PageAllocator:
    """Hands out pages, as one physical run where that is possible.

    Args:
        num_pages: pages of the pool.
        shuffle_seed: permute the free list by this seed and never look for runs; for tests of fragmented pools.
    """

    def __init__(self, num_pages: int, *, shuffle_seed: int | None = None) -> None:
        self.num_pages = check_int("num_pages", num_pages, minimum=1)
        self._ref_counts = [0] * num_pages
        self._order = list(range(num_pages))
        self._seek_runs = shuffle_seed is None
        if shuffle_seed is not None:
            random.Random(shuffle_seed).shuffle(self._order)

    @property
    def num_free(self) -> int:
        """Pages that nobody holds."""
        return self._ref_counts.count(0)

    @property
    def num_used(self) -> int:
        """Pages that somebody holds."""
        return self.num_pages - self.num_free

    def ref_count(self, page: int) -> int:
        """How many holders a page has."""
        return self._ref_counts[page]

    def allocate(self, num_runs: int, pages_per_run: int) -> list[PageRun]:
        """Take ``num_runs`` equal runs, all or none; side by side (equal stride) if the pool has the room.

        Raises:
            OutOfPagesError: too few free pages; nothing is taken.
        """
        check_int("num_runs", num_runs, minimum=1)
        check_int("pages_per_run", pages_per_run, minimum=1)
        wanted, free = num_runs * pages_per_run, self.num_free
        if wanted > free:
            raise OutOfPagesError(
                f"{num_runs} branches of {pages_per_run} pages need {wanted} pages, {free} of {self.num_pages} are "
                "free. Close a session, use a smaller window, or make the pool larger."
            )
        together = self._find_run(wanted) if self._seek_runs else None
        if together is not None:
            pages = list(range(together, together + wanted))
            runs = [PageRun(tuple(pages[i : i + pages_per_run])) for i in range(0, wanted, pages_per_run)]
            self._take(pages)
            return runs
        return [self._allocate_one(pages_per_run) for _ in range(num_runs)]

    def _allocate_one(self, num_pages: int) -> PageRun:
        start = self._find_run(num_pages) if self._seek_runs else None
        if start is not None:
            pages = list(range(start, start + num_pages))
        else:
            pages = [page for page in self._order if self._ref_counts[page] == 0][:num_pages]
        self._take(pages)
        return PageRun(tuple(pages))

    def _find_run(self, length: int) -> int | None:
        start = 0
        for page in range(self.num_pages):
            if self._ref_counts[page] != 0:
                start = page + 1
            elif page - start + 1 == length:
                return start
        return None

    def _take(self, pages: Sequence[int]) -> None:
        for page in pages:
            self._ref_counts[page] += 1

    def share(self, run: PageRun) -> None:
        """Add a holder to every page of a run.

        Raises:
            ValueError: a page of the run is free.
        """
        self._check_held(run)
        self._take(run.pages)

    def release(self, run: PageRun) -> None:
        """Give up one hold on every page of a run.

        Raises:
            ValueError: a page is free already, or no page of this pool; nothing is released.
        """
        self._check_held(run)
        for page in run.pages:
            self._ref_counts[page] -= 1

    def _check_held(self, run: PageRun) -> None:
        for page in run.pages:
            if not 0 <= page < self.num_pages:
                raise ValueError(f"page {page} does not belong to this pool of {self.num_pages} pages.")
            if self._ref_counts[page] == 0:
                raise ValueError(f"page {page} is free: it was released before.")

    def check_integrity(self, held: Sequence[PageRun]) -> None:
        """Compare the counts with an explicit list of the runs held.

        Raises:
            RuntimeError: a page's count differs; the message has the page and both counts.
        """
        expected = [0] * self.num_pages
        for run in held:
            for page in run.pages:
                expected[page] += 1
        for page, (want, have) in enumerate(zip(expected, self._ref_counts, strict=True)):
            if want != have:
                raise RuntimeError(f"page {page} is held by {want} branches but counted {have} times.")
