"""Losses of the third stage, which mends first chunks: they have no history, and all later chunks follow them.

Three parts, on three batches of one step: flow matching on first chunks alone at high noise levels, where the number
and the colours of the shapes are decided; the few-step sampler itself, unrolled with gradients and judged by the
colours and kinds it shows, because few steps blur what many steps keep apart; and ordinary teacher forcing on short
clips, so that later chunks stay as good as they are.
"""

from collections.abc import Sequence

import torch

from .models import LATENT_CHANNELS, encode_text
from .scene_reader import SceneJudge
from .teacher_forcing import CHUNK, MAX_START, chunk_ids
from .train_transformer import TOKENS_PER_FRAME, TeacherForcing, TextToLatents, shifted

HIGH_SHIFT = 8.0
LENGTHS = (3, 3, 3, 3, 3, 3, 2, 1)  # latent frames of a first chunk, drawn evenly
CLIP_WEIGHT = 0.5
SAMPLE_WEIGHT = 0.7
CONTINUED = 0.5  # share of the sampled first chunks that are followed by a second one


def short_partitions(num_frames: int) -> dict[tuple[int, ...], float]:
    """How a clip of `num_frames` latent frames, a multiple of 3, falls into chunks, and how often."""
    whole = (CHUNK,) * (num_frames // CHUNK - 1)
    return {(*whole, CHUNK): 0.7, (1, *whole, 2): 0.2, (2, *whole, 1): 0.1}


def causal_bias(partition: Sequence[int], device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Attention bias of chunks that see themselves and all before: (1, 1, L, L)."""
    chunk = chunk_ids(partition).repeat_interleave(TOKENS_PER_FRAME)
    hidden = chunk[None] > chunk[:, None]
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill(hidden, -torch.inf)[None, None].to(device)


def step_sigmas(num_steps: int, shift: float) -> list[float]:
    """Noise levels of a recipe with `num_steps` evenly spaced denoising steps before the warp by `shift`."""
    return shifted(1 - torch.arange(num_steps) / num_steps, shift).tolist()


class FirstChunkLoss:
    """The sum of the three parts, for tensors of fixed shapes, as `Trainer` wants it."""

    def __init__(
        self,
        model: TextToLatents,
        device: torch.device,
        judge: SceneJudge,
        sigmas: Sequence[float],
        clip_frames: int,
    ) -> None:
        self.model, self.judge, self.sigmas = model, judge, sigmas
        self.clips = TeacherForcing(model, device, short_partitions(clip_frames), first_chunk_weight=0.0)
        self.context = self.clips.context
        self.continuing = causal_bias((CHUNK, CHUNK), device, self.clips.partitions.bias.dtype)
        self.lengths = torch.tensor(LENGTHS, device=device)
        self.parts: dict[str, torch.Tensor] = {}

    def __call__(
        self,
        chunks: torch.Tensor,
        first_ids: torch.Tensor,
        clips: torch.Tensor,
        clip_ids: torch.Tensor,
        prompt_ids: torch.Tensor,
        wanted: torch.Tensor,
        judged: torch.Tensor,
    ) -> torch.Tensor:
        """chunks (B, 16, 3, 8, 8), clips (b, 16, F, 8, 8), ids (*, 24), wanted and judged (R, words) bool -> scalar."""
        chunk_loss = self.flow_matching(chunks, first_ids)
        clip_loss = self.clips(clips, clip_ids)
        sample_loss = self.sampled(prompt_ids, wanted, judged)
        self.parts = {"chunk": chunk_loss.detach(), "clip": clip_loss.detach(), "sample": sample_loss.detach()}
        return chunk_loss + CLIP_WEIGHT * clip_loss + SAMPLE_WEIGHT * sample_loss

    def flow_matching(self, latents: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """Squared error of the velocity on first chunks of one to three latent frames at high noise levels."""
        batch, device = len(latents), latents.device
        frame = torch.arange(CHUNK, device=device)
        length = self.lengths[torch.randint(len(LENGTHS), (batch, 1), device=device)]
        real = frame < length
        seen = real[:, None] | torch.eye(CHUNK, dtype=torch.bool, device=device)  # left-over frames see themselves too
        seen = seen.repeat_interleave(TOKENS_PER_FRAME, 1).repeat_interleave(TOKENS_PER_FRAME, 2)
        self._alone(batch, device)
        self.context.bias = torch.zeros(seen.shape, device=device).masked_fill(~seen, -torch.inf)[:, None]
        self.context.bias = self.context.bias.to(self.clips.partitions.bias.dtype)

        sigma = shifted(torch.rand(batch, device=device), HIGH_SHIFT)
        noise = torch.randn_like(latents)
        noisy = torch.lerp(latents, noise, sigma.view(-1, 1, 1, 1, 1))
        timestep = (1000 * sigma)[:, None].expand(-1, CHUNK * TOKENS_PER_FRAME)
        error = self.model(noisy, timestep, token_ids).float() - (noise - latents)
        return (error.square().mean(dim=(1, 3, 4)) * real).sum() / real.sum()

    def sampled(self, token_ids: torch.Tensor, wanted: torch.Tensor, judged: torch.Tensor) -> torch.Tensor:
        """The judge's loss of first chunks drawn by the recipe's own sampler, and of chunks that follow some of them."""
        text = encode_text(self.model.text_encoder, token_ids)
        self._alone(len(text), text.device)
        first, first_loss = self._unroll(text, (wanted, judged), None)
        rows = slice(0, max(1, round(CONTINUED * len(text))))
        self._alone(len(text[rows]), text.device)
        self.context.bias = self.continuing.expand(len(text[rows]), -1, -1, -1)
        self.context.start = torch.randint(MAX_START, (len(text[rows]),), device=text.device)
        _, second_loss = self._unroll(text[rows], (wanted[rows], judged[rows]), first[rows].detach())
        return first_loss + second_loss

    def _unroll(
        self, text: torch.Tensor, asked: tuple[torch.Tensor, torch.Tensor], history: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Samples one chunk (B, 16, 3, 8, 8) after a `history` like it, with gradients through all steps, and its loss.

        The estimate of every step counts, by the square root of what the next noise level leaves of it.
        """
        latents = torch.randn(len(text), LATENT_CHANNELS, CHUNK, 8, 8, device=text.device)
        past = torch.zeros_like(latents[:, :, :0]) if history is None else history
        tokens = torch.arange(TOKENS_PER_FRAME * (past.shape[2] + CHUNK), device=text.device)
        noisy = (tokens >= TOKENS_PER_FRAME * past.shape[2]).float().expand(len(text), -1)
        loss, total = torch.zeros((), device=text.device), 0.0
        for sigma, following in zip(self.sigmas, [*self.sigmas[1:], 0.0], strict=True):
            inputs = torch.cat([past, latents], dim=2)
            velocity = self.model.transformer(inputs, 1000 * sigma * noisy, text, return_dict=False)[0]
            clean = latents - sigma * velocity[:, :, past.shape[2] :].float()
            weight = (1 - following) ** 0.5
            loss, total = loss + weight * self.judge.loss(clean, *asked).mean(), total + weight
            latents = torch.lerp(clean, torch.randn_like(clean), following)
        return latents, loss / total

    def _alone(self, batch: int, device: torch.device) -> None:
        """Sets the context for chunks without a clean half, at the start of a video."""
        self.context.halves = 1
        self.context.bias = None
        self.context.start = torch.zeros(batch, device=device)
