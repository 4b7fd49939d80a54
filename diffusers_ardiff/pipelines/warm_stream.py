"""The short streams of a warm-up: every chunk while the window fills, the first overwrite, the steady state."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from .memory import CachePlanner
from .window import kept_frames

if TYPE_CHECKING:
    from .ar_pipeline import ARDiffusionPipeline
    from .stream import ARStream
    from .warmup import WarmState

RECOMPILE_LIMIT = 256


@torch.no_grad()
def run_chunks(
    pipeline: ARDiffusionPipeline, planner: CachePlanner, warm: WarmState, *, merge_commits: bool
) -> tuple[float, ...]:
    """Make chunks until the window is full and has been overwritten once; seconds of each."""
    # A merged forward spans two chunks; both have to be steady once.
    last_frame = _last_frame(planner, num_overwrites=2 if merge_commits else 1)
    seconds: list[float] = []
    with _recorded_stream(pipeline, planner, warm, merge_commits=merge_commits) as stream:
        while not seconds or _has_room(stream, last_frame):
            start = time.perf_counter()
            next(stream)
            # Commit included, so that the last one is captured too where commits are not merged.
            if not merge_commits:
                stream.rollout.commit_held()
            _wait_for(planner.device)
            seconds.append(time.perf_counter() - start)
    return tuple(seconds)


@torch.no_grad()
def run_recaches(pipeline: ARDiffusionPipeline, planner: CachePlanner, warm: WarmState) -> None:
    """The same chunks again, each with a prompt switch that rewrites the window behind it."""
    last_frame = _last_frame(planner, num_overwrites=1)
    with _recorded_stream(pipeline, planner, warm, merge_commits=False) as stream:
        embeds = _embeds(pipeline, planner)
        negative = embeds if planner.guided else None
        is_first = True
        while is_first or _has_room(stream, last_frame):
            is_first = False
            next(stream)
            stream.switch_prompt(prompt_embeds=embeds, negative_prompt_embeds=negative, mode="recache")
        _wait_for(planner.device)


def _last_frame(planner: CachePlanner, *, num_overwrites: int) -> int:
    """Latent frames after which nothing new happens."""
    recipe = planner.recipe
    overwritten = 0 if recipe.num_window_frames is None else recipe.chunk_frames * num_overwrites
    return kept_frames(recipe) + overwritten


def _has_room(stream: ARStream, last_frame: int) -> bool:
    return stream.rollout.num_latent_frames + stream.rollout.recipe.chunk_frames <= last_frame


@contextmanager
def _recorded_stream(
    pipeline: ARDiffusionPipeline, planner: CachePlanner, warm: WarmState, *, merge_commits: bool
) -> Iterator[ARStream]:
    """A stream of the planned size in the warm pool, whose shapes are compiled and whose forwards are captured."""
    state = pipeline.call_state
    warm.set_recording(True)
    try:
        call = _stream_call(pipeline, planner) | {"cache": warm.manager, "merge_commits": merge_commits}
        # Shapes of earlier warm-ups count against dynamo's limit too.
        with torch._dynamo.config.patch(recompile_limit=RECOMPILE_LIMIT), pipeline.stream(**call) as stream:
            yield stream
    finally:
        warm.set_recording(False)
        pipeline.call_state = state


def _embeds(pipeline: ARDiffusionPipeline, planner: CachePlanner) -> torch.Tensor:
    """A random prompt (videos, text_len, text_dim), from noise of its own, so that the global one stays as it is."""
    size = (planner.shape.num_videos, planner.text_len, pipeline.transformer.config["text_dim"])
    return torch.randn(size, generator=torch.Generator().manual_seed(0)).to(pipeline.transformer.dtype)


def _stream_call(pipeline: ARDiffusionPipeline, planner: CachePlanner) -> dict[str, Any]:
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
