"""What every streaming decoder can do."""

from __future__ import annotations

from typing import Protocol, Self

import torch


class DecodeStream(Protocol):
    """Decoder state of one rollout: ``VaeDecodeStream`` or ``LightDecodeStream``."""

    @property
    def num_latent_frames(self) -> int:
        """Latent frames that went through since the video began."""

    @property
    def state_bytes(self) -> int:
        """Bytes of the state held now."""

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Frames (B, 3, frames, H, W), float32 in [-1, 1], of the next chunk (B, C, n, h, w)."""

    def fork(self) -> Self:
        """A second stream that goes on from the same past."""

    def reset(self) -> None:
        """Forget the past."""
