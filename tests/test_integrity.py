"""Random sequences of everything sessions do, against an explicit list of (position, value); and what integrity means."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from rollouts import make_manager

from diffusers_ardiff.attention import paged_write_attn
from diffusers_ardiff.cache import Branch, KVManager, OutOfPagesError, PageRun, Session
from diffusers_ardiff.context import PagedForwardContext

SINK, WINDOW, PAGE_SIZE, MAX_EXTRA, LAYERS = 3, 9, 4, 2, 2


@dataclass
class Twin:
    """One session as lists: what each committed position holds, and which ones a failed forward may have spoilt."""

    tokens: dict[int, float] = field(default_factory=dict)
    pending: list[float] = field(default_factory=list)
    end: int = 0
    origin: int = SINK
    written_end: int = 0
    stale_start: int | None = None
    turned: int = 0

    def fork(self) -> Twin:
        twin = copy.copy(self)
        twin.tokens, twin.pending = dict(self.tokens), []
        return twin

    def shortest_forward(self) -> int:
        return max(1, self.written_end - self.end)

    def recache_start(self) -> int:
        if self.origin == SINK and self.end <= SINK + WINDOW:
            return 0
        return max(self.origin, self.end - WINDOW)

    def visible(self, start: int, length: int) -> list[int]:
        end = start + length
        return [p for p in range(end) if p < SINK or p >= max(self.origin, end - WINDOW)]

    def write(self, start: int, length: int) -> None:
        end = start + length
        rewritten = start <= self.origin or length >= WINDOW
        self.written_end = end if rewritten else max(self.written_end, end)
        self.pending = []
        if start < SINK:
            self.turned = 0

    def intact(self) -> list[int]:
        """Committed positions whose bytes nobody may have touched."""
        oldest = max(self.origin, self.written_end - WINDOW)
        limit = self.end if self.stale_start is None else self.stale_start
        return [p for p in range(limit) if p < SINK or p >= oldest]

    def storage_index(self, position: int) -> int:
        return position if position < SINK else SINK + (position - self.origin) % WINDOW


class World:
    """A pool with sessions and their twins; ``step`` does something at random and then compares everything."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.manager: KVManager = make_manager(
            SINK,
            WINDOW,
            page_size=PAGE_SIZE,
            extra=MAX_EXTRA,
            layers=LAYERS,
            heads=1,
            head_dim=2,
            max_sessions=6,
            shuffle_seed=seed if seed % 2 else None,
            evict="offload" if seed % 4 >= 2 else None,
        )
        self.twins: dict[Session, Twin] = {}
        self.done: set[str] = set()

    def step(self) -> None:
        actions = {
            self.open: 1.0,
            self.forward: 6.0,
            self.commit: 6.0,
            self.abort: 1.5,
            self.fork: 4.0,
            self.restore: 0.7,
            self.offload: 0.7,
            self.onload: 2.0,
            self.flush: 1.0,
            self.reset: 0.2,
            self.recache: 1.0,
            self.turn: 1.0,
            self.close: 2.5,
        }
        action = self.rng.choices(list(actions), list(actions.values()))[0]
        if action == self.open or self.twins:
            action()
        self.manager.check_integrity()
        for session, twin in self.twins.items():
            if not session.offloaded:
                check_values(session.branch(), twin)

    def pick(self, suits: Callable[[Session], bool] = lambda session: not session.offloaded) -> Session | None:
        return self.rng.choice([s for s in self.twins if suits(s)] or [None])

    def try_to_take(self, take: Callable[[], Session]) -> Session | None:
        """A new session, or None where the pool is rightly full."""
        free, sessions = self.manager.allocator.num_free, self.manager.sessions
        try:
            return take()
        except OutOfPagesError:
            assert free < self.manager.geometry.num_pages
            assert self.manager.allocator.num_free == free
            assert self.manager.sessions == sessions
            self.done.add("full")
            return None

    # -- actions -----------------------------------------------------------------------------------------------------

    def open(self) -> None:
        if (session := self.try_to_take(self.manager.open_session)) is not None:
            self.twins[session] = Twin()

    def forward(self) -> None:
        session = self.pick(lambda s: not s.offloaded and self.twins[s].stale_start is None)
        if session is None:
            return
        twin = self.twins[session]
        length = max(self.rng.randint(1, 4), twin.shortest_forward())
        twin.write(twin.end, length)
        twin.pending = self.run(session, twin, twin.end, length)

    def recache(self) -> None:
        session = self.pick()
        if session is None or (length := self.twins[session].end - self.twins[session].recache_start()) == 0:
            return
        twin = self.twins[session]
        start = twin.recache_start()
        twin.write(start, length)
        if self.rng.random() < 0.4:
            self.crash(session, length, start)
            twin.stale_start = start
            self.done.add("stale")
        else:
            values = self.run(session, twin, start, length)
            twin.tokens |= dict(enumerate(values, start))
            twin.stale_start = None

    def run(self, session: Session, twin: Twin, start: int, length: int) -> list[float]:
        """One forward whose queries see all keys alike, so that it returns the mean of what it sees."""
        num_extra = self.rng.randint(0, MAX_EXTRA)
        rows, extra = self.values(length), self.values(num_extra)
        context = PagedForwardContext(session.branches, num_tokens=length, start=start, num_extra=num_extra)
        with context:
            for layer in range(LAYERS):
                out = write(context, layer, rows, extra)
        known = twin.tokens | dict(enumerate(rows, start))
        seen = [known[p] for p in twin.visible(start, length)] + extra
        torch.testing.assert_close(out, torch.full_like(out, sum(seen) / len(seen)), rtol=1e-5, atol=1e-6)
        return rows

    def values(self, count: int) -> list[float]:
        return [self.rng.random() for _ in range(count)]

    def abort(self) -> None:
        session = self.pick(lambda s: not s.offloaded and self.twins[s].stale_start is None)
        if session is not None:
            twin = self.twins[session]
            length = max(self.rng.randint(1, 4), twin.shortest_forward())
            twin.write(twin.end, length)
            self.crash(session, length, twin.end)

    def crash(self, session: Session, length: int, start: int) -> None:
        context = PagedForwardContext(session.branches, num_tokens=length, start=start)
        with pytest.raises(ArithmeticError), context:
            for layer in range(self.rng.randint(0, LAYERS)):
                write(context, layer, self.values(length), [])
            raise ArithmeticError

    def commit(self) -> None:
        session = self.pick(lambda s: not s.offloaded and self.twins[s].stale_start is None)
        if session is not None:
            twin = self.twins[session]
            session.commit()
            twin.tokens |= dict(enumerate(twin.pending, twin.end))
            twin.end, twin.pending = twin.end + len(twin.pending), []
            assert session.branch().committed_tokens == twin.end

    def fork(self) -> None:
        parent = self.pick(lambda _: True)
        twin = self.twins[parent]
        if parent.offloaded or twin.stale_start is not None:
            with pytest.raises(RuntimeError, match=r"stale|onload"):
                parent.fork()
            return
        copies = self.manager.storage.num_copied_runs
        if (child := self.try_to_take(parent.fork)) is not None:
            assert self.manager.storage.num_copied_runs == copies
            assert child.branch().run == parent.branch().run
            self.done.add("grandchild" if parent.branch().hold.borrowed else "child")
            self.twins[child] = twin.fork()

    def restore(self) -> None:
        session, source = self.pick(), self.pick(lambda s: not s.offloaded and self.twins[s].stale_start is None)
        if session is not None and source is not None and session is not source:
            session.restore(source)
            self.twins[session] = self.twins[source].fork()

    def offload(self) -> None:
        if (session := self.pick()) is not None:
            session.offload()

    def onload(self) -> None:
        session = self.pick(lambda s: s.offloaded)
        if session is not None:
            self.try_to_take(lambda: session.onload() or session)

    def flush(self) -> None:
        session, keep = self.pick(), self.rng.choice([0, 0, 1, 2, 5, 20])
        if session is None:
            return
        twin = self.twins[session]
        if twin.stale_start is not None and (keep > 0 or twin.stale_start < SINK):
            with pytest.raises(RuntimeError, match="stale"):
                session.flush(keep)
            return
        session.flush(keep)
        twin.origin = max(twin.origin, twin.end - min(keep, WINDOW))
        twin.stale_start, twin.pending = None, []

    def turn(self) -> None:
        """A "rotation" that doubles the sink's keys at each step, so that turning twice would not go unnoticed."""
        session = self.pick(lambda s: not s.offloaded and self.twins[s].end >= SINK)
        if session is not None:
            twin, offset = self.twins[session], self.rng.randint(0, 3)
            twice = torch.full((1, 1, 1, 2), 2.0**offset)
            session.branch().turn_sink(offset, (twice, torch.zeros_like(twice)) if offset else None)
            twin.turned = offset
            self.done.add("turned")

    def reset(self) -> None:
        if (session := self.pick()) is not None:
            session.reset()
            self.twins[session] = Twin()

    def close(self) -> None:
        session = self.pick(lambda _: True)
        session.close()
        del self.twins[session]


def write(context: PagedForwardContext, layer: int, rows: list[float], extra: list[float]) -> torch.Tensor:
    """Layer 0 gets the values, layer 1 their negatives, so that they can't be mixed up; returns layer 0's sign."""
    sign = -1.0 if layer else 1.0
    keys, actions = (torch.tensor(values).view(1, -1, 1, 1).expand(-1, -1, 1, 2) * sign for values in (rows, extra))
    query = torch.zeros(1, len(rows), 1, 2)
    return sign * paged_write_attn(
        context.layer_inputs(layer), query, keys, keys, *((actions, actions) if extra else ())
    )


def check_values(branch: Branch, twin: Twin) -> None:
    """Every position that is still visible holds what was committed there, in every layer."""
    positions = twin.intact()
    if not positions:
        return
    storage = branch.storage
    slots = storage.slots(torch.tensor([twin.storage_index(p) for p in positions]), branch.run)
    values = torch.tensor([twin.tokens[p] for p in positions])
    keys = values * torch.tensor([2.0**twin.turned if p < SINK else 1.0 for p in positions])
    for pools, expected in ((storage.key_pools, keys), (storage.value_pools, values)):
        for pool, sign in zip(pools, (1.0, -1.0), strict=True):
            assert torch.equal(pool[slots, 0, 0], sign * expected), positions


@pytest.mark.parametrize("seed", range(20))
def test_random_sequences_against_an_explicit_list(seed: int) -> None:
    world = World(seed)
    for _ in range(500):
        world.step()
    assert world.done >= {"child", "grandchild", "stale", "turned"}
    assert "full" in world.done or world.manager.evict
    for session in world.rng.sample(list(world.twins), len(world.twins)):
        session.close()
        world.manager.check_integrity()
    assert world.manager.allocator.num_free == world.manager.allocator.num_pages
    assert world.manager.sessions == ()


# -- what check_integrity finds -------------------------------------------------------------------------------------


def make_family(shuffle_seed: int | None = None) -> tuple[KVManager, Session, Session]:
    manager = make_manager(3, 9, page_size=4, max_sessions=3, shuffle_seed=shuffle_seed)
    parent = manager.open_session()
    return manager, parent, parent.fork()


def lose_a_count(manager: KVManager, parent: Session, child: Session) -> None:
    manager.allocator.release(parent.branch().run)


def forget_a_borrow(manager: KVManager, parent: Session, child: Session) -> None:
    child.branch().hold.borrowed = None


def own_twice(manager: KVManager, parent: Session, child: Session) -> None:
    manager.allocator.share(parent.branch().hold.own)
    manager.allocator.release(child.branch().hold.own)
    child.branch().hold.own = parent.branch().hold.own


def borrow_half(manager: KVManager, parent: Session, child: Session) -> None:
    """Counts are right, but a borrowed run must be one that somebody owns, or owned."""
    mine, theirs = child.branch().hold, parent.branch().hold.own
    mixed = PageRun((*theirs.pages[:2], *mine.own.pages[2:]))
    manager.allocator.share(mixed)
    manager.allocator.release(theirs)
    mine.borrowed = mixed


def borrow_from_a_borrower(manager: KVManager, parent: Session, child: Session) -> None:
    """The child never wrote its own run, so there is nothing to read."""
    hold = manager.open_session().branch().hold
    manager.allocator.share(child.branch().hold.own)
    hold.borrowed = child.branch().hold.own


def drop_a_session(manager: KVManager, parent: Session, child: Session) -> None:
    del manager._sessions[child.session_id]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lose_a_count, "held by 2 branches but counted 1"),
        (forget_a_borrow, "held by 1 branches but counted 2"),
        (own_twice, "owned by two"),
        (borrow_half, "not owned as one"),
        (borrow_from_a_borrower, "never wrote"),
        (drop_a_session, "2 branches with pages, its open sessions have 1"),
    ],
)
def test_integrity_finds(damage: Callable[[KVManager, Session, Session], None], message: str) -> None:
    manager, parent, child = make_family()
    manager.check_integrity()
    damage(manager, parent, child)
    with pytest.raises(RuntimeError, match=message):
        manager.check_integrity()


@pytest.mark.parametrize("row", [None, 0, 2])
def test_integrity_finds_a_wrong_staging_row(row: int | None) -> None:
    """A row shared with the parent, one that is free, and none where a fragmented run needs one."""
    manager, parent, child = make_family(shuffle_seed=4)
    manager.check_integrity()
    assert (parent.branch().staging_row, child.branch().staging_row) == (0, 1)
    child.branch().hold.staging_row = row
    with pytest.raises(RuntimeError, match="staging row"):
        manager.check_integrity()
