"""Second stage: the transformer and its text encoder, by teacher forcing on encoded clips and on first chunks alone."""

from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import AutoencoderKLWan

from .first_chunk import FirstChunks
from .latents import EncodeSettings, LatentClips, encode_clips
from .models import build_text_encoder, build_transformer
from .probe import probe_first_chunks
from .teacher_forcing import CHUNK, TeacherForcing, TextToLatents
from .train_vae import load_trained_vae
from .training import Budget, Trainer, load_state, save_state, write_json

PROBES = 4  # first chunks are scored this often on the way


@dataclass(frozen=True)
class TransformerSettings:
    """Sizes of the stage.

    batch, chunks: clips and first chunks a step; num_clips, num_openings: so many are encoded, in at most
    `encode_seconds` and `opening_seconds`; encode_batch: clips encoded together.
    """

    batch: int = 32
    chunks: int = 256
    num_clips: int = 32768
    num_openings: int = 65536
    encode_batch: int = 32
    encode_seconds: float = 20
    opening_seconds: float = 8
    peak_rate: float = 1.5e-3
    compile: bool = True


def train_transformer(
    state: Path, budget: Budget, device: torch.device, seed: int, settings: TransformerSettings
) -> None:
    """Trains (or goes on training) `state/transformer.safetensors` and `state/text_encoder.safetensors`."""
    torch.manual_seed(seed)
    generator = torch.Generator(device).manual_seed(seed)
    vae = load_trained_vae(state, device)
    clips, openings = _encode(vae, generator, settings)
    print(
        f"encoded {len(clips.token_ids)} clips, {len(openings.token_ids)} openings in {budget.elapsed():.0f} s",
        flush=True,
    )
    model = TextToLatents(build_transformer(), build_text_encoder()).to(device)
    resumed = load_state(model.transformer, state / "transformer.safetensors")
    load_state(model.text_encoder, state / "text_encoder.safetensors")
    teacher_forcing = TeacherForcing(model, device)
    first_chunks = FirstChunks(model, teacher_forcing.context, device)

    def objective(*batch: torch.Tensor) -> torch.Tensor:
        return teacher_forcing.loss(*batch[:3]) + first_chunks.loss(*batch[3:])

    if settings.compile:
        model.transformer.compile_repeated_blocks(fullgraph=True, dynamic=False)
    trainer = Trainer(model, objective, budget, settings.peak_rate, decay=0.999)
    next_probe = 1 / PROBES
    while trainer.progress < 1:
        starts, _, start_ids = openings.draw(settings.chunks, generator)
        trainer.train_step(*clips.draw(settings.batch, generator), starts, start_ids)
        if trainer.progress >= next_probe:
            next_probe += 1 / PROBES
            print("first chunks:", probe_first_chunks(first_chunks, vae), flush=True)
    trainer.average.apply()
    print("first chunks of the average:", probe_first_chunks(first_chunks, vae), flush=True)
    save_state(model.transformer, state / "transformer.safetensors")
    save_state(model.text_encoder, state / "text_encoder.safetensors")
    write_json(state / "progress.json", transformer={"steps": trainer.step, "resumed": resumed, "log": trainer.log})


def _encode(
    vae: AutoencoderKLWan, generator: torch.Generator, settings: TransformerSettings
) -> tuple[LatentClips, LatentClips]:
    """Whole clips, and many more first chunks: these are cheap, and each is trained on often."""
    clips = EncodeSettings(settings.num_clips, settings.encode_seconds, settings.encode_batch)
    openings = EncodeSettings(
        settings.num_openings,
        settings.opening_seconds,
        8 * settings.encode_batch,
        latent_frames=CHUNK,
        captions=2,
        spoiled=False,
    )
    return encode_clips(vae, generator, clips), encode_clips(vae, generator, openings)
