"""Second stage: the transformer and its text encoder, by teacher forcing on encoded clips."""

from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import WanTransformer3DModel
from torch import nn
from transformers import UMT5EncoderModel

from .latents import EncodeSettings, encode_clips
from .models import SHIFT, build_text_encoder, build_transformer, encode_text
from .teacher_forcing import MAX_START, PARTITIONS, Partitions, TrainingContext, prepare_for_teacher_forcing
from .train_vae import load_trained_vae
from .training import Budget, Trainer, load_state, save_state, write_json

# Noise on the clean half. Mostly little, against drift; sometimes so much that the history hardly shows the colours
# and the caption has to tell them.
MAX_CLEAN_NOISE = 0.1
MAX_HEAVY_NOISE = 0.7
HEAVY_SHARE = 0.15
TOKENS_PER_FRAME = 16
FIRST_CHUNK_WEIGHT = 3.0  # the first chunk alone has no history, and everything follows from it


@dataclass(frozen=True)
class TransformerSettings:
    """Sizes of the stage: `batch` clips a step; the data set grows to `num_clips` within `encode_seconds`."""

    batch: int = 32
    num_clips: int = 32768
    encode_batch: int = 32
    encode_seconds: float = 30
    peak_rate: float = 1.5e-3
    compile: bool = True


class TextToLatents(nn.Module):
    """The two modules trained together: token ids and latents in, flow velocity out."""

    def __init__(self, transformer: WanTransformer3DModel, text_encoder: UMT5EncoderModel) -> None:
        super().__init__()
        self.transformer = transformer
        self.text_encoder = text_encoder

    def forward(self, latents: torch.Tensor, timestep: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """latents (B, 16, 2F, 8, 8), timestep (B, 2L), token_ids (B, 24) -> velocity like latents."""
        text = encode_text(self.text_encoder, token_ids)
        return self.transformer(latents, timestep, text, return_dict=False)[0]


def train_transformer(
    state: Path, budget: Budget, device: torch.device, seed: int, settings: TransformerSettings
) -> None:
    """Trains (or goes on training) `state/transformer.safetensors` and `state/text_encoder.safetensors`."""
    torch.manual_seed(seed)
    generator = torch.Generator(device).manual_seed(seed)
    encoding = EncodeSettings(settings.num_clips, settings.encode_seconds, settings.encode_batch)
    clips = encode_clips(load_trained_vae(state, device), generator, encoding)
    print(f"encoded {len(clips.latents)} clips in {budget.elapsed():.0f} s", flush=True)
    model = TextToLatents(build_transformer(), build_text_encoder()).to(device)
    resumed = load_state(model.transformer, state / "transformer.safetensors")
    load_state(model.text_encoder, state / "text_encoder.safetensors")
    objective = TeacherForcing(model, device)
    if settings.compile:
        model.transformer.compile_repeated_blocks(fullgraph=True)
    trainer = Trainer(model, objective, budget, settings.peak_rate, decay=0.999)
    while trainer.progress < 1:
        trainer.train_step(*clips.draw(settings.batch, generator))
    trainer.average.apply()
    save_state(model.transformer, state / "transformer.safetensors")
    save_state(model.text_encoder, state / "text_encoder.safetensors")
    write_json(state / "progress.json", transformer={"steps": trainer.step, "resumed": resumed, "log": trainer.log})


class TeacherForcing:
    """The flow-matching loss of a batch, with random partitions, noise levels and start frames."""

    def __init__(
        self,
        model: TextToLatents,
        device: torch.device,
        shares: dict[tuple[int, ...], float] = PARTITIONS,
        first_chunk_weight: float = FIRST_CHUNK_WEIGHT,
    ) -> None:
        self.model = model
        self.context: TrainingContext = prepare_for_teacher_forcing(model.transformer)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.partitions = Partitions.build(shares, device, tokens_per_frame=TOKENS_PER_FRAME, dtype=dtype)
        self.first_chunk_weight = first_chunk_weight

    def __call__(self, latents: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """Weighted squared error of the velocity `noise - latents` on noisy frames; latents: (B, 16, F, 8, 8)."""
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
        clean = torch.lerp(latents, torch.randn_like(latents), stain[:, None, :, None, None])

        timestep = torch.cat([torch.zeros_like(sigma), 1000 * sigma], dim=1)
        timestep = timestep.repeat_interleave(TOKENS_PER_FRAME, dim=1)
        velocity = self.model(torch.cat([clean, noisy], dim=2), timestep, token_ids)[:, :, latents.shape[2] :]
        error = (velocity.float() - (noise - latents)).square().mean(dim=(1, 3, 4))
        weight = torch.where(chunks == 0, self.first_chunk_weight, 1.0)
        return (error * weight).sum() / weight.sum()

    def _clean_noise(self, batch: int, device: torch.device) -> torch.Tensor:
        """The highest noise level on the clean half of each clip: (batch, 1)."""
        heavy = torch.rand(batch, 1, device=device) < HEAVY_SHARE
        return MAX_CLEAN_NOISE + (MAX_HEAVY_NOISE - MAX_CLEAN_NOISE) * heavy


def shifted(uniform: torch.Tensor, shift: float) -> torch.Tensor:
    """Noise levels of a schedule with `shift`."""
    return shift * uniform / (1 + (shift - 1) * uniform)
