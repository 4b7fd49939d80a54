"""Which keys a query sees: segments, plans, and the masks of paged forwards. Coordinates only, no attention."""

from .paged import FullAttnSpans, MaskedRow, PagedMask, build_paged_mask
from .plan import PagedPiecewisePlan, PagedPiecewiseSegment, build_paged_piecewise_plan
from .segments import QueryRange, Segment, SegmentMode, Span, build_segments, dense_mask

__all__ = [
    "FullAttnSpans",
    "MaskedRow",
    "PagedMask",
    "PagedPiecewisePlan",
    "PagedPiecewiseSegment",
    "QueryRange",
    "Segment",
    "SegmentMode",
    "Span",
    "build_paged_mask",
    "build_paged_piecewise_plan",
    "build_segments",
    "dense_mask",
]
