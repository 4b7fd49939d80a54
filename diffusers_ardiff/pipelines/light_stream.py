"""The light decoder as a stream: chunks in, chunks out, with a state per rollout."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import torch

from .light_decoder import LightDecoder

LightStep = Callable[[torch.Tensor, tuple[torch.Tensor, ...]], tuple[torch.Tensor, tuple[torch.Tensor, ...]]]
"""(latents, state) -> (pixels, state), as ``LightDecoder.forward``."""


class LightDecodeStream:
    """Decoder state of one rollout; streams on the same decoder do not influence each other.

    A chunk is one call of the network, whatever its length. The same chunks give the same bits; other chunks agree to
    float rounding.

    Args:
        decoder: the network, on the device of the latents.
        step: how a chunk is decoded; None: the network itself, else a compiled form of it.
    """

    def __init__(self, decoder: LightDecoder, step: LightStep | None = None) -> None:
        self._decoder = decoder
        self._step: LightStep = step if step is not None else decoder
        self.reset()

    def reset(self) -> None:
        """Forget the past and free the state; the next chunk begins a video of any size."""
        self._state: tuple[torch.Tensor, ...] = ()
        self._size: tuple[int, ...] | None = None
        self._num_latent_frames = 0

    def fork(self) -> LightDecodeStream:
        """A second stream that goes on from the same past. State tensors are replaced, never written: no copy."""
        return copy.copy(self)

    @property
    def num_latent_frames(self) -> int:
        """Latent frames that went through since the video began."""
        return self._num_latent_frames

    @property
    def state_bytes(self) -> int:
        """Bytes of the tensors held now; constant from the first chunk on."""
        return sum(entry.untyped_storage().nbytes() for entry in self._state)

    @torch.no_grad()
    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Decode the next chunk; a chunk that fails leaves the past as it was.

        Args:
            latents: (B, C, n, h, w), normalised as the transformer makes them.

        Returns:
            (B, 3, frames, H, W), float32 in [-1, 1]; ``4n - 3`` frames for the first chunk and ``4n`` afterwards.

        Raises:
            ValueError: wrong shape, or batch or size other than this video began with.
        """
        channels = self._decoder.latent_channels
        if latents.ndim != 5 or latents.shape[1] != channels or 0 in latents.shape:
            raise ValueError(
                f"latents must be (batch, {channels}, frames, height, width), got {tuple(latents.shape)}."
            )
        size = (latents.shape[0], *latents.shape[3:])
        if self._size is not None and size != self._size:
            raise ValueError(
                f"A video keeps (batch, height, width): it began with {self._size}, got {size}. Call reset() to begin "
                "another video."
            )
        is_first = self._num_latent_frames == 0
        state = self._decoder.empty_state(*size) if is_first else self._state
        pixels, self._state = self._step(latents.contiguous(), state)
        self._size = size
        self._num_latent_frames += latents.shape[2]
        return pixels[:, :, self._decoder.temporal_factor - 1 :] if is_first else pixels


def light_state_bytes(decoder: LightDecoder, batch: int, latent_height: int, latent_width: int) -> int:
    """Bytes that a ``LightDecodeStream`` holds from its first chunk on."""
    shapes = decoder.state_shapes(batch, latent_height, latent_width)
    return sum(math.prod(shape) for shape in shapes) * decoder.dtype.itemsize
