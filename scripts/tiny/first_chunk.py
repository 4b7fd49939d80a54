"""First chunks: they have no history, so the noise and the caption alone decide them, and all later chunks follow."""

from collections.abc import Sequence

import torch

from .models import LATENT_CHANNELS, encode_text
from .teacher_forcing import CHUNK, TOKENS_PER_FRAME, TextToLatents, TrainingContext, shifted

HIGH_SHIFT = 8.0  # of the noise levels: what is where is decided at the high ones
LENGTHS = (3, 3, 3, 3, 3, 3, 2, 1)  # latent frames of a first chunk, drawn evenly
NUM_STEPS, RECIPE_SHIFT = 8, 5.0  # of the recipe in `builtin/tiny/model_index.json`


class FirstChunks:
    """Flow matching on first chunks alone, and the recipe's sampler for them."""

    def __init__(self, model: TextToLatents, context: TrainingContext, device: torch.device) -> None:
        self.model, self.context = model, context
        self.lengths = torch.tensor(LENGTHS, device=device)

    def loss(self, latents: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """Squared error of the velocity on chunks of one to three latent frames; latents: (B, 16, 3, 8, 8)."""
        batch, device = len(latents), latents.device
        frame = torch.arange(CHUNK, device=device)
        length = self.lengths[torch.randint(len(self.lengths), (batch, 1), device=device)]
        real = frame < length
        seen = real[:, None] | torch.eye(CHUNK, dtype=torch.bool, device=device)  # left-over frames see themselves too
        seen = seen.repeat_interleave(TOKENS_PER_FRAME, 1).repeat_interleave(TOKENS_PER_FRAME, 2)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        bias = torch.zeros(seen.shape, device=device, dtype=dtype).masked_fill(~seen, -torch.inf)[:, None]
        self._enter(batch, device, bias)

        sigma = shifted(torch.rand(batch, device=device), HIGH_SHIFT)
        noise = torch.randn_like(latents)
        noisy = torch.lerp(latents, noise, sigma.view(-1, 1, 1, 1, 1))
        timestep = (1000 * sigma)[:, None].expand(-1, CHUNK * TOKENS_PER_FRAME)
        error = self.model(noisy, timestep, token_ids).float() - (noise - latents)
        return (error.square().mean(dim=(1, 3, 4)) * real).sum() / real.sum()

    @torch.no_grad()
    def sample(self, token_ids: torch.Tensor, sigmas: Sequence[float]) -> torch.Tensor:
        """First chunks (B, 16, 3, 8, 8) drawn by the few-step rule with noise levels `sigmas`."""
        text = encode_text(self.model.text_encoder, token_ids)
        batch, device = len(text), text.device
        self._enter(batch, device, None)
        latents = torch.randn(batch, LATENT_CHANNELS, CHUNK, 8, 8, device=device)
        for sigma, following in zip(sigmas, [*sigmas[1:], 0.0], strict=True):
            timestep = torch.full((batch, CHUNK * TOKENS_PER_FRAME), 1000 * sigma, device=device)
            velocity = self.model.transformer(latents, timestep, text, return_dict=False)[0].float()
            latents = torch.lerp(latents - sigma * velocity, torch.randn_like(latents), following)
        return latents

    def _enter(self, batch: int, device: torch.device, bias: torch.Tensor | None) -> None:
        """Sets the context for chunks without a clean half, at the start of a video."""
        self.context.halves = 1
        self.context.bias = bias
        self.context.start = torch.zeros(batch, device=device)


def step_sigmas(num_steps: int, shift: float) -> list[float]:
    """Noise levels of a recipe with `num_steps` evenly spaced denoising steps before the warp by `shift`."""
    return shifted(1 - torch.arange(num_steps) / num_steps, shift).tolist()
