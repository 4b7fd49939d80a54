"""Wan-Animate: the first frame of every forward is the reference picture, the others a chunk of video.

The picture's tokens stand in every forward, so they are extra rows, never committed. Like text rows of joint models they see
themselves only: what saw the video would differ from chunk to chunk. Faces go through convolutions in time, which need
the frames before the chunk; their outputs for those are dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn

from ..attention import paged_write_attn
from ..merged import MergedLayerInputs
from ..rope import Rotary, VideoRope, apply_rotary
from .base import project_out, project_qkv, refuse_mask
from .family import RopeFunction, Stack, register_family
from .wan import ATTN_PARTS, PagedWanSelfAttnProcessor, WanFamily


class PagedAnimateProcessor(PagedWanSelfAttnProcessor):
    """Self-attention whose chunk goes through the paged cache; ``num_reference`` rows before it are the picture's."""

    num_reference = 0

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        rotary_emb: Rotary | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """hidden_states (rows, tokens, dim) -> the same shape.

        Raises:
            ValueError: a dense mask is given while paged inputs are bound, or the forward is merged.
        """
        if self.inputs is None or rotary_emb is None:
            return super().__call__(attn, hidden_states, encoder_hidden_states, attention_mask, rotary_emb, **kwargs)
        refuse_mask(attention_mask)
        if isinstance(self.inputs, MergedLayerInputs):
            raise ValueError("Wan-Animate takes no merged forwards; commit each chunk in a forward of its own.")
        heads, size = (attn.heads, -1), self.num_reference
        query, key, value = project_qkv(attn, hidden_states)
        query, key = attn.norm_q(query).unflatten(2, heads), attn.norm_k(key).unflatten(2, heads)
        query, key = apply_rotary(query, *rotary_emb), apply_rotary(key, *rotary_emb)
        value = value.unflatten(2, heads)
        (picture, query), (own_key, key), (own_value, value) = (
            (part[:, :size], part[:, size:]) for part in (query, key, value)
        )
        seen = dispatch_attention_fn(picture, own_key, own_value, backend=self._attention_backend)
        video = paged_write_attn(self.inputs, query, key, value, own_key, own_value)
        return project_out(attn, torch.cat([seen, video], dim=1))


@dataclass(frozen=True)
class ReferenceRope:
    """Angles of the picture at frame 0, then of the chunk, whose frames count from 1."""

    rope: VideoRope

    def __call__(
        self, frame_positions: Sequence[Sequence[int]], height: int, width: int, device: torch.device | str = "cpu"
    ) -> Rotary:
        """Cosine and sine of picture and chunk; ``frame_positions`` are those of the video, from 0."""
        return self.rope([[0, *(p + 1 for p in positions)] for positions in frame_positions], height, width, device)


class WanAnimateFamily(WanFamily):
    """Wan-Animate."""

    name = "wan-animate"
    parts = ("blocks", "rope", "condition_embedder", "face_encoder.conv1_local", "pose_patch_embedding", "config")
    absent = ("config.deltatime_type",)
    stacks = (Stack(blocks="blocks", self_attn="attn1", cross_attn="attn2", parts=ATTN_PARTS),)
    checks_calls = True

    def make_self_processor(self, attn: Any) -> PagedAnimateProcessor:
        """A processor for a block's ``attn1``."""
        return PagedAnimateProcessor(attn.processor)

    def make_rope(self, transformer: Any) -> RopeFunction:
        """Angles of the picture and of tokens at absolute frames of the video; the family has no options."""
        return ReferenceRope(VideoRope(head_dim=self.geometry(transformer).head_dim))

    def fused_write_refusals(self, attn: Any, num_heads: int, head_dim: int) -> list[str]:
        """The kernel knows no rows that are not committed."""
        return ["Wan-Animate has the picture's rows beside the chunk's"]

    def sharding_refusals(self, transformer: Any) -> list[str]:
        """Pose, picture and faces are added to the tokens whole."""
        return ["pose, reference picture and faces are added to all tokens of a chunk"]

    def register_hooks(self, transformer: Any, bound: Callable[[], Any]) -> list[Any]:
        """Faces of the frames before the chunk are convolved and dropped."""

        def keep_chunk(module: Any, args: Any, faces: torch.Tensor) -> torch.Tensor:
            context = bound()
            if context is None:
                return faces
            processor = transformer.blocks[0].attn1.processor
            return faces[:, -(context.num_tokens // processor.num_reference) :]

        hook = transformer.face_encoder.register_forward_hook(keep_chunk)
        return [*super().register_hooks(transformer, bound), hook]

    def check_call(self, transformer: Any, call: Mapping[str, Any], context: Any) -> None:
        """The picture must be announced as extra rows, and the faces reach as far back as the convolutions do."""
        latents, faces = call["hidden_states"], call["face_pixel_values"]
        tokens, num_frames = self.geometry(transformer).tokens_per_frame(*latents.shape[3:]), latents.shape[2] - 1
        if (context.num_tokens, context.num_extra) != (num_frames * tokens, tokens):
            raise ValueError(
                f"the call has the reference picture and {num_frames} frames of {tokens} tokens, the forward context "
                f"num_tokens={context.num_tokens} and num_extra={context.num_extra}; make it with num_tokens="
                f"{num_frames * tokens} and num_extra={tokens}."
            )
        back = transformer.face_encoder.conv1_local.kernel_size[0] - 1
        for start in context.starts:
            first = start // tokens
            begin, end = 4 * max(first - back, 0), 4 * (first + num_frames - 1) + 1
            if faces.shape[2] != end - begin:
                raise ValueError(
                    f"a chunk of {num_frames} latent frames from frame {first} on takes the faces of pixel frames [{begin}, "
                    f"{end}), as the face encoder looks {back} latent frames back; got {faces.shape[2]} frames."
                )
        for layer in self.layers(transformer):
            layer.self_attn.processor.num_reference = tokens


register_family(WanAnimateFamily())
