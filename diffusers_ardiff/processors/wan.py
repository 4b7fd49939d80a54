"""Attention processors of the Wan family: project, normalise, rotate, call the paged op, project back.

Plain objects, never modules. A processor without bound inputs hands the call to the host's own processor that it
replaced, so the model then behaves exactly as it did before.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn

from ..attention import QKNorm, WriteChoice, paged_norm_rope_write_attn, paged_write_attn, write_attn_in_turn
from ..attention.writing import FUSED_DTYPES, TORCH_WRITE
from ..cache.text import TextLayerKV
from ..context import PagedLayerInputs
from ..merged import MergedLayerInputs
from ..parallel import HeadExchange
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
    """Self-attention over the paged cache; ``inputs`` is bound for the length of one forward.

    ``write`` says who normalises, rotates and writes; whoever sets it has asked ``norm_refusals`` before. ``exchange`` deals
    the heads out to several ranks, each of which has a share of the tokens.
    """

    inputs: PagedLayerInputs | MergedLayerInputs | None = None
    write: WriteChoice = TORCH_WRITE
    exchange: HeadExchange | None = None

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
        heads = (attn.heads, -1)
        query, key, value = _project_qkv(attn, hidden_states)
        is_fused = self.write.compiled if torch.compiler.is_compiling() else self.write.eager
        if is_fused and rotary_emb is not None and not isinstance(self.inputs, MergedLayerInputs):
            states = (query.unflatten(2, heads), key.unflatten(2, heads), value.unflatten(2, heads))
            norm = QKNorm(attn.norm_q.weight, attn.norm_k.weight, attn.norm_q.eps)
            return _project_out(attn, paged_norm_rope_write_attn(self.inputs, *states, rotary_emb, norm))
        query, key = attn.norm_q(query).unflatten(2, heads), attn.norm_k(key).unflatten(2, heads)
        if rotary_emb is not None:
            query, key = apply_rotary(query, *rotary_emb), apply_rotary(key, *rotary_emb)
        value = value.unflatten(2, heads)
        attention: Any = write_attn_in_turn if isinstance(self.inputs, MergedLayerInputs) else paged_write_attn
        if self.exchange is not None:
            return _project_out(attn, self.exchange.attend(attention, self.inputs, (query, key, value)))
        return _project_out(attn, attention(self.inputs, query, key, value))


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
        if type(norm) is not torch.nn.RMSNorm or tuple(norm.normalized_shape) != (dim,):
            reasons.append(f"{name} is no torch.nn.RMSNorm over {dim} channels")
        elif norm.weight is None or norm.weight.dtype not in FUSED_DTYPES or norm.eps is None:
            reasons.append(f"{name} has no eps or no weights of a dtype the kernel takes")
        elif _is_hooked(norm):
            reasons.append(f"{name} has hooks (offloading), which a kernel would pass by")
    if not reasons and attn.norm_q.eps != attn.norm_k.eps:
        reasons.append(f"norm_q and norm_k have different eps, {attn.norm_q.eps} and {attn.norm_k.eps}")
    return reasons


def _is_hooked(module: torch.nn.Module) -> bool:
    is_wrapped = getattr(module.forward, "__func__", None) is not type(module).forward
    return is_wrapped or bool(module._forward_hooks or module._forward_pre_hooks)


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
