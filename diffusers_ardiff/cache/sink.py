"""Keys of a branch's sink, turned to another rotary position when the window has moved on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from ..rope import Rotary, apply_rotary
from .float8 import FLOAT8, as_bytes, store_as


@dataclass(frozen=True, kw_only=True)
class SinkKeys:
    """How far the sink's keys in the pool are turned, and the keys as they were written. Immutable; forks share it.

    Turning always starts from what was written, so nothing adds up over a long rollout, and the same offset gives the
    same bits.

    Attributes:
        offset: frames; None where a turn failed half-way.
        written: (S, num_heads, head_dim) of each layer; empty before the first turn.
    """

    offset: int | None = 0
    written: tuple[torch.Tensor, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Bytes of the keys as they were written."""
        return sum(keys.nbytes for keys in self.written)

    def apply(self, function: Callable[[torch.Tensor], torch.Tensor]) -> SinkKeys:
        """The same with ``function`` applied to every tensor, such as a copy to another device."""
        return replace(self, written=tuple(function(keys) for keys in self.written))


def turn_keys(pools: list[torch.Tensor], rows: slice | torch.Tensor, written: SinkKeys, rotary: Rotary | None) -> None:
    """Overwrite the sink's rows of every key pool with the written keys, turned by ``rotary`` (None: as written).

    Of a float8 pool the stored values are turned: the scale is the same before and after.
    """
    for pool, keys in zip(pools, written.written, strict=True):
        keys = keys.to(pool.device)
        if rotary is not None:
            wide = keys.float() if keys.dtype == FLOAT8 else keys
            keys = store_as(apply_rotary(wide[None], *rotary)[0], pool.dtype, 1.0)
        as_bytes(pool)[rows] = as_bytes(keys)
