"""First stage: the causal video autoencoder, on rendered clips."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import AutoencoderKLWan
from torch.nn import functional as F

from .models import build_vae, decode_video, encode_video
from .score import colors_shown
from .shapes import BACKGROUND, TINTED_SHARE, render, sample_scenes, simulate
from .training import Budget, Trainer, load_state, save_state, write_json

SHAPE_WEIGHT = 4.0
KL_WEIGHT = 3e-4


@dataclass(frozen=True)
class VaeSettings:
    """Sizes of the stage; frames are pixel frames (1 + 4n), `num_clips` clips a step out of `num_scenes`.

    The causal state takes some 30 latent frames to settle. Clips of 41 frames (enough for a first piece) leave colours
    wrong from frame 50 on; clips of 121 frames cure that.
    """

    num_clips: int = 5
    num_frames: int = 41
    num_scenes: int = 8192
    peak_rate: float = 1.5e-3
    num_test_clips: int = 24


def train_vae(state: Path, budget: Budget, device: torch.device, seed: int, settings: VaeSettings) -> None:
    """Trains (or goes on training) `state/vae.safetensors` and measures the latents' mean and deviation."""
    torch.manual_seed(seed)
    generator = torch.Generator(device).manual_seed(seed)
    vae = build_vae().to(device)
    resumed = load_state(vae, state / "vae.safetensors")
    scenes = sample_scenes(settings.num_scenes, generator, tinted_share=TINTED_SHARE)
    track = simulate(scenes, settings.num_frames)
    trainer = Trainer(vae, lambda video: vae_loss(vae, video), budget, settings.peak_rate, decay=0.998)
    while trainer.progress < 1:
        rows = torch.randint(settings.num_scenes, (settings.num_clips,), generator=generator, device=device)
        trainer.train_step(render(scenes.select(rows), track[rows]))
    trainer.average.apply()
    save_state(vae, state / "vae.safetensors")
    report = {"steps": trainer.step, "resumed": resumed, "log": trainer.log}
    report |= evaluate_vae(vae, generator, settings.num_test_clips)
    print(report, flush=True)
    write_json(state / "progress.json", vae=report)


def vae_loss(vae: AutoencoderKLWan, video: torch.Tensor) -> torch.Tensor:
    """Absolute plus squared error, pixels on and beside shapes counted five times, and a small KL term.

    The absolute error alone stays on the plateau where everything is background: that is the median.
    """
    posterior = encode_video(vae, video)
    recon = decode_video(vae, posterior.sample()).float()
    near_shape = F.max_pool3d((video - BACKGROUND).abs().amax(dim=1, keepdim=True), (1, 5, 5), 1, (0, 2, 2)) > 0.05
    weight = 1 + SHAPE_WEIGHT * near_shape
    error = (recon - video).abs()
    error = ((error + error**2) * weight).sum() / (3 * weight.sum())
    divergence = 0.5 * (posterior.mean.float() ** 2 + posterior.var.float() - 1 - posterior.logvar.float()).mean()
    return error + KL_WEIGHT * divergence


@torch.no_grad()
def evaluate_vae(vae: AutoencoderKLWan, generator: torch.Generator, num_clips: int) -> dict[str, object]:
    """Latent statistics, error and share of frames with the right colours over fresh clips of 161 frames."""
    latents, errors, right = [], [], []
    for _ in range(num_clips // 4):
        scenes = sample_scenes(4, generator)
        video = render(scenes, simulate(scenes, 161))
        latents.append(encode_video(vae, video).mode())
        recon = decode_video(vae, latents[-1]).clamp(-1, 1)
        errors.append((recon - video).abs().mean(dim=(0, 1, 3, 4)))
        right.append((colors_shown(recon) == colors_shown(video)).all(dim=-1).float().mean())
    values = torch.cat(latents).float()
    std = values.std(dim=(0, 2, 3, 4))
    error = torch.stack(errors).mean(dim=0)
    return {
        "latents_mean": values.mean(dim=(0, 2, 3, 4)).tolist(),
        "latents_std": std.clamp(min=0.1 * std.max().item()).tolist(),
        "error_first_9_frames": error[:9].mean().item(),
        "error_last_9_frames": error[-9:].mean().item(),
        "right_frames": torch.stack(right).mean().item(),
    }


def load_trained_vae(state: Path, device: torch.device) -> AutoencoderKLWan:
    """The trained VAE with the measured latent statistics in its config."""
    vae = build_vae()
    if not load_state(vae, state / "vae.safetensors"):
        raise FileNotFoundError(f"{state / 'vae.safetensors'} is missing: run --stage vae first")
    report = json.loads((state / "progress.json").read_text())["vae"]
    vae.register_to_config(latents_mean=report["latents_mean"], latents_std=report["latents_std"])
    return vae.to(device).eval().requires_grad_(False)
