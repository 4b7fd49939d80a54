"""Writes the trained components as a diffusers folder (16-bit weights, no `model_index.json`)."""

from pathlib import Path

import torch

from .captions import build_tokenizer
from .models import build_scheduler, build_text_encoder, build_transformer
from .train_vae import load_trained_vae
from .training import load_state


def export_components(state: Path, folder: Path) -> None:
    """Saves vae, transformer, text_encoder, tokenizer and scheduler under `folder`, each in its own sub-folder."""
    transformer, text_encoder = build_transformer(), build_text_encoder()
    for name, module in (("transformer", transformer), ("text_encoder", text_encoder)):
        if not load_state(module, state / f"{name}.safetensors"):
            raise FileNotFoundError(f"no trained {name} in {state}: run --stage transformer first")
    vae = load_trained_vae(state, torch.device("cpu"))
    vae.half().save_pretrained(folder / "vae")
    transformer.half().save_pretrained(folder / "transformer")
    text_encoder.half().save_pretrained(folder / "text_encoder")
    build_tokenizer().save_pretrained(folder / "tokenizer")
    build_scheduler().save_pretrained(folder / "scheduler")
