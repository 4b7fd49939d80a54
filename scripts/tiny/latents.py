"""A large set of rendered clips, encoded once by the trained VAE, with several captions each."""

import random
import time
from dataclasses import dataclass

import torch
from diffusers import AutoencoderKLWan

from .captions import build_tokenizer, caption_scenes, other_colors, other_kinds
from .models import encode_video, latent_stats
from .shapes import TINTED_SHARE, Scenes, render, sample_scenes, simulate, spoil_one

VAGUE_SHARE = 0.25  # "a red shape": colours then work with kinds they were never shown with
SPOILED = 2


@dataclass(frozen=True)
class LatentClips:
    """Normalised latents (M, 16, F, 8, 8) in float16 and token ids (N, captions, 3, 24) of N clips, M >= N.

    histories: (N,) rows of `latents`: the clip itself, or the same clip with one mistake.
    """

    latents: torch.Tensor
    token_ids: torch.Tensor
    histories: torch.Tensor

    def draw(self, count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Random clips: float32 latents (count, 16, F, 8, 8), their histories alike, and the ids of one caption each."""
        device = self.latents.device
        clip = torch.randint(len(self.token_ids), (count,), generator=generator, device=device)
        caption = torch.randint(self.token_ids.shape[1], (count,), generator=generator, device=device)
        return self.latents[clip].float(), self.latents[self.histories[clip]].float(), self.token_ids[clip, caption]


@dataclass(frozen=True)
class EncodeSettings:
    """How clips are made: up to `num_clips` within `max_seconds`, of F `latent_frames` (4 F - 3 pixel frames) each.

    captions: captions a clip; batch: clips encoded together; spoiled: one in `SPOILED` also with one mistake, as history.
    """

    num_clips: int
    max_seconds: float
    batch: int
    latent_frames: int = 21
    captions: int = 4
    spoiled: bool = True


@torch.no_grad()
def encode_clips(vae: AutoencoderKLWan, generator: torch.Generator, settings: EncodeSettings) -> LatentClips:
    """Renders, captions and encodes clips."""
    rng = random.Random(generator.initial_seed())
    device, start = generator.device, time.monotonic()
    latents, ids, twins = [], [], []
    for _ in range(0, settings.num_clips, 16 * settings.batch):
        scenes = sample_scenes(16 * settings.batch, generator, tinted_share=TINTED_SHARE)
        track = simulate(scenes, 4 * settings.latent_frames - 3)
        ids.append(caption_ids(scenes, rng, settings.captions, vague_share=VAGUE_SHARE))
        latents.append(_encode(vae, scenes, track, settings.batch))
        if settings.spoiled:
            part = torch.arange(0, 16 * settings.batch, SPOILED, device=device)
            twins.append(_encode(vae, spoil_one(scenes.select(part), generator), track[part], settings.batch))
        if time.monotonic() - start > settings.max_seconds:
            break
    token_ids = torch.cat(ids)
    histories = torch.arange(len(token_ids), device=device)
    if settings.spoiled:
        histories[::SPOILED] = len(token_ids) + torch.arange(sum(map(len, twins)), device=device)
    return LatentClips(torch.cat([*latents, *twins]), token_ids, histories)


def _encode(vae: AutoencoderKLWan, scenes: Scenes, track: torch.Tensor, batch: int) -> torch.Tensor:
    """Normalised latents in float16 of the rendered scenes, `batch` at a time."""
    mean, std = latent_stats(vae)
    latents = []
    for part in torch.arange(len(track), device=track.device).split(batch):
        video = render(scenes.select(part), track[part])
        with torch.autocast(track.device.type, torch.bfloat16, enabled=track.is_cuda):
            encoded = encode_video(vae, video).mode()
        latents.append(((encoded.float() - mean) / std).half())
    return torch.cat(latents)


def caption_ids(scenes: Scenes, rng: random.Random, captions: int, **shares: float) -> torch.Tensor:
    """Token ids of several captions a scene, on the scenes' device: (N, captions, 3, 24).

    Of three each, the second has other colours and the third other kinds; see `models.encode_apart`. Shares as in
    `caption_scenes`.
    """
    texts = zip(*(caption_scenes(scenes, rng, **shares) for _ in range(captions)), strict=True)
    flat = [
        version
        for group in texts
        for text in group
        for version in (text, other_colors(text, rng), other_kinds(text, rng))
    ]
    ids = build_tokenizer()(flat, padding="max_length", truncation=True, return_tensors="pt").input_ids
    return ids.view(-1, captions, 3, ids.shape[-1]).to(scenes.colors.device)
