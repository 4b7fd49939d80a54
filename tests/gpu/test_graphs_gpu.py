"""Warm-up on a CUDA device: launched, compiled, replayed and merged forwards agree, nothing recompiles, nothing waits."""

from __future__ import annotations

import gc
import re
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from dense import relative_error
from live_streams import NEW, stream_of, take
from recorders import replays
from session_runs import CHUNK, make_pool, rows_of
from test_warm_compile import switch_every_way
from tiny_components import QUICK, make_pipeline, make_transformer, record_pools
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code
from torch.profiler import ProfilerActivity, profile

from diffusers_ardiff import ARDiffusionPipeline, quantize_linears
from diffusers_ardiff.attention import write_attn_in_turn
from diffusers_ardiff.fp8 import Float8Linear, quantize_rows
from diffusers_ardiff.launch import WritePass
from diffusers_ardiff.merged import MergedForwardContext

pytestmark = pytest.mark.gpu

NUM_CHUNKS = 6
BF16_TOLERANCE = 5e-2
"""Of latents after several chunks, each made from the last: rounding adds up."""


def gpu_pipeline() -> ARDiffusionPipeline:
    transformer = make_transformer(attention_head_dim=64, num_attention_heads=2, ffn_dim=256, num_layers=3)
    return make_pipeline(QUICK, transformer=transformer).to("cuda", torch.bfloat16)


def latents_of(pipe: ARDiffusionPipeline, **call: Any) -> torch.Tensor:
    with stream_of(pipe, **call) as stream:
        return take(stream, NUM_CHUNKS)


@pytest.fixture(scope="module")
def eager_latents() -> torch.Tensor:
    return latents_of(gpu_pipeline())


@pytest.fixture(scope="module")
def warm_pipe() -> ARDiffusionPipeline:
    """Compiled, captured, with merged forwards too."""
    torch._dynamo.reset()
    pipe = gpu_pipeline()
    report = pipe.warmup(merge_commits=True)
    print(report)
    assert report.num_compiled_shapes == 2 and report.num_graphs == 4
    assert report.total_seconds < 120
    return pipe


def test_replayed_kernels_give_the_same_bits(eager_latents: torch.Tensor) -> None:
    """Fill, first overwrite, steady state."""
    pipe = gpu_pipeline()
    report = pipe.warmup(compile=False)
    assert report.num_graphs == 4
    assert torch.equal(latents_of(pipe), eager_latents)
    assert replays(pipe) == 3 * NUM_CHUNKS - 1
    with stream_of(pipe) as stream, stream_of(gpu_pipeline()) as plain:
        assert torch.equal(switch_every_way(stream), switch_every_way(plain))


def test_a_recache_is_replayed() -> None:
    """While the window fills and in the steady state: the same bits as launched, nothing captured later."""
    pipe = gpu_pipeline()
    report = pipe.warmup(compile=False, recache=True)
    assert report.num_graphs == 6
    for num_chunks in (1, 2, 4):
        with stream_of(pipe) as stream, stream_of(gpu_pipeline()) as plain:
            for one in (stream, plain):
                take(one, num_chunks)
            before = replays(pipe)
            for one in (stream, plain):
                one.switch_prompt(prompt_embeds=NEW, mode="recache")
            assert replays(pipe) == before + 2
            assert torch.equal(take(stream, 2), take(plain, 2))
    assert len(pipe._warm.graphs) == 6


def test_commits_leave_the_last_attention_out_and_give_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, eager_latents: torch.Tensor
) -> None:
    """Captured twice (once to warm up), replayed, and eager: as where every commit attends to its end."""
    pipe = gpu_pipeline()
    pipe.warmup(compile=False)
    assert sum(key.only_writes for key in pipe._warm.graphs.keys) == 2
    replayed = latents_of(pipe)
    monkeypatch.setattr(WritePass, "ends_with", lambda *args: False)
    expected = latents_of(gpu_pipeline())
    assert torch.equal(replayed, expected)
    assert torch.equal(eager_latents, expected)


def test_compiled_blocks_agree_with_eager_ones_and_their_graphs_with_them(eager_latents: torch.Tensor) -> None:
    torch._dynamo.reset()
    pipe = gpu_pipeline()
    pipe.warmup(cuda_graphs=False)
    compiled = latents_of(pipe)
    assert 0 < relative_error(compiled, eager_latents) < BF16_TOLERANCE
    pipe.warmup()
    assert torch.equal(latents_of(pipe), compiled)
    assert replays(pipe) == 3 * NUM_CHUNKS - 1


def test_merged_agrees(warm_pipe: ARDiffusionPipeline, eager_latents: torch.Tensor) -> None:
    before = replays(warm_pipe)
    merged = latents_of(warm_pipe, merge_commits=True)
    assert relative_error(merged, eager_latents) < BF16_TOLERANCE
    assert replays(warm_pipe) - before == 2 * NUM_CHUNKS
    plain = latents_of(gpu_pipeline(), merge_commits=True)
    assert relative_error(plain, eager_latents) < BF16_TOLERANCE


def test_nothing_recompiles_after_the_warmup(warm_pipe: ARDiffusionPipeline) -> None:
    counters.clear()
    for merge in (False, True):
        with (
            torch._dynamo.config.patch(error_on_recompile=True),
            stream_of(warm_pipe, merge_commits=merge) as stream,
            stream_of(gpu_pipeline()) as plain,
        ):
            assert relative_error(switch_every_way(stream), switch_every_way(plain)) < 2 * BF16_TOLERANCE
    assert counters["stats"]["unique_graphs"] == 0


def test_the_first_chunk_is_as_fast_as_others(warm_pipe: ARDiffusionPipeline) -> None:
    firsts, others = [], []
    for _ in range(5):
        with stream_of(warm_pipe) as stream:
            for index in range(8):
                torch.cuda.synchronize()
                start = time.perf_counter()
                next(stream)
                torch.cuda.synchronize()
                (others if index else firsts).append(time.perf_counter() - start)
    assert statistics.median(firsts) < 1.5 * statistics.median(others)


def test_another_resolution_is_captured_anew() -> None:
    pipe = gpu_pipeline()
    pipe.warmup(compile=False)
    expected = latents_of(pipe, height=48)
    assert replays(pipe) == 0
    pipe.warmup(height=48, compile=False)
    assert torch.equal(latents_of(pipe, height=48), expected)
    assert replays(pipe) == 3 * NUM_CHUNKS - 1


def test_a_moved_pool_refuses_to_replay() -> None:
    pipe = gpu_pipeline()
    pipe.warmup(compile=False)
    with stream_of(pipe) as stream:
        take(stream, 2)
        storage = pipe._warm.manager.storage
        storage.key_pools[2] = storage.key_pools[2].clone()
        with pytest.raises(RuntimeError, match="pools have moved"):
            next(stream)


def test_cooldown_gives_the_pool_back() -> None:
    pipe = gpu_pipeline()
    with record_pools() as pools:
        pipe.warmup(compile=False)
        latents_of(pipe)
        pipe.cooldown()
        gc.collect()
        assert pools[0]() is None


@contextmanager
def no_waiting() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("merge", [False, True], ids=["apart", "merged"])
@pytest.mark.parametrize("is_warm", [False, True], ids=["launched", "replayed"])
def test_a_chunk_never_waits_for_the_device(request: pytest.FixtureRequest, is_warm: bool, merge: bool) -> None:
    """Commit, steps, noise from a generator of the host, angles: whatever would synchronise the stream raises."""
    pipe = request.getfixturevalue("warm_pipe") if is_warm else gpu_pipeline()
    with stream_of(pipe, merge_commits=merge) as stream:
        take(stream, 4)
        with no_waiting():
            next(stream)
            next(stream)


def test_a_replayed_chunk_is_a_few_launches(warm_pipe: ARDiffusionPipeline) -> None:
    """One graph launch a forward; beside them only copies of inputs, noise and the few-step rule."""

    def launches(pipe: ARDiffusionPipeline) -> tuple[int, int]:
        with stream_of(pipe) as stream:
            take(stream, 4)
            torch.cuda.synchronize()
            with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
                next(stream)
                torch.cuda.synchronize()
        counts = {event.key: event.count for event in profiler.key_averages()}
        kernels = sum(count for key, count in counts.items() if key.startswith(("cudaLaunchKernel", "cuLaunchKernel")))
        return counts.get("cudaGraphLaunch", 0), kernels

    (graphs, replayed), (no_graphs, launched) = launches(warm_pipe), launches(gpu_pipeline())
    assert (graphs, no_graphs) == (3, 0)
    assert replayed < launched / 2


def test_float8_linears() -> None:
    linear = torch.nn.Linear(256, 512, dtype=torch.bfloat16, device="cuda").requires_grad_(False)
    inputs = torch.randn(3, 40, 256, dtype=torch.bfloat16, device="cuda")
    weight, weight_scale = quantize_rows(linear.weight)
    rows, scale = quantize_rows(inputs.view(-1, 256))
    product = (rows.float() * scale) @ (weight.float() * weight_scale).t() + linear.bias.float()
    out = Float8Linear(linear)(inputs)
    assert relative_error(out.float(), product.view_as(out)) < 1e-2
    assert 1e-3 < relative_error(out.float(), linear(inputs).float()) < 6e-2


def test_a_float8_video(eager_latents: torch.Tensor) -> None:
    torch._dynamo.reset()
    pipe = gpu_pipeline()
    quantize_linears(pipe.transformer)
    eager = latents_of(pipe)
    pipe.warmup()
    assert relative_error(latents_of(pipe), eager) < 2e-1
    assert 0 < relative_error(eager, eager_latents) < 5e-1
    with stream_of(pipe) as stream:
        take(stream, 2)
        stream.switch_prompt(prompt_embeds=NEW)
        assert torch.isfinite(take(stream, 2)).all()


def test_a_compiled_merged_forward_copies_no_pool() -> None:
    """Two writes to one pool in one graph: a compiler that can't do both in place clones the whole pool."""
    branch = make_pool(1, device="cuda").open_session().branch()
    num_slots = branch.storage.key_pools[0].shape[0]
    halves = [rows_of(0), rows_of(1)]
    rows = [torch.cat([half[i] for half in halves]).cuda() for i in range(3)]

    def layer(inputs: Any, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return write_attn_in_turn(inputs, query * 2, keys + 1, values).sin()

    with torch.no_grad(), MergedForwardContext([branch], num_tokens=CHUNK) as context:
        out, sources = run_and_get_code(torch.compile(layer, fullgraph=True), context.layer_inputs(0), *rows)
        expected = layer(context.layer_inputs(1), *rows)
    assert relative_error(out, expected) < 1e-4
    buffers = re.findall(r"empty_strided\w*\(\((\d+),", "\n".join(sources))
    assert buffers and str(num_slots) not in buffers
