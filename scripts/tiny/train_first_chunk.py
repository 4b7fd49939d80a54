"""Third stage: mends the first chunks of a trained transformer; see `first_chunk` for the losses."""

import random
from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import AutoencoderKLWan

from .first_chunk import FirstChunkLoss, step_sigmas
from .latents import EncodeSettings, LatentClips, caption_ids, encode_clips
from .models import build_text_encoder, build_transformer, encode_video, latent_stats
from .scene_reader import SceneJudge, cell_shares, train_scene_judge, wanted_words
from .shapes import COLORS, render, sample_scenes, simulate
from .teacher_forcing import CHUNK
from .train_transformer import TextToLatents
from .train_vae import load_trained_vae
from .training import Budget, Trainer, load_state, save_state, write_json

MANY_SHAPES = (0.1, 0.3, 0.6)  # scenes of three shapes go wrong most often
VAGUE_SHARE = 0.3


@dataclass(frozen=True)
class FirstChunkSettings:
    """Sizes of the stage: first chunks, short clips and sampled prompts of a step, and of the data they come from.

    `num_steps` and `shift` are those of the recipe that the model is meant to be sampled with.
    """

    chunks: int = 256
    clips: int = 16
    prompts: int = 64
    num_steps: int = 6
    shift: float = 8.0
    clip_frames: int = 9
    num_chunks: int = 16384
    num_clips: int = 2048
    num_prompts: int = 16384
    encode_batch: int = 32
    encode_seconds: float = 30
    reader_clips: int = 4096
    reader_steps: int = 1500
    peak_rate: float = 3e-4
    average_decay: float = 0.999
    compile: bool = True


@dataclass(frozen=True)
class PromptBank:
    """Captions of scenes that need no video: token ids (N, 24); which words are wanted and judged, (N, words) bool.

    A share of `VAGUE_SHARE` says "shape" in place of every kind, so that colour words work without a kind they are
    known with; the kinds of these are not judged.
    """

    token_ids: torch.Tensor
    wanted: torch.Tensor
    judged: torch.Tensor

    @classmethod
    def build(cls, generator: torch.Generator, count: int) -> "PromptBank":
        """Captions of fresh training scenes, none of them empty."""
        rng = random.Random(generator.initial_seed())
        vague = round(VAGUE_SHARE * count)
        parts = []
        for number, vague_share in ((vague, 1.0), (count - vague, 0.0)):
            scenes = sample_scenes(number, generator, numbers=MANY_SHAPES)
            ids = caption_ids(scenes, rng, captions=1, empty_share=0.0, vague_share=vague_share)[:, 0]
            wanted = wanted_words(scenes)
            judged = torch.ones_like(wanted)
            judged[:, len(COLORS) :] = vague_share == 0
            parts.append((ids, wanted, judged))
        return cls(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))

    def draw(self, count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Token ids, wanted and judged words of `count` random prompts."""
        rows = torch.randint(len(self.wanted), (count,), generator=generator, device=generator.device)
        return self.token_ids[rows], self.wanted[rows], self.judged[rows]


def train_first_chunk(
    state: Path, budget: Budget, device: torch.device, seed: int, settings: FirstChunkSettings
) -> None:
    """Goes on training `state/transformer.safetensors` and `state/text_encoder.safetensors`."""
    torch.manual_seed(seed)
    generator = torch.Generator(device).manual_seed(seed)
    vae = load_trained_vae(state, device)
    chunks, clips = encode_training_data(vae, generator, settings)
    judge = fit_judge(vae, generator, settings)
    prompts = PromptBank.build(generator, settings.num_prompts)
    print(f"data and scene reader ready after {budget.elapsed():.0f} s", flush=True)

    model = TextToLatents(build_transformer(), build_text_encoder()).to(device)
    for name in ("transformer", "text_encoder"):
        if not load_state(getattr(model, name), state / f"{name}.safetensors"):
            raise FileNotFoundError(f"no trained {name} in {state}: run --stage transformer first")
    sigmas = step_sigmas(settings.num_steps, settings.shift)
    objective = FirstChunkLoss(model, device, judge, sigmas, settings.clip_frames)
    if settings.compile:
        model.transformer.compile_repeated_blocks(fullgraph=True, dynamic=False)
    trainer = Trainer(model, objective, budget, settings.peak_rate, settings.average_decay)
    while trainer.progress < 1:
        batches = (
            chunks.draw(settings.chunks, generator),
            clips.draw(settings.clips, generator),
            prompts.draw(settings.prompts, generator),
        )
        trainer.train_step(*(tensor for batch in batches for tensor in batch))
    trainer.average.apply()
    save_state(model.transformer, state / "transformer.safetensors")
    save_state(model.text_encoder, state / "text_encoder.safetensors")
    write_json(state / "progress.json", first_chunk={"steps": trainer.step, "log": trainer.log})
    print({name: round(value.item(), 4) for name, value in objective.parts.items()}, flush=True)


def encode_training_data(
    vae: AutoencoderKLWan, generator: torch.Generator, settings: FirstChunkSettings
) -> tuple[LatentClips, LatentClips]:
    """First chunks with many captions each, and short clips."""
    options = {"max_seconds": settings.encode_seconds, "batch": settings.encode_batch, "captions": 16}
    first = EncodeSettings(settings.num_chunks, latent_frames=CHUNK, numbers=MANY_SHAPES, **options)
    short = EncodeSettings(settings.num_clips, latent_frames=settings.clip_frames, numbers=MANY_SHAPES, **options)
    return encode_clips(vae, generator, first), encode_clips(vae, generator, short)


def fit_judge(vae: AutoencoderKLWan, generator: torch.Generator, settings: FirstChunkSettings) -> SceneJudge:
    """A judge whose reader is trained on first chunks whose pixels are known."""
    mean, std = latent_stats(vae)
    latents, shares = [], []
    for _ in range(0, settings.reader_clips, settings.encode_batch):
        scenes = sample_scenes(settings.encode_batch, generator)
        video = render(scenes, simulate(scenes, 4 * CHUNK - 3))
        with torch.no_grad():
            latents.append((encode_video(vae, video).mode() - mean) / std)
        shares.append(cell_shares(video, scenes))
    return train_scene_judge(torch.cat(latents), torch.cat(shares), settings.reader_steps)
