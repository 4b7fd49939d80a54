"""Keys and values in float8: a saturating cast with a static scale, and rows of such pools moved as bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

FLOAT8 = torch.float8_e4m3fn
FLOAT8_MAX = 448.0


@dataclass(frozen=True, kw_only=True)
class KVScales:
    """What the stored values of a float8 pool are multiplied by: ``key`` for K, ``value`` for V, static.

    float8_e4m3fn holds magnitudes from 2**-9 to 448 with 3 bits behind the point. 1.0 fits keys that are normalised;
    where a model's keys or values are larger than 448, or mostly below 0.02, give their largest magnitude / 448.

    Raises:
        ValueError: a scale is not positive and finite.
    """

    key: float = 1.0
    value: float = 1.0

    def __post_init__(self) -> None:
        for name, scale in (("key", self.key), ("value", self.value)):
            if not (math.isfinite(scale) and scale > 0):
                raise ValueError(f"the {name} scale of a float8 pool must be positive and finite, got {scale!r}.")

    def check_dtype(self, dtype: torch.dtype) -> None:
        """Raise ValueError for scales that a pool of ``dtype`` would not apply."""
        if dtype != FLOAT8 and self != KVScales():
            raise ValueError(
                f"kv_scales are of float8 pools, this one is {dtype}. Leave them out, or ask for {FLOAT8}."
            )


UNSCALED = KVScales()


def store_as(tensor: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
    """``tensor`` as a pool of ``dtype`` keeps it; in float8 divided by ``scale`` and saturated at 448, NaN staying NaN.

    A plain cast makes NaN of an overflow on some devices, and one NaN spoils every query that sees it.
    """
    if dtype != FLOAT8:
        return tensor.to(dtype)
    # The reciprocal, as the kernel that writes has it: both round alike.
    return (tensor.float() * (1.0 / scale)).clamp(-FLOAT8_MAX, FLOAT8_MAX).to(FLOAT8)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A view of a float8 tensor as uint8, since torch moves few float8 tensors by index; any other tensor as it is."""
    return tensor.view(torch.uint8) if tensor.dtype == FLOAT8 else tensor


def take_rows(pool: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """A copy of the rows of a pool (slots, H, D) at ``slots`` (N,): (N, H, D), as they are stored."""
    return as_bytes(pool).index_select(0, slots).view(pool.dtype)
