"""Attention where causal tokens and fully visible spans alternate, one plain attention call a segment.

The coordinates come from ``diffusers_ardiff.masks``; its public names are here as well.
"""

from ...masks.plan import PagedPiecewisePlan, PagedPiecewiseSegment, build_paged_piecewise_plan
from ...masks.segments import QueryRange, Segment, SegmentMode, Span, build_segments, dense_mask
from .dense import AttnFunc, piecewise_attn, sdpa_attn_func
from .runner import PagedPiecewiseRunner, run_paged_piecewise_plan

__all__ = [
    "AttnFunc",
    "PagedPiecewisePlan",
    "PagedPiecewiseRunner",
    "PagedPiecewiseSegment",
    "QueryRange",
    "Segment",
    "SegmentMode",
    "Span",
    "build_paged_piecewise_plan",
    "build_segments",
    "dense_mask",
    "piecewise_attn",
    "run_paged_piecewise_plan",
    "sdpa_attn_func",
]
