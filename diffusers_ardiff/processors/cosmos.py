"""The Cosmos family (Predict 2 and 2.5): norms per head, rotation by halves, frames a second in the angles."""

from __future__ import annotations

from typing import Any

import torch

from ..rope import AxialRope, Rotary, apply_rotary_halves
from .base import PagedSelfAttnProcessor, attend, project_out, refuse_mask
from .family import RopeFunction, Stack, TransformerFamily, register_family

_ATTN_PARTS = ("to_q", "to_k", "to_v", "to_out", "norm_q", "norm_k", "heads", "set_processor")


class PagedCosmosProcessor(PagedSelfAttnProcessor):
    """Self-attention over the paged cache."""

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: Rotary | None = None,
    ) -> torch.Tensor:
        """hidden_states (rows, tokens, dim) -> the same shape.

        Raises:
            ValueError: a dense mask is given while paged inputs are bound.
        """
        if self.inputs is None:
            return self.host_processor(attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb)
        refuse_mask(attention_mask)
        heads = (attn.heads, -1)
        query = attn.norm_q(attn.to_q(hidden_states).unflatten(2, heads))
        key = attn.norm_k(attn.to_k(hidden_states).unflatten(2, heads))
        if self.rotary is not None:
            query, key = apply_rotary_halves(query, *self.rotary), apply_rotary_halves(key, *self.rotary)
        value = attn.to_v(hidden_states).unflatten(2, heads)
        return project_out(attn, attend(self.inputs, query, key, value))


class CosmosFamily(TransformerFamily):
    """Cosmos transformers without learned positions."""

    name = "cosmos"
    parts = ("transformer_blocks", "rope.t_ntk_factor", "patch_embed", "time_embed", "norm_out", "config")
    stacks = (Stack(blocks="transformer_blocks", self_attn="attn1", parts=_ATTN_PARTS),)

    def refusals(self, transformer: Any) -> list[str]:
        """Learned positions (Cosmos 1) count from the first frame of each forward and end with their table."""
        if getattr(transformer, "learnable_pos_embed", None) is None:
            return []
        return [
            "learned positions (extra_pos_embed_type='learnable') start at frame 0 in every forward, so every chunk would "
            "look like the first one; models without them, such as Cosmos Predict 2, are supported"
        ]

    def patch_size(self, transformer: Any) -> tuple[int, int, int]:
        """(frames, height, width) of a patch, in latents."""
        frames, height, width = transformer.config.patch_size
        return frames, height, width

    def make_self_processor(self, attn: Any) -> PagedSelfAttnProcessor:
        """A processor for a block's ``attn1``."""
        return PagedCosmosProcessor(attn.processor)

    def make_rope(self, transformer: Any, *, fps: float | None = None) -> RopeFunction:
        """Angles of tokens at absolute frames.

        Args:
            transformer: a model of the family.
            fps: frames a second, as the host takes it per call; None: one position a frame.
        """
        rope = transformer.rope
        factors = (rope.t_ntk_factor, rope.h_ntk_factor, rope.w_ntk_factor)
        time_theta, height_theta, width_theta = (10000.0 * factor for factor in factors)
        return AxialRope(
            dims=(rope.dim_t, rope.dim_h, rope.dim_w),
            thetas=(time_theta, height_theta, width_theta),
            scales=(1.0 if fps is None else rope.base_fps / fps, 1.0, 1.0),
            halves=True,
        )


register_family(CosmosFamily())
