"""Offload to host memory and back, and eviction of the least recently used: every bit comes back, every page too."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rollouts import forward, poison
from session_runs import CHUNK, NUM_PAGES, SHUFFLES, alone, equal, make_pool, make_stale, rows_of, run, stored
from tiny_components import PROMPT, seed

from diffusers_ardiff import ARDiffusionPipeline
from diffusers_ardiff.cache import OutOfPagesError, Session, TextKV, TextLayerKV
from diffusers_ardiff.context import PagedForwardContext


def text_kv(image: bool) -> TextKV:
    return TextKV((TextLayerKV(*(torch.randn(1, 5, 2, 8) for _ in range(4 if image else 2))),) * 2)


# -- sessions ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffle_seed", SHUFFLES)
@pytest.mark.parametrize("image", [True, False])
@pytest.mark.parametrize("chunks", [0, 1, 4, 7])
def test_round_trip(chunks: int, image: bool, shuffle_seed: int | None) -> None:
    """Other sessions use the pages meanwhile, and the session comes back to different ones."""
    manager = make_pool(2, shuffle_seed=shuffle_seed)
    session = manager.open_session()
    run(session, *range(chunks))
    branch = session.branch()
    branch.text = text = text_kv(image)
    before, pages, host_bytes = stored(branch, min(24 * chunks, 96)), branch.run, min(24 * chunks, 96) * 2 * 2 * 16 * 4
    session.offload()
    assert (session.offloaded, branch.host_bytes) == (True, host_bytes)
    assert manager.allocator.num_free == 2 * NUM_PAGES
    manager.check_integrity()
    poison(manager.storage)
    other = manager.open_session()
    other_out = run(other, 50, 51)
    session.onload()
    assert (session.offloaded, branch.host_bytes) == (False, 0)
    assert branch.run != pages
    assert torch.equal(stored(branch, min(24 * chunks, 96)), before)
    for old, new in zip(itertools.chain(*text.layers), itertools.chain(*branch.text.layers), strict=True):
        assert new is None if old is None else torch.equal(new, old)
    manager.check_integrity()
    expected = alone(*range(chunks), 90, 91, shuffle_seed=shuffle_seed)
    assert equal(run(session, 90, 91), expected[chunks:])
    assert equal([*other_out, *run(other, 52)], alone(50, 51, 52, shuffle_seed=shuffle_seed))


def test_host_copy_does_not_share_memory_with_the_pool() -> None:
    """On the CPU a copy "to the host" is the same tensor unless asked otherwise."""
    manager = make_pool(1)
    session = manager.open_session()
    session.branch().text = text = text_kv(False)
    run(session, 0, 1)
    session.offload()
    assert session.branch().text.layers[0].key.data_ptr() != text.layers[0].key.data_ptr()
    run(manager.open_session(), 5, 6, 7)
    manager.sessions[1].close()
    session.onload()
    assert equal(run(session, 2), alone(0, 1, 2)[2:])


def test_what_waits_for_a_commit_comes_back() -> None:
    session = make_pool(2).open_session()
    run(session, 0, 1, 2, 3)
    forward(session.branches, rows_of(4), commit=False)
    session.offload()
    poison(session.branch()._storage)
    session.onload()
    session.commit()
    assert equal(run(session, 5), alone(0, 1, 2, 3, 4, 5)[5:])


def test_stale_stays_stale() -> None:
    session = make_pool(2).open_session()
    run(session, 0, 1)
    make_stale(session.branch())
    session.offload()
    session.onload()
    with pytest.raises(RuntimeError, match="stale"):
        run(session, 2)
    forward(session.branches, rows_of(9, 48), start=0)
    run(session, 2)


def test_text_that_changes_meanwhile_wins() -> None:
    session = make_pool(2).open_session()
    session.branch().text = text_kv(False)
    session.offload()
    session.branch().text = new = text_kv(False)
    session.onload()
    assert torch.equal(session.branch().text.layers[0].key, new.layers[0].key)


REFUSED: dict[str, Callable[[Session], Any]] = {
    "a forward": lambda session: run(session, 1),
    "a commit": lambda session: session.commit(),
    "a flush": lambda session: session.flush(0),
    "a reset": lambda session: session.reset(),
    "a fork": lambda session: session.fork(),
    "a restore": lambda session: session.restore(session),
    "a look at the pages": lambda session: session.branch().run,
}


@pytest.mark.parametrize("action", REFUSED)
def test_offloaded_session_says_what_to_do(action: str) -> None:
    manager = make_pool(2)
    session = manager.open_session()
    run(session, 0)
    session.offload()
    with pytest.raises(RuntimeError, match=rf"{action} .*offloaded session. Call onload\(\)"):
        REFUSED[action](session)
    session.onload()
    assert equal(run(session, 1), alone(0, 1)[1:])


def test_only_idle_sessions_are_offloaded() -> None:
    manager = make_pool(2, branches_per_session=2)
    session = manager.open_session(["positive", "negative"])
    with PagedForwardContext([session.branch("negative")], num_tokens=CHUNK):
        with pytest.raises(RuntimeError, match=r"an offload.*open"):
            session.offload()
        assert manager.evict_idle() == ()
    assert not session.offloaded
    session.close()
    for action in (session.offload, session.onload):
        with pytest.raises(RuntimeError, match="closed"):
            action()


def test_calling_again_does_nothing() -> None:
    manager = make_pool(2)
    session = manager.open_session()
    run(session, 0)
    session.onload()
    session.offload()
    session.offload()
    manager.check_integrity()
    session.onload()
    pages = session.branch().run
    session.onload()
    assert session.branch().run == pages
    assert equal(run(session, 1), alone(0, 1)[1:])


def test_onload_into_a_full_pool_is_refused() -> None:
    manager = make_pool(1)
    session = manager.open_session()
    run(session, 0, 1)
    session.offload()
    other = manager.open_session()
    with pytest.raises(OutOfPagesError, match="need 6 pages, 0 of 6"):
        session.onload()
    assert session.offloaded
    manager.check_integrity()
    other.close()
    session.onload()
    assert equal(run(session, 2), alone(0, 1, 2)[2:])


@pytest.mark.parametrize("direction", ["read", "write"])
def test_copy_that_fails_changes_nothing(direction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second branch finds no memory; the first one must not be on the other side then."""
    manager = make_pool(2, branches_per_session=2)
    session = manager.open_session(["positive", "negative"])
    run(session, 0)
    if direction == "write":
        session.offload()
    used, method, calls = manager.allocator.num_used, getattr(manager.storage, direction), itertools.count()

    def fail_second(*args: Any) -> Any:
        if next(calls) == 1:
            raise MemoryError
        return method(*args)

    monkeypatch.setattr(manager.storage, direction, fail_second)
    with pytest.raises(MemoryError):
        session.offload() if direction == "read" else session.onload()
    assert {branch.offloaded for branch in session.branches} == {direction == "write"}
    assert manager.allocator.num_used == used
    manager.check_integrity()
    monkeypatch.undo()
    session.onload()
    assert equal(run(session, 1)[:1], alone(0, 1)[1:])


def test_closing_an_offloaded_session() -> None:
    manager = make_pool(2)
    session = manager.open_session()
    run(session, 0)
    session.offload()
    session.close()
    assert (session.branch().host_bytes, session.branch().text, manager.sessions) == (0, None, ())
    assert manager.allocator.num_used == 0


# -- forks ------------------------------------------------------------------------------------------------------------


def test_offloading_a_borrower_and_its_lender() -> None:
    """The borrower just leaves; the lender's pages stay until the last borrower has left them."""
    manager = make_pool(4)
    parent = manager.open_session()
    run(parent, 0, 1, 2, 3)
    first, second = parent.fork(), parent.fork()
    first.offload()
    manager.check_integrity()
    assert manager.allocator.num_used == 2 * NUM_PAGES
    parent.offload()
    assert manager.allocator.num_used == 2 * NUM_PAGES
    assert manager.storage.num_copied_runs == 0
    second_out = run(second, 7)
    assert manager.storage.num_copied_runs == 1
    assert manager.allocator.num_used == NUM_PAGES
    for session in (first, parent):
        session.onload()
    assert first.branch().run == first.branch().hold.own
    manager.check_integrity()
    assert equal(second_out, alone(0, 1, 2, 3, 7)[4:])
    for session in (first, parent):
        assert equal(run(session, 8), alone(0, 1, 2, 3, 8)[4:])
    assert manager.storage.num_copied_runs == 1


# -- eviction ---------------------------------------------------------------------------------------------------------


def test_evict_idle_takes_the_least_recently_used() -> None:
    manager = make_pool(4)
    first, second, third, fourth = (manager.open_session() for _ in range(4))
    for session in (second, first, fourth, third, first):
        run(session, 0)
    assert manager.evict_idle() == (second,)
    with PagedForwardContext(fourth.branches, num_tokens=CHUNK):
        assert manager.evict_idle() == (third,)
    second.onload()
    fork = fourth.fork()
    assert manager.evict_idle(num_sessions=2) == (first, second)
    assert manager.evict_idle(num_sessions=9) == (fourth, fork)
    assert manager.allocator.num_used == 0
    with pytest.raises(ValueError, match="num_sessions"):
        manager.evict_idle(0)


def test_full_pool_evicts_nobody_unless_asked() -> None:
    manager = make_pool(1)
    session = manager.open_session()
    with pytest.raises(OutOfPagesError):
        manager.open_session()
    assert not session.offloaded
    with pytest.raises(ValueError, match="evict"):
        make_pool(2, evict="lru")


def test_more_worlds_than_fit() -> None:
    """Four worlds take turns in a pool of two; each is that of a pool of its own."""
    manager = make_pool(2, evict="offload")
    worlds = [manager.open_session() for _ in range(4)]
    assert [world.offloaded for world in worlds] == [True, True, False, False]
    outs: list[list[torch.Tensor]] = [[] for _ in worlds]
    for turn in range(6):
        for index, world in enumerate(worlds):
            world.onload()
            outs[index] += run(world, 10 * index + turn)
            manager.check_integrity()
    for index, out in enumerate(outs):
        assert equal(out, alone(*range(10 * index, 10 * index + 6)))


def test_a_fork_evicts_others_but_never_its_parent() -> None:
    manager = make_pool(2, evict="offload")
    parent, other = manager.open_session(), manager.open_session()
    run(parent, 0, 1)
    run(other, 5)
    child = parent.fork()
    assert (parent.offloaded, other.offloaded) == (False, True)
    assert equal(run(child, 2), alone(0, 1, 2)[2:])
    child.close()
    small = make_pool(1, evict="offload").open_session()
    with pytest.raises(OutOfPagesError):
        small.fork()
    assert not small.offloaded


def test_pages_on_loan_make_no_room() -> None:
    """Offloading the parent alone frees nothing as long as its child reads its pages, so the child has to go too."""
    manager = make_pool(2, evict="offload")
    parent = manager.open_session()
    run(parent, 0, 1)
    child = parent.fork()
    manager.open_session()
    assert (parent.offloaded, child.offloaded) == (True, True)
    assert manager.allocator.num_used == NUM_PAGES
    child.onload()
    assert equal(run(child, 2), alone(0, 1, 2)[2:])


def test_nobody_is_evicted_in_vain() -> None:
    """A busy session holds the pages that an open needs: the idle one would not make the room."""
    manager = make_pool(2, branches_per_session=2, evict="offload")
    busy = manager.open_session(["positive", "negative"])
    idle = [manager.open_session(), manager.open_session()]
    with PagedForwardContext(busy.branches, num_tokens=CHUNK), pytest.raises(OutOfPagesError):
        manager.open_session(["a", "b", "c"])
    assert not any(session.offloaded for session in idle)
    with PagedForwardContext(busy.branches, num_tokens=CHUNK):
        manager.open_session()
    assert [session.offloaded for session in idle] == [True, False]


# -- streams ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_videos", [1, 2])
def test_stream_goes_on_as_if_nothing_had_been(pipe: ARDiffusionPipeline, num_videos: int) -> None:
    """Offloaded with a commit due; another stream takes the pages, and the prompt changes with a recache afterwards."""
    pool = pipe.create_cache(num_videos=num_videos, guided=True)
    call = {"cache": pool, "output_type": "pt", "guidance_scale": 3.0}
    prompts = [PROMPT] * num_videos

    def finish(stream: Any) -> list[torch.Tensor]:
        stream.switch_prompt("a blue square moving up", mode="recache")
        return [next(stream).frames for _ in range(3)]

    with pipe.stream(prompts, generator=seed(0), **call) as stream:
        expected = [next(stream).frames for _ in range(4)] + finish(stream)
    stream = pipe.stream(prompts, generator=seed(0), **call)
    past = [next(stream).frames for _ in range(4)]
    stream.offload()
    rollout = stream.rollout
    committed = rollout.sessions[0].branch().committed_tokens
    assert committed == rollout.num_latent_frames * rollout.tokens_per_frame
    assert pool.allocator.num_used == 0
    with pipe.stream(prompts, generator=seed(9), **call) as other:
        next(other)
        with pytest.raises(OutOfPagesError):
            stream.onload()
        with pytest.raises(RuntimeError, match=r"stream is offloaded; call onload\(\)"):
            next(stream)
        with pytest.raises(RuntimeError, match=r"Call onload\(\)"):
            stream.fork()
    assert not stream.closed
    stream.onload()
    assert equal(past + finish(stream), expected)
    stream.close()
    assert pool.allocator.num_used == 0
    with pytest.raises(RuntimeError, match="closed"):
        stream.offload()
    with pytest.raises(RuntimeError, match="closed"):
        stream.onload()


def test_evicted_stream_comes_back(pipe: ARDiffusionPipeline) -> None:
    """The pool evicts it with a commit due: what it held is still there after an onload."""
    pool = pipe.create_cache()
    pool.evict = "offload"
    call = {"cache": pool, "output_type": "latent"}
    with pipe.stream(PROMPT, generator=seed(0), **call) as stream:
        expected = [next(stream).latents for _ in range(5)]
    with pipe.stream(PROMPT, generator=seed(0), **call) as stream:
        latents = [next(stream).latents for _ in range(3)]
        with pipe.stream(PROMPT, generator=seed(1), **call) as other:
            next(other)
            with pytest.raises(RuntimeError, match="onload"):
                next(stream)
        stream.onload()
        assert equal([*latents, *(next(stream).latents for _ in range(2))], expected)
    pool.check_integrity()
    assert pool.allocator.num_used == 0
