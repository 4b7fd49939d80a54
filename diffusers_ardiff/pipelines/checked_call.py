"""A call after its checks, before anything is allocated."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..recipes import Recipe
from .decode_stream import DecodeStream
from .inputs import CallArguments, FramePlan
from .live import EventRules
from .memory import CachePlanner


@dataclass(frozen=True, kw_only=True)
class CheckedCall:
    """Arguments that passed every check, with what follows from them. Nothing is allocated or encoded yet."""

    arguments: CallArguments
    recipe: Recipe
    guidance_scale: float
    frames: FramePlan
    planner: CachePlanner
    given_video: torch.Tensor | None
    decoder: DecodeStream | None
    rules: EventRules

    @property
    def num_videos(self) -> int:
        """Rows of every forward."""
        return self.planner.shape.num_videos

    @property
    def num_steps(self) -> int:
        """Denoise steps of all chunks; 0 for an endless stream."""
        chunks = range(len(self.frames.generated_sizes or ()))
        if self.recipe.context_mode == "rolling":
            return len(chunks) + self.recipe.num_chunks_at_once - 1 if chunks else 0
        return sum(len(self.recipe.timesteps(index)) for index in chunks)
