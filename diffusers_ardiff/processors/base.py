"""What the attention processors of all families share. They are plain objects, never modules."""

from __future__ import annotations

from typing import Any

import torch

from ..attention import WriteChoice, paged_write_attn, write_attn_in_turn
from ..attention.writing import TORCH_WRITE
from ..context import PagedLayerInputs
from ..merged import MergedLayerInputs
from ..parallel import HeadExchange
from ..rope import Rotary


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


class PagedSelfAttnProcessor(HostSettings):
    """Base of the self-attention processors. Without bound inputs they hand the call to the host's own processor.

    Attributes:
        inputs: of this layer, bound for the length of one forward.
        rotary: angles of its tokens, bound too, where the family does not replace the host's rope module.
        write: who normalises, rotates and writes; whoever sets it has asked the family's ``fused_write_refusals``.
        exchange: deals the heads out to several ranks, each of which has a share of the tokens; bound too, and only where the
            family's ``sharding_refusals`` are none.
    """

    inputs: PagedLayerInputs | MergedLayerInputs | None = None
    rotary: Rotary | None = None
    write: WriteChoice = TORCH_WRITE
    exchange: HeadExchange | None = None


def attend(
    inputs: PagedLayerInputs | MergedLayerInputs, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> torch.Tensor:
    """Write the rows and attend: (rows, tokens, heads, head_dim) each."""
    if isinstance(inputs, MergedLayerInputs):
        return write_attn_in_turn(inputs, query, key, value)
    return paged_write_attn(inputs, query, key, value)


def is_hooked(module: torch.nn.Module) -> bool:
    """Whether something hangs on a module's calls (offloading brings weights along), which reading its weights passes by."""
    is_wrapped = getattr(module.forward, "__func__", None) is not type(module).forward
    return is_wrapped or bool(module._forward_hooks or module._forward_pre_hooks)


def refuse_mask(attention_mask: object) -> None:
    """A dense mask and paged inputs can't both say what is visible.

    Raises:
        ValueError: a mask is given.
    """
    if attention_mask is not None:
        raise ValueError(
            "paged self-attention takes no dense attention_mask: the window decides what is visible, and the forward "
            "context's full_attn_spans."
        )


def project_qkv(attn: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query, key and value of a module with ``to_q``, ``to_k``, ``to_v``, fused or not: (rows, tokens, dim) each."""
    if getattr(attn, "fused_projections", False):
        query, key, value = attn.to_qkv(hidden_states).chunk(3, dim=-1)
        return query, key, value
    return attn.to_q(hidden_states), attn.to_k(hidden_states), attn.to_v(hidden_states)


def project_out(attn: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """(rows, tokens, heads, head_dim) through linear layer and dropout of ``to_out``."""
    linear, dropout, *_ = attn.to_out
    return dropout(linear(hidden_states.flatten(2, 3)))
