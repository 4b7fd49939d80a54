"""The Wan family: Wan 2.1 and 2.2, SkyReels-V2, ChronoEdit and Wan-VACE.

Processors project, normalise, rotate, call the paged op, project back. One without bound inputs hands the call to the
host's own processor that it replaced, so the model then behaves exactly as it did before.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn

from ..attention import QKNorm, paged_norm_rope_write_attn
from ..attention.writing import FUSED_DTYPES
from ..cache.text import TextKV, TextLayerKV
from ..merged import MergedLayerInputs
from ..rope import Rotary, VideoRope, apply_rotary
from .base import HostSettings, PagedSelfAttnProcessor, attend, is_hooked, project_out, project_qkv, refuse_mask
from .family import RopeFunction, Stack, TransformerFamily, register_family

ATTN_PARTS = ("to_q", "to_k", "to_v", "to_out", "norm_q", "norm_k", "heads", "set_processor")


class PagedWanSelfAttnProcessor(PagedSelfAttnProcessor):
    """Self-attention over the paged cache; its angles are the ``rotary_emb`` that the rope module returns."""

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
            ValueError: a dense mask is given while paged inputs are bound.
        """
        if self.inputs is None:
            return self.host_processor(
                attn, hidden_states, encoder_hidden_states, attention_mask, rotary_emb, **kwargs
            )
        refuse_mask(attention_mask)
        heads = (attn.heads, -1)
        query, key, value = project_qkv(attn, hidden_states)
        is_fused = self.write.compiled if torch.compiler.is_compiling() else self.write.eager
        if is_fused and rotary_emb is not None and not isinstance(self.inputs, MergedLayerInputs):
            states = (query.unflatten(2, heads), key.unflatten(2, heads), value.unflatten(2, heads))
            norm = QKNorm(attn.norm_q.weight, attn.norm_k.weight, attn.norm_q.eps)
            return project_out(attn, paged_norm_rope_write_attn(self.inputs, *states, rotary_emb, norm))
        query, key = attn.norm_q(query).unflatten(2, heads), attn.norm_k(key).unflatten(2, heads)
        if rotary_emb is not None:
            query, key = apply_rotary(query, *rotary_emb), apply_rotary(key, *rotary_emb)
        states = (query, key, value.unflatten(2, heads))
        if self.exchange is not None:
            return project_out(attn, self.exchange.attend(attend, self.inputs, states))
        return project_out(attn, attend(self.inputs, *states))


class PagedWanCrossAttnProcessor(HostSettings):
    """Cross-attention over text K/V that were computed once per prompt; ``text`` is bound for one forward."""

    text: TextLayerKV | None = None

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        rotary_emb: Rotary | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """hidden_states (rows, tokens, dim) -> the same shape; ``encoder_hidden_states`` is not read while bound."""
        text = self.text
        if text is None:
            return self.host_processor(
                attn, hidden_states, encoder_hidden_states, attention_mask, rotary_emb, **kwargs
            )
        query = attn.norm_q(attn.to_q(hidden_states)).unflatten(2, (attn.heads, -1))
        out = dispatch_attention_fn(query, text.key, text.value, backend=self._attention_backend)
        if text.image_key is not None and text.image_value is not None:
            out = out + dispatch_attention_fn(query, text.image_key, text.image_value, backend=self._attention_backend)
        return project_out(attn, out)


def norm_refusals(attn: Any, dim: int) -> list[str]:
    """Why the fused write cannot stand in for a layer's query and key norms, a phrase each; empty: it can.

    It reads their weights without calling them, so a norm that something hangs on (offloading brings weights along
    with the call) is refused.

    Args:
        attn: a Wan self-attention module.
        dim: heads times head size; norms must be over all of it.
    """
    reasons = []
    for name in ("norm_q", "norm_k"):
        norm = getattr(attn, name)
        if type(norm) is not torch.nn.RMSNorm or norm.normalized_shape != (dim,):
            reasons.append(f"{name} is no torch.nn.RMSNorm over {dim} channels")
        elif (weight := norm.weight) is None or weight.dtype not in FUSED_DTYPES or norm.eps is None:
            reasons.append(f"{name} has no eps or no weights of a dtype the kernel takes")
        elif is_hooked(norm):
            reasons.append(f"{name} has hooks (offloading), which a kernel would pass by")
    if not reasons and attn.norm_q.eps != attn.norm_k.eps:
        reasons.append(f"norm_q and norm_k have different eps, {attn.norm_q.eps} and {attn.norm_k.eps}")
    return reasons


def project_text(attn: Any, text_states: torch.Tensor, image_states: torch.Tensor | None) -> TextLayerKV:
    """Keys and values of one cross-attention layer.

    Args:
        attn: a Wan cross-attention module.
        text_states: (rows, text_len, dim), after the model's text embedder.
        image_states: (rows, image_len, dim), after its image embedder, where the model has added projections.
    """
    heads = (attn.heads, -1)
    if getattr(attn, "fused_projections", False):
        key, value = attn.to_kv(text_states).chunk(2, dim=-1)
    else:
        key, value = attn.to_k(text_states), attn.to_v(text_states)
    text_key, text_value = attn.norm_k(key).unflatten(2, heads), value.unflatten(2, heads)
    if image_states is None:
        return TextLayerKV(text_key, text_value)
    if getattr(attn, "fused_projections", False):
        key, value = attn.to_added_kv(image_states).chunk(2, dim=-1)
    else:
        key, value = attn.add_k_proj(image_states), attn.add_v_proj(image_states)
    return TextLayerKV(text_key, text_value, attn.norm_added_k(key).unflatten(2, heads), value.unflatten(2, heads))


class WanFamily(TransformerFamily):
    """Wan and its clones. ``vace_blocks`` see video of their own, so they are layers of the cache like the others."""

    name = "wan"
    parts: ClassVar[tuple[str, ...]] = ("blocks", "rope", "condition_embedder", "config")
    stacks: ClassVar[tuple[Stack, ...]] = (
        Stack(blocks="blocks", self_attn="attn1", cross_attn="attn2", parts=ATTN_PARTS),
        Stack(blocks="vace_blocks", self_attn="attn1", cross_attn="attn2", parts=ATTN_PARTS, optional=True),
    )
    # Wan-Animate has an adapter of its own; Helios brings its history along as tokens; AnyFlow rotates complex numbers.
    absent: ClassVar[tuple[str, ...]] = ("face_encoder", "patch_short", "config.deltatime_type")
    rope_module = "rope"

    def heads(self, attn: Any) -> tuple[int, int]:
        """Number and size of the heads of a self-attention module."""
        return attn.heads, attn.norm_k.weight.shape[0] // attn.heads

    def patch_size(self, transformer: Any) -> tuple[int, int, int]:
        """(frames, height, width) of a patch, in latents."""
        frames, height, width = transformer.config.patch_size
        return frames, height, width

    def make_self_processor(self, attn: Any) -> PagedWanSelfAttnProcessor:
        """A processor for a block's ``attn1``."""
        return PagedWanSelfAttnProcessor(attn.processor)

    def make_cross_processor(self, attn: Any) -> PagedWanCrossAttnProcessor:
        """A processor for a block's ``attn2``."""
        return PagedWanCrossAttnProcessor(attn.processor)

    def make_rope(self, transformer: Any) -> RopeFunction:
        """Angles of tokens at absolute frames; the family has no options."""
        return VideoRope(head_dim=self.geometry(transformer).head_dim)

    def compute_text_kv(
        self, transformer: Any, prompt_embeds: torch.Tensor, image_embeds: torch.Tensor | None
    ) -> TextKV:
        """Text K/V of all layers."""
        embedder = transformer.condition_embedder
        text_states = embedder.text_embedder(prompt_embeds.to(transformer.dtype))
        image_states = None if image_embeds is None else embedder.image_embedder(image_embeds)
        layers = self.layers(transformer)
        return TextKV(tuple(project_text(layer.cross_attn, text_states, image_states) for layer in layers))

    def sharding_refusals(self, transformer: Any) -> list[str]:
        """VACE blocks have tokens of their own."""
        if getattr(transformer, "vace_blocks", None):
            return ["its VACE blocks read tokens of a video of their own, which nobody cuts"]
        return []

    def fused_write_refusals(self, attn: Any, num_heads: int, head_dim: int) -> list[str]:
        """Why the fused kernel can't stand in for the layer's norms."""
        return norm_refusals(attn, num_heads * head_dim)


register_family(WanFamily())
