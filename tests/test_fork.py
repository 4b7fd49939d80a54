"""Forks and snapshots: pages shared until somebody writes, then one copy each; nobody's history changes by another's."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from rollouts import Rows, forward, pool_bytes
from session_runs import (
    CHUNK,
    NUM_PAGES,
    SHUFFLES,
    WINDOW,
    alone,
    equal,
    make_pool,
    make_stale,
    rows_of,
    run,
    stored,
)
from tiny_components import PROMPT, failing, seed

from diffusers_ardiff import ARDiffusionPipeline, PromptSwitch
from diffusers_ardiff.cache import (
    Branch,
    KVManager,
    OutOfPagesError,
    RingGeometry,
    RingState,
    Session,
    TextKV,
    TextLayerKV,
)
from diffusers_ardiff.context import PagedForwardContext
from diffusers_ardiff.pipelines import ARStream
from diffusers_ardiff.pipelines.steps import NoiseSource


def state_of(branch: Branch) -> tuple[int, int, int, bool]:
    ring = branch.ring
    return ring.committed_end, ring.origin, ring.written_end, ring.stale


# -- the fork itself --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffle_seed", SHUFFLES)
def test_fork_moves_no_bytes(shuffle_seed: int | None) -> None:
    manager = make_pool(5, shuffle_seed=shuffle_seed)
    parent = manager.open_session()
    run(parent, 0, 1, 2, 3, 4)
    forward(parent.branches, rows_of(5), commit=False)
    parent.branch().text = text = TextKV((TextLayerKV(torch.ones(1), torch.ones(1)),))
    before, free = pool_bytes(manager.storage), manager.allocator.num_free
    child = parent.fork()
    assert torch.equal(pool_bytes(manager.storage), before)
    assert manager.storage.num_copied_runs == 0
    mine, theirs = parent.branch(), child.branch()
    assert state_of(theirs) == state_of(mine) == (120, 24, 144, False)
    assert theirs.run == mine.run
    assert theirs.text is text
    assert set(theirs.hold.own.pages).isdisjoint(mine.run.pages)
    assert manager.allocator.num_free == free - NUM_PAGES
    assert (mine.ring.has_pending, theirs.ring.has_pending) == (True, False)
    assert child.session_id != parent.session_id
    manager.check_integrity()


def test_ring_takes_where_another_stands() -> None:
    """H, O, E and the stale mark, and nothing that waits for a commit on either side."""
    rings = [RingState(RingGeometry(sink_tokens=3, window_tokens=9, page_size=4)) for _ in range(2)]
    for ring, length in zip(rings, (4, 5), strict=True):
        for _ in range(2):
            span = ring.plan_forward(length)
            ring.begin(span)
            ring.finish(span, succeeded=True)
            ring.commit()
        ring.flush(1)
    failed = rings[0].plan_forward(1, start=7)
    rings[0].begin(failed)
    rings[0].finish(failed, succeeded=False)
    waits = rings[1].plan_forward(2)
    rings[1].begin(waits)
    rings[1].finish(waits, succeeded=True)
    rings[1].take(rings[0])
    assert (rings[1].committed_end, rings[1].origin, rings[1].written_end) == (8, 7, 8)
    assert (rings[1].stale, rings[1].has_pending) == (True, False)


@pytest.mark.parametrize("shuffle_seed", SHUFFLES)
@pytest.mark.parametrize("prefix", [1, 3, 6])
def test_four_futures_when_the_parent_writes_first(prefix: int, shuffle_seed: int | None) -> None:
    """One copy a borrower, none afterwards; the parent's table and bytes are those of an unforked run."""
    manager = make_pool(5, shuffle_seed=shuffle_seed)
    parent = manager.open_session()
    run(parent, *range(prefix))
    children = [parent.fork() for _ in range(4)]
    pages = parent.branch().run
    out = run(parent, 50)
    assert manager.storage.num_copied_runs == 4
    assert parent.branch().run == pages
    outs = [run(child, 100 + index, 7, 8, 9) for index, child in enumerate(children)]
    assert manager.storage.num_copied_runs == 4
    assert equal(out + run(parent, 51, 52), alone(*range(prefix), 50, 51, 52, shuffle_seed=shuffle_seed)[prefix:])
    for index, child_out in enumerate(outs):
        expected = alone(*range(prefix), 100 + index, 7, 8, 9, shuffle_seed=shuffle_seed)
        assert equal(child_out, expected[prefix:])
    manager.check_integrity()


def test_child_writes_first() -> None:
    """Its copy is the only one, made of what is written only; the parent's bytes and the other child stay."""
    manager = make_pool(5)
    parent = manager.open_session()
    run(parent, 0, 1)
    first, second = parent.fork(), parent.fork()
    before = stored(parent.branch())
    run(first, 2)
    assert manager.storage.num_copied_runs == 1
    assert torch.equal(stored(parent.branch()), before)
    assert first.branch().run == first.branch().hold.own
    assert second.branch().run == parent.branch().run
    keys = manager.storage.key_pools[0][manager.storage.slots(torch.arange(96), first.branch().run)]
    assert torch.equal(keys.isnan().any(-1).any(-1), torch.arange(96) >= 72)
    run(parent, 3)
    assert manager.storage.num_copied_runs == 2


def test_grandchildren() -> None:
    manager = make_pool(5)
    root = manager.open_session()
    run(root, 0, 1, 2, 3, 4)
    child = root.fork()
    grandchild = child.fork()
    assert grandchild.branch().run == root.branch().run
    child_out = run(child, 10)
    assert manager.storage.num_copied_runs == 1
    assert grandchild.branch().run == root.branch().run
    late = child.fork()
    assert late.branch().run == child.branch().hold.own
    root_out = run(root, 20)
    assert manager.storage.num_copied_runs == 2
    assert late.branch().run == child.branch().hold.own
    child_out += run(child, 11)
    assert manager.storage.num_copied_runs == 3
    manager.check_integrity()
    prefix = (0, 1, 2, 3, 4)
    assert equal(root_out, alone(*prefix, 20)[5:])
    assert equal(child_out, alone(*prefix, 10, 11)[5:])
    assert equal(run(grandchild, 30), alone(*prefix, 30)[5:])
    assert equal(run(late, 40), alone(*prefix, 10, 40)[6:])
    assert manager.storage.num_copied_runs == 3


@pytest.mark.parametrize("shuffle_seed", SHUFFLES)
@pytest.mark.parametrize("child_first", [True, False])
def test_both_go_on_in_turns(child_first: bool, shuffle_seed: int | None) -> None:
    """The child denoises while the parent denoises and commits, forward by forward, through the wrap."""
    manager = make_pool(5, shuffle_seed=shuffle_seed)
    parent = manager.open_session()
    run(parent, 0, 1, 2)
    child = parent.fork()
    outs: dict[Session, list[torch.Tensor]] = {parent: [], child: []}
    order = [child, parent] if child_first else [parent, child]
    for number in range(3, 10):
        for session, shift in zip(order, (100, 200), strict=True):
            forward(session.branches, rows_of(1000 + number + shift), commit=False)
        for session, shift in zip(order, (100, 200), strict=True):
            outs[session].append(forward(session.branches, rows_of(number + shift)))
    for session, shift in zip(order, (100, 200), strict=True):
        expected = alone(0, 1, 2, *range(3 + shift, 10 + shift), shuffle_seed=shuffle_seed)
        assert equal(outs[session], expected[3:])
    assert manager.storage.num_copied_runs == 1


def test_parent_and_child_in_one_forward() -> None:
    manager = make_pool(5)
    parent = manager.open_session()
    run(parent, 0, 1, 2, 3, 4)
    child = parent.fork()
    both = Rows(*(torch.cat(pair) for pair in zip(rows_of(10), rows_of(20), strict=True)))
    out = forward([parent.branch(), child.branch()], both)
    for row, number in ((0, 10), (1, 20)):
        torch.testing.assert_close(out[row], alone(0, 1, 2, 3, 4, number)[5][0], rtol=1e-5, atol=1e-5)
    assert manager.storage.num_copied_runs == 1


def test_only_the_branch_that_is_written_is_copied() -> None:
    manager = make_pool(5, branches_per_session=2)
    parent = manager.open_session(["positive", "negative"])
    run(parent, 0, 1)
    child = parent.fork()
    forward([child.branch("negative")], rows_of(2))
    assert manager.storage.num_copied_runs == 1
    assert child.branch("positive").run == parent.branch("positive").run
    assert child.branch("negative").run == child.branch("negative").hold.own
    manager.check_integrity()


# -- what counts as a write -------------------------------------------------------------------------------------------


def recache(session: Session) -> None:
    start, length = session.branch().ring.recache_span()
    forward(session.branches, rows_of(77, length), start=start)


def flush(session: Session) -> None:
    session.flush(CHUNK)


@pytest.mark.parametrize("write", [recache, flush])
@pytest.mark.parametrize("by_parent", [True, False])
def test_recache_and_flush_are_writes(write: Any, by_parent: bool) -> None:
    manager = make_pool(5)
    parent = manager.open_session()
    run(parent, 0, 1, 2, 3, 4, 5)
    children = [parent.fork(), parent.fork()]
    writer, others = (parent, children) if by_parent else (children[0], [parent, children[1]])
    write(writer)
    assert manager.storage.num_copied_runs == (2 if by_parent else 1)
    for other in others:
        assert equal(run(other, 9), alone(0, 1, 2, 3, 4, 5, 9)[6:])
    twin = make_pool(1).open_session()
    run(twin, 0, 1, 2, 3, 4, 5)
    write(twin)
    assert equal(run(writer, 9), run(twin, 9))


@pytest.mark.parametrize("boundary", [True, False])
@pytest.mark.parametrize("by_parent", [True, False])
def test_forgetting_is_no_write(by_parent: bool, boundary: bool) -> None:
    """A reset moves no bytes, so it copies none; what the next forward then copies is only what is left to read."""
    manager = make_pool(5)
    parent = manager.open_session()
    run(parent, 0, 1, 2, 3, 4)
    child = parent.fork()
    forgets, other = (parent, child) if by_parent else (child, parent)
    if boundary:
        forgets.flush(0)
    else:
        forgets.reset()
    assert manager.storage.num_copied_runs == 0
    manager.check_integrity()
    twin = make_pool(1).open_session()
    run(twin, 0, 1, 2, 3, 4)
    twin.flush(0) if boundary else twin.reset()
    assert equal(run(forgets, 5, 6), run(twin, 5, 6))
    assert equal(run(other, 5, 6), alone(0, 1, 2, 3, 4, 5, 6)[5:])


def test_reset_borrower_lets_go_of_the_pages() -> None:
    """It has nothing to read there any more, so a lender that closes takes them along."""
    manager = make_pool(2)
    parent = manager.open_session()
    run(parent, 0)
    child = parent.fork()
    child.reset()
    parent.close()
    assert manager.allocator.num_free == NUM_PAGES
    manager.check_integrity()


def test_commit_is_no_write() -> None:
    manager = make_pool(5)
    parent = manager.open_session()
    run(parent, 0)
    forward(parent.branches, rows_of(1), commit=False)
    child = parent.fork()
    parent.commit()
    child.commit()
    assert manager.storage.num_copied_runs == 0
    assert (parent.branch().committed_tokens, child.branch().committed_tokens) == (48, 24)


def test_child_knows_what_an_aborted_chunk_overwrote() -> None:
    """E is handed on: the shorter retry that the parent would be refused is refused to the child too."""
    parent = make_pool(5).open_session()
    run(parent, 0, 1, 2, 3)
    with pytest.raises(ArithmeticError), PagedForwardContext(parent.branches, num_tokens=48):
        raise ArithmeticError
    child = parent.fork()
    with pytest.raises(ValueError, match="at least 48"):
        forward(child.branches, rows_of(4))
    assert child.branch().storage.num_copied_runs == 0


# -- refusals ---------------------------------------------------------------------------------------------------------


def test_full_pool_refuses_a_fork() -> None:
    manager = make_pool(2)
    parent = manager.open_session()
    run(parent, 0, 1)
    other = manager.open_session()
    before, holds = pool_bytes(manager.storage), manager.ledger.holds
    with pytest.raises(OutOfPagesError, match="need 6 pages, 0 of 12"):
        parent.fork()
    assert torch.equal(pool_bytes(manager.storage), before)
    assert (manager.sessions, manager.ledger.holds) == ((parent, other), holds)
    assert [manager.allocator.ref_count(page) for page in range(12)] == [1] * 12
    other.close()
    assert parent.fork().branch().run == parent.branch().run


def test_fork_is_refused_while_open_stale_or_closed() -> None:
    manager = make_pool(5, branches_per_session=2)
    parent = manager.open_session(["positive", "negative"])
    run(parent, 0, 1)
    with PagedForwardContext([parent.branch("negative")], num_tokens=CHUNK), pytest.raises(RuntimeError, match="open"):
        parent.fork()
    make_stale(parent.branch("negative"))
    with pytest.raises(RuntimeError, match=r"a fork is refused.*stale"):
        parent.fork()
    parent.close()
    with pytest.raises(RuntimeError, match="closed"):
        parent.fork()
    assert manager.allocator.num_used == 0


def test_refused_call_copies_nothing() -> None:
    manager = make_pool(5)
    parent = manager.open_session()
    run(parent, 0, 1, 2, 3)
    child = parent.fork()
    for session in (parent, child):
        with pytest.raises(ValueError):
            forward(session.branches, rows_of(0, WINDOW + 1))
        with pytest.raises(ValueError):
            session.flush(-1)
    assert manager.storage.num_copied_runs == 0
    assert child.branch().run == parent.branch().run


def test_copy_that_fails_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Out of memory in the second row's copy once left the first row claimed for ever."""
    manager = make_pool(5)
    parent = manager.open_session()
    run(parent, 0, 1, 2, 3)
    first, second = parent.fork(), parent.fork()
    copy, calls = manager.storage.copy, itertools.count()

    def fail_second(*args: Any) -> None:
        if next(calls) == 1:
            raise MemoryError
        copy(*args)

    monkeypatch.setattr(manager.storage, "copy", fail_second)
    with pytest.raises(MemoryError):
        PagedForwardContext([first.branch(), second.branch()], num_tokens=CHUNK).prepare()
    manager.check_integrity()
    for session in (first, second, parent):
        assert equal(run(session, 9), alone(0, 1, 2, 3, 9)[4:])


# -- leaving ----------------------------------------------------------------------------------------------------------


def test_pages_of_a_closed_owner_live_until_the_last_borrower_leaves() -> None:
    manager = make_pool(3)
    parent = manager.open_session()
    run(parent, 0, 1, 2, 3)
    first, second = parent.fork(), parent.fork()
    pages = parent.branch().run.pages
    parent.close()
    assert manager.allocator.num_free == 0
    manager.check_integrity()
    assert equal(run(first, 5), alone(0, 1, 2, 3, 5)[4:])
    assert [manager.allocator.ref_count(page) for page in pages] == [1] * 6
    second.close()
    assert manager.storage.num_copied_runs == 1
    assert manager.allocator.num_free == 2 * NUM_PAGES
    manager.check_integrity()


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_all_pages_come_back_in_any_order(order: tuple[int, ...]) -> None:
    manager = make_pool(3, shuffle_seed=4)
    parent = manager.open_session()
    run(parent, 0, 1)
    child = parent.fork()
    family = [parent, child, child.fork()]
    for index in order:
        family[index].close()
        manager.check_integrity()
    assert manager.allocator.num_free == manager.allocator.num_pages
    assert manager.storage.num_copied_runs == 0


@pytest.mark.parametrize("is_fork", [True, False])
def test_crash_in_another_session(is_fork: bool) -> None:
    """A0 B0 A1, where B raises in its second layer and closes: A is bit-identical and B's pages are back."""
    manager = make_pool(2)
    first = manager.open_session()
    run(first, 0, 1, 2, 3)
    second = first.fork() if is_fork else manager.open_session()
    with (
        pytest.raises(ArithmeticError),
        second,
        PagedForwardContext(second.branches, num_tokens=CHUNK) as context,
    ):
        context.layer_inputs(0).key_pool[context.layer_inputs(0).slot_mapping[0]] = float("inf")
        raise ArithmeticError
    assert equal(run(first, 4), alone(0, 1, 2, 3, 4)[4:])
    assert manager.allocator.num_free == NUM_PAGES
    manager.check_integrity()


# -- snapshot and restore ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffle_seed", SHUFFLES)
def test_restore_goes_on_from_the_snapshot(shuffle_seed: int | None) -> None:
    """As often as wanted, in the session's own pages."""
    manager = make_pool(2, shuffle_seed=shuffle_seed)
    session = manager.open_session()
    run(session, 0, 1, 2, 3)
    session.branch().text = text = TextKV(())
    pages = session.branch().run
    snapshot = session.snapshot()
    expected = run(session, 4, 5, 6)
    assert manager.storage.num_copied_runs == 1
    for times in (2, 3):
        session.branch().text = None
        session.restore(snapshot)
        assert manager.storage.num_copied_runs == times
        assert session.branch().text is text
        assert session.branch().run == pages
        manager.check_integrity()
        assert equal(run(session, 4, 5, 6), expected)
    assert equal(run(snapshot, 4), expected[:1])


def test_restore_before_any_write_copies_nothing() -> None:
    manager = make_pool(2)
    session = manager.open_session()
    run(session, 0, 1, 2, 3)
    snapshot = session.snapshot()
    session.flush(0)
    session.restore(snapshot)
    assert manager.storage.num_copied_runs == 0
    assert equal(run(session, 4), alone(0, 1, 2, 3, 4)[4:])


def test_restore_heals_and_drops_what_waits_for_a_commit() -> None:
    manager = make_pool(2)
    session = manager.open_session()
    run(session, 0, 1)
    snapshot = session.snapshot()
    make_stale(session.branch())
    session.restore(snapshot)
    assert not session.branch().ring.stale
    forward(session.branches, rows_of(9), commit=False)
    session.restore(snapshot)
    session.commit()
    assert session.branch().committed_tokens == 48
    assert equal(run(session, 2), alone(0, 1, 2)[2:])


def test_restore_spares_other_forks() -> None:
    """It writes into the session's own pages, which a younger fork still reads."""
    manager = make_pool(3)
    session = manager.open_session()
    run(session, 0, 1, 2, 3)
    snapshot = session.snapshot()
    run(session, 4)
    younger = session.fork()
    session.restore(snapshot)
    manager.check_integrity()
    assert equal(run(younger, 5), alone(0, 1, 2, 3, 4, 5)[5:])
    assert equal(run(session, 6), alone(0, 1, 2, 3, 6)[4:])


def test_borrower_is_restored_from_a_stranger() -> None:
    """It has never written its own pages; it leaves its lender's, and the lender copies nothing for it later."""
    manager = make_pool(3)
    parent, stranger = manager.open_session(), manager.open_session()
    run(parent, 0, 1)
    run(stranger, 5, 6, 7)
    child = parent.fork()
    child.restore(stranger)
    manager.check_integrity()
    run(parent, 2)
    assert manager.storage.num_copied_runs == 1
    assert equal(run(child, 8), alone(5, 6, 7, 8)[3:])


def test_restore_is_refused() -> None:
    manager, other = make_pool(3, branches_per_session=2), make_pool(5)
    session = manager.open_session()
    run(session, 0)
    snapshot = session.snapshot()
    for source in (other.open_session(), manager.open_session(["negative"])):
        with pytest.raises(ValueError, match="same pool with the same branches"):
            session.restore(source)
    with (
        PagedForwardContext(session.branches, num_tokens=CHUNK),
        pytest.raises(RuntimeError, match=r"a restore.*open"),
    ):
        session.restore(snapshot)
    make_stale(snapshot.branch())
    with pytest.raises(RuntimeError, match=r"a restore is refused.*stale"):
        session.restore(snapshot)
    snapshot.close()
    with pytest.raises(RuntimeError, match=r"a restore.*closed"):
        session.restore(snapshot)
    assert session.branch().committed_tokens == CHUNK


def test_restore_that_fails_leaves_no_branch_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Out of memory in the second branch's copy: the first stood at the snapshot and the second at 0, and both went on
    together at different positions without a word."""
    manager = make_pool(3, branches_per_session=2)
    session = manager.open_session(["positive", "negative"])
    run(session, 0, 1)
    snapshot = session.snapshot()
    run(session, 2)
    copy, calls = manager.storage.copy, itertools.count()

    def fail_second(*args: Any) -> None:
        if next(calls) == 1:
            raise MemoryError
        copy(*args)

    with monkeypatch.context() as patch:
        patch.setattr(manager.storage, "copy", fail_second)
        with pytest.raises(MemoryError):
            session.restore(snapshot)
    manager.check_integrity()
    assert [branch.committed_tokens for branch in session.branches] == [0, 0]
    session.restore(snapshot)
    assert equal(run(session, 9), alone(0, 1, 9)[2:] * 2)


# -- streams ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def pool(pipe: ARDiffusionPipeline) -> Iterator[KVManager]:
    """Room for three guided streams; has to be empty and sound again at the end."""
    manager = pipe.create_cache(num_videos=3, guided=True)
    yield manager
    manager.check_integrity()
    assert manager.allocator.num_free == manager.allocator.num_pages


def open_stream(pipe: ARDiffusionPipeline, pool: KVManager, **call: Any) -> ARStream:
    return pipe.stream(PROMPT, cache=pool, **{"generator": seed(0), "output_type": "pt", "guidance_scale": 3.0} | call)


def frames(stream: ARStream, count: int) -> list[torch.Tensor]:
    return [torch.as_tensor(next(stream).frames) for _ in range(count)]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_two_futures_of_a_stream(pipe: ARDiffusionPipeline, pool: KVManager, order: tuple[int, ...]) -> None:
    """One child has the parent's prompt and noise to come and makes the parent's frames; the other one goes its way."""
    with open_stream(pipe, pool) as unforked:
        expected = frames(unforked, 7)
    parent = open_stream(pipe, pool)
    past = frames(parent, 4)
    same, other = parent.fork(), parent.fork(generator=seed(5))
    other.switch_prompt("a blue square moving up")
    assert other.state is not parent.state
    assert pool.storage.num_copied_runs == 0
    futures: list[list[torch.Tensor]] = [[], [], []]
    for _ in range(3):
        for stream, future in zip((other, parent, same), futures, strict=True):
            future += frames(stream, 1)
    assert equal(past + futures[1], expected)
    assert equal(futures[2], expected[4:])
    assert not any(torch.equal(a, b) for a, b in zip(futures[0], expected[4:], strict=True))
    assert pool.storage.num_copied_runs == 4
    family = (parent, same, other)
    for index in order:
        family[index].close()
        pool.check_integrity()


def test_child_equals_a_run_with_its_prompt_and_noise(pipe: ARDiffusionPipeline, pool: KVManager) -> None:
    """The other future is right, not just different: an unforked run that changes prompt and noise at that chunk."""
    generator = seed(0)
    with open_stream(pipe, pool, generator=generator) as unforked:
        frames(unforked, 4)
        unforked.switch_prompt("a blue square moving up")
        generator.set_state(seed(5).get_state())
        expected = frames(unforked, 3)
    with open_stream(pipe, pool) as parent:
        frames(parent, 4)
        with parent.fork(generator=seed(5)) as child:
            parent.close()
            child.switch_prompt("a blue square moving up")
            assert equal(frames(child, 3), expected)


def test_fork_keeps_the_schedule_the_given_chunks_and_the_count(pipe: ARDiffusionPipeline, pool: KVManager) -> None:
    """Forked after the first of three given chunks, before a scheduled switch, in a call of a fixed length."""
    context = torch.randn(1, pipe.transformer.config["in_channels"], 7, 4, 6, generator=seed(3))
    call: dict[str, Any] = {
        "context_latents": context,
        "num_frames": 58,
        "prompt_schedule": [PromptSwitch(latent_frame=10, prompt="a green circle", mode="recache")],
    }
    with open_stream(pipe, pool, **call) as unforked:
        expected = [chunk.frames for chunk in unforked]
    parent = open_stream(pipe, pool, **call)
    first = next(parent).frames
    child = parent.fork()
    assert equal([first, *(chunk.frames for chunk in parent)], expected)
    chunks = list(child)
    assert equal([chunk.frames for chunk in chunks], expected[1:])
    assert [chunk.index for chunk in chunks] == list(range(1, len(expected)))


def test_fork_goes_on_with_a_blend_and_with_given_noise(pipe: ARDiffusionPipeline, pool: KVManager) -> None:
    """A child in the middle of a blend takes its next step; given noise is read where the parent stood."""
    noise = torch.randn(1, pipe.transformer.config["in_channels"], 15, 4, 6, generator=seed(3))

    def step_noise(chunk: int, step: int, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(shape, generator=seed(100 * chunk + step))

    with open_stream(pipe, pool, latents=noise, step_noise=step_noise) as parent:
        frames(parent, 2)
        parent.switch_prompt("a blue square moving up", mode="blend", blend_chunks=3)
        frames(parent, 1)
        with parent.fork() as child:
            assert equal(frames(child, 2), frames(parent, 2))


def test_fork_needs_a_free_session(pipe: ARDiffusionPipeline) -> None:
    """Two videos and room for three: the fork of the second finds no pages, and the first's are given back."""
    pool = pipe.create_cache(num_videos=3)
    with pipe.stream([PROMPT, PROMPT], cache=pool, generator=seed(0), output_type="latent") as stream:
        next(stream)
        with pytest.raises(OutOfPagesError):
            stream.fork()
        with pytest.raises(ValueError, match="3 generators was given for 2 videos"):
            stream.fork(generator=[seed(0), seed(1), seed(2)])
        pool.check_integrity()
        assert len(pool.sessions) == 2
        assert not stream.closed
        next(stream)
    with pytest.raises(RuntimeError, match="closed"):
        stream.fork()
    assert pool.allocator.num_used == 0


def test_crash_of_a_child_leaves_the_parent(pipe: ARDiffusionPipeline, pool: KVManager) -> None:
    with open_stream(pipe, pool) as unforked:
        expected = frames(unforked, 4)
    with open_stream(pipe, pool) as parent:
        past = frames(parent, 2)
        child = parent.fork()
        used = pool.allocator.num_used
        with failing(pipe.transformer.blocks[1], ArithmeticError(), after=3), pytest.raises(ArithmeticError):
            next(child)
        assert child.closed
        assert pool.allocator.num_used == used // 2
        assert equal(past + frames(parent, 2), expected)


@pytest.mark.parametrize("as_list", [True, False])
def test_forked_noise_does_not_advance_the_source(as_list: bool) -> None:
    generator = [seed(1), seed(2)] if as_list else seed(1)
    source = NoiseSource(device=torch.device("cpu"), generator=generator)
    shape = (2, 4)
    source.step(shape, 0, 0)
    fork, other = source.fork(), source.fork(generator=[seed(3), seed(4)])
    drawn = [fork.step(shape, 0, 0) for _ in range(3)]
    assert not torch.equal(other.step(shape, 0, 0), drawn[0])
    assert equal([source.step(shape, 0, 0) for _ in range(3)], drawn)
