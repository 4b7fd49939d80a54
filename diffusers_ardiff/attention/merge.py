"""Attention over parts of the keys, joined by log-sum-exp.

Shapes: B rows, L queries, N keys, H heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch


class PartialResult(NamedTuple):
    """``out`` (B, L, H, D); ``lse`` (B, H, L) float32, natural log of the sum of the weights."""

    out: torch.Tensor
    lse: torch.Tensor


class PartialAttention(Protocol):
    """An attention kernel that also says how much weight its keys carry.

    Called with query (B, L, H, D) and keys, values (B, N, H, D), whose rows may lie at any stride but whose tokens
    follow each other. ``causal`` is bottom-right aligned, query i sees keys 0 .. N - L + i, and N >= L >= 1 then.
    """

    def __call__(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        /,
        *,
        causal: bool,
        softmax_scale: float,
    ) -> PartialResult: ...


def merge_partial_attention(outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor]) -> torch.Tensor:
    """Attention over the union of disjoint sets of keys, from attention over each, in float32.

    Args:
        outs: (B, L, H, D) each, one or more.
        lses: (B, H, L) each, -inf where a query saw no key of that set; what ``outs`` holds there is not read.

    Returns: (B, L, H, D) in the dtype of the first of ``outs``; 0 where a query saw no key of any set.

    Raises:
        ValueError: no parts, or another number of ``lses``.
    """
    if not outs or len(outs) != len(lses):
        raise ValueError(f"one or more outputs with a log-sum-exp each are needed, got {len(outs)} and {len(lses)}.")
    shares = torch.stack([lse.float() for lse in lses]).softmax(0).transpose(-1, -2)[..., None]
    merged = torch.zeros(outs[0].shape, dtype=torch.float32, device=outs[0].device)
    for out, share in zip(outs, shares, strict=True):
        # Without keys an output may be NaN, and 0 times NaN is NaN; without any keys the shares themselves are.
        merged += torch.where(share > 0, out.float() * share, 0.0)
    return merged.to(outs[0].dtype)
