"""Attention processors of the Wan family: project, normalise, rotate, call the paged op, project back.

Plain objects, never modules. A processor without bound inputs hands the call to the host's own processor that it
replaced, so the model then behaves exactly as it did before.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn

from ..attention import paged_write_attn, write_attn_in_turn
from ..cache.text import TextLayerKV
from ..context import PagedLayerInputs
from ..merged import MergedLayerInputs
from ..rope import Rotary, apply_rotary


class HostSettings:
    """The settings that diffusers keeps on a processor; they stay in one place, the host's own processor."""

    def __init__(self, host_processor: Any) -> None:
        self.host_processor = host_processor

    @property
    def _attention_backend(self) -> Any:
        return getattr(self.host_processor, "_attention_backend", None)

    @_attention_backend.setter
    def _attention_backend(self, value: Any) -> None:
        self.host_processor._attention_backend = value

    @property
    def _parallel_config(self) -> Any:
        return getattr(self.host_processor, "_parallel_config", None)

    @_parallel_config.setter
    def _parallel_config(self, value: Any) -> None:
        self.host_processor._parallel_config = value


class PagedWanSelfAttnProcessor(HostSettings):
    """Self-attention over the paged cache; ``inputs`` is bound for the length of one forward."""

    inputs: PagedLayerInputs | MergedLayerInputs | None = None

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
        if attention_mask is not None:
            raise ValueError(
                "paged self-attention takes no dense attention_mask: the window decides what is visible, and the forward "
                "context's full_attn_spans."
            )
        query, key, value = _project_qkv(attn, hidden_states)
        query = attn.norm_q(query).unflatten(2, (attn.heads, -1))
        key = attn.norm_k(key).unflatten(2, (attn.heads, -1))
        value = value.unflatten(2, (attn.heads, -1))
        if rotary_emb is not None:
            query, key = apply_rotary(query, *rotary_emb), apply_rotary(key, *rotary_emb)
        if isinstance(self.inputs, MergedLayerInputs):
            out = write_attn_in_turn(self.inputs, query, key, value)
        else:
            out = paged_write_attn(self.inputs, query, key, value)
        return _project_out(attn, out)


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
        return _project_out(attn, out)


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


def _project_qkv(attn: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if getattr(attn, "fused_projections", False):
        query, key, value = attn.to_qkv(hidden_states).chunk(3, dim=-1)
        return query, key, value
    return attn.to_q(hidden_states), attn.to_k(hidden_states), attn.to_v(hidden_states)


def _project_out(attn: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    return attn.to_out[1](attn.to_out[0](hidden_states.flatten(2, 3)))
