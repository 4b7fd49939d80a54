"""Guidance with the branches on ranks of their own: each runs one, and they exchange predictions."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..parallel import VideoGroups


def predict_apart(
    groups: VideoGroups | None, forward: Callable[[], torch.Tensor], like: torch.Tensor, guidance_scale: float
) -> torch.Tensor:
    """One denoise step's velocity, the same on the ranks of both branches.

    Args:
        groups: of this rank's team.
        forward: of the branch held here.
        like: what the forward's output is like.
        guidance_scale: weight of the positive branch; up to 1.0 the negative one doesn't run.
    """
    assert groups is not None
    if guidance_scale > 1.0:
        positive, negative = groups.gather_branches(forward())
        return negative + guidance_scale * (positive - negative)
    return groups.from_positive(forward() if groups.layout.branch_index == 0 else None, like)
