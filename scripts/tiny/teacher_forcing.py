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
from transformers import UMT5EncoderModel

from .captions import vocabulary
from .models import SHIFT, encode_apart
from .shapes import COLORS

# Noise on the clean half. Mostly little, against drift; sometimes so much that the history hardly shows the colours
# and the caption has to tell them.
MAX_CLEAN_NOISE = 0.1
MAX_HEAVY_NOISE = 0.7
HEAVY_SHARE = 0.15
CHUNK = 3
WINDOW = 9
MAX_START = 3000
TOKENS_PER_FRAME = 16
# Partitions of a clip of 21 latent frames and how often they are drawn: whole chunks, image-to-video (the first
# frame alone), and short chunks at the end or the start.
PARTITIONS: dict[tuple[int, ...], float] = {
    (3,) * 7: 0.7,
    (1, 3, 3, 3, 3, 3, 3, 2): 0.15,
    (3, 3, 3, 3, 3, 3, 1, 2): 0.05,
    (3, 3, 3, 3, 3, 3, 2, 1): 0.05,
    (2, 3, 3, 3, 3, 3, 3, 1): 0.05,
}


MAX_CHUNKS = max(map(len, PARTITIONS))


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


class TextToLatents(nn.Module):
    """The two modules trained together: token ids and latents in, flow velocity out."""

    def __init__(self, transformer: WanTransformer3DModel, text_encoder: UMT5EncoderModel) -> None:
        super().__init__()
        self.transformer = transformer
        self.text_encoder = text_encoder
        words = vocabulary()
        self.register_buffer("color_words", torch.tensor([word in COLORS for word in words]), persistent=False)

    def forward(self, latents: torch.Tensor, timestep: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """latents (B, 16, 2F, 8, 8), timestep (B, 2L), token_ids (B, 3, 24) -> velocity like latents."""
        text = encode_apart(self.text_encoder, token_ids, self.color_words)
        return self.transformer(latents, timestep, text, return_dict=False)[0]


class TeacherForcing:
    """The flow-matching loss of a batch, with random partitions, noise levels and start frames."""

    def __init__(self, model: TextToLatents, device: torch.device) -> None:
        self.model = model
        self.context: TrainingContext = prepare_for_teacher_forcing(model.transformer)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.partitions = Partitions.build(PARTITIONS, device, tokens_per_frame=TOKENS_PER_FRAME, dtype=dtype)

    def loss(self, latents: torch.Tensor, histories: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """Squared error of the velocity `noise - latents` on noisy frames; latents and histories: (B, 16, F, 8, 8).

        The clean half shows the histories up to a random chunk and the latents after it. So where the history
        contradicts the caption the caption wins: a shape that went wrong is mended, and a new prompt is followed.
        """
        batch, device = len(latents), latents.device
        partition = (torch.rand(batch, 1, device=device) > self.partitions.cumulative[:-1]).sum(dim=1)
        self.context.bias = self.partitions.bias[partition]
        self.context.halves = 2
        self.context.start = torch.randint(MAX_START, (batch,), device=device)

        chunks = self.partitions.chunks[partition]
        sigma = shifted(torch.rand(chunks.shape, device=device), SHIFT).gather(1, chunks)
        noise = torch.randn_like(latents)
        noisy = torch.lerp(latents, noise, sigma[:, None, :, None, None])
        stain = torch.rand(chunks.shape, device=device).gather(1, chunks) * self._clean_noise(batch, device)
        switch = torch.randint(1, MAX_CHUNKS, (batch, 1), device=device)
        clean = torch.where((chunks < switch)[:, None, :, None, None], histories, latents)
        clean = torch.lerp(clean, torch.randn_like(latents), stain[:, None, :, None, None])

        timestep = torch.cat([torch.zeros_like(sigma), 1000 * sigma], dim=1)
        timestep = timestep.repeat_interleave(TOKENS_PER_FRAME, dim=1)
        velocity = self.model(torch.cat([clean, noisy], dim=2), timestep, token_ids)[:, :, latents.shape[2] :]
        return (velocity.float() - (noise - latents)).square().mean()

    def _clean_noise(self, batch: int, device: torch.device) -> torch.Tensor:
        """The highest noise level on the clean half of each clip: (batch, 1)."""
        heavy = torch.rand(batch, 1, device=device) < HEAVY_SHARE
        return MAX_CLEAN_NOISE + (MAX_HEAVY_NOISE - MAX_CLEAN_NOISE) * heavy


def shifted(uniform: torch.Tensor, shift: float) -> torch.Tensor:
    """Noise levels of a schedule with `shift`."""
    return shift * uniform / (1 + (shift - 1) * uniform)
