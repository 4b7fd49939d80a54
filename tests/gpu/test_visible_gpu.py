"""Forwards that see less than is stored, on every backend of a CUDA device, against the reference on the same values."""

from __future__ import annotations

import pytest
import torch
from dense import relative_error
from rollouts import Rows, forward
from test_backends_gpu import KERNELS, TOLERANCE, gpu_rows, open_manager

from diffusers_ardiff.cache import Branch

pytestmark = pytest.mark.gpu

SINK, WINDOW, EXTRA = 48, 400, 96
MAX_PAST = 70


def run(branches: list[Branch], steps: list[tuple[Rows, Rows]], backend: str) -> list[torch.Tensor]:
    outs = []
    for rows, extra in steps:
        outs.append(forward(branches, rows, extra=extra, backend=backend, commit=False, max_past=MAX_PAST))
        outs.append(forward(branches, rows, backend=backend))
    return outs


@pytest.mark.parametrize("num_rows", [1, 2])
@pytest.mark.parametrize("shuffle_seed", [None, 4])
@pytest.mark.parametrize("backend", KERNELS)
def test_as_the_reference(backend: str, shuffle_seed: int | None, num_rows: int) -> None:
    """Until the ring has been overwritten twice; with two rows one is three forwards ahead."""
    pools = [
        open_manager(SINK, WINDOW, extra=EXTRA, max_sessions=num_rows, shuffle_seed=shuffle_seed) for _ in range(2)
    ]
    branches = [[pool.open_session().branch() for _ in range(num_rows)] for pool in pools]
    ahead = [(gpu_rows(branches[0][:1], 96), gpu_rows(branches[0][:1], EXTRA)) for _ in range(3)]
    steps = [(gpu_rows(branches[0], 96), gpu_rows(branches[0], EXTRA)) for _ in range(9)]
    outs = []
    for rows, name in zip(branches, (backend, "reference"), strict=True):
        first = run(rows[:1], ahead, name)
        outs.append(first + run(rows, steps, name))
    for have, expected in zip(*outs, strict=True):
        assert relative_error(have, expected) < TOLERANCE
