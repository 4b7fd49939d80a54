"""What the pipeline hands out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from diffusers.utils.outputs import BaseOutput


@dataclass
class ARDiffusionPipelineOutput(BaseOutput):
    """Videos of one call.

    Args:
        frames: by ``output_type``: ``"np"`` array (videos, frames, height, width, 3) in [0, 1]; ``"pt"`` tensor
            (videos, frames, 3, height, width); ``"pil"`` list of lists of images; ``"latent"`` tensor
            (videos, channels, latent frames, height, width).
    """

    frames: Any


@dataclass(frozen=True, kw_only=True)
class ARChunk:
    """One chunk of a stream.

    Args:
        index: number of the chunk in the stream, given ones included.
        frames: pixel frames of this chunk, in the form of ``ARDiffusionPipelineOutput.frames``.
        latents: (videos, channels, latent frames, height, width) float32, clean.
        start_latent_frame: absolute latent frame of the first one.
        is_given: the chunk holds latents of a given image or video.
    """

    index: int
    frames: Any
    latents: torch.Tensor
    start_latent_frame: int
    is_given: bool = False

    @property
    def num_latent_frames(self) -> int:
        """Latent frames of this chunk."""
        return self.latents.shape[2]
