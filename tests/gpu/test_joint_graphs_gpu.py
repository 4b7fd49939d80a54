"""Joint forwards replayed from CUDA graphs: the bits of launched ones, each row's video, and no waiting."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from dense import relative_error
from live_streams import NEW, OLD, stream_of, take
from test_graphs_gpu import BF16_TOLERANCE, gpu_pipeline, no_waiting, replays
from tiny_components import random_embeds, record_pools, seed

from diffusers_ardiff import ARDiffusionPipeline, StreamBatch

pytestmark = pytest.mark.gpu

NUM_ROUNDS = 6
TEXTS = (OLD, NEW)


def batch_of(pipe: ARDiffusionPipeline, ahead: int = 0, **call: Any) -> StreamBatch:
    """Two streams, the first of them some chunks ahead; in the warm pool where there is one."""
    pool = {} if pipe._warm is not None else {"cache": pipe.create_cache(num_videos=2)}
    streams = [
        stream_of(pipe, prompt_embeds=text, generator=seed(number), **pool, **call)
        for number, text in enumerate(TEXTS)
    ]
    if ahead:
        take(streams[0], ahead)
    return StreamBatch(streams)


def latents_of(batch: StreamBatch, rounds: int = NUM_ROUNDS) -> list[torch.Tensor]:
    """Of each stream, joined; the streams are closed."""
    chunks = [batch.step() for _ in range(rounds)]
    for stream in batch.streams:
        stream.close()
    return [torch.cat([row[number].latents for row in chunks], dim=2) for number in range(len(batch.streams))]


@pytest.fixture(scope="module")
def warm_pipe() -> ARDiffusionPipeline:
    pipe = gpu_pipeline()
    assert pipe.warmup(num_streams=2, compile=False).num_graphs == 5 * 2
    return pipe


@pytest.mark.parametrize(("ahead", "num_replays"), [(0, 2 * 6 + 5), (2, 5 + 1 + 2 + 3 * 4), (4, 11 + 1 + 2 + 3 * 4)])
def test_bits_of_launched_joint_forwards(warm_pipe: ARDiffusionPipeline, ahead: int, num_replays: int) -> None:
    """Ragged rows are launched in both, full windows at different frames are replayed in one."""
    before = replays(warm_pipe)
    have, expected = latents_of(batch_of(warm_pipe, ahead)), latents_of(batch_of(gpu_pipeline(), ahead))
    assert replays(warm_pipe) - before == num_replays
    assert all(torch.equal(left, right) for left, right in zip(have, expected, strict=True))


def test_rows_are_the_videos_of_single_streams(warm_pipe: ARDiffusionPipeline) -> None:
    """To rounding: a kernel may split the work of two rows differently than that of one."""
    for number, latents in enumerate(latents_of(batch_of(warm_pipe))):
        with stream_of(gpu_pipeline(), prompt_embeds=TEXTS[number], generator=seed(number)) as single:
            assert relative_error(latents, take(single, NUM_ROUNDS)) < BF16_TOLERANCE


def test_a_prompt_change_in_one(warm_pipe: ARDiffusionPipeline) -> None:
    rounds = []
    for pipe in (warm_pipe, gpu_pipeline()):
        batch = batch_of(pipe)
        for _ in range(2):
            batch.step()
        batch.streams[1].update(prompt_embeds=random_embeds(9), mode="recache")
        rounds.append(latents_of(batch, 3))
    assert all(torch.equal(left, right) for left, right in zip(*rounds, strict=True))


def test_a_replayed_round_never_waits_for_the_device(warm_pipe: ARDiffusionPipeline) -> None:
    batch = batch_of(warm_pipe, 1)
    for _ in range(3):
        batch.step()
    with no_waiting():
        batch.step()
        batch.step()
    for stream in batch.streams:
        stream.close()


def test_compiled_and_replayed() -> None:
    torch._dynamo.reset()
    pipe = gpu_pipeline()
    report = pipe.warmup(num_streams=2)
    assert (report.num_compiled_shapes, report.num_graphs) == (2, 5 * 2)
    with torch._dynamo.config.patch(error_on_recompile=True):
        have = latents_of(batch_of(pipe))
    assert replays(pipe) == 2 * 6 + 5
    for left, right in zip(have, latents_of(batch_of(gpu_pipeline())), strict=True):
        assert relative_error(left, right) < BF16_TOLERANCE


def test_cooldown_gives_the_pool_back() -> None:
    pipe = gpu_pipeline()
    with record_pools() as pools:
        pipe.warmup(num_streams=2, compile=False)
        latents_of(batch_of(pipe))
        pipe.cooldown()
        gc.collect()
        assert pools[0]() is None
