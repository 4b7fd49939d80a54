"""Attention processors that read and write the paged cache, one file a model family."""

from .attach import OffsetRope, PagedAttachment, TransformerGeometry, attach_paged_attention
from .wan import PagedWanCrossAttnProcessor, PagedWanSelfAttnProcessor

__all__ = [
    "OffsetRope",
    "PagedAttachment",
    "PagedWanCrossAttnProcessor",
    "PagedWanSelfAttnProcessor",
    "TransformerGeometry",
    "attach_paged_attention",
]
