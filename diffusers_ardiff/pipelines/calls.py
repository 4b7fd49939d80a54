"""What the transformer is called with: latents, timestep, rotary angles, text, for a plain or a merged forward."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from ..cache import TextKV
from ..context import PagedForwardContext
from ..graphs import ForwardCall
from ..merged import MergedForwardContext
from ..processors import PagedAttachment
from ..rope import Rotary, VideoRope
from .hook import ControlHook, ControlInputs, apply_hook
from .window import LatentShape

POSITIVE, NEGATIVE = "positive", "negative"
_CACHE_CONTEXT = {POSITIVE: "cond", NEGATIVE: "uncond"}


class ForwardCalls:
    """Makes the calls of one rollout.

    Args:
        attachment: paged processors of the transformer.
        shape: of the latents.
        device: where the transformer runs.
    """

    def __init__(self, attachment: PagedAttachment, shape: LatentShape, device: torch.device) -> None:
        self._shape = shape
        self._device = device
        self._geometry = attachment.geometry
        self._rope = VideoRope(head_dim=self._geometry.head_dim)
        transformer = attachment.transformer
        # Text K/V are bound in every forward; the host only needs a row to run its text embedder on.
        self._text_stub = torch.zeros(
            shape.num_videos, 1, transformer.config["text_dim"], dtype=transformer.dtype, device=device
        )
        self._rotary: dict[tuple[int, int], Rotary] = {}

    @property
    def tokens_per_frame(self) -> int:
        """C, tokens of one latent frame."""
        return self._geometry.tokens_per_frame(self._shape.height, self._shape.width)

    def plain(
        self,
        context: PagedForwardContext,
        latents: torch.Tensor,
        timestep: float,
        text: TextKV,
        *,
        branch: str,
        control: tuple[ControlHook | None, Sequence[Any]],
    ) -> ForwardCall:
        """The call of one chunk: latents (videos, channels, frames, height, width) at one timestep.

        Args:
            context: of its tokens.
            latents, timestep: of all its frames.
            text: of its rows.
            branch: name of the branch.
            control: the hook that edits the arguments, and the controls of each frame.
        """
        start = context.starts[0] // self.tokens_per_frame
        latents, timesteps = latents.to(self._text_stub.dtype), self._timesteps(timestep)
        arguments = {"hidden_states": latents, "timestep": timesteps}
        hook, frame_controls = control
        if hook is not None:
            # A clone: a hook that edits in place must not reach the latents that the next step starts from.
            inputs = ControlInputs(
                latents=latents.clone(),
                timestep=timesteps,
                frame_controls=tuple(frame_controls),
                start_latent_frame=start,
                branch=branch,
            )
            arguments = apply_hook(hook, inputs)
        return ForwardCall(
            context=context,
            arguments=arguments | {"encoder_hidden_states": self._text_stub},
            rotary=self._rotary_for(start, latents.shape[2]),
            text=text,
            cache_name=_CACHE_CONTEXT[branch],
        )

    def merged(
        self, context: MergedForwardContext, chunks: Sequence[torch.Tensor], timesteps: Sequence[float], text: TextKV
    ) -> ForwardCall:
        """The call of two chunks as two halves of one batch: the one to commit, then the next one.

        As rows and not as one long sequence: each half has a timestep of its own, so the modulation stays one vector a
        row instead of one a token.

        Args:
            context: of their tokens.
            chunks, timesteps: of both.
            text: of the rows of one half, twice.
        """
        starts = (context.starts[0], context.upcoming_starts[0])
        num_videos, num_frames = chunks[0].shape[0], chunks[0].shape[2]
        angles = (self._rotary_for(start // self.tokens_per_frame, num_frames) for start in starts)
        cos, sin = (
            torch.cat([half.expand(num_videos, -1, -1, -1) for half in pair]) for pair in zip(*angles, strict=True)
        )
        return ForwardCall(
            context=context,
            arguments={
                "hidden_states": torch.cat(list(chunks)).to(self._text_stub.dtype),
                "timestep": torch.cat([self._timesteps(timestep) for timestep in timesteps]),
                "encoder_hidden_states": torch.cat([self._text_stub, self._text_stub]),
            },
            rotary=(cos, sin),
            text=text,
            cache_name=_CACHE_CONTEXT[POSITIVE],
        )

    def copy(self) -> ForwardCalls:
        """For a fork, which is closed by itself."""
        copied = copy.copy(self)
        copied._rotary = dict(self._rotary)
        return copied

    def close(self) -> None:
        """Let go of all tensors; no call can be made any more."""
        self._rotary.clear()
        self._text_stub = self._text_stub.new_empty(0)

    def _timesteps(self, timestep: float) -> torch.Tensor:
        # One a row, not one a token: its embedding is computed once and broadcast.
        return torch.full((self._shape.num_videos,), timestep, device=self._device)

    def _rotary_for(self, start_frame: int, num_frames: int) -> Rotary:
        """Angles of these frames, computed once a chunk; those of the last two chunks are kept."""
        key = (start_frame, num_frames)
        if key not in self._rotary:
            _, patch_height, patch_width = self._geometry.patch_size
            grid = (self._shape.height // patch_height, self._shape.width // patch_width)
            frames = list(range(start_frame, start_frame + num_frames))
            for oldest in list(self._rotary)[:-1]:
                del self._rotary[oldest]
            self._rotary[key] = self._rope([frames], *grid, device=self._device)
        return self._rotary[key]
