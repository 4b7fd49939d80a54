"""Every test starts from the same seed and runs on one thread, so results are the same bits each time."""

from collections.abc import Iterator

import pytest
import torch
from torch._dynamo.utils import counters

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """Nothing compiled before, so that graphs can be counted; nothing left over."""
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
