"""Frame counts: pixel and latent frames, and how a rollout is cut into chunks. One place for mask, cache and loop."""

from __future__ import annotations

from ..recipes import Recipe
from ..validation import check_int
from .vae_stream import num_latent_frames


def count_latent_frames(num_frames: int, temporal_factor: int) -> int:
    """Latent frames that hold ``num_frames`` pixel frames: ceil((n - 1) / factor) + 1.

    Raises:
        ValueError: ``num_frames`` is not a whole number >= 1.
    """
    return num_latent_frames(check_int("num_frames", num_frames, minimum=1), temporal_factor)


def next_chunk_size(recipe: Recipe, num_done: int, num_latent_frames: int | None) -> int | None:
    """Latent frames of the next chunk to generate, always a whole chunk; None: all ``num_latent_frames`` are there.

    The first chunk has the recipe's ``first_chunk_frames`` where nothing came before it. Example: 20 frames in chunks
    of 3 are 7 chunks.

    Args:
        num_done: latent frames before the chunk, given ones included.
        num_latent_frames: of the whole video; None: endless.
    """
    if num_latent_frames is not None and num_done >= num_latent_frames:
        return None
    if num_done == 0 and recipe.first_chunk_frames is not None:
        return recipe.first_chunk_frames
    return recipe.chunk_frames


def generated_chunk_sizes(recipe: Recipe, num_given: int, num_latent_frames: int) -> list[int]:
    """Sizes of all chunks to generate."""
    sizes: list[int] = []
    num_done = num_given
    while (size := next_chunk_size(recipe, num_done, num_latent_frames)) is not None:
        sizes.append(size)
        num_done += size
    return sizes


def given_chunk_sizes(recipe: Recipe, num_given: int) -> list[int]:
    """How given latents are committed: like generated chunks, but the last may be short. An image is alone in its one.

    Example: 7 frames in chunks of 3 are 3, 3, 1; where the first chunk has 1 frame, they are 1, 3, 3.
    """
    sizes = generated_chunk_sizes(recipe, 0, num_given)
    surplus = sum(sizes) - num_given
    return [*sizes[:-1], sizes[-1] - surplus] if sizes else []


def check_history_limit(recipe: Recipe, num_given: int, num_latent_frames: int | None) -> None:
    """Refuse a rollout that full history cannot hold, before anything runs; an endless one needs room for a chunk.

    Raises:
        ValueError: with the frames asked for and the frames held.
    """
    if recipe.max_latent_frames is None:
        return
    if num_latent_frames is None:
        num_latent_frames = num_given + 1
    needed = num_given + sum(generated_chunk_sizes(recipe, num_given, num_latent_frames))
    if needed > recipe.max_latent_frames:
        raise ValueError(
            f"{num_latent_frames} latent frames take {needed} in whole chunks, but recipe {recipe.name!r} keeps the "
            f"full history of at most {recipe.max_latent_frames}. Ask for fewer frames, or set a window "
            "(num_window_frames=9, num_sink_frames=3 in the call; --num-window-frames 9 --num-sink-frames 3 of the scripts) or a "
            "larger max_latent_frames."
        )
