"""One video on several processes: all of them were asked for the same one, from the same noise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..parallel import VideoGroups
from .checked_call import CheckedCall
from .prompts import PromptSwitch


def check_same_call(groups: VideoGroups | None, call: CheckedCall) -> None:
    """Raise ValueError on all ranks of a team where they were given different videos to make."""
    if groups is None:
        return
    a, frames = call.arguments, call.frames
    values = {
        name: getattr(a, name)
        for name in ("prompt", "negative_prompt", "prompt_embeds", "negative_prompt_embeds", "generator", "latents")
    }
    step_noise = a.step_noise if isinstance(a.step_noise, torch.Tensor) else None
    values |= {"context_latents": a.context_latents, "image or video": call.given_video, "step_noise": step_noise}
    values |= {"prompt_schedule": [_switch_parts(switch) for switch in a.prompt_schedule], "recipe": call.recipe}
    values |= {"height and width": call.planner.shape, "guidance_scale": call.guidance_scale}
    values |= {"num_frames": (frames.num_frames, frames.generated_sizes), "merge_commits": a.merge_commits}
    groups.check_same(values)


def _switch_parts(switch: PromptSwitch) -> Sequence[Any]:
    return [
        switch.latent_frame,
        switch.prompt,
        switch.prompt_embeds,
        switch.mode,
        switch.keep_frames,
        switch.blend_chunks,
    ]


def shared_generator(groups: VideoGroups | None, generator: Any) -> Any:
    """The generator of a call; where none is given, one that all ranks of a team seed alike, from the first one's."""
    if groups is None or generator is not None:
        return generator
    return torch.Generator().manual_seed(groups.share(int(torch.randint(2**62, ()))))
