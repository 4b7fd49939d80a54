"""A large set of rendered clips, encoded once by the trained VAE, with several captions each."""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from diffusers import AutoencoderKLWan

from .captions import build_tokenizer, caption_scenes
from .models import encode_video, latent_stats
from .shapes import NUMBERS, Scenes, render, sample_scenes, simulate


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


@dataclass(frozen=True)
class EncodeSettings:
    """How clips are made: up to `num_clips` within `max_seconds`, of F `latent_frames` (4 F - 3 pixel frames) each.

    captions: captions a clip; numbers: weights of one, two and three shapes; batch: clips encoded together.
    """

    num_clips: int
    max_seconds: float
    batch: int
    latent_frames: int = 21
    captions: int = 4
    numbers: Sequence[float] = NUMBERS


@torch.no_grad()
def encode_clips(vae: AutoencoderKLWan, generator: torch.Generator, settings: EncodeSettings) -> LatentClips:
    """Renders, captions and encodes clips."""
    mean, std = latent_stats(vae)
    rng = random.Random(generator.initial_seed())
    latents, ids, start = [], [], time.monotonic()
    for _ in range(0, settings.num_clips, 16 * settings.batch):
        scenes = sample_scenes(16 * settings.batch, generator, numbers=settings.numbers)
        track = simulate(scenes, 4 * settings.latent_frames - 3)
        ids.append(caption_ids(scenes, rng, settings.captions))
        for part in torch.arange(16 * settings.batch, device=track.device).split(settings.batch):
            video = render(scenes.select(part), track[part])
            with torch.autocast(track.device.type, torch.bfloat16, enabled=track.is_cuda):
                encoded = encode_video(vae, video).mode()
            latents.append(((encoded.float() - mean) / std).half())
        if time.monotonic() - start > settings.max_seconds:
            break
    return LatentClips(torch.cat(latents), torch.cat(ids))


def caption_ids(scenes: Scenes, rng: random.Random, captions: int, **shares: float) -> torch.Tensor:
    """Token ids of several captions a scene, on the scenes' device: (N, captions, 24); shares as in `caption_scenes`."""
    texts = list(zip(*(caption_scenes(scenes, rng, **shares) for _ in range(captions)), strict=True))
    options = {"padding": "max_length", "truncation": True, "return_tensors": "pt"}
    ids = build_tokenizer()([text for group in texts for text in group], **options).input_ids
    return ids.view(len(texts), captions, -1).to(scenes.colors.device)
