"""The CogVideoX family (with rotary positions): joint attention, one set of projections for text and video."""

from __future__ import annotations

from typing import Any

import torch

from ..rope import AxialRope, Rotary, apply_rotary
from .base import PagedSelfAttnProcessor, project_out, project_qkv, refuse_mask
from .family import RopeFunction, Stack, TransformerFamily, register_family
from .joint import JointRows, attend_jointly

_ATTN_PARTS = ("to_q", "to_k", "to_v", "to_out", "heads", "set_processor")


class PagedCogVideoXProcessor(PagedSelfAttnProcessor):
    """Joint attention whose video rows go through the paged cache; text rows see text."""

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: Rotary | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Video (rows, tokens, dim) and text (rows, text_len, dim) -> the same shapes.

        Raises:
            ValueError: a dense mask is given while paged inputs are bound, or the forward announced no text rows.
        """
        if self.inputs is None:
            return self.host_processor(attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb)
        refuse_mask(attention_mask)
        video, text = self._project(attn, hidden_states), self._project(attn, encoder_hidden_states)
        if self.rotary is not None:
            video = JointRows(
                apply_rotary(video.query, *self.rotary), apply_rotary(video.key, *self.rotary), video.value
            )
        outs = attend_jointly(self.inputs, video, text, backend=self._attention_backend)
        return project_out(attn, outs[0]), project_out(attn, outs[1])

    @staticmethod
    def _project(attn: Any, states: torch.Tensor) -> JointRows:
        query, key, value = (part.unflatten(2, (attn.heads, -1)) for part in project_qkv(attn, states))
        query = query if attn.norm_q is None else attn.norm_q(query)
        return JointRows(query, key if attn.norm_k is None else attn.norm_k(key), value)


class CogVideoXFamily(TransformerFamily):
    """CogVideoX 5B and 1.5: rotary positions only."""

    name = "cogvideox"
    parts = ("transformer_blocks", "patch_embed.text_proj", "time_embedding", "norm_final", "config")
    absent = ("config.LFE_id_dim",)  # ConsisID, whose blocks look at a face too
    stacks = (Stack(blocks="transformer_blocks", self_attn="attn1", parts=_ATTN_PARTS),)

    def refusals(self, transformer: Any) -> list[str]:
        """Positions that the patch embedding adds count from the first frame of each forward."""
        patches = transformer.patch_embed
        adds = patches.use_positional_embeddings or patches.use_learned_positional_embeddings
        if not adds:
            return []
        return [
            "the patch embedding adds positions that start at frame 0 in every forward, so every chunk would look like the "
            "first one; models with use_rotary_positional_embeddings and without learned positions are supported"
        ]

    def patch_size(self, transformer: Any) -> tuple[int, int, int]:
        """(frames, height, width) of a patch, in latents."""
        config = transformer.config
        return config.patch_size_t or 1, config.patch_size, config.patch_size

    def make_self_processor(self, attn: Any) -> PagedSelfAttnProcessor:
        """A processor for a block's ``attn1``."""
        return PagedCogVideoXProcessor(attn.processor)

    def make_rope(
        self, transformer: Any, *, extents: tuple[tuple[float, float], tuple[float, float]] | None = None
    ) -> RopeFunction:
        """Angles of tokens at absolute frames; they stand for the host's ``image_rotary_emb``.

        Args:
            transformer: a model of the family.
            extents: (top, bottom), (left, right) of the frame in the grid that the model was trained on, as the host's
                pipeline crops it; None: the frame has that size, or the model is CogVideoX 1.5.
        """
        head_dim = self.geometry(transformer).head_dim
        spatial = head_dim // 8 * 3
        return AxialRope(dims=(head_dim // 4, spatial, spatial), extents=extents)


register_family(CogVideoXFamily())
