"""Kandinsky 5 video with dense attention: norms per head in float32, rotated states rounded to bfloat16."""

from __future__ import annotations

from typing import Any

import torch

from ..rope import AxialRope, Rotary, apply_rotary
from .base import PagedSelfAttnProcessor, attend
from .family import RopeFunction, Stack, TransformerFamily, register_family

_ATTN_PARTS = (
    "to_query", "to_key", "to_value", "query_norm", "key_norm", "out_layer", "num_heads", "set_processor",
)  # fmt: skip


class PagedKandinskyProcessor(PagedSelfAttnProcessor):
    """Self-attention of the visual blocks over the paged cache."""

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        rotary_emb: torch.Tensor | None = None,
        sparse_params: Any = None,
    ) -> torch.Tensor:
        """hidden_states (rows, tokens, dim) -> the same shape.

        Raises:
            ValueError: sparse attention is asked for while paged inputs are bound.
        """
        if self.inputs is None:
            return self.host_processor(attn, hidden_states, encoder_hidden_states, rotary_emb, sparse_params)
        if sparse_params is not None:
            raise ValueError(
                "sparse attention picks blocks of keys from whole videos and orders tokens by tiles; the cache holds all of "
                "the window's keys, frame by frame. Call the transformer with sparse_params=None."
            )
        heads = (attn.num_heads, -1)
        query, key = attn.to_query(hidden_states).unflatten(-1, heads), attn.to_key(hidden_states).unflatten(-1, heads)
        query, key = attn.query_norm(query.float()).type_as(query), attn.key_norm(key.float()).type_as(key)
        if self.rotary is not None:
            query, key = _rotate(query, self.rotary), _rotate(key, self.rotary)
        value = attn.to_value(hidden_states).unflatten(-1, heads)
        return attn.out_layer(attend(self.inputs, query, key, value).flatten(-2, -1))


def _rotate(states: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    # The host rounds rotated states to bfloat16, whatever its own dtype.
    return apply_rotary(states.float(), *rotary).to(torch.bfloat16).type_as(states)


class KandinskyFamily(TransformerFamily):
    """Kandinsky 5 video."""

    name = "kandinsky5"
    parts = (
        "visual_transformer_blocks", "text_transformer_blocks", "visual_rope_embeddings.axes_dims", "visual_embeddings",
        "config",
    )  # fmt: skip
    stacks = (Stack(blocks="visual_transformer_blocks", self_attn="self_attention", parts=_ATTN_PARTS),)

    def heads(self, attn: Any) -> tuple[int, int]:
        """Number and size of the heads of a self-attention module."""
        return attn.num_heads, attn.to_key.out_features // attn.num_heads

    def patch_size(self, transformer: Any) -> tuple[int, int, int]:
        """(frames, height, width) of a patch, in latents."""
        frames, height, width = transformer.config.patch_size
        return frames, height, width

    def make_self_processor(self, attn: Any) -> PagedSelfAttnProcessor:
        """A processor for a visual block's ``self_attention``."""
        return PagedKandinskyProcessor(attn.processor)

    def make_rope(
        self, transformer: Any, *, scale_factor: tuple[float, float, float] = (1.0, 1.0, 1.0)
    ) -> RopeFunction:
        """Angles of tokens at absolute frames; they stand for the host's ``visual_rope_pos``.

        Args:
            transformer: a model of the family.
            scale_factor: as the host takes it per call.
        """
        time, height, width = scale_factor
        dims = transformer.visual_rope_embeddings.axes_dims
        return AxialRope(dims=(dims[0], dims[1], dims[2]), scales=(1 / time, 1 / height, 1 / width))


register_family(KandinskyFamily())
