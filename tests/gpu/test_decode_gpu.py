"""Decoding on a GPU: compiled, channels-last and overlapped frames, and memory that comes back."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLWan
from tiny_components import PROMPT, QUICK, failing, make_pipeline
from tiny_components import make_vae as tiny_vae
from torch._dynamo.utils import counters

from diffusers_ardiff import ARDiffusionPipeline, LightDecoder
from diffusers_ardiff.benchmarks.models import build_pipeline, windowed
from diffusers_ardiff.benchmarks.rollout import RolloutSettings, measure_rollout

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

CALL: dict[str, Any] = {"num_frames": 45}
MAX_ERROR = {torch.float32: 1e-4, torch.bfloat16: 6e-2}


@pytest.fixture(autouse=True)
def exact_float32() -> Iterator[None]:
    """Rounding to TF32 would drown what is compared; compiled code of another test is not this one's."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    torch._dynamo.reset()
    counters.clear()
    yield
    torch.backends.cudnn.allow_tf32 = before


def make_vae() -> AutoencoderKLWan:
    """Large enough that decoding takes a while beside the tiny transformer's steps."""
    torch.manual_seed(2)
    return AutoencoderKLWan(base_dim=32, num_res_blocks=2).eval()


def make_pipe(
    dtype: torch.dtype = torch.float32, *, light: bool = False, vae: AutoencoderKLWan | None = None
) -> ARDiffusionPipeline:
    pipe = make_pipeline(QUICK.replace(height=128, width=160), vae=vae or make_vae()).to("cuda", dtype)
    if light:
        torch.manual_seed(4)
        decoder = LightDecoder(widths=(64, 32, 16, 16)).requires_grad_(False).eval()
        for weight in decoder.parameters():
            weight.mul_(1.3)
        decoder.decoder["22"].bias.fill_(0.5)
        pipe.set_decoder(decoder.to(dtype))
    return pipe


def options_of(pipe: ARDiffusionPipeline, **options: bool) -> None:
    pipe.set_decoder(pipe.decoding.light, **options)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def frames_of(pipe: ARDiffusionPipeline, output_type: str = "pt") -> Any:
    return pipe(PROMPT, **CALL, generator=generator(), output_type=output_type).frames


@pytest.mark.parametrize(
    ("light", "dtype", "channels_last"),
    [(False, torch.float32, True), (True, torch.float32, False), (True, torch.bfloat16, True)],
    ids=["wan float32", "light float32", "light bfloat16"],
)
def test_compiled_is_plain_within_rounding(light: bool, dtype: torch.dtype, channels_last: bool) -> None:
    """The smallest VAE, since compiling takes its time; ``scripts/benchmark.py decode`` compares the real one."""
    pipe = make_pipe(dtype, light=light, vae=tiny_vae())
    plain = frames_of(pipe)
    options_of(pipe, compile=True, channels_last=channels_last)
    pipe.warmup_decoder()
    warm = counters["stats"]["unique_graphs"]
    fast = frames_of(pipe)
    assert counters["stats"]["unique_graphs"] == warm > 0
    assert plain.std() > 0.01
    assert (fast - plain).abs().max().item() <= MAX_ERROR[dtype]
    stream = pipe.decoding.open(torch.device("cuda"))
    for _ in range(3):
        stream.decode(torch.zeros(1, 16, 3, 16, 20, device="cuda"))
    assert stream.state_bytes == pipe.decoding.state_bytes(16, 20), "the state keeps activations alive"


def test_compiled_and_overlapped() -> None:
    """What was compiled ahead serves the decode stream, with the same bits."""
    pipe = make_pipe(light=True)
    options_of(pipe, compile=True)
    expected = frames_of(pipe)
    options_of(pipe, compile=True, overlap=True)
    pipe.warmup_decoder()
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert torch.equal(frames_of(pipe), expected)


@pytest.mark.parametrize("light", [False, True], ids=["wan", "light"])
@pytest.mark.parametrize("output_type", ["pt", "np", "pil"])
def test_overlap_gives_the_same_bits(output_type: str, light: bool) -> None:
    pipe = make_pipe(light=light)
    plain = frames_of(pipe, output_type)
    options_of(pipe, overlap=True)
    whole = frames_of(pipe, output_type)
    with pipe.stream(PROMPT, **CALL, generator=generator(), output_type=output_type) as stream:
        one_by_one = [chunk.frames for chunk in stream]
    with pipe.stream(PROMPT, **CALL, generator=generator(), output_type=output_type) as stream:
        late = [chunk.frames for chunk in list(stream)]
    for parts in (one_by_one, late):
        if output_type == "pt":
            assert torch.equal(whole, plain) and torch.equal(torch.cat(parts, dim=1), plain)
        elif output_type == "np":
            assert np.array_equal(whole, plain) and np.array_equal(np.concatenate(parts, axis=1), plain)
        else:
            images = [image for part in parts for image in part[0]]
            assert [np.asarray(i).tolist() for i in images] == [np.asarray(i).tolist() for i in plain[0]]


def test_frames_are_safe_whatever_the_caller_does() -> None:
    """Latents edited in place, frames dropped unread, read late, on another stream, or in another thread."""
    pipe = make_pipe()
    plain = frames_of(pipe)
    options_of(pipe, overlap=True)
    kept: dict[int, Any] = {}
    side = torch.cuda.Stream()
    with pipe.stream(PROMPT, **CALL, generator=generator(), output_type="pt") as stream:
        for chunk in stream:
            chunk.latents.fill_(float("nan"))
            if chunk.index == 0:
                continue
            if chunk.index == 1:
                with torch.cuda.stream(side):
                    kept[1] = chunk.frames.clone()
            else:
                kept[chunk.index] = chunk
    threads = [threading.Thread(target=lambda i=i: kept.update({i: kept[i].frames.clone()})) for i in kept if i > 1]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    assert len(kept) == 3
    assert torch.equal(torch.cat([kept[i] for i in sorted(kept)], dim=1), plain[:, 9:])


def test_next_chunk_does_not_wait_for_the_decoder() -> None:
    """With a decoder held back on its stream, the next chunk's latents are finished first.

    The light decoder: a CUDA stream takes about a thousand launches before the host has to wait, and two chunks of the
    Wan decoder are more. With that one this test failed.
    """
    pipe = make_pipe(light=True)
    options_of(pipe, overlap=True)
    with pipe.stream(PROMPT, output_type="pt") as stream:
        for _ in range(4):
            next(stream)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream._output._lane):
            torch.cuda._sleep(int(1.5e10))  # several seconds, longer than a chunk on a busy machine
        slow, later = next(stream), next(stream)
        assert torch.isfinite(later.latents.sum()).item()
        assert not slow.output.done.query()
        assert torch.isfinite(slow.frames).all().item() and slow.output.done.query()


def test_fork_decodes_from_the_same_past() -> None:
    pipe = make_pipe()
    options_of(pipe, overlap=True)
    manager = pipe.create_cache(num_videos=2)
    with pipe.stream(PROMPT, cache=manager, generator=generator(), output_type="pt") as stream:
        next(stream)
        with stream.fork() as child:
            ours, other = [next(stream).frames for _ in range(3)], [next(child).frames for _ in range(3)]
    for left, right in zip(ours, other, strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize("how", ["close", "error", "decoder error", "reset"])
@pytest.mark.parametrize("output_type", ["pt", "np"])
def test_memory_comes_back(how: str, output_type: str) -> None:
    pipe = make_pipe()
    options_of(pipe, overlap=True)
    frames_of(pipe, output_type)
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    stream = pipe.stream(PROMPT, output_type=output_type)
    for _ in range(3):
        next(stream)
    if how == "close":
        stream.close()
    elif how == "reset":
        stream.reset(keep=())
        assert stream.vae_state_bytes == 0
        stream.close()
    else:
        module = pipe.transformer if how == "error" else pipe.vae.decoder.mid_block
        with failing(module, RuntimeError("stop here")), pytest.raises(RuntimeError, match="stop here"):
            next(stream)
        assert stream.closed
    del stream
    gc.collect()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before


@pytest.mark.parametrize("decoder", ["wan", "overlapped"])
def test_peak_is_within_the_plan(decoder: str) -> None:
    """Weights, plan, working memory included, and 10 %; at the real size, through the fill and into the steady state."""
    torch.backends.cudnn.allow_tf32 = True
    device = torch.device("cuda")
    pipe = build_pipeline("wan-1.3b", device)
    pipe.set_decoder(overlap=decoder == "overlapped")
    recipe = windowed(pipe.recipe, 0, 6)
    result = measure_rollout(pipe, RolloutSettings(recipe=recipe, measured_chunks=2))
    assert result.peak_over_plan is not None and result.peak_over_plan <= 1.1, result.to_dict()
