"""Pixel scores of first chunks during training, before a pipeline exists to score."""

import torch
from diffusers import AutoencoderKLWan

from .captions import build_tokenizer
from .evaluate import by_group, make_prompts, wanted_colors
from .first_chunk import NUM_STEPS, RECIPE_SHIFT, FirstChunks, step_sigmas
from .models import decode_video, latent_stats
from .score import motion, right_frames


@torch.no_grad()
def probe_first_chunks(first: FirstChunks, vae: AutoencoderKLWan, count: int = 96) -> dict[str, object]:
    """Right frames in percent by group of prompts, and motion, of first chunks made as by the recipe."""
    prompts = make_prompts(count, seed=1000)
    ids = build_tokenizer()([prompt.text for prompt in prompts], padding="max_length", return_tensors="pt").input_ids
    mean, std = latent_stats(vae)
    with torch.compiler.set_stance("force_eager"):  # no further compiled variant for this batch
        latents = first.sample(ids.to(mean.device), step_sigmas(NUM_STEPS, RECIPE_SHIFT))
        video = decode_video(vae, latents * std + mean)
    right = right_frames(video, wanted_colors(prompts)).cpu()
    return by_group(right, prompts) | {"motion": round(motion(video).nanmean().item(), 2)}
