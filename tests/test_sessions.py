"""Sessions and branches: interleaved, reset, flushed, closed; text that is switched as a whole."""

import pytest
import torch
from dense import TokenHistory
from rollouts import Rows, forward, make_manager, pool_bytes, random_rows
from torch.testing import assert_close

from diffusers_ardiff.cache import OutOfPagesError, TextKV, TextLayerKV
from diffusers_ardiff.context import PagedForwardContext


def rollout(branch, chunks: int, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    storage = branch.storage
    size = (1, 24, storage.shape.num_heads, storage.shape.head_dim)
    outs = []
    for _ in range(chunks):
        rows = Rows(*(torch.randn(size, generator=generator) for _ in range(3)))
        outs.append(forward([branch], rows))
    return outs


# -- sessions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffle_seed", [None, 4])
def test_interleaved_sessions_equal_sessions_alone(shuffle_seed: int | None) -> None:
    """A and B take turns through the wrap; A's bits are those of A alone, and closing B gives its pages back."""
    alone = rollout(make_manager(24, 72).open_session().branch(), 8, seed=1)
    manager = make_manager(24, 72, max_sessions=2, shuffle_seed=shuffle_seed)
    first, second = manager.open_session(), manager.open_session()
    generators = [torch.Generator().manual_seed(seed) for seed in (1, 2)]
    outs = []
    for _ in range(8):
        for session, generator in zip((first, second), generators, strict=True):
            rows = Rows(*(torch.randn(1, 24, 2, 8, generator=generator) for _ in range(3)))
            out = forward(session.branches, rows)
            if session is first:
                outs.append(out)
    if shuffle_seed is None:
        assert all(torch.equal(a, b) for a, b in zip(outs, alone, strict=True))
    else:
        assert_close(outs, alone, rtol=1e-5, atol=1e-5)
    assert manager.allocator.num_free == 0
    second.close()
    assert manager.allocator.num_free == 6
    manager.check_integrity()


def test_full_pool_refuses_a_session_and_takes_one_after_a_close() -> None:
    manager = make_manager(24, 72)
    session = manager.open_session()
    with pytest.raises(OutOfPagesError, match="need 6 pages, 0 of 6"):
        manager.open_session()
    session.close()
    assert manager.open_session().session_id == 1


@pytest.mark.parametrize("names", [[], ["positive", "positive"]])
def test_branch_names_must_differ(names: list[str]) -> None:
    manager = make_manager(24, 72, branches_per_session=2)
    with pytest.raises(ValueError, match="different names"):
        manager.open_session(names)
    assert manager.allocator.num_used == 0


def test_close_is_idempotent_and_frees_once() -> None:
    manager = make_manager(24, 72, max_sessions=2)
    keeps, goes = manager.open_session(), manager.open_session()
    goes.close()
    goes.close()
    assert (manager.sessions, manager.allocator.num_used) == ((keeps,), 6)
    manager.check_integrity()
    manager.close()
    assert (manager.sessions, manager.allocator.num_used) == ((), 0)


def test_session_closes_itself_after_an_exception() -> None:
    manager = make_manager(24, 72)
    with pytest.raises(ArithmeticError), manager.open_session() as session:
        raise ArithmeticError
    assert session.closed
    assert manager.allocator.num_used == 0


def test_next_session_sees_nothing_of_the_last_one() -> None:
    """Its pages are the same ones, full of finite values."""
    manager = make_manager(24, 72)
    with manager.open_session() as session:
        rollout(session.branch(), 8, seed=1)
    again = rollout(manager.open_session().branch(), 8, seed=2)
    fresh = rollout(make_manager(24, 72).open_session().branch(), 8, seed=2)
    assert all(torch.equal(a, b) for a, b in zip(again, fresh, strict=True))


# -- branches -------------------------------------------------------------------------------------------------------

ORDERS = [
    ["positive", "negative", "positive", "positive"],
    ["negative", "positive", "positive", "positive"],
    ["positive", "positive", "negative", "positive"],
]


@pytest.mark.parametrize("order", ORDERS, ids="-".join)
def test_guidance_branches_never_mix(order: list[str]) -> None:
    """The branch was once chosen by call parity, so a skipped unconditional pass mixed both caches (DiCache#8). Keys
    are +1 and values +2 for the positive branch, -1 and -2 for the negative one."""
    session = make_manager(24, 72, branches_per_session=2).open_session(["positive", "negative"])
    for name in order:
        branch, sign = session.branch(name), 1.0 if name == "positive" else -1.0
        ones = torch.full((1, 24, 2, 8), sign)
        out = forward([branch], Rows(ones, ones, 2 * ones))
        assert_close(out, 2 * ones)
    for name, sign in (("positive", 1.0), ("negative", -1.0)):
        branch = session.branch(name)
        tokens = branch.committed_tokens
        assert tokens == 24 * order.count(name)
        base = branch.run.pages[0] * 16
        assert bool((branch.storage.key_pools[0][base : base + tokens] == sign).all())
        assert bool((branch.storage.value_pools[0][base : base + tokens] == 2 * sign).all())


def test_commit_of_a_session_is_all_or_nothing() -> None:
    """One branch could not commit: the other one had already advanced, and both disagreed about their position."""
    session = make_manager(24, 72, branches_per_session=2).open_session(["positive", "negative"])
    positive, negative = session.branches
    forward([negative], random_rows([negative], 24))
    fail_recache(negative)
    forward([positive], random_rows([positive], 24), commit=False)
    with pytest.raises(RuntimeError, match="stale"):
        session.commit()
    assert (positive.committed_tokens, negative.committed_tokens) == (0, 24)


@pytest.mark.parametrize("keep", [24, -1])
def test_flush_of_a_session_is_all_or_nothing(keep: int) -> None:
    """A stale branch refused the flush after the branch before it had been flushed."""
    session = make_manager(24, 72, branches_per_session=2).open_session(["positive", "negative"])
    for branch in session.branches:
        rollout(branch, 6, seed=1)
    fail_recache(session.branch("negative"))
    before = pool_bytes(session.branch().storage)
    with pytest.raises((RuntimeError, ValueError)):
        session.flush(keep)
    assert session.branch("positive").ring.origin == 24
    assert torch.equal(pool_bytes(session.branch().storage), before)


def fail_recache(branch) -> None:
    start, length = branch.ring.recache_span()
    with pytest.raises(ArithmeticError), PagedForwardContext([branch], num_tokens=length, start=start):
        raise ArithmeticError


# -- flush, recache, reset ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffle_seed", [None, 4])
@pytest.mark.parametrize("frames", [2, 3, 7])
@pytest.mark.parametrize("keep_frames", [0, 1, 2, 5])
def test_flush_moves_keys_through_a_buffer(frames: int, keep_frames: int, shuffle_seed: int | None) -> None:
    """Source and target overlap; the flush also runs before the window is full, and the next chunks wrap again."""
    session = make_manager(24, 72, layers=2, shuffle_seed=shuffle_seed).open_session()
    (branch,), history = session.branches, TokenHistory(24, 72)
    for step in range(frames + 6):
        if step == frames:
            session.flush(24 * keep_frames)
            history.flush(24 * keep_frames)
            assert branch.committed_tokens == 24 * frames
        rows = random_rows([branch], 24)
        out = forward([branch], rows)
        expected = history.attend(*(t[0] for t in rows))
        history.commit(rows.keys[0], rows.values[0])
        assert_close(out[0], expected, rtol=1e-5, atol=1e-5)


def test_flush_that_fails_half_way_is_healed_by_a_recache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory ran out after layer 0 had moved: the branch counted as flushed, and its later layers read old keys at the
    new places without a word. Now it is stale: forwards are refused until the kept tokens are written again."""
    branch, history = make_manager(24, 72, layers=2).open_session().branch(), TokenHistory(24, 72)
    for _ in range(6):
        rows = random_rows([branch], 24)
        forward([branch], rows)
        history.commit(rows.keys[0], rows.values[0])
    copy, calls = torch.Tensor.index_copy_, []

    def copy_once(*args: object) -> torch.Tensor:
        calls.append(args)
        if len(calls) == 2:
            raise MemoryError
        return copy(*args)

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "index_copy_", copy_once)
        with pytest.raises(MemoryError):
            branch.flush(30)
    history.flush(30)
    rows = random_rows([branch], 24)
    with pytest.raises(RuntimeError, match="stale"):
        forward([branch], rows)
    start, length = branch.ring.recache_span()
    again = random_rows([branch], length)
    forward([branch], again, start=start)
    history.commit(again.keys[0], again.values[0], start=start)
    assert (start, length) == (114, 30)
    assert_close(forward([branch], rows)[0], history.attend(*(t[0] for t in rows)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("frames", [3, 4, 7])
def test_recache_replaces_the_window(frames: int) -> None:
    """While everything fits it rewrites the sink too, later it leaves the sink alone."""
    (branch,), history = make_manager(24, 72).open_session().branches, TokenHistory(24, 72)
    for _ in range(frames):
        rows = random_rows([branch], 24)
        forward([branch], rows)
        history.commit(rows.keys[0], rows.values[0])
    start, length = branch.ring.recache_span()
    assert start == (0 if frames <= 4 else 96)
    rows = random_rows([branch], length)
    out = forward([branch], rows, start=start)
    assert_close(out[0], history.attend(*(t[0] for t in rows), start=start), rtol=1e-5, atol=1e-5)
    history.commit(rows.keys[0], rows.values[0], start=start)
    rows = random_rows([branch], 24)
    assert_close(forward([branch], rows)[0], history.attend(*(t[0] for t in rows)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("keep_text", [True, False])
def test_reset_keeps_pages_and_text_unless_asked(keep_text: bool) -> None:
    """Self K/V and text K/V are reset separately: a reset once brought back the first prompt (scope#148)."""
    session = make_manager(24, 72).open_session()
    branch = session.branch()
    fresh = rollout(branch, 6, seed=1)
    branch.text = text = text_kv(5)
    run = branch.run
    session.reset(keep_text=keep_text)
    assert (branch.committed_tokens, branch.run) == (0, run)
    assert branch.text is (text if keep_text else None)
    again = rollout(branch, 6, seed=1)
    assert all(torch.equal(a, b) for a, b in zip(fresh, again, strict=True))


# -- text -----------------------------------------------------------------------------------------------------------


def text_kv(length: int, rows: int = 1, layers: int = 2, image: bool = False) -> TextKV:
    def tensors() -> list[torch.Tensor]:
        return [torch.randn(rows, length, 2, 8) for _ in range(4 if image else 2)]

    return TextKV(tuple(TextLayerKV(*tensors()) for _ in range(layers)))


@pytest.mark.parametrize("image", [False, True])
def test_text_of_one_row_is_a_view(image: bool) -> None:
    text = text_kv(5, rows=3, image=image)
    assert text.num_bytes == 3 * 2 * (4 if image else 2) * 5 * 16 * 4
    for index in range(3):
        for whole, row in zip(text.layers, text.row(index).layers, strict=True):
            for before, after in zip(whole, row, strict=True):
                if before is None:
                    assert after is None
                    continue
                assert torch.equal(after, before[index : index + 1])
                assert after.untyped_storage().data_ptr() == before.untyped_storage().data_ptr()
