"""The denoising of one chunk, step by step, so that whoever runs the transformer may serve several chunks at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..recipes import Recipe
from .steps import NoiseSource, add_noise, predict_clean

AfterStep = Callable[[float, torch.Tensor], tuple[torch.Tensor, bool]]
"""(timestep, latents after the step) -> (latents to go on with, whether to stop here)."""


@dataclass(frozen=True, kw_only=True)
class FrameStep:
    """What one forward of a rollout is given.

    Args:
        latents: (videos, channels, frames, height, width).
        timestep: in [0, 1000], of all frames, or one a frame.
        num_extra_frames: how many of the last frames live for this forward only.
        controls: one a frame; None: the rollout's current ones.
        start_frame: absolute latent frame of the first one, where that is not the next of the cache.
    """

    latents: torch.Tensor
    timestep: float | tuple[float, ...]
    num_extra_frames: int = 0
    controls: tuple[Any, ...] | None = None
    start_frame: int | None = None

    @property
    def num_frames(self) -> int:
        """All frames of the forward."""
        return self.latents.shape[2]


class Denoiser(Protocol):
    """Makes one chunk: ask for ``step``, give its velocity to ``take``, until there is no step left."""

    @property
    def latents(self) -> torch.Tensor:
        """The chunk as it stands."""
        ...

    @property
    def step(self) -> FrameStep | None:
        """The next forward; None: the chunk is done."""
        ...

    def take(self, velocity: torch.Tensor) -> None:
        """Go on with the transformer's output for ``step``."""
        ...


class ChunkDenoiser:
    """The few-step rule on one chunk.

    Args:
        recipe: steps.
        noise: drawn from in order: the initial noise now, then that of each step.
        shape: (videos, channels, frames, height, width).
        place: index of the chunk and of its first frame, counted over what is generated.
        after_step: called after each step.
    """

    def __init__(
        self,
        recipe: Recipe,
        noise: NoiseSource,
        shape: tuple[int, ...],
        place: tuple[int, int],
        after_step: AfterStep,
    ) -> None:
        chunk_index, first_frame = place
        self._timesteps, self._sigmas = recipe.timesteps(chunk_index), recipe.sigmas(chunk_index)
        self._noise, self._shape, self._chunk_index = noise, shape, chunk_index
        self._after_step = after_step
        self._num_done = 0
        self._stopped = False
        self.latents = noise.initial(shape, first_frame)

    @property
    def step(self) -> FrameStep | None:
        """The next forward; None: the chunk is done."""
        if self._stopped or self._num_done == len(self._timesteps):
            return None
        return FrameStep(latents=self.latents, timestep=self._timesteps[self._num_done])

    def take(self, velocity: torch.Tensor) -> None:
        """Go on with the transformer's output for ``step``."""
        done = self._num_done
        latents = predict_clean(self.latents, velocity, self._sigmas[done])
        if done + 1 < len(self._sigmas):
            noise = self._noise.step(self._shape, self._chunk_index, done)
            latents = add_noise(latents, noise, self._sigmas[done + 1])
        self._num_done += 1
        self.latents, self._stopped = self._after_step(self._timesteps[done], latents)
