"""A long rollout, timed chunk by chunk: is every chunk as cheap as the one after the window filled?"""

from __future__ import annotations

import statistics
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ..cache import KVManager
from ..pipelines import ARDiffusionPipeline
from ..pipelines.window import kept_frames
from ..recipes import Recipe
from ..validation import check_int

CHUNKS_COMPARED = 30


@dataclass(frozen=True, kw_only=True)
class CacheFootprint:
    """What must not grow with the length of a rollout."""

    pages_in_use: int
    table_width: int
    metadata_bytes: int
    pool_bytes: int


@dataclass(frozen=True, kw_only=True)
class RolloutResult:
    """Times of one rollout, a chunk each, in seconds. ``first_steady_chunk``: the first one with a full window."""

    chunk_seconds: tuple[float, ...]
    first_steady_chunk: int
    footprint_after_fill: CacheFootprint
    footprint_at_end: CacheFootprint
    peak_device_bytes: int | None

    @property
    def time_to_first_chunk(self) -> float:
        """Seconds until the first frames are there."""
        return self.chunk_seconds[0]

    @property
    def after_fill_seconds(self) -> float:
        """Median of the 30 chunks right after the window is full."""
        return statistics.median(self.chunk_seconds[self.first_steady_chunk :][:CHUNKS_COMPARED])

    @property
    def last_seconds(self) -> float:
        """Median of the last 30 chunks."""
        return statistics.median(self.chunk_seconds[-CHUNKS_COMPARED:])

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self) | {
            "time_to_first_chunk": self.time_to_first_chunk,
            "after_fill_seconds": self.after_fill_seconds,
            "last_seconds": self.last_seconds,
            "last_over_after_fill": self.last_seconds / self.after_fill_seconds,
        }


def measure_rollout(
    pipeline: ARDiffusionPipeline, *, num_frames: int, decode: bool = True, prompt: str = "a red circle"
) -> RolloutResult:
    """Generate ``num_frames`` pixel frames and time each chunk, its late commit included.

    Args:
        pipeline: on its device; its own recipe and size are used.
        num_frames: enough for the window to fill and at least 60 chunks more.
        decode: with the VAE's stream decode.

    Raises:
        ValueError: too few frames for a comparison.
    """
    recipe = pipeline.recipe
    first_steady = 1 + -(-kept_frames(recipe) // recipe.chunk_frames)
    factor = pipeline.vae_scale_factor_temporal
    needed = factor * recipe.chunk_frames * (first_steady + 2 * CHUNKS_COMPARED)
    check_int("num_frames", num_frames, minimum=needed)
    device = pipeline._execution_device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    seconds: list[float] = []
    after_fill: CacheFootprint | None = None
    manager = pipeline.create_cache(decode=decode)
    output_type = "pt" if decode else "latent"
    with pipeline.stream(prompt, num_frames=num_frames, output_type=output_type, cache=manager) as stream:
        start = time.perf_counter()
        for chunk in stream:
            _wait_for(device)
            seconds.append(time.perf_counter() - start)
            if chunk.index == first_steady:
                after_fill = footprint(manager)
            at_end = footprint(manager)
            start = time.perf_counter()
    assert after_fill is not None
    return RolloutResult(
        chunk_seconds=tuple(seconds),
        first_steady_chunk=first_steady,
        footprint_after_fill=after_fill,
        footprint_at_end=at_end,
        peak_device_bytes=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
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


def describe(recipe: Recipe, result: RolloutResult, temporal_factor: int) -> str:
    """The result in a few lines: window, steps, speed, flatness."""
    window = "full history" if recipe.num_window_frames is None else f"{recipe.num_window_frames} frames"
    frames = recipe.chunk_frames * temporal_factor
    return "\n".join(
        [
            f"window {window} + sink {recipe.num_sink_frames}, chunk {recipe.chunk_frames}, "
            f"{len(recipe.denoising_steps)} steps + commit, {len(result.chunk_seconds)} chunks",
            f"first chunk after {result.time_to_first_chunk:.3f} s; steady {result.after_fill_seconds:.4f} s a chunk, "
            f"{frames / result.after_fill_seconds:.1f} pixel frames a second",
            f"last {CHUNKS_COMPARED} chunks {result.last_seconds:.4f} s: "
            f"{result.last_seconds / result.after_fill_seconds:.3f} x the {CHUNKS_COMPARED} right after the fill",
            f"pages, tables, metadata, pool after fill and at the end: {result.footprint_after_fill} "
            f"{'==' if result.footprint_after_fill == result.footprint_at_end else '!='} {result.footprint_at_end}",
        ]
    )


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
