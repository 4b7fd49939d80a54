"""Attention processors that read and write the paged cache, one file a model family."""

from . import cogvideox, cosmos, hunyuan, kandinsky, ltx, wan_animate  # noqa: F401
from .attach import OffsetRope, PagedAttachment, attach_paged_attention
from .base import PagedSelfAttnProcessor
from .family import (
    Layer,
    Stack,
    TransformerFamily,
    TransformerGeometry,
    find_family,
    list_families,
    register_family,
    unregister_family,
)
from .wan import PagedWanCrossAttnProcessor, PagedWanSelfAttnProcessor

__all__ = [
    "Layer",
    "OffsetRope",
    "PagedAttachment",
    "PagedSelfAttnProcessor",
    "PagedWanCrossAttnProcessor",
    "PagedWanSelfAttnProcessor",
    "Stack",
    "TransformerFamily",
    "TransformerGeometry",
    "attach_paged_attention",
    "find_family",
    "list_families",
    "register_family",
    "unregister_family",
]
