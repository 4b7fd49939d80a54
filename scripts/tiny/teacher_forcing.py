"""Teacher forcing for chunk-wise autoregressive denoising: one forward over [clean clip | noisy clip].

Clean frames stand for what a K/V cache holds at inference, noisy frames for the chunk being denoised. The attention
mask gives each half exactly the keys it will have there: a window of W latent frames that ends with its own chunk.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from diffusers import WanTransformer3DModel
from diffusers.models.transformers.transformer_wan import WanAttention, WanAttnProcessor
from torch import nn

CHUNK = 3
WINDOW = 9
MAX_START = 3000
# Partitions of a clip of 21 latent frames and how often they are drawn: whole chunks, image-to-video (the first
# frame alone), and short chunks at the end or the start.
PARTITIONS: dict[tuple[int, ...], float] = {
    (3,) * 7: 0.7,
    (1, 3, 3, 3, 3, 3, 3, 2): 0.15,
    (3, 3, 3, 3, 3, 3, 1, 2): 0.05,
    (3, 3, 3, 3, 3, 3, 2, 1): 0.05,
    (2, 3, 3, 3, 3, 3, 3, 1): 0.05,
}


def chunk_ids(partition: Sequence[int]) -> torch.Tensor:
    """The chunk that each latent frame belongs to: (F,)."""
    return torch.repeat_interleave(torch.arange(len(partition)), torch.tensor(partition))


def frame_mask(partition: Sequence[int], window: int = WINDOW) -> torch.Tensor:
    """Which of the 2F frames [clean | noisy] (rows) see which (columns): (2F, 2F) bool."""
    chunk = chunk_ids(partition)
    frame = torch.arange(len(chunk))
    end = torch.tensor(partition).cumsum(0)[chunk]
    in_window = frame[None] >= end[:, None] - window
    past = (chunk[None] < chunk[:, None]) & in_window
    own = (chunk[None] == chunk[:, None]) & in_window
    return torch.cat([torch.cat([past | own, torch.zeros_like(own)], 1), torch.cat([past, own], 1)], 0)


@dataclass
class Partitions:
    """Tables over P partitions: attention bias (P, 1, 2L, 2L), chunk of each frame (P, F), summed shares (P,)."""

    bias: torch.Tensor
    chunks: torch.Tensor
    cumulative: torch.Tensor

    @classmethod
    def build(
        cls, shares: dict[tuple[int, ...], float], device: torch.device, tokens_per_frame: int, dtype: torch.dtype
    ) -> "Partitions":
        """Builds the tables of the partitions in `shares`, for L = F * tokens_per_frame tokens a half."""
        allowed = torch.stack([frame_mask(partition) for partition in shares])
        allowed = allowed.repeat_interleave(tokens_per_frame, 1).repeat_interleave(tokens_per_frame, 2)
        bias = torch.zeros(allowed.shape, dtype=dtype).masked_fill(~allowed, -torch.inf)[:, None]
        chunks = torch.stack([chunk_ids(partition) for partition in shares])
        cumulative = torch.tensor(list(shares.values())).cumsum(0)
        return cls(bias.to(device), chunks.to(device), cumulative.to(device))


@dataclass
class TrainingContext:
    """What the next forward needs beside its arguments; read by `TrainingRope`.

    bias: attention bias or None; start: (B,) first frame of each clip; halves: 2 for [clean | noisy], 1 for noisy alone.
    """

    bias: torch.Tensor | None = None
    halves: int = 2
    start: torch.Tensor = field(default_factory=lambda: torch.zeros(1))


class TrainingRope(nn.Module):
    """Replaces `transformer.rope`: each half sits at frames start, start + 1, ...; the mask rides along.

    Returns (cos, sin, bias): cos and sin are (B, halves * L, 1, D) float32 of angles computed in float64.
    """

    def __init__(self, head_dim: int, context: TrainingContext, theta: float = 10000.0) -> None:
        super().__init__()
        self.context = context
        side = 2 * (head_dim // 6)
        self.dims = (head_dim - 2 * side, side, side)
        self.theta = theta

    def _angles(self, position: torch.Tensor, dim: int) -> torch.Tensor:
        """Angles (..., dim) of float64 positions, each frequency twice in a row."""
        powers = torch.arange(0, dim, 2, dtype=torch.float64, device=position.device) / dim
        return (position[..., None] * self.theta**-powers).repeat_interleave(2, dim=-1)

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """hidden_states: latents (B, C, halves * F, H, W), of which only the shape and the device matter."""
        halves = self.context.halves
        num_frames, rows, columns = hidden_states.shape[2] // halves, *(size // 2 for size in hidden_states.shape[3:])
        options = {"dtype": torch.float64, "device": hidden_states.device}
        start = self.context.start.to(**options)
        frames = (start[:, None] + torch.arange(num_frames, **options)).repeat(1, halves)
        shape = (len(start), halves * num_frames, rows, columns)
        parts = [
            self._angles(frames, self.dims[0])[:, :, None, None].expand(*shape, -1),
            self._angles(torch.arange(rows, **options), self.dims[1])[None, None, :, None].expand(*shape, -1),
            self._angles(torch.arange(columns, **options), self.dims[2])[None, None, None].expand(*shape, -1),
        ]
        angles = torch.cat(parts, dim=-1).flatten(1, 3)[:, :, None]
        return angles.cos().float(), angles.sin().float(), self.context.bias


class MaskedWanAttnProcessor(WanAttnProcessor):
    """Self-attention under the mask that `TrainingRope` hands over as third element of `rotary_emb`."""

    def __call__(
        self,
        attn: WanAttention,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        rotary_emb: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        cos, sin, bias = rotary_emb
        return super().__call__(attn, hidden_states, encoder_hidden_states, bias, (cos, sin))


def prepare_for_teacher_forcing(transformer: WanTransformer3DModel) -> TrainingContext:
    """Swaps the rope and the self-attention processors (neither has weights); returns the context to fill."""
    context = TrainingContext()
    transformer.rope = TrainingRope(transformer.config.attention_head_dim, context)
    for block in transformer.blocks:
        block.attn1.set_processor(MaskedWanAttnProcessor())
    return context
