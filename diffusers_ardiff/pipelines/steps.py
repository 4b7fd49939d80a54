"""The few-step rule and the noise it draws."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from diffusers.utils.torch_utils import randn_tensor

from ..transfer import upload

StepNoise = torch.Tensor | Callable[[int, int, tuple[int, ...]], torch.Tensor]
"""Noise added after each but a chunk's last step: (chunks, steps - 1, videos, channels, frames, height, width), or a
function of (chunk index, step index, shape of one chunk's latents)."""


def predict_clean(noisy: torch.Tensor, velocity: torch.Tensor, sigma: float) -> torch.Tensor:
    """x0 = x - sigma * v, in float32, for a flow-matching velocity v = noise - x0."""
    return noisy.float() - sigma * velocity.float()


def add_noise(clean: torch.Tensor, noise: torch.Tensor, sigma: float) -> torch.Tensor:
    """(1 - sigma) * x0 + sigma * noise: the clean latents at another noise level."""
    return (1.0 - sigma) * clean + sigma * noise


@dataclass(kw_only=True)
class NoiseSource:
    """Draws a rollout's noise chunk by chunk, so that a longer run begins like a shorter one, bit by bit.

    Order within a chunk: its initial noise, then the noise of each step.

    Args:
        generator: one for all videos, or one a video, which then equals that video made alone.
        latents: given initial noise (videos, channels, all generated frames, height, width).
        step_noise: given step noise; see ``StepNoise``.
    """

    device: torch.device
    generator: Any = None
    latents: torch.Tensor | None = None
    step_noise: StepNoise | None = None

    def initial(self, shape: tuple[int, ...], first_frame: int) -> torch.Tensor:
        """Noise a chunk starts from; ``first_frame`` counts generated frames.

        Raises:
            ValueError: the given latents end before this chunk does.
        """
        if self.latents is None:
            return self._draw(shape)
        end = first_frame + shape[2]
        if end > self.latents.shape[2]:
            raise ValueError(
                f"`latents` holds noise for {self.latents.shape[2]} frames, the next chunk needs frames {first_frame} "
                f"to {end - 1}. Give more noise, or stop before."
            )
        return upload(self.latents[:, :, first_frame:end].float(), self.device)

    def step(self, shape: tuple[int, ...], chunk_index: int, step_index: int) -> torch.Tensor:
        """Noise added after one step of a chunk."""
        if self.step_noise is None:
            return self._draw(shape)
        if callable(self.step_noise):
            noise = self.step_noise(chunk_index, step_index, shape)
        elif chunk_index >= self.step_noise.shape[0] or step_index >= self.step_noise.shape[1]:
            raise ValueError(
                f"`step_noise` holds noise for {tuple(self.step_noise.shape[:2])} (chunks, steps), chunk {chunk_index}, "
                f"step {step_index} needs more. Give more noise, or stop before."
            )
        else:
            noise = self.step_noise[chunk_index, step_index]
        if tuple(noise.shape) != tuple(shape):
            raise ValueError(
                f"`step_noise` of chunk {chunk_index}, step {step_index} has shape {tuple(noise.shape)}, expected "
                f"{tuple(shape)}."
            )
        return upload(noise.float(), self.device)

    def fork(self, generator: Any = None) -> NoiseSource:
        """The noise to come, once more: drawing from one source does not advance the other.

        Args:
            generator: draw from it instead, as in ``NoiseSource``; None: from copies of this source's generators as
                they are now. Where this source has none, both draw from torch's global generator.
        """
        if generator is None and self.generator is not None:
            is_list = isinstance(self.generator, list)
            generator = [g.clone_state() for g in self.generator] if is_list else self.generator.clone_state()
        return dataclasses.replace(self, generator=generator)

    def state(self) -> list[torch.Tensor]:
        """Where the generators stand; empty where there is none and torch's global one is drawn from."""
        return [generator.get_state() for generator in self._generators]

    def rewind(self, state: list[torch.Tensor]) -> None:
        """Draw again what was drawn since ``state`` was taken; no-op without a generator."""
        for generator, known in zip(self._generators, state, strict=True):
            generator.set_state(known)

    @property
    def _generators(self) -> list[torch.Generator]:
        if self.generator is None:
            return []
        return self.generator if isinstance(self.generator, list) else [self.generator]

    def _draw(self, shape: tuple[int, ...]) -> torch.Tensor:
        # Drawn where the generator lives, then copied without waiting: the device goes on with what is queued.
        first = self.generator[0] if isinstance(self.generator, list) else self.generator
        device = self.device if first is None else first.device
        return upload(randn_tensor(shape, generator=self.generator, device=device, dtype=torch.float32), self.device)
