"""HunyuanVideo and HunyuanVideo 1.5: joint attention, two streams with projections of their own, then one in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from ..rope import AxialRope, Rotary, apply_rotary
from .base import PagedSelfAttnProcessor
from .family import RopeFunction, Stack, TransformerFamily, register_family
from .joint import JointRows, attend_jointly

_SINGLE_PARTS = ("to_q", "to_k", "to_v", "norm_q", "norm_k", "heads", "set_processor")
_DUAL_PARTS = (*_SINGLE_PARTS, "to_out", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")


class PagedHunyuanProcessor(PagedSelfAttnProcessor):
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

        ``attention_mask`` hides padding of the text, which while bound is what lies beyond the announced text rows.

        Raises:
            ValueError: the forward announced no text rows.
        """
        if self.inputs is None:
            return self.host_processor(attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb)
        video, text = self._project(attn, hidden_states), self._project_text(attn, encoder_hidden_states)
        if self.rotary is not None:
            video = JointRows(
                apply_rotary(video.query, *self.rotary), apply_rotary(video.key, *self.rotary), video.value
            )
        outs = attend_jointly(self.inputs, video, text, backend=self._attention_backend)
        video_out, text_out = (out.flatten(2, 3) for out in outs)
        if getattr(attn, "to_out", None) is not None:
            video_out = attn.to_out[1](attn.to_out[0](video_out))
        if getattr(attn, "to_add_out", None) is not None:
            text_out = attn.to_add_out(text_out)
        return video_out, text_out

    @staticmethod
    def _project(attn: Any, states: torch.Tensor) -> JointRows:
        heads = (attn.heads, -1)
        return JointRows(
            attn.norm_q(attn.to_q(states).unflatten(2, heads)),
            attn.norm_k(attn.to_k(states).unflatten(2, heads)),
            attn.to_v(states).unflatten(2, heads),
        )

    @classmethod
    def _project_text(cls, attn: Any, states: torch.Tensor) -> JointRows:
        if getattr(attn, "add_q_proj", None) is None:
            return cls._project(attn, states)
        projections = (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)
        query, key, value = (project(states).unflatten(2, (attn.heads, -1)) for project in projections)
        query = query if attn.norm_added_q is None else attn.norm_added_q(query)
        return JointRows(query, key if attn.norm_added_k is None else attn.norm_added_k(key), value)


class HunyuanVideoFamily(TransformerFamily):
    """HunyuanVideo."""

    name = "hunyuan-video"
    parts: ClassVar[tuple[str, ...]] = (
        "transformer_blocks", "rope", "x_embedder", "context_embedder", "time_text_embed", "config",
    )  # fmt: skip
    absent: ClassVar[tuple[str, ...]] = ("config.num_decoder_layers",)  # Motif-Video, which also attends to text alone
    stacks: ClassVar[tuple[Stack, ...]] = (
        Stack(blocks="transformer_blocks", self_attn="attn", parts=_DUAL_PARTS),
        Stack(blocks="single_transformer_blocks", self_attn="attn", parts=_SINGLE_PARTS),
    )
    checks_calls = True

    def refusals(self, transformer: Any) -> list[str]:
        """FramePack brings its history along in every forward; token replacement takes every chunk's first frame for
        the given picture."""
        config, reasons = transformer.config, []
        if "has_clean_x_embedder" in config:
            reasons.append("FramePack runs a compressed history in every forward instead of caching keys and values")
        if config.get("image_condition_type") == "token_replace":
            reasons.append(
                "with image_condition_type='token_replace' the first frame of every forward is taken for the given picture"
            )
        return reasons

    def patch_size(self, transformer: Any) -> tuple[int, int, int]:
        """(frames, height, width) of a patch, in latents."""
        config = transformer.config
        return config.patch_size_t, config.patch_size, config.patch_size

    def make_self_processor(self, attn: Any) -> PagedSelfAttnProcessor:
        """A processor for a block's ``attn``."""
        return PagedHunyuanProcessor(attn.processor)

    def make_rope(self, transformer: Any) -> RopeFunction:
        """Angles of tokens at absolute frames; the family has no options."""
        config = transformer.config
        time, height, width = config.rope_axes_dim
        return AxialRope(dims=(time, height, width), thetas=(config.rope_theta,) * 3)

    def check_call(self, transformer: Any, call: Mapping[str, Any], context: Any) -> None:
        """Every row must have as much text that is no padding as the forward announced."""
        _check_text([call["encoder_attention_mask"]], context.num_extra)


class HunyuanVideo15Family(HunyuanVideoFamily):
    """HunyuanVideo 1.5: two texts and a picture's embeddings, the valid rows of all first."""

    name = "hunyuan-video-1.5"
    parts = (
        "transformer_blocks",
        "rope",
        "x_embedder",
        "context_embedder_2",
        "image_embedder",
        "time_embed",
        "config",
    )
    absent = ("time_text_embed",)
    stacks = (Stack(blocks="transformer_blocks", self_attn="attn", parts=_DUAL_PARTS),)

    def refusals(self, transformer: Any) -> list[str]:
        """None known."""
        return []

    def check_call(self, transformer: Any, call: Mapping[str, Any], context: Any) -> None:
        """Every row must have as many text and picture rows that are no padding as the forward announced."""
        pictures = call["image_embeds"]
        # The host hides the picture's rows when all of them are zero.
        shown = torch.full(pictures.shape[:2], bool((pictures != 0).any()), device=pictures.device)
        _check_text([call["encoder_attention_mask"], call["encoder_attention_mask_2"], shown], context.num_extra)


def _check_text(masks: list[torch.Tensor], announced: int) -> None:
    lengths = torch.cat([mask.bool() for mask in masks], dim=1).sum(1).tolist()
    if any(length != announced for length in lengths):
        raise ValueError(
            f"the rows have {lengths} text rows that are no padding, the forward context announced num_extra={announced}. "
            "They must agree; rows with texts of different length take a forward each."
        )


register_family(HunyuanVideoFamily())
register_family(HunyuanVideo15Family())
