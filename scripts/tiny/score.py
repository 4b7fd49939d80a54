"""Judges videos by their pixels alone: which palette colours they show, and how far the shapes move."""

import torch

from .shapes import PALETTE

MIN_PIXELS = 25
TOLERANCE = 0.6


def classify(video: torch.Tensor) -> torch.Tensor:
    """Pixels near each palette colour: (B, 3, F, H, W) in [-1, 1] -> (B, F, colours, H, W) bool.

    The colours are at least 1.7 apart and the tolerance is 0.6, so blends at edges belong to no colour.
    """
    palette = torch.tensor(list(PALETTE.values()), device=video.device, dtype=video.dtype)
    layers = [torch.linalg.vector_norm(video - color.view(1, 3, 1, 1, 1), dim=1) < TOLERANCE for color in palette]
    return torch.stack(layers, dim=2)


def colors_shown(video: torch.Tensor) -> torch.Tensor:
    """Which colours fill more than 25 pixels of each frame: (B, F, colours) bool."""
    return classify(video).sum(dim=(-2, -1)) > MIN_PIXELS
