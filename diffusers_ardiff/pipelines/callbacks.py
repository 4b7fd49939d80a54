"""``callback_on_step_end``: what it is given, and what it changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from .calls import NEGATIVE, POSITIVE
from .prompts import PromptState
from .settings import StreamSettings

if TYPE_CHECKING:
    from .host import PipelineHost

ENDED_EARLY = (
    "a callback, a control hook or a `step_noise` function raised StopIteration before the video's end; an iterator it "
    "takes from may be too short."
)
_BRANCHES = {"prompt_embeds": POSITIVE, "negative_prompt_embeds": NEGATIVE}


def run_callback(
    pipeline: PipelineHost,
    settings: StreamSettings,
    prompt: PromptState,
    step: int,
    timestep: float,
    latents: torch.Tensor,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Call it after a step; the latents to go on with, and embeddings by branch name where they changed.

    Tensors may be returned, or edited in place and not returned, as in diffusers.
    """
    if settings.callback is None:
        return latents, {}
    known = {"latents": latents, **{name: prompt.embeds.get(branch) for name, branch in _BRANCHES.items()}}
    passed = {name: known[name] for name in settings.callback_tensors}
    # The callback may take tensors out of its dictionary.
    returned = settings.callback(pipeline, step, timestep, dict(passed))
    if not isinstance(returned, Mapping | None):
        raise TypeError(f"callback_on_step_end must return a dictionary of tensors, or None, got {returned!r}.")
    after: Mapping[str, Any] = passed | dict(returned or {})
    embeds = {branch: after[name] for name, branch in _BRANCHES.items() if after.get(name) is not None}
    changed = {branch: value for branch, value in embeds.items() if not prompt.is_current(branch, value)}
    return _fitting(after.get("latents", latents), latents), changed


def _fitting(returned: Any, latents: torch.Tensor) -> torch.Tensor:
    """Latents of a callback, in the dtype and on the device of those it got."""
    if not isinstance(returned, torch.Tensor) or returned.shape != latents.shape:
        got = tuple(returned.shape) if isinstance(returned, torch.Tensor) else repr(returned)
        raise ValueError(f"callback_on_step_end must return `latents` of shape {tuple(latents.shape)}, got {got}.")
    return returned.to(latents)
