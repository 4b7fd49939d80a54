"""The first frame of a recomputed context, encoded again from pixels that were handed out (Krea Realtime).

A context is a short video of its own: its first latent frame should be that of one pixel frame, as a video's first is,
and not one that stands for several. Once the true first frame is too far away, the pixel frame right before those of
the context's other latents takes its place, encoded alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from ..recipes import Recipe
from .vae_stream import encode_video, temporal_factor
from .window import num_past_frames


def num_kept_pixels(recipe: Recipe, factor: int) -> int:
    """Pixel frames to keep: the one to encode, and those of the past latents behind it. 2 at 4 make 9."""
    return 1 + num_past_frames(recipe) * factor


class FirstFrame:
    """The last decoded frames of a rollout, of which the oldest is encoded alone.

    Args:
        vae: encodes.
        recipe: of context mode "recompute".
    """

    def __init__(self, vae: Any, recipe: Recipe) -> None:
        self._vae = vae
        self._num_pixels = num_kept_pixels(recipe, temporal_factor(vae))
        self._pixels: torch.Tensor | None = None
        self._latents: torch.Tensor | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of the pixels kept."""
        return 0 if self._pixels is None else self._pixels.untyped_storage().nbytes()

    def add(self, pixels: torch.Tensor) -> None:
        """Take the decoded frames (videos, 3, frames, H, W) in [-1, 1] of the next chunk."""
        known = [] if self._pixels is None else [self._pixels]
        joined = torch.cat([*known, pixels.to(self._vae.dtype)], dim=2)
        self._pixels, self._latents = joined[:, :, -self._num_pixels :].clone(), None

    def latents(self) -> torch.Tensor:
        """The oldest pixel frame kept, as a latent frame (videos, channels, 1, h, w) float32; encoded once a chunk.

        Raises:
            RuntimeError: no frames were decoded.
        """
        if self._pixels is None or self._pixels.shape[2] < self._num_pixels:
            have = 0 if self._pixels is None else self._pixels.shape[2]
            raise RuntimeError(
                f"the context's first frame is encoded from the oldest of {self._num_pixels} decoded frames, and {have} "
                "were decoded. Take chunks from the stream, or a recipe with encode_first_frame=False."
            )
        if self._latents is None:
            self._latents = encode_video(self._vae, self._pixels[:, :, :1])
        return self._latents

    def copy(self) -> FirstFrame:
        """For a fork. Tensors are replaced, never written."""
        return copy.copy(self)

    def move(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Apply ``function`` to the pixels, such as a copy to another device."""
        self._latents = None
        if self._pixels is not None:
            self._pixels = function(self._pixels)

    def clear(self) -> None:
        """Forget the past."""
        self._pixels = self._latents = None
