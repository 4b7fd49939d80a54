"""Shape and window of a rollout, in frames and in tokens."""

from __future__ import annotations

from dataclasses import dataclass

from ..cache import RingGeometry
from ..recipes import Recipe


@dataclass(frozen=True, kw_only=True)
class LatentShape:
    """Shape of one latent frame of a rollout."""

    num_videos: int
    channels: int
    height: int
    width: int

    def chunk(self, num_frames: int) -> tuple[int, int, int, int, int]:
        """(videos, channels, frames, height, width) of a chunk."""
        return (self.num_videos, self.channels, num_frames, self.height, self.width)


def ring_geometry(recipe: Recipe, tokens_per_frame: int, page_size: int) -> RingGeometry:
    """The recipe's window in tokens of this frame size."""
    sink = recipe.num_sink_frames
    if recipe.num_window_frames is not None:
        window = recipe.num_window_frames
    else:
        window = (recipe.max_latent_frames or 0) - sink
    return RingGeometry(
        sink_tokens=sink * tokens_per_frame,
        window_tokens=window * tokens_per_frame,
        page_size=page_size,
        max_extra_tokens=(recipe.num_chunks_at_once - 1) * recipe.chunk_frames * tokens_per_frame,
        full_history=recipe.num_window_frames is None,
    )


def kept_frames(recipe: Recipe) -> int:
    """Latent frames that can be visible at once, S + W; as many clean latents are kept for a recache."""
    if recipe.num_window_frames is None:
        return recipe.max_latent_frames or 0
    return recipe.num_sink_frames + recipe.num_window_frames


def max_past_frames(recipe: Recipe, num_frames: int) -> int | None:
    """Frames beside the sink that a forward of ``num_frames`` sees before its own; None: all that are stored.

    In a rolling window all frames of the forward count, so the more chunks it holds, the less of the past is visible.
    """
    if recipe.context_mode != "rolling" or recipe.num_window_frames is None:
        return None
    return max(recipe.num_window_frames - num_frames, 0)


def num_past_frames(recipe: Recipe) -> int:
    """Latent frames of the window that come before the current chunk, at most."""
    return (recipe.num_window_frames or 0) - recipe.chunk_frames


def frames_in_forward(recipe: Recipe) -> int:
    """Latent frames of the largest forward that every video has, given frames and recaches aside."""
    size = max(recipe.chunk_frames, recipe.first_chunk_frames or 0) * recipe.num_chunks_at_once
    context = kept_frames(recipe) - recipe.chunk_frames if recipe.context_mode == "recompute" else 0
    return max(size, context)


def latent_frames_in_memory(recipe: Recipe) -> int:
    """Latent frames that a session keeps from chunk to chunk: clean ones, the sink's own, and chunks still noisy."""
    first = recipe.num_sink_frames if recipe.context_mode == "recompute" else 0
    return kept_frames(recipe) + first + (recipe.num_chunks_at_once - 1) * recipe.chunk_frames
