"""Forwards that see less of the past than is stored, against attention over explicit lists of positions."""

from __future__ import annotations

import pytest
import torch
from dense import dense_attention, relative_error
from rollouts import Rows, forward, make_manager, random_rows

from diffusers_ardiff.cache import Branch, KVManager
from diffusers_ardiff.context import PagedForwardContext
from diffusers_ardiff.graphs import plan_of

SINK, WINDOW, EXTRA = 7, 45, 19
STEPS = [5, 9, 14, 5, 9, 14, 14, 9]


class ListedHistory:
    """Every committed key and value by position."""

    def __init__(self) -> None:
        self.keys, self.values = torch.empty(0, 2, 8), torch.empty(0, 2, 8)

    def attend(self, rows: Rows, extra: Rows | None, max_past: int | None) -> torch.Tensor:
        """One row's forward: the sink, at most ``max_past`` tokens after it that the window still has, and its own."""
        start, end = len(self.keys), len(self.keys) + rows.keys.shape[1]
        oldest = max(end - WINDOW, SINK) if max_past is None else max(end - WINDOW, SINK, start - max_past)
        seen = [p for p in range(start) if p < SINK or p >= oldest]
        keys, values = (
            torch.cat([past[seen], own[0], *([other[0]] if other is not None else [])])
            for past, own, other in (
                (self.keys, rows.keys, None if extra is None else extra.keys),
                (self.values, rows.values, None if extra is None else extra.values),
            )
        )
        return dense_attention(rows.query[0], keys, values)

    def commit(self, rows: Rows) -> None:
        self.keys, self.values = torch.cat([self.keys, rows.keys[0]]), torch.cat([self.values, rows.values[0]])


def parts(rows: Rows, index: int) -> Rows:
    return Rows(*(tensor[index : index + 1] for tensor in rows))


def make_pool(sessions: int = 1, shuffle_seed: int | None = None, **kwargs: object) -> KVManager:
    return make_manager(SINK, WINDOW, extra=EXTRA, max_sessions=sessions, shuffle_seed=shuffle_seed, **kwargs)


def run_step(
    branches: list[Branch], histories: list[ListedHistory], num: int, max_past: int | None, **kwargs
) -> float:
    """A forward with extra rows that sees ``max_past``, then a commit that sees all; the largest error of the first."""
    rows, extra = random_rows(branches, num), random_rows(branches, EXTRA)
    out = forward(branches, rows, extra=extra, commit=False, max_past=max_past, **kwargs)
    errors = [
        relative_error(out[i], history.attend(parts(rows, i), parts(extra, i), max_past))
        for i, history in enumerate(histories)
    ]
    whole = forward(branches, rows, **kwargs)
    errors += [relative_error(whole[i], h.attend(parts(rows, i), None, None)) for i, h in enumerate(histories)]
    for i, history in enumerate(histories):
        history.commit(parts(rows, i))
    return max(errors)


@pytest.mark.parametrize("shuffle_seed", [None, 3])
@pytest.mark.parametrize("backend", ["reference", "sdpa"])
@pytest.mark.parametrize("max_past", [0, 1, 6, 16, 31, 1000])
def test_to_the_token(max_past: int, backend: str, shuffle_seed: int | None) -> None:
    """Fill, overwrite and wrap; what is hidden in one forward is visible in the next."""
    branch, history = make_pool(shuffle_seed=shuffle_seed).open_session().branch(), ListedHistory()
    for num in STEPS:
        assert run_step([branch], [history], num, max_past, backend=backend) < 1e-5


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
def test_rows_of_different_pasts(backend: str) -> None:
    """One row has nothing to hide yet, one hides less than the other: lengths differ, and are padded with what exists."""
    pool = make_pool(3)
    branches = [pool.open_session().branch() for _ in range(3)]
    histories = [ListedHistory() for _ in branches]
    for ahead, index in ((6, 0), (2, 1)):
        for num in STEPS[:ahead]:
            run_step(branches[index : index + 1], histories[index : index + 1], num, None, backend=backend)
    for num in STEPS:
        assert run_step(branches, histories, num, 11, backend=backend) < 1e-5


def test_after_a_flush() -> None:
    branch, history = make_pool().open_session().branch(), ListedHistory()
    for num in STEPS:
        run_step([branch], [history], num, None)
    branch.flush(10)
    rows = random_rows([branch], 5)
    out = forward([branch], rows, commit=False, max_past=4)
    assert relative_error(out[0], history.attend(rows, None, 4)) < 1e-5


def test_nothing_is_gathered_where_all_is_visible() -> None:
    """So such forwards keep their views, their kernels and their graphs."""
    branch = make_pool().open_session().branch()
    for num in STEPS:
        forward([branch], random_rows([branch], num))
    for max_past, is_gathered in ((None, False), (WINDOW - 5, False), (WINDOW - 6, True)):
        context = PagedForwardContext([branch], num_tokens=5, max_past_tokens=max_past).prepare()
        assert (plan_of(context.parts[0]).visible is not None) == is_gathered
        context.close(succeeded=False)


def test_refusals() -> None:
    branch = make_pool().open_session().branch()
    with pytest.raises(ValueError, match="full_attn_spans and max_past_tokens can't be combined"):
        PagedForwardContext([branch], num_tokens=5, full_attn_spans=[(0, 5)], max_past_tokens=3)
    with pytest.raises(ValueError, match="max_past_tokens"):
        PagedForwardContext([branch], num_tokens=5, max_past_tokens=-1)
    assert branch.is_idle
