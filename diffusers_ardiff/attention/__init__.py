"""The write-and-attend op, its reference, and the backends it chooses from."""

from . import backends
from .in_turn import write_attn_in_turn
from .op import paged_attention, paged_norm_rope_write_attn, paged_write_attn
from .registry import (
    AttentionBackend,
    AttentionRequest,
    choose_page_size,
    get_backend,
    list_backends,
    register_backend,
    select_backend,
    supported_kernel_block_sizes,
)
from .writing import QKNorm, WriteChoice, check_write_name, choose_write, fused_write_refusals

__all__ = [
    "AttentionBackend",
    "AttentionRequest",
    "QKNorm",
    "WriteChoice",
    "backends",
    "check_write_name",
    "choose_page_size",
    "choose_write",
    "fused_write_refusals",
    "get_backend",
    "list_backends",
    "paged_attention",
    "paged_norm_rope_write_attn",
    "paged_write_attn",
    "register_backend",
    "select_backend",
    "supported_kernel_block_sizes",
    "write_attn_in_turn",
]
