"""What a rollout's measurement says, as numbers, text and JSON."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from typing import Any

from ..recipes import Recipe


@dataclass(frozen=True, kw_only=True)
class CacheFootprint:
    """What must not grow with the length of a rollout."""

    pages_in_use: int
    table_width: int
    metadata_bytes: int
    pool_bytes: int


@dataclass(frozen=True, kw_only=True)
class ChunkTimes:
    """Seconds and bytes of one chunk.

    Args:
        seconds: from the moment it is asked for to the next one's.
        commit_before: the commit forward of the chunk before, which runs first.
        to_latents, to_frames: from the start of its own first forward.
        allocated_bytes, peak_bytes: on the device; None on the CPU.
    """

    seconds: float
    commit_before: float
    to_latents: float
    to_frames: float
    allocated_bytes: int | None = None
    peak_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class RolloutResult:
    """One rollout.

    Args:
        chunks: all of them.
        first_steady_chunk: index of the first one that begins with a full window.
        compared: chunks right after it, and at the end, whose medians are compared.
        time_to_first_chunk: seconds from the call to the first frames, memory allocated in between.
        footprint_after_fill, footprint_at_end: of the cache.
        weights_bytes: on the device before the call, a warm pool left out; None on the CPU.
        planned_bytes: the memory plan, working memory included.
    """

    chunks: tuple[ChunkTimes, ...]
    first_steady_chunk: int
    compared: int
    time_to_first_chunk: float
    footprint_after_fill: CacheFootprint
    footprint_at_end: CacheFootprint
    weights_bytes: int | None
    planned_bytes: int

    @property
    def chunk_seconds(self) -> tuple[float, ...]:
        """Seconds of every chunk."""
        return tuple(chunk.seconds for chunk in self.chunks)

    @property
    def after_fill_seconds(self) -> float:
        """Median of the ``compared`` chunks right after the window is full."""
        return statistics.median(self.chunk_seconds[self.first_steady_chunk :][: self.compared])

    @property
    def last_seconds(self) -> float:
        """Median of the last ``compared`` chunks."""
        return statistics.median(self.chunk_seconds[-self.compared :])

    @property
    def mean_seconds(self) -> float:
        """Mean of the chunks in the steady state: what the frame rate follows from."""
        return statistics.fmean(self.chunk_seconds[self.first_steady_chunk :])

    def steady(self, name: str) -> float:
        """Median of a field of ``ChunkTimes`` over the steady state."""
        return statistics.median(getattr(chunk, name) for chunk in self.chunks[self.first_steady_chunk :])

    @property
    def transformer_seconds(self) -> float:
        """Median of denoising and commit of a chunk, decoding left out."""
        steady = self.chunks[self.first_steady_chunk :]
        return statistics.median(chunk.commit_before + chunk.to_latents for chunk in steady)

    @property
    def peak_bytes(self) -> int | None:
        """Most bytes on the device at any time; None on the CPU."""
        peaks = [chunk.peak_bytes for chunk in self.chunks if chunk.peak_bytes is not None]
        return max(peaks) if peaks else None

    @property
    def steady_peak_bytes(self) -> int | None:
        """Most bytes on the device while the window is full; None on the CPU."""
        peaks = [c.peak_bytes for c in self.chunks[self.first_steady_chunk :] if c.peak_bytes is not None]
        return max(peaks) if peaks else None

    @property
    def held_bytes(self) -> int | None:
        """Bytes on the device between the last chunks: weights, pool, text, decoder state; None on the CPU."""
        return self.chunks[-1].allocated_bytes

    @property
    def peak_over_plan(self) -> float | None:
        """Peak over weights and plan; None on the CPU."""
        if self.peak_bytes is None or self.weights_bytes is None:
            return None
        return self.peak_bytes / (self.weights_bytes + self.planned_bytes)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self) | {
            "after_fill_seconds": self.after_fill_seconds,
            "last_seconds": self.last_seconds,
            "last_over_after_fill": self.last_seconds / self.after_fill_seconds,
            "mean_seconds": self.mean_seconds,
            "transformer_seconds": self.transformer_seconds,
            "to_latents_seconds": self.steady("to_latents"),
            "to_frames_seconds": self.steady("to_frames"),
            "latents_over_chunk": self.steady("to_latents") / self.transformer_seconds,
            "peak_bytes": self.peak_bytes,
            "steady_peak_bytes": self.steady_peak_bytes,
            "held_bytes": self.held_bytes,
            "peak_over_plan": self.peak_over_plan,
        }


def window_label(recipe: Recipe) -> str:
    """The window as others count it, the sink included, then sink and recent frames: "12 (3+9)"."""
    if recipe.num_window_frames is None:
        return f"full history of {recipe.max_latent_frames}"
    sink, recent = recipe.num_sink_frames, recipe.num_window_frames
    return f"{sink + recent} ({sink}+{recent})"


def describe(recipe: Recipe, result: RolloutResult, temporal_factor: int, decoder: str = "none") -> str:
    """The result in a few lines: window, steps, decoder, speed, latency, memory, flatness."""
    frames = recipe.chunk_frames * temporal_factor
    lines = [
        f"window {window_label(recipe)} latent frames, chunk {recipe.chunk_frames}, {len(recipe.denoising_steps)} steps "
        f"+ commit at {recipe.commit_timestep:g}, decoder {decoder}, {len(result.chunks)} chunks",
        f"  {result.mean_seconds:.4f} s a chunk, {frames / result.mean_seconds:.1f} pixel frames a second; first chunk "
        f"after {result.time_to_first_chunk:.3f} s",
        f"  start to latents {result.steady('to_latents'):.4f} s "
        f"({result.steady('to_latents') / result.transformer_seconds:.2f} x denoising + commit "
        f"{result.transformer_seconds:.4f} s), start to frames {result.steady('to_frames'):.4f} s",
        f"  last {result.compared} chunks {result.last_seconds:.4f} s: "
        f"{result.last_seconds / result.after_fill_seconds:.3f} x the {result.compared} right after the fill",
        f"  cache after fill and at the end: {result.footprint_after_fill} "
        f"{'==' if result.footprint_after_fill == result.footprint_at_end else '!='} {result.footprint_at_end}",
    ]
    if result.peak_bytes is not None and result.weights_bytes is not None:
        steady, held = result.steady_peak_bytes or 0, result.held_bytes or 0
        lines.append(
            f"  steady state: peak {steady / 2**30:.2f} GiB, of which {held / 2**30:.2f} are held between chunks (weights, "
            f"pool, text, decoder state) and {(steady - held) / 2**30:.2f} come and go"
        )
        lines.append(
            f"  peak {result.peak_bytes / 2**30:.2f} GiB: {result.peak_over_plan:.3f} x weights "
            f"{result.weights_bytes / 2**30:.2f} + plan {result.planned_bytes / 2**30:.2f}"
        )
    return "\n".join(lines)
