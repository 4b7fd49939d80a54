"""The one way in which controls reach the model: a callable that edits the transformer's arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

_OWNED = ("encoder_hidden_states", "encoder_hidden_states_image", "return_dict")


@dataclass(frozen=True, kw_only=True)
class ControlInputs:
    """What a control hook sees of one transformer forward.

    Args:
        latents: (videos, channels, frames, height, width) in the transformer's dtype, a copy: noisy in a denoise
            forward, clean in a commit or a recache.
        timestep: (videos,) float32; (videos, tokens) where the frames of a forward have several ("rolling" recipes).
        frame_controls: the controls of each latent frame; None for frames made before any were given. All the same
            object in a denoise forward and in the commit of its chunk; a recache spans several chunks.
        start_latent_frame: absolute latent frame of the first one; 0 where a "recompute" recipe computes its context
            again, whose frames do not follow each other.
        branch: ``"positive"``, or ``"negative"`` under guidance.
    """

    latents: torch.Tensor
    timestep: torch.Tensor
    frame_controls: tuple[Any, ...]
    start_latent_frame: int
    branch: str

    @property
    def controls(self) -> Any:
        """The controls of the last latent frame: in a denoise forward, the stream's latest."""
        return self.frame_controls[-1]


ControlHook = Callable[[ControlInputs], Mapping[str, Any]]
"""Called before every transformer forward (denoise, commit, recache; each branch). Returns keyword arguments for the
transformer that replace ``hidden_states`` or ``timestep`` or come on top of them; an empty mapping changes nothing."""


def apply_hook(hook: ControlHook, inputs: ControlInputs) -> dict[str, Any]:
    """The transformer's keyword arguments under a hook.

    Raises:
        TypeError: the hook returned no mapping.
        ValueError: it changed a shape that the cache depends on, or an argument that is not its own.
    """
    changed = hook(inputs)
    if not isinstance(changed, Mapping):
        raise TypeError(f"a control hook returns a mapping of transformer arguments, got {type(changed).__name__}.")
    owned = [name for name in _OWNED if name in changed]
    if owned:
        raise ValueError(
            f"a control hook can't set {owned}: text comes from the stream's text K/V; change it by `update(prompt=...)`."
        )
    plain = {"hidden_states": inputs.latents, "timestep": inputs.timestep}
    for name, value in plain.items():
        new = changed.get(name, value)
        if not isinstance(new, torch.Tensor) or new.shape != value.shape:
            got = tuple(new.shape) if isinstance(new, torch.Tensor) else type(new).__name__
            raise ValueError(
                f"a control hook must keep the shape of `{name}`, {tuple(value.shape)}, which the pages of this forward "
                f"were laid out for; got {got}."
            )
        plain[name] = new.to(value)
    return {**changed, **plain}
