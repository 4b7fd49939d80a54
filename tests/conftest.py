"""Every test starts from the same seed and runs on one thread, so results are the same bits each time."""

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
