"""How a stream runs, and what callbacks may change while it does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .live import EventRules
from .prompts import PromptSwitch

StepCallback = Callable[[Any, int, float, dict[str, Any]], dict[str, Any] | None]
"""(pipeline, step, timestep, tensors) -> tensors to go on with, or None: diffusers' ``callback_on_step_end``."""


@dataclass(kw_only=True)
class CallState:
    """What callbacks read and change while a stream runs; the pipeline keeps it, and no memory with it, afterwards.

    Args:
        guidance_scale: may be changed between steps.
        num_timesteps: denoise steps of all chunks together; 0 for an endless stream.
        interrupted: stop after the current step.
    """

    guidance_scale: float
    num_timesteps: int = 0
    interrupted: bool = False


class CallProperties:
    """The pipeline's properties of its latest call, under the names that diffusers users and callbacks know."""

    call_state: CallState | None

    @property
    def guidance_scale(self) -> float | None:
        """Guidance scale of the running call (of the finished one, after it)."""
        return self.call_state.guidance_scale if self.call_state is not None else None

    @property
    def num_timesteps(self) -> int:
        """Denoise steps of the running call (of the finished one, after it), all chunks together; 0: endless."""
        return self.call_state.num_timesteps if self.call_state is not None else 0

    @property
    def interrupt(self) -> bool:
        """Whether the running call was asked to stop after its current step."""
        return self.call_state is not None and self.call_state.interrupted

    # The names that diffusers callbacks write to.

    @property
    def _guidance_scale(self) -> float | None:
        return self.guidance_scale

    @_guidance_scale.setter
    def _guidance_scale(self, value: float) -> None:
        if self.call_state is not None:
            self.call_state.guidance_scale = value

    @property
    def _interrupt(self) -> bool:
        return self.interrupt

    @_interrupt.setter
    def _interrupt(self, value: bool) -> None:
        if self.call_state is not None:
            self.call_state.interrupted = value


@dataclass(kw_only=True)
class StreamSettings:
    """How one stream runs; checked by the pipeline before it is made.

    Args:
        given: clean latents of each given chunk, in order.
        num_frames, total_latent_frames: pixel and latent frames to hand out in all, given ones included; None: endless.
        output_type: form of ``ARChunk.frames``.
        rules: what the stream takes while it runs; its ``text_len`` serves later prompts too.
        schedule: prompt switches, sorted by frame.
        callback, callback_tensors: ``callback_on_step_end`` and the names of the tensors it gets.
        on_step: called after each step, for progress bars.
    """

    given: Sequence[torch.Tensor]
    num_frames: int | None
    total_latent_frames: int | None
    output_type: str
    rules: EventRules
    schedule: Sequence[PromptSwitch] = ()
    callback: StepCallback | None = None
    callback_tensors: Sequence[str] = ("latents",)
    on_step: Callable[[], None] | None = None
