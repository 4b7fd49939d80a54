"""Every test starts from the same seed and runs on one thread, so results are the same bits each time.

The pipeline and what the tests of live control start from are here too, since many files share them; a file that needs
others defines them under the same names.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
import torch
from torch._dynamo.utils import counters

if TYPE_CHECKING:
    from diffusers_ardiff import ARDiffusionPipeline
    from diffusers_ardiff.cache import KVManager

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


@pytest.fixture(scope="module")
def pipe() -> ARDiffusionPipeline:
    """The tiny pipeline with two steps a chunk, one for all tests of a file."""
    # Here, so that tests of the cache alone need not wait for diffusers.
    from tiny_components import QUICK, make_pipeline

    return make_pipeline(QUICK)


@pytest.fixture
def manager(pipe: ARDiffusionPipeline) -> KVManager:
    """A pool for one stream of it."""
    return pipe.create_cache()


@pytest.fixture(scope="module")
def plain(pipe: ARDiffusionPipeline) -> torch.Tensor:
    """Latents of four chunks whose prompt stays."""
    from live_streams import OLD
    from tiny_components import latents_of

    return latents_of(pipe, None, prompt_embeds=OLD, num_frames=45)
