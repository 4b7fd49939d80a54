"""Sessions of a small pool that denoise and commit numbered chunks; the same numbers give the same bits."""

from __future__ import annotations

from typing import Any

import torch
from rollouts import Rows, forward, make_manager

from diffusers_ardiff.cache import Branch, KVManager, Session
from diffusers_ardiff.context import PagedForwardContext

CHUNK, SINK, WINDOW, NUM_PAGES = 24, 24, 72, 6
SHUFFLES = [None, 4]


def make_pool(sessions: int, **kwargs: Any) -> KVManager:
    """A poisoned pool of two layers; ``NUM_PAGES`` pages a branch."""
    return make_manager(SINK, WINDOW, layers=2, max_sessions=sessions, **kwargs)


def rows_of(number: int, num_tokens: int = CHUNK) -> Rows:
    """The rows of a chunk, from its number."""
    generator = torch.Generator().manual_seed(number)
    return Rows(*(torch.randn(1, num_tokens, 2, 8, generator=generator) for _ in range(3)))


def run(session: Session, *numbers: int) -> list[torch.Tensor]:
    """Denoise once and commit these chunks in every branch of a session; what the commit forwards return."""
    outs = []
    for number in numbers:
        for branch in session.branches:
            forward([branch], rows_of(1000 + number), commit=False)
            outs.append(forward([branch], rows_of(number)))
    return outs


def alone(*numbers: int, shuffle_seed: int | None = None) -> list[torch.Tensor]:
    """The same chunks in a pool that no other session ever saw."""
    return run(make_pool(1, shuffle_seed=shuffle_seed).open_session(), *numbers)


def equal(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    """Whether two lists of tensors agree bit by bit."""
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def stored(branch: Branch, num_tokens: int = NUM_PAGES * 16) -> torch.Tensor:
    """Raw bytes of the branch's first storage indices: K of every layer, then V."""
    storage = branch.storage
    slots = storage.slots(torch.arange(num_tokens), branch.run)
    return torch.stack([pool[slots] for pool in (*storage.key_pools, *storage.value_pools)]).view(torch.uint8)


def make_stale(branch: Branch) -> None:
    """Let a recache of the branch fail."""
    start, length = branch.ring.recache_span()
    context = PagedForwardContext([branch], num_tokens=length, start=start)
    context.prepare()
    context.close(succeeded=False)
