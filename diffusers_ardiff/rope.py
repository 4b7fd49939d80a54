"""Rotary angles of video tokens at absolute frame positions, without a table that ends.

The host's own module slices a table of 1024 positions and always starts at frame 0. Here the angles of the frames asked
for are computed in float64 on the host, once per chunk; cosine and sine are stored in float32, which stays within 1e-6
of float64 at any position (float32 angles are off by 5e-5 at frame 5000).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from .transfer import upload

Rotary = tuple[torch.Tensor, torch.Tensor]
"""(cos, sin), each (rows, tokens, 1 or heads, head_dim) float32. Every angle is there twice: in a row for interleaved
pairs, or in the first half of a head and again in the second (``apply_rotary_halves``)."""


@dataclass(frozen=True, kw_only=True)
class VideoRope:
    """Three-axis rotary embedding as Wan lays it out: head_dim = time + height + width parts.

    Height and width take ``2 * (head_dim // 6)`` each, time the rest (Wan 2.1: 44 / 42 / 42 of 128).
    """

    head_dim: int
    theta: float = 10000.0

    def __call__(
        self, frame_positions: Sequence[Sequence[int]], height: int, width: int, device: torch.device | str = "cpu"
    ) -> Rotary:
        """Cosine and sine for tokens in frame-major order.

        Args:
            frame_positions: for each row, the absolute latent frame of each frame of the forward.
            height, width: patch grid of a frame, in tokens.
            device: where the result goes.
        """
        spatial = 2 * (self.head_dim // 6)
        times = torch.tensor(frame_positions, dtype=torch.float64)
        time = self._angles(times, self.head_dim - 2 * spatial)[:, :, None, None]
        column = self._angles(torch.arange(height, dtype=torch.float64), spatial)[None, None, :, None]
        row = self._angles(torch.arange(width, dtype=torch.float64), spatial)[None, None, None]
        grid = (*times.shape, height, width, -1)

        def table(function: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
            parts = [function(part).float().repeat_interleave(2, dim=-1).expand(grid) for part in (time, column, row)]
            return upload(torch.cat(parts, dim=-1).flatten(1, 3)[:, :, None], device)

        return table(torch.cos), table(torch.sin)

    def turn(self, num_frames: int, device: torch.device | str = "cpu") -> Rotary:
        """Cosine and sine (1, 1, 1, head_dim) that move keys which are rotated already by ``num_frames`` in time."""
        spatial = 2 * (self.head_dim // 6)
        time = self._angles(torch.tensor([float(num_frames)], dtype=torch.float64), self.head_dim - 2 * spatial)
        angles = torch.cat([time[0], torch.zeros(spatial, dtype=torch.float64)]).repeat_interleave(2)
        return tuple(upload(f(angles).float()[None, None, None], device) for f in (torch.cos, torch.sin))  # type: ignore[return-value]

    def _angles(self, positions: torch.Tensor, dim: int) -> torch.Tensor:
        """positions x inverse frequencies theta^(-2i/dim): (..., dim / 2) float64."""
        inverse = self.theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
        return positions[..., None] * inverse


@dataclass(frozen=True, kw_only=True)
class AxialRope:
    """Three-axis rotary embedding with a size, base and scale for each axis: (time, height, width).

    Attributes:
        dims: channels of a head for each axis.
        thetas: bases of the inverse frequencies.
        scales: factors of the positions.
        extents: start and stop for height and width; n patches lie evenly from start to stop * (n - 1) / n. None: patch
            i is at position i.
        halves: every angle is in the first half of a head and again in the second; otherwise twice in a row.
    """

    dims: tuple[int, int, int]
    thetas: tuple[float, float, float] = (10000.0, 10000.0, 10000.0)
    scales: tuple[float, float, float] = (1.0, 1.0, 1.0)
    extents: tuple[tuple[float, float], tuple[float, float]] | None = None
    halves: bool = False

    def __call__(
        self, frame_positions: Sequence[Sequence[int]], height: int, width: int, device: torch.device | str = "cpu"
    ) -> Rotary:
        """Cosine and sine for tokens in frame-major order; arguments as in ``VideoRope``."""
        rows, columns = self._spread(0, height), self._spread(1, width)
        parts = spread_grid(torch.tensor(frame_positions, dtype=torch.float64), rows, columns)
        angles = [
            (part * scale)[..., None] * theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
            for part, dim, theta, scale in zip(parts, self.dims, self.thetas, self.scales, strict=True)
        ]
        return store_angles(torch.cat(angles, dim=-1)[:, :, None], halves=self.halves, device=device)

    def _spread(self, axis: int, count: int) -> torch.Tensor:
        steps = torch.arange(count, dtype=torch.float64)
        if self.extents is None:
            return steps
        start, stop = self.extents[axis]
        last = stop * (count - 1) / count
        return start + steps * ((last - start) / max(count - 1, 1))


def spread_grid(
    times: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Coordinates of every token, frame by frame, from those of the axes: (batch, frames), (height,), (width,) give three
    tensors (batch, tokens)."""
    grid = (*times.shape, len(rows), len(columns))
    axes = (times[:, :, None, None], rows[None, None, :, None], columns[None, None, None])
    time, row, column = (axis.expand(grid).flatten(1) for axis in axes)
    return time, row, column


def store_angles(angles: torch.Tensor, *, halves: bool, device: torch.device | str) -> Rotary:
    """Cosine and sine of (rows, tokens, 1 or heads, head_dim / 2) angles, each twice, in float32 on ``device``."""
    tables = [table.float() for table in (torch.cos(angles), torch.sin(angles))]
    doubled = [torch.cat([t, t], dim=-1) if halves else t.repeat_interleave(2, dim=-1) for t in tables]
    cos, sin = (upload(table, device) for table in doubled)
    return cos, sin


def apply_rotary(hidden_states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate (rows, tokens, heads, head_dim) by interleaved pairs; computed in the angles' dtype, returned in the input's."""
    even, odd = hidden_states.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[..., 0::2], sin[..., 1::2]
    rotated = torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1)
    return rotated.flatten(-2).type_as(hidden_states)


def apply_rotary_halves(hidden_states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """``apply_rotary`` where channel i of a head's first half is paired with channel i of its second."""
    first, second = hidden_states.chunk(2, dim=-1)
    half = first.shape[-1]
    cos, sin = cos[..., :half], sin[..., :half]
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1).type_as(hidden_states)
