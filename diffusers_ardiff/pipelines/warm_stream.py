"""The short streams of a warm-up: every chunk while the window fills, the first overwrite, the steady state."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch

from .memory import CachePlanner
from .together import StreamBatch
from .window import kept_frames

if TYPE_CHECKING:
    from .host import PipelineHost
    from .stream import ARStream
    from .warm_state import WarmState

RECOMPILE_LIMIT = 256


@torch.no_grad()
def run_chunks(
    pipeline: PipelineHost, planner: CachePlanner, warm: WarmState, *, num_streams: int, merge_commits: bool
) -> tuple[float, ...]:
    """Let streams run one by one, then together, while shapes and forwards are recorded; seconds of each chunk."""
    with _recorded_streams(pipeline, planner, warm, num_streams, merge_commits=merge_commits) as streams:
        seconds = [one for stream in streams for one in _run_alone(stream)]
        if num_streams > 1:
            seconds += _run_together(streams)
    return tuple(seconds)


@torch.no_grad()
def run_recaches(pipeline: PipelineHost, planner: CachePlanner, warm: WarmState, *, num_streams: int) -> None:
    """The same chunks again, each with a prompt switch that rewrites the window behind it."""
    embeds = _embeds(pipeline, planner)
    negative = embeds if planner.guided else None
    with _recorded_streams(pipeline, planner, warm, num_streams, merge_commits=False) as streams:
        for stream in streams:

            def make(stream: ARStream = stream) -> None:
                next(stream)
                stream.switch_prompt(prompt_embeds=embeds, negative_prompt_embeds=negative, mode="recache")

            _run_steady(stream, make, num_overwrites=1)


def _run_alone(stream: ARStream) -> list[float]:
    """Make chunks until the window is full and has been overwritten once; seconds of each."""
    merges = stream.rollout.merge_commits

    def make() -> None:
        next(stream)
        # Commit included, so that the last one is captured too where commits are not merged.
        if not merges:
            stream.rollout.commit_held()

    # A merged forward spans two chunks; both have to be steady once.
    return _run_steady(stream, make, num_overwrites=2 if merges else 1)


def _run_together(streams: list[ARStream]) -> list[float]:
    """The same for joint forwards, from the start; a chunk's commit runs with the next one, hence one more."""
    for stream in streams:
        stream.reset()
    batch = StreamBatch(streams)
    return _run_steady(streams[0], batch.step, num_overwrites=2)


def _run_steady(stream: ARStream, make: Callable[[], object], *, num_overwrites: int) -> list[float]:
    """Call ``make`` until the stream has filled its window and gone on for so many chunks; seconds of each call."""
    recipe = stream.rollout.recipe
    last_frame = kept_frames(recipe)
    if recipe.num_window_frames is not None:
        last_frame += recipe.chunk_frames * num_overwrites
    seconds: list[float] = []
    while not seconds or stream.rollout.num_latent_frames + recipe.chunk_frames <= last_frame:
        start = time.perf_counter()
        make()
        _wait_for(stream.rollout.device)
        seconds.append(time.perf_counter() - start)
    return seconds


@contextmanager
def _recorded_streams(
    pipeline: PipelineHost, planner: CachePlanner, warm: WarmState, num_streams: int, *, merge_commits: bool
) -> Iterator[list[ARStream]]:
    """Streams of the planned size in the warm pool, whose shapes are compiled and whose forwards are captured."""
    state = pipeline.call_state
    warm.set_recording(True)
    try:
        call = _stream_call(pipeline, planner) | {"cache": warm.manager, "merge_commits": merge_commits}
        # Shapes of earlier warm-ups count against dynamo's limit too.
        with torch._dynamo.config.patch(recompile_limit=RECOMPILE_LIMIT), ExitStack() as stack:
            yield [stack.enter_context(pipeline.stream(**call)) for _ in range(num_streams)]
    finally:
        warm.set_recording(False)
        pipeline.call_state = state


def _embeds(pipeline: PipelineHost, planner: CachePlanner) -> torch.Tensor:
    """A random prompt (videos, text_len, text_dim), from noise of its own, so that the global one stays as it is."""
    size = (planner.shape.num_videos, planner.text_len, pipeline.transformer.config["text_dim"])
    return torch.randn(size, generator=torch.Generator().manual_seed(0)).to(pipeline.transformer.dtype)


def _stream_call(pipeline: PipelineHost, planner: CachePlanner) -> dict[str, Any]:
    """Arguments of a stream of the planned size under a random prompt."""
    shape, factor = planner.shape, pipeline.vae_scale_factor_spatial
    embeds = _embeds(pipeline, planner)
    return {
        "prompt_embeds": embeds,
        "negative_prompt_embeds": embeds if planner.guided else None,
        "height": shape.height * factor,
        "width": shape.width * factor,
        "recipe": planner.recipe,
        "guidance_scale": 2.0 if planner.guided else 1.0,
        "generator": torch.Generator().manual_seed(0),
        "output_type": "latent" if planner.decoding is None else "pt",
    }


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
