"""Rotary angles of a forward's rows, whichever frame each of them stands at; computed once a chunk."""

from __future__ import annotations

import torch

from ..context import PagedForwardContext
from ..rope import Rotary, VideoRope


class FrameAngles:
    """Angles of whole latent frames.

    Args:
        rope: computes them.
        grid: height and width of a frame, in patches.
        device: of the result.
    """

    def __init__(self, rope: VideoRope, grid: tuple[int, int], device: torch.device) -> None:
        self._rope, self._grid, self._device = rope, grid, device
        self._known: tuple[tuple[tuple[int, int], ...], Rotary] | None = None

    def of(self, forward: PagedForwardContext) -> Rotary:
        """(cos, sin) of the tokens of a forward, each (rows, tokens, 1, head_dim), or (1, ...) where rows are alike."""
        tokens = self._grid[0] * self._grid[1]
        frames = forward.num_tokens // tokens
        starts = tuple((start // tokens, frames) for start in forward.starts)
        key = starts[:1] if len(set(starts)) == 1 else starts
        if self._known is None or self._known[0] != key:
            positions = [list(range(start, start + count)) for start, count in key]
            self._known = (key, self._rope(positions, *self._grid, device=self._device))
        return self._known[1]

    def clear(self) -> None:
        """Let go of the angles kept."""
        self._known = None
