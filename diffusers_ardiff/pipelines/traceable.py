"""The Wan decoder in a form that torch.compile can follow, for the length of a call.

diffusers marks the state of its temporal upsampling with a string and compares it with ``==``, tensors included, which
Dynamo of torch 2.11 cannot trace.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import WanResample

STARTED = "Rep"
"""diffusers' marker of an upsampling that has seen the video's first frame only."""
KEPT_FRAMES = 2


@contextmanager
def traceable(decoder: torch.nn.Module) -> Iterator[None]:
    """Within the block, the decoder's resampling parts compute the same without comparing tensors with strings.

    Parts whose forward somebody else has replaced are left alone.
    """
    parts = [part for part in decoder.modules() if type(part) is WanResample and "forward" not in vars(part)]
    for part in parts:
        part.__dict__["forward"] = MethodType(_resample, part)
    try:
        yield
    finally:
        for part in parts:
            del part.__dict__["forward"]


def _resample(self: Any, x: torch.Tensor, feat_cache: list[Any] | None = None, feat_idx: Any = (0,)) -> torch.Tensor:
    """Upsampling in space, and in time where the part does so: (B, C, t, h, w) -> (B, C', t or 2 t, 2 h, 2 w)."""
    if self.mode == "upsample3d" and feat_cache is not None:
        x = _double_in_time(self.time_conv, x, feat_cache, feat_idx)
    images = self.resample(x.transpose(1, 2).flatten(0, 1))
    return images.unflatten(0, (x.shape[0], x.shape[2])).transpose(1, 2)


def _double_in_time(
    time_conv: torch.nn.Module, x: torch.Tensor, feat_cache: list[Any], feat_idx: list[int]
) -> torch.Tensor:
    """Twice the frames, after the past that the cache holds; a video's first frame stays a single one."""
    index = feat_idx[0]
    feat_idx[0] += 1
    past = feat_cache[index]
    if past is None:
        feat_cache[index] = STARTED
        return x
    has_past = isinstance(past, torch.Tensor)
    kept = x[:, :, -KEPT_FRAMES:].clone()
    if kept.shape[2] < KEPT_FRAMES:
        kept = torch.cat([past[:, :, -1:] if has_past else torch.zeros_like(kept), kept], dim=2)
    feat_cache[index] = kept
    frames = time_conv(x, past) if has_past else time_conv(x)
    return frames.unflatten(1, (2, -1)).permute(0, 2, 3, 1, 4, 5).flatten(2, 3)
