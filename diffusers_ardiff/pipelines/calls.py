"""What the transformer is called with: latents, timestep, rotary angles, text, for a plain, joint or merged forward."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..cache import TextKV
from ..context import PagedForwardContext
from ..graphs import ForwardCall
from ..merged import MergedForwardContext
from ..processors import PagedAttachment
from ..recipes import Recipe
from ..rope import Rotary, VideoRope
from ..rope_policies import RopePolicy
from ..transfer import upload
from .angles import FrameAngles
from .denoise import FrameStep
from .hook import ControlHook, ControlInputs, apply_hook
from .window import LatentShape, max_past_frames

POSITIVE, NEGATIVE = "positive", "negative"
_CACHE_CONTEXT = {POSITIVE: "cond", NEGATIVE: "uncond"}


class ForwardCalls:
    """Makes the calls of one rollout.

    Args:
        attachment: paged processors of the transformer.
        shape: of the latents.
        policy: where rotary positions put the sink.
        device: where the transformer runs.

    Attributes:
        angles: of the rollout's frames; they have to be prepared before a forward claims its branches.
    """

    def __init__(
        self, attachment: PagedAttachment, shape: LatentShape, policy: RopePolicy, device: torch.device
    ) -> None:
        self._shape = shape
        self._device = device
        self._geometry = attachment.geometry
        _, patch_height, patch_width = self._geometry.patch_size
        grid = (shape.height // patch_height, shape.width // patch_width)
        self.angles = FrameAngles(VideoRope(head_dim=self._geometry.head_dim), grid, policy, device)
        transformer = attachment.transformer
        # Text K/V are bound in every forward; the host only needs a row to run its text embedder on.
        self._text_stub = torch.zeros(
            shape.num_videos, 1, transformer.config["text_dim"], dtype=transformer.dtype, device=device
        )

    @property
    def tokens_per_frame(self) -> int:
        """C, tokens of one latent frame."""
        return self._geometry.tokens_per_frame(self._shape.height, self._shape.width)

    def max_past_tokens(self, recipe: Recipe, step: FrameStep) -> int | None:
        """Tokens beside the sink that a forward sees before its own; None: all that are stored."""
        frames = max_past_frames(recipe, step.num_frames)
        return None if frames is None else frames * self.tokens_per_frame

    def count_tokens(self, step: FrameStep) -> tuple[int, int]:
        """(tokens, extra rows) of one video in a forward."""
        num_extra = step.num_extra_frames * self.tokens_per_frame
        return step.num_frames * self.tokens_per_frame - num_extra, num_extra

    def arguments(self, step: FrameStep, hook: ControlHook | None, *, branch: str) -> dict[str, Any]:
        """The transformer's arguments for these frames but for its text.

        Args:
            step: with a start frame and controls, if there is a hook.
            hook: edits the arguments.
            branch: name of the branch.
        """
        latents, timesteps = step.latents.to(self._text_stub.dtype), self._timesteps(step.timestep)
        if hook is None:
            return {"hidden_states": latents, "timestep": timesteps}
        inputs = ControlInputs(
            # A clone: a hook that edits in place must not reach the latents that the next step starts from.
            latents=latents.clone(),
            timestep=timesteps,
            frame_controls=step.controls or (),
            start_latent_frame=step.start_frame or 0,
            branch=branch,
        )
        return apply_hook(hook, inputs)

    def plain(
        self, context: PagedForwardContext, arguments: Mapping[str, Any], text: TextKV, *, branch: str
    ) -> ForwardCall:
        """The call of one chunk with ``arguments``; turns the sinks of its branches first, where they have to be."""
        return self._call(context, arguments, self.angles.prepare(context), text, branch=branch)

    def joint(
        self, context: PagedForwardContext, arguments: Mapping[str, Any], text: TextKV, *, branch: str
    ) -> ForwardCall:
        """The call of rows of several rollouts, whose sinks each of them has turned."""
        return self._call(context, arguments, self.angles.of(context), text, branch=branch)

    def merged(
        self, context: MergedForwardContext, chunks: Sequence[torch.Tensor], timesteps: Sequence[Any], text: TextKV
    ) -> ForwardCall:
        """The call of two chunks as two halves of one batch: the one to commit, then the next one.

        As rows and not as one long sequence: each half has a timestep of its own, so the modulation stays one vector a
        row instead of one a token.

        Args:
            context: of their tokens.
            chunks, timesteps: of both.
            text: of the rows of one half, twice.
        """
        halves = (self.angles.prepare(context), self.angles.at(context.upcoming_starts, context.num_tokens))
        cos, sin = (torch.cat(pair) for pair in zip(*halves, strict=True))
        arguments = {
            "hidden_states": torch.cat(list(chunks)).to(self._text_stub.dtype),
            "timestep": torch.cat([self._timesteps(timestep) for timestep in timesteps]),
        }
        return self._call(context, arguments, (cos, sin), text, branch=POSITIVE)

    def copy(self) -> ForwardCalls:
        """For a fork, which is closed by itself."""
        copied = copy.copy(self)
        copied.angles = self.angles.copy()
        return copied

    def close(self) -> None:
        """Let go of all tensors; no call can be made any more."""
        self.angles.clear()
        self._text_stub = self._text_stub.new_empty(0)

    def _call(
        self, context: Any, arguments: Mapping[str, Any], rotary: Rotary, text: TextKV, *, branch: str
    ) -> ForwardCall:
        num_rows = arguments["hidden_states"].shape[0]
        stub = self._text_stub
        if num_rows != stub.shape[0]:
            stub = stub[:1].expand(num_rows, -1, -1)
        return ForwardCall(
            context=context,
            arguments={**arguments, "encoder_hidden_states": stub},
            rotary=rotary,
            text=text,
            cache_name=_CACHE_CONTEXT[branch],
        )

    def _timesteps(self, timestep: float | tuple[float, ...]) -> torch.Tensor:
        """(videos,), whose embedding is computed once and broadcast; of several, (videos, tokens), as Wan asks for."""
        if not isinstance(timestep, tuple):
            return torch.full((self._shape.num_videos,), timestep, device=self._device)
        tokens = torch.tensor(timestep).repeat_interleave(self.tokens_per_frame)
        return upload(tokens, self._device).expand(self._shape.num_videos, -1)
