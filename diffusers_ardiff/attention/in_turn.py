"""Write-and-attend of a merged forward: the rows to commit, then those of the next chunk, which see them committed."""

from __future__ import annotations

import torch

from ..merged import MergedLayerInputs
from .op import paged_write_attn


def write_attn_in_turn(
    inputs: MergedLayerInputs, query: torch.Tensor, k_curr: torch.Tensor, v_curr: torch.Tensor
) -> torch.Tensor:
    """``paged_write_attn`` of the first half of the rows, then of the second: (2 R, L, H, D).

    In the steady state the second write lands on tokens that the first half still sees, so the order matters.
    """
    halves = zip(inputs, query.chunk(2), k_curr.chunk(2), v_curr.chunk(2), strict=True)
    return torch.cat([paged_write_attn(*half) for half in halves])
