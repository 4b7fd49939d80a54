"""Sessions on a CUDA device: joint forwards, turned sinks, the recipes krea and rolling-forcing, forks.

What each of them computes is shown on the CPU against dense implementations; here the same videos come from the GPU. The
merge of partial results by log-sum-exp (2e-2 of dense in bfloat16) is in test_masked_gpu.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from dense import relative_error
from test_context_modes import KREA, ROLLING, noise_of
from tiny_components import QUICK, make_pipeline, make_transformer, random_embeds

from diffusers_ardiff import ARDiffusionPipeline, Recipe, StreamBatch
from diffusers_ardiff.pipelines import ARStream
from diffusers_ardiff.pipelines.denoise import FrameStep
from diffusers_ardiff.pipelines.joint import JointForward, prepare_rows

pytestmark = pytest.mark.gpu

RECIPES = {
    "commit": QUICK,
    "relative": QUICK.replace(rope_policy="relative"),
    "capped": QUICK.replace(rope_policy="capped", rope_limit_frames=9),
    "krea": KREA,
    "rolling": ROLLING,
}


@pytest.fixture(autouse=True)
def exact_float32() -> Iterator[None]:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.cuda.set_sync_debug_mode("default")


def stream_of(pipe: ARDiffusionPipeline, recipe: Recipe, number: int, **call: Any) -> ARStream:
    latents = torch.cat([noise_of(50 * number + chunk, -1) for chunk in range(14)], dim=2)
    return pipe.stream(
        prompt_embeds=random_embeds(number),
        recipe=recipe,
        latents=latents,
        step_noise=lambda chunk, step, shape: noise_of(50 * number + chunk, step, shape),
        output_type="latent",
        **call,
    )


@pytest.mark.parametrize("name", [*RECIPES, "krea, first frame encoded"])
def test_together_on_gpu_as_alone_on_cpu(name: str) -> None:
    """Two streams, one two chunks ahead, until both have overwritten their windows."""
    recipe, ahead, rounds = RECIPES.get(name, KREA.replace(encode_first_frame=True)), 2, 5
    host, device = make_pipeline(recipe), make_pipeline(recipe).to("cuda")
    expected = []
    for number, count in enumerate((ahead + rounds, rounds)):
        with stream_of(host, recipe, number) as stream:
            expected.append([next(stream).latents for _ in range(count)])
    pool = device.create_cache(recipe=recipe, num_videos=2)
    pool.storage.fill_(float("nan"))
    streams = [stream_of(device, recipe, number, cache=pool) for number in range(2)]
    for _ in range(ahead):
        next(streams[0])
    batch = StreamBatch(streams)
    for index in range(rounds):
        chunks = batch.step()
        assert relative_error(chunks[0].latents.cpu(), expected[0][ahead + index]) < 1e-4
        assert relative_error(chunks[1].latents.cpu(), expected[1][index]) < 1e-4


@pytest.mark.parametrize("ahead", [0, 1, 4])
def test_bfloat16_rows_as_alone(ahead: int) -> None:
    """One joint denoise step at head size 128 through the backend that is chosen here, ragged unless ``ahead`` is 0."""
    transformer = make_transformer(num_attention_heads=2, attention_head_dim=128)
    pipe = make_pipeline(QUICK, transformer=transformer).to("cuda", torch.bfloat16)
    pool = pipe.create_cache(num_videos=2)
    streams = [stream_of(pipe, QUICK, number, cache=pool) for number in range(2)]
    for _ in range(ahead):
        next(streams[0])
    for stream in streams:
        next(stream)
        stream.rollout.commit_held()
    steps = [FrameStep(latents=noise_of(90 + n, -1).cuda(), timestep=700.0) for n in range(2)]
    with torch.no_grad():
        alone = [stream.rollout.predict(step, 1.0) for stream, step in zip(streams, steps, strict=True)]
        rows = [prepare_rows(s.rollout, "positive", step) for s, step in zip(streams, steps, strict=True)]
        joint = JointForward().run(rows)
    for left, right in zip(joint, alone, strict=True):
        assert relative_error(left, right) < 2e-2


@pytest.mark.parametrize("name", ["commit", "relative", "rolling"])
def test_a_joint_step_never_waits_for_the_device(name: str) -> None:
    """Positions, turned sinks, joined text and staggered timesteps reach the device without a stream sync."""
    recipe = RECIPES[name]
    pipe = make_pipeline(recipe).to("cuda")
    pool = pipe.create_cache(recipe=recipe, num_videos=2)
    noise = torch.randn(1, 16, 60, 4, 6, device="cuda")
    call = {"recipe": recipe, "cache": pool, "output_type": "latent", "latents": noise}
    streams = [
        pipe.stream(
            prompt_embeds=random_embeds(number).cuda(),
            step_noise=lambda _chunk, _step, shape: noise[:, :, : shape[2]],
            **call,
        )
        for number in range(2)
    ]
    batch = StreamBatch(streams)
    for _ in range(5):
        batch.step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    batch.step()
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", RECIPES)
def test_replayed_forwards_see_the_sink_where_it_is_now(name: str) -> None:
    """Bit by bit the video of launched forwards, on keys that the fused kernel writes and a turn moves in place."""
    recipe, latents = RECIPES[name], []
    for warm in (False, True):
        pipe = make_pipeline(recipe).to("cuda")
        if warm:
            pipe.warmup(text_len=random_embeds(0).shape[1], compile=False)
        with stream_of(pipe, recipe, 0) as stream:
            assert stream.rollout.runner.attachment.choose_write("cuda", torch.float32).eager
            latents.append(torch.cat([next(stream).latents for _ in range(8)], dim=2))
    assert torch.equal(*latents)
    assert pipe._warm is not None and pipe._warm.graphs is not None and pipe._warm.graphs.num_replays >= 7


def test_a_fork_allocates_nothing_and_copies_one_window() -> None:
    recipe = RECIPES["relative"]
    pipe = make_pipeline(recipe).to("cuda")
    pool = pipe.create_cache(recipe=recipe, num_videos=2)
    stream = stream_of(pipe, recipe, 0, cache=pool)
    for _ in range(4):
        next(stream)
    stream.rollout.commit_held()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    session = stream.rollout.sessions[0].fork()
    assert torch.cuda.memory_allocated() == before
    assert pool.storage.num_copied_runs == 0
    session.branch().prepare_write()
    assert torch.cuda.memory_allocated() == before
    assert pool.storage.num_copied_runs == 1
    session.close()
