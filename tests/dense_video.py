"""A Wan transformer with a plain dictionary of frames for a cache, and rotary positions given frame by frame.

Written from the rules, never from the package's code: keys are kept as they were before the rotation, and every forward
rotates all that it sees at positions which a policy's own definition gives. One video, float32; angles in float64.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from dense import dense_attention

Positions = Callable[[list[int]], dict[int, int]]
"""Frames that a forward sees, sorted, its own included -> rotary position of each."""


def absolute(frames: list[int]) -> dict[int, int]:
    return {frame: frame for frame in frames}


def relative(frames: list[int]) -> dict[int, int]:
    """Numbered without gaps."""
    return {frame: index for index, frame in enumerate(frames)}


def capped(limit: int, sink: int) -> Positions:
    """The newest frame is at ``limit - 1`` at most, the window keeps its distances, the sink its positions."""

    def place(frames: list[int]) -> dict[int, int]:
        back = max(frames[-1] - (limit - 1), 0)
        return {frame: frame if frame < sink else frame - back for frame in frames}

    return place


def rotated(states: torch.Tensor, positions: Sequence[int], grid: tuple[int, int]) -> torch.Tensor:
    """(frames * height * width, heads, dim) turned as Wan does: complex pairs, split into time, height and width."""
    height, width = grid
    pairs = states.shape[-1] // 2
    space = states.shape[-1] // 6
    coordinates = torch.cartesian_prod(
        torch.tensor(positions, dtype=torch.float64),
        torch.arange(height, dtype=torch.float64),
        torch.arange(width, dtype=torch.float64),
    )
    angles = []
    for axis, count in enumerate((pairs - 2 * space, space, space)):
        frequencies = 10000.0 ** (-torch.arange(count, dtype=torch.float64) / count)
        angles.append(coordinates[:, axis, None] * frequencies)
    turn = torch.polar(torch.tensor(1.0, dtype=torch.float64), torch.cat(angles, dim=1))[:, None]
    numbers = torch.view_as_complex(states.double().unflatten(-1, (pairs, 2)).contiguous())
    return torch.view_as_real(numbers * turn).flatten(-2).float()


class _Layer:
    """Self-attention of one layer over the frames it keeps; ``video`` says what a forward sees."""

    def __init__(self, video: DenseVideo) -> None:
        self.video = video
        self.frames: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.new: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, rotary_emb=None):
        heads = (attn.heads, -1)
        query = attn.norm_q(attn.to_q(hidden_states))[0].unflatten(1, heads)
        key = attn.norm_k(attn.to_k(hidden_states))[0].unflatten(1, heads)
        value = attn.to_v(hidden_states)[0].unflatten(1, heads)
        own, seen, grid = self.video.own, self.video.seen, self.video.grid
        size = grid[0] * grid[1]
        self.new = dict(zip(own, zip(key.split(size), value.split(size), strict=True), strict=True))
        all_frames = self.frames | self.new
        place = self.video.positions(seen)
        keys = rotated(torch.cat([all_frames[f][0] for f in seen]), [place[f] for f in seen], grid)
        values = torch.cat([all_frames[f][1] for f in seen])
        out = dense_attention(rotated(query, [place[f] for f in own], grid), keys, values)
        return attn.to_out[0](out.flatten(1)[None])


class DenseVideo:
    """Forwards of one video; the caller says which frames each brings, sees and keeps."""

    def __init__(self, transformer: Any, text: torch.Tensor, positions: Positions) -> None:
        self.transformer = copy.deepcopy(transformer)
        self.text, self.positions = text, positions
        self.own: list[int] = []
        self.seen: list[int] = []
        self.grid = (0, 0)
        self.layers = [_Layer(self) for _ in self.transformer.blocks]
        for block, layer in zip(self.transformer.blocks, self.layers, strict=True):
            block.attn1.set_processor(layer)

    @torch.no_grad()
    def forward(
        self,
        latents: torch.Tensor,
        timesteps: float | Sequence[float],
        own: Sequence[int],
        seen: Sequence[int],
        *,
        keep: bool = False,
    ) -> torch.Tensor:
        """Frames ``own`` (1, channels, n, height, width) at a timestep each, or one; past frames ``seen`` are visible."""
        self.own, self.seen = list(own), sorted({*seen, *own})
        self.grid = (latents.shape[3] // 2, latents.shape[4] // 2)
        times = torch.tensor([timesteps] * len(self.own) if isinstance(timesteps, (int, float)) else timesteps)
        tokens = times.float().repeat_interleave(self.grid[0] * self.grid[1])[None]
        out = self.transformer(latents, tokens, self.text, return_dict=False)[0]
        if keep:
            for layer in self.layers:
                layer.frames.update(layer.new)
        return out

    def forget(self) -> None:
        """Drop every frame."""
        for layer in self.layers:
            layer.frames.clear()


def window_of(own: Sequence[int], sink: int, window: int, origin: int = 0) -> list[int]:
    """Past frames that a forward sees: the sink, and the window that ends with the forward's own frames."""
    end = own[-1] + 1
    return [f for f in range(own[0]) if f < sink or f >= max(end - window, origin)]


def few_steps(
    predict: Callable[[torch.Tensor, float], torch.Tensor],
    noise: torch.Tensor,
    fresh: Sequence[torch.Tensor],
    timesteps: Sequence[float],
    sigmas: Sequence[float],
) -> torch.Tensor:
    """x0 = x - sigma * v, then (1 - sigma') * x0 + sigma' * noise; x0 itself at the last step."""
    latents = noise
    for index, (timestep, sigma) in enumerate(zip(timesteps, sigmas, strict=True)):
        clean = latents - sigma * predict(latents, timestep)
        last = index + 1 == len(timesteps)
        latents = clean if last else (1 - sigmas[index + 1]) * clean + sigmas[index + 1] * fresh[index]
    return latents
