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
from recorders import GraphWatch, copied_state
from tiny_components import PROMPT, QUICK, failing, make_pipeline
from tiny_components import make_vae as tiny_vae
from torch._dynamo.utils import counters
from torch._inductor.compile_fx import compile_fx

from diffusers_ardiff import ARDiffusionPipeline, LightDecoder
from diffusers_ardiff.benchmarks.models import build_pipeline, windowed
from diffusers_ardiff.benchmarks.rollout import RolloutSettings, measure_rollout
from diffusers_ardiff.pipelines.decode_step import set_conv_layout
from diffusers_ardiff.pipelines.decoding import DecodeOptions, Decoding
from diffusers_ardiff.pipelines.stream import ARStream

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


@pytest.mark.parametrize("channels_last", [True, False], ids=["channels-last", "contiguous"])
def test_state_is_copied_once(channels_last: bool) -> None:
    """Inductor's graphs give the state as the next call takes it; see the test of this name that needs no GPU."""
    vae, watch = tiny_vae().to("cuda"), GraphWatch(compile_fx)
    set_conv_layout(vae, channels_last=channels_last)
    options = DecodeOptions(compile=True, channels_last=channels_last)
    stream = Decoding(vae, None, options, compiler=watch).open(torch.device("cuda"))
    for _ in range(3):
        stream.decode(torch.zeros(1, 16, 3, 16, 20, device="cuda"))
    state = [entry for entry in stream._cache if isinstance(entry, torch.Tensor)]
    assert len(state) > 10 and copied_state(watch, state) == []


@pytest.mark.parametrize("light", [False, True], ids=["wan", "light"])
def test_weights_of_another_layout_compile_anew(light: bool) -> None:
    """What was compiled for channels-last weights was run on contiguous ones, and failed: "expected size 16==16, stride
    27==1 at dim=1"."""
    pipe = make_pipe(light=light, vae=tiny_vae())
    plain = frames_of(pipe)
    for channels_last in (True, False):
        options_of(pipe, compile=True, channels_last=channels_last)
        assert (frames_of(pipe) - plain).abs().max().item() <= MAX_ERROR[torch.float32]


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


def chunks_beside_a_held_decoder(stream: ARStream, cycles: float) -> tuple[bool, bool]:
    """Two more chunks, while the decode stream sleeps for so many GPU cycles before it begins them.

    Returns: whether the first one's frames were still to come when the second one's latents were finished; whether the
        frames are finite once they are read.
    """
    torch.cuda.synchronize()
    with torch.cuda.stream(stream._output._lane):
        torch.cuda._sleep(int(cycles))
    first, second = next(stream), next(stream)
    assert torch.isfinite(second.latents.sum()).item()
    is_held = not first.output.done.query()
    return is_held, torch.isfinite(first.frames).all().item() and torch.isfinite(second.frames).all().item()


def test_next_chunk_does_not_wait_for_the_decoder() -> None:
    """With a decoder held back on its stream, the next chunk's latents are finished first.

    What this test took for a wait, three times: two chunks of the Wan decoder are more launches than a CUDA stream takes
    before the host has to wait (about a thousand), hence the light one; a busy machine, hence the long sleep; and the
    sleep itself, since loading a kernel at its first use waits until the device is idle. ``isfinite`` was used first while
    the decoder slept. Memory that is taken from the driver, on the device or pinned, can wait likewise, and a decoder that
    is behind has more of it in use. Hence the rehearsals: the ring goes round, then the very same happens, sleep included,
    until nothing in it is new.
    """
    pipe = make_pipe(light=True)
    options_of(pipe, overlap=True)
    with pipe.stream(PROMPT, output_type="pt") as stream:
        for _ in range(12):
            next(stream)
        for _ in range(3):
            chunks_beside_a_held_decoder(stream, 1e9)
        # Several seconds, longer than two chunks on a busy machine.
        is_held, is_finite = chunks_beside_a_held_decoder(stream, 1.5e10)
    assert is_held, "the latents of a chunk were finished after the frames of the one before"
    assert is_finite


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
