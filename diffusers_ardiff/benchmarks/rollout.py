"""A long rollout, timed chunk by chunk: how fast, at what latency, in how much memory, and whether it stays so.

The host asks for a chunk once the one before the last is finished, like a player that holds one chunk ready. Times are
marks on the device's stream, so nothing is waited for in between.
"""

from __future__ import annotations

import itertools
import statistics
import time
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from ..cache import KVManager, MemoryPlan
from ..pipelines import ARChunk, ARDiffusionPipeline, ARStream, CacheOptions
from ..pipelines.overlap import OverlappedFrames, decode_lane
from ..pipelines.warmup import WarmupReport
from ..pipelines.window import kept_frames
from ..recipes import Recipe
from ..validation import check_int
from .clock import Clock, Mark
from .models import TEXT_LEN, random_embeds
from .peak import reset_peak
from .report import CacheFootprint, ChunkTimes, RolloutResult

SETTLING_CHUNKS = 2


@dataclass(frozen=True, kw_only=True)
class RolloutSettings:
    """What to measure.

    Args:
        recipe: chunk, window, steps; with a window. None: the pipeline's.
        measured_chunks: chunks in the steady state at least; the first half is compared with the last.
        num_frames: pixel frames in all; None: as many as ``measured_chunks`` need.
        decode: with frames, from the pipeline's decoder.
        backend: attention backend by name.
        kv_dtype: of the K/V pool; None: the transformer's.
        seed: of the noise.
    """

    recipe: Recipe | None = None
    measured_chunks: int = 60
    num_frames: int | None = None
    decode: bool = True
    backend: str | None = None
    kv_dtype: torch.dtype | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_int("measured_chunks", self.measured_chunks, minimum=2)


@dataclass(kw_only=True)
class _Chunk:
    """Marks of one chunk."""

    asked: Mark
    started: Mark
    latents: Mark
    frames: Mark
    ended: Mark
    memory: tuple[int, int] | None = None


def first_steady_chunk(recipe: Recipe) -> int:
    """Index of the first chunk that begins with a full window."""
    return 1 + -(-kept_frames(recipe) // recipe.chunk_frames)


def count_chunks(settings: RolloutSettings, recipe: Recipe, temporal_factor: int) -> int:
    """Chunks to make.

    Raises:
        ValueError: ``num_frames`` are too few for ``measured_chunks``.
    """
    needed = first_steady_chunk(recipe) + settings.measured_chunks
    if settings.num_frames is None:
        return needed + SETTLING_CHUNKS
    frames_a_chunk = temporal_factor * recipe.chunk_frames
    num_frames = check_int("num_frames", settings.num_frames, minimum=1)
    if num_frames < frames_a_chunk * needed:
        raise ValueError(
            f"num_frames must be at least {frames_a_chunk * needed}, got {num_frames}: the window is full after "
            f"{first_steady_chunk(recipe)} chunks of {frames_a_chunk} frames, and {settings.measured_chunks} more are "
            "measured. Ask for more frames, or for fewer measured_chunks."
        )
    return -(-num_frames // frames_a_chunk)


def measure_rollout(pipeline: ARDiffusionPipeline, settings: RolloutSettings | None = None) -> RolloutResult:
    """Generate one video from random embeddings and time each chunk, the commit of the one before included.

    A pool that ``warm_up`` left is used.

    Args:
        pipeline: on its device, its decoder chosen and warmed up; the recipe's size is used.
        settings: what to measure.

    Raises:
        ValueError: too few frames for a comparison.
    """
    settings = settings if settings is not None else RolloutSettings()
    recipe = settings.recipe if settings.recipe is not None else pipeline.recipe
    num_chunks = count_chunks(settings, recipe, pipeline.vae_scale_factor_temporal)
    device = pipeline._execution_device
    embeds = random_embeds(pipeline, device)
    planner = pipeline.plan_cache(**_plan_arguments(settings, recipe))
    plan = planner.plan(with_work=True, num_replay_texts=1 if pipeline.warm_text_bytes else 0)
    warm = pipeline.warm_pool(planner)
    weights = _allocated(device)
    if weights is not None and warm is not None:
        weights -= warm.storage.num_bytes + pipeline.warm_text_bytes
    began = time.perf_counter()
    manager = warm if warm is not None else planner.build()
    with pipeline.stream(
        prompt_embeds=embeds,
        recipe=recipe,
        cache=manager,
        generator=torch.Generator(device).manual_seed(settings.seed),
        output_type="pt" if settings.decode else "latent",
    ) as stream:
        run = _Run(stream, manager, Clock(device), began)
        run.make(num_chunks, first_steady_chunk(recipe))
    return _result(settings, recipe, run, plan, weights)


def warm_up(
    pipeline: ARDiffusionPipeline, settings: RolloutSettings, *, compile: bool, cuda_graphs: bool
) -> WarmupReport:
    """``pipe.warmup`` for the rollouts of these settings; raises like it."""
    recipe = settings.recipe if settings.recipe is not None else pipeline.recipe
    return pipeline.warmup(compile=compile, cuda_graphs=cuda_graphs, **_plan_arguments(settings, recipe))


@torch.no_grad()
def time_decoding(pipeline: ARDiffusionPipeline, recipe: Recipe, *, repeats: int = 5) -> float:
    """Seconds of decoding one steady chunk while nothing else runs: the median, once kernels are loaded."""
    device, factor = pipeline._execution_device, pipeline.vae_scale_factor_spatial
    clock, decoding = Clock(device), pipeline.decoding
    channels = pipeline.transformer.config["in_channels"]
    size = (1, channels, recipe.chunk_frames, recipe.height // factor, recipe.width // factor)
    latents, stream = torch.zeros(size, device=device), decoding.open(device)
    lane = torch.cuda.stream(decode_lane(device)) if decoding.options.overlap else nullcontext()
    with lane:
        for _ in range(2):
            stream.decode(latents)
        marks = [clock.mark()]
        for _ in range(repeats):
            stream.decode(latents)
            marks.append(clock.mark())
        clock.wait(marks[-1])
    return statistics.median(clock.seconds(start, end) for start, end in itertools.pairwise(marks))


def _plan_arguments(settings: RolloutSettings, recipe: Recipe) -> dict[str, Any]:
    return {
        "recipe": recipe,
        "decode": settings.decode,
        "text_len": TEXT_LEN,
        "cache": CacheOptions(backend=settings.backend, kv_dtype=settings.kv_dtype),
    }


class _Run:
    """One rollout under measurement."""

    def __init__(self, stream: ARStream, manager: KVManager, clock: Clock, began: float) -> None:
        self.chunks: list[_Chunk] = []
        self.time_to_first_chunk = 0.0
        self.footprints: list[CacheFootprint] = []
        self._stream, self._manager, self._clock, self._began = stream, manager, clock, began
        self._latents: Mark = clock.mark()
        make = stream._output.make

        def noted(latents: torch.Tensor, past: torch.Tensor) -> Any:
            self._latents = clock.mark()
            return make(latents, past)

        stream._output.make = noted  # type: ignore[method-assign]

    def make(self, num_chunks: int, first_steady: int) -> None:
        previous: ARChunk | None = None
        for index in range(num_chunks):
            if index >= 2:
                self._clock.wait(self.chunks[-2].ended)
            chunk = self._make_one(index)
            if previous is not None:
                # A player's stream waits for frames that overlap, once the chunk after them is under way.
                previous.frames  # noqa: B018
            previous = chunk
            if index in (first_steady, num_chunks - 1):
                self.footprints.append(footprint(self._manager))
        self._clock.wait(self.chunks[-1].ended)

    def _make_one(self, index: int) -> ARChunk:
        clock, device = self._clock, self._clock.device
        reset_peak(device)
        asked = clock.mark()
        self._stream.rollout.commit_held()
        started = clock.mark()
        chunk = next(self._stream)
        frames = chunk.output.done if isinstance(chunk.output, OverlappedFrames) else clock.mark()
        marks = _Chunk(asked=asked, started=started, latents=self._latents, frames=frames, ended=frames)
        if index == 0:
            clock.wait(frames)
            self.time_to_first_chunk = time.perf_counter() - self._began
        if device.type == "cuda":
            marks.memory = (_allocated(device) or 0, torch.cuda.max_memory_allocated(device))
        self.chunks.append(marks)
        return chunk

    def times(self) -> list[ChunkTimes]:
        """Seconds of every chunk; all marks are reached."""
        between = self._clock.seconds
        ends = [chunk.asked for chunk in self.chunks[1:]] + [self.chunks[-1].ended]
        return [
            ChunkTimes(
                seconds=between(chunk.asked, end),
                commit_before=between(chunk.asked, chunk.started),
                to_latents=between(chunk.started, chunk.latents),
                to_frames=between(chunk.started, chunk.frames),
                allocated_bytes=chunk.memory[0] if chunk.memory is not None else None,
                peak_bytes=chunk.memory[1] if chunk.memory is not None else None,
            )
            for chunk, end in zip(self.chunks, ends, strict=True)
        ]


def _result(
    settings: RolloutSettings, recipe: Recipe, run: _Run, plan: MemoryPlan, weights: int | None
) -> RolloutResult:
    after_fill, at_end = run.footprints
    return RolloutResult(
        chunks=tuple(run.times()),
        first_steady_chunk=first_steady_chunk(recipe),
        compared=min(settings.measured_chunks // 2, 30),
        time_to_first_chunk=run.time_to_first_chunk,
        footprint_after_fill=after_fill,
        footprint_at_end=at_end,
        weights_bytes=weights,
        planned_bytes=plan.peak_bytes,
    )


def footprint(manager: KVManager) -> CacheFootprint:
    """Pages, page tables and metadata of all open sessions now."""
    branches = [branch for session in manager.sessions for branch in session.branches]
    return CacheFootprint(
        pages_in_use=manager.allocator.num_used,
        table_width=max((len(branch.run.pages) for branch in branches), default=0),
        metadata_bytes=sum(4 * len(branch.run.pages) for branch in branches),
        pool_bytes=manager.storage.num_bytes,
    )


def _allocated(device: torch.device) -> int | None:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else None
