"""Chunks denoised together, each one step further than the next (Rolling Forcing).

With n steps, n chunks are in the window. Every forward holds all of them, each at its own timestep, all seeing each
other; the oldest leaves it finished and a new one enters as noise. Its first n - 1 forwards hold fewer chunks, and so do the
last ones of a bounded video.

    forward 0   [t0]                     chunk 0 enters
    forward 4   [t4 t3 t2 t1 t0]         chunk 0 is done, committed next
    forward 5      [t4 t3 t2 t1 t0]      chunk 1 is done
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from ..recipes import Recipe
from .denoise import AfterStep, ChunkDenoiser, Denoiser, FrameStep
from .frames import generated_chunk_sizes
from .rollout import Rollout
from .steps import NoiseSource, add_noise, predict_clean


@dataclass(frozen=True, kw_only=True)
class RollingBlock:
    """One chunk in the window: latents (videos, channels, frames, height, width) after ``num_done`` steps."""

    latents: torch.Tensor
    chunk_index: int
    num_done: int = 0


@dataclass
class RollingWindow:
    """Chunks that are begun, oldest first; stays with a stream from chunk to chunk, empty where the recipe has none."""

    blocks: list[RollingBlock] = field(default_factory=list)

    def copy(self) -> RollingWindow:
        """The same chunks for a fork."""
        return RollingWindow(list(self.blocks))

    def move(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Apply ``function`` to all latents, such as a copy to another device."""
        self.blocks = [replace(block, latents=function(block.latents)) for block in self.blocks]


class RollingDenoiser:
    """The few-step rule on all chunks of a window, until the oldest is done, which then leaves the window.

    Only the oldest will be committed next, so the others' rows live for each forward only.

    Args:
        recipe: steps.
        noise: drawn from in order: a chunk's initial noise when it enters; after a forward, that of each chunk.
        shape: (videos, channels, frames, height, width) of one chunk.
        place: index of the oldest chunk and of its first frame, counted over what is generated.
        after_step: called after each forward with the oldest chunk's timestep and latents.
        window: the chunks that are begun, and how many are left to make, the oldest included; None: endless.
    """

    def __init__(
        self,
        recipe: Recipe,
        noise: NoiseSource,
        shape: tuple[int, ...],
        place: tuple[int, int],
        after_step: AfterStep,
        window: tuple[RollingWindow, int | None],
    ) -> None:
        self._timesteps, self._sigmas = recipe.timesteps(), recipe.sigmas()
        self._noise, self._shape, self._place = noise, shape, place
        self._after_step = after_step
        self._window, self._num_left = window
        self._finished: RollingBlock | None = None
        self._stopped = False
        self._enter()

    @property
    def latents(self) -> torch.Tensor:
        """The oldest chunk as it stands."""
        return (self._finished or self._window.blocks[0]).latents

    @property
    def step(self) -> FrameStep | None:
        """The next forward of all chunks; None: the oldest is done."""
        if self._stopped or self._finished is not None:
            return None
        blocks, size = self._window.blocks, self._shape[2]
        return FrameStep(
            latents=torch.cat([block.latents for block in blocks], dim=2),
            timestep=tuple(self._timesteps[block.num_done] for block in blocks for _ in range(size)),
            num_extra_frames=(len(blocks) - 1) * size,
        )

    def take(self, velocity: torch.Tensor) -> None:
        """Go on with the transformer's output for ``step``."""
        blocks = self._window.blocks
        timestep = self._timesteps[blocks[0].num_done]
        parts = velocity.split(self._shape[2], dim=2)
        blocks[:] = [self._advanced(block, part) for block, part in zip(blocks, parts, strict=True)]
        latents, self._stopped = self._after_step(timestep, blocks[0].latents)
        blocks[0] = replace(blocks[0], latents=latents)
        if blocks[0].num_done == len(self._timesteps):
            self._finished = blocks.pop(0)
        else:
            self._enter()

    def _advanced(self, block: RollingBlock, velocity: torch.Tensor) -> RollingBlock:
        done = block.num_done
        latents = predict_clean(block.latents, velocity, self._sigmas[done])
        if done + 1 < len(self._sigmas):
            noise = self._noise.step(self._shape, block.chunk_index, done)
            latents = add_noise(latents, noise, self._sigmas[done + 1])
        return replace(block, latents=latents, num_done=done + 1)

    def _enter(self) -> None:
        """Let one more chunk in, if there is room and one is to come."""
        blocks = self._window.blocks
        room = len(self._timesteps) if self._num_left is None else min(len(self._timesteps), self._num_left)
        if len(blocks) < room:
            index, first_frame = self._place[0] + len(blocks), self._place[1] + len(blocks) * self._shape[2]
            blocks.append(RollingBlock(latents=self._noise.initial(self._shape, first_frame), chunk_index=index))


def start_denoiser(
    rollout: Rollout,
    noise: NoiseSource,
    size: int,
    place: tuple[int, int],
    after_step: AfterStep,
    window: RollingWindow,
    total_latent_frames: int | None,
) -> Denoiser:
    """What makes the next chunk of ``size`` frames under the rollout's recipe; see the two classes.

    ``total_latent_frames`` is that of the whole video, None: endless.
    """
    recipe, shape, done = rollout.recipe, rollout.shape.chunk(size), rollout.num_latent_frames
    if recipe.context_mode != "rolling":
        return ChunkDenoiser(recipe, noise, shape, place, after_step)
    left = None if total_latent_frames is None else len(generated_chunk_sizes(recipe, done, total_latent_frames))
    return RollingDenoiser(recipe, noise, shape, place, after_step, (window, left))
