"""Judges videos by their pixels alone: which palette colours they show, and how far the shapes move.

Videos are (B, 3, F, H, W) in [-1, 1].
"""

import torch

from .shapes import TOLERANCE, palette

MIN_PIXELS = 25


def classify(video: torch.Tensor) -> torch.Tensor:
    """Pixels near each palette colour: (B, F, colours, H, W) bool.

    The colours are at least 1.7 apart and the tolerance is 0.6, so blends at edges belong to no colour.
    """
    red, green, blue = video[:, :, :, None].unbind(dim=1)  # (B, F, 1, H, W) each
    colors = palette(video.device).to(video.dtype)[..., None, None]
    distance = (red - colors[:, 0]) ** 2 + (green - colors[:, 1]) ** 2 + (blue - colors[:, 2]) ** 2
    return distance < TOLERANCE**2


def colors_shown(video: torch.Tensor) -> torch.Tensor:
    """Which colours fill more than 25 pixels of each frame: (B, F, colours) bool."""
    return classify(video).sum(dim=(-2, -1)) > MIN_PIXELS


def right_frames(video: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Frames that show exactly the `wanted` colours (B, colours) bool: (B, F) bool."""
    return (colors_shown(video) == wanted[:, None].to(video.device)).all(dim=-1)


def centroids(video: torch.Tensor) -> torch.Tensor:
    """Mean (x, y) in pixels of each colour shown, NaN for the others: (B, F, colours, 2)."""
    masks = classify(video).float()
    pixels = masks.sum(dim=(-2, -1))
    x = (masks.sum(dim=-2) * torch.arange(masks.shape[-1], device=video.device)).sum(dim=-1) / pixels
    y = (masks.sum(dim=-1) * torch.arange(masks.shape[-2], device=video.device)).sum(dim=-1) / pixels
    return torch.stack([x, y], dim=-1).masked_fill((pixels <= MIN_PIXELS)[..., None], torch.nan)


def motion(video: torch.Tensor) -> torch.Tensor:
    """Mean centroid displacement in pixels per frame, over colours shown in both of two frames: (B,); NaN if none."""
    return torch.linalg.vector_norm(centroids(video).diff(dim=1), dim=-1).nanmean(dim=(1, 2))
