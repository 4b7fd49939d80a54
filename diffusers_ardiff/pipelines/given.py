"""Images and videos that a video begins with: what is accepted, and how it becomes the VAE's input."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from PIL import Image

PICTURE_TYPES = (Image.Image, np.ndarray, torch.Tensor)
ACCEPTED = "PIL images, or arrays (height, width, 3) or tensors (3, height, width) of floats in [0, 1]"


def preprocess_image(processor: Any, image: Any, **size: int) -> torch.Tensor:
    """An image, or one a video, as (1 or videos, 3, 1, height, width) in [-1, 1].

    Raises:
        TypeError, ValueError: no picture, or values or channels that are none of a picture.
    """
    _check_types("image", image)
    return _checked("image", processor.preprocess(_as_list(image), **size)[:, :, None])


def preprocess_video(processor: Any, video: Any, **size: int) -> torch.Tensor:
    """A video, or one each, as (1 or videos, 3, frames, height, width) in [-1, 1].

    Raises:
        TypeError, ValueError: no frames, or values or channels that are none of a picture.
    """
    _check_types("video", video)
    return _checked("video", processor.preprocess_video(_as_list(video), **size))


def _as_list(given: Any) -> Any:
    """Tuples as lists, which is what the host's processor knows."""
    return [_as_list(part) for part in given] if isinstance(given, (list, tuple)) else given


def _check_types(name: str, given: Any) -> None:
    """Raise for anything but pictures in lists, before the host's processor says so in other words."""
    if isinstance(given, (list, tuple)):
        if not given:
            raise ValueError(f"`{name}` is an empty list; give {ACCEPTED}.")
        for part in given:
            _check_types(name, part)
    elif not isinstance(given, PICTURE_TYPES):
        raise TypeError(
            f"`{name}` must be {ACCEPTED}, or a list of them, got {given!r}. Read a file first, with PIL.Image.open or "
            "diffusers_ardiff.video_io.read_video."
        )
    elif not isinstance(given, Image.Image) and not _is_float(given):
        raise ValueError(
            f"`{name}` must be {ACCEPTED}, got {given.dtype}. Divide by 255, or make PIL images (Image.fromarray)."
        )


def _is_float(values: np.ndarray | torch.Tensor) -> bool:
    return values.is_floating_point() if isinstance(values, torch.Tensor) else np.issubdtype(values.dtype, np.floating)


def _checked(name: str, pictures: torch.Tensor) -> torch.Tensor:
    if pictures.shape[1] != 3:
        raise ValueError(
            f"`{name}` must have 3 channels (red, green, blue), got {pictures.shape[1]}; give {ACCEPTED}, and convert PIL images "
            "with image.convert('RGB')."
        )
    low, high = pictures.min().item(), pictures.max().item()
    # Resizing may overshoot a little; NaN fails both comparisons.
    if not (low >= -1.1 and high <= 1.1):
        raise ValueError(
            f"`{name}` must be {ACCEPTED}, got {low / 2 + 0.5:.3g} .. {high / 2 + 0.5:.3g}. Divide by 255 where they are bytes."
        )
    return pictures
