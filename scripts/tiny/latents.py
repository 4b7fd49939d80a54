"""A large set of rendered clips, encoded once by the trained VAE, with several captions each."""

import random
import time
from dataclasses import dataclass

import torch
from diffusers import AutoencoderKLWan

from .captions import build_tokenizer, caption_scenes
from .models import encode_video, latent_stats
from .shapes import render, sample_scenes, simulate

LATENT_FRAMES = 21
CAPTIONS = 4


@dataclass(frozen=True)
class LatentClips:
    """Normalised latents (N, 16, F, 8, 8) in float16 and token ids (N, captions, 24) of N clips."""

    latents: torch.Tensor
    token_ids: torch.Tensor

    def draw(self, count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """Random clips, each with one of its captions: float32 latents (count, ...) and token ids (count, 24)."""
        device = self.latents.device
        clip = torch.randint(len(self.latents), (count,), generator=generator, device=device)
        caption = torch.randint(self.token_ids.shape[1], (count,), generator=generator, device=device)
        return self.latents[clip].float(), self.token_ids[clip, caption]


@torch.no_grad()
def encode_clips(
    vae: AutoencoderKLWan, generator: torch.Generator, num_clips: int, max_seconds: float, batch: int
) -> LatentClips:
    """Renders and encodes up to `num_clips` clips of 21 latent frames (81 pixel frames) within `max_seconds`."""
    mean, std = latent_stats(vae)
    rng = random.Random(generator.initial_seed())
    tokenizer = build_tokenizer()
    latents, texts, start = [], [], time.monotonic()
    for _ in range(0, num_clips, 16 * batch):
        scenes = sample_scenes(16 * batch, generator)
        track = simulate(scenes, 4 * LATENT_FRAMES - 3)
        texts += zip(*(caption_scenes(scenes, rng) for _ in range(CAPTIONS)), strict=True)
        for part in torch.arange(16 * batch, device=track.device).split(batch):
            video = render(scenes.select(part), track[part])
            with torch.autocast(track.device.type, torch.bfloat16, enabled=track.is_cuda):
                encoded = encode_video(vae, video).mode()
            latents.append(((encoded.float() - mean) / std).half())
        if time.monotonic() - start > max_seconds:
            break
    options = {"padding": "max_length", "truncation": True, "return_tensors": "pt"}
    ids = tokenizer([text for group in texts for text in group], **options).input_ids
    return LatentClips(torch.cat(latents), ids.view(len(texts), CAPTIONS, -1).to(track.device))
