"""Rollouts of the public reference implementations, number for number, through the public pipeline.

Every ``.safetensors`` file in the folder named by ``ARDIFF_ORACLES`` (default: ``tests/oracles``) is a case, driven by its own
config. Keys, windows, positions, text and prompt switches all move these results, so losing any of them fails by
orders of magnitude.
"""

from __future__ import annotations

import json
import os
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from safetensors import safe_open
from safetensors.torch import save_file

from diffusers_ardiff import ARDiffusionPipeline, CacheOptions, PromptSwitch, Recipe
from diffusers_ardiff.checkpoints import infer_transformer_config, load_ar_checkpoint
from diffusers_ardiff.recipes import window_from_peer

ORACLES = Path(os.environ.get("ARDIFF_ORACLES", Path(__file__).parent / "oracles"))
FILES = sorted(ORACLES.glob("*.safetensors"))
MAX_RELATIVE_ERROR = 1e-4


def test_oracle_files_exist() -> None:
    """An empty folder would turn the whole file into a test of nothing."""
    assert FILES, f"no .safetensors in {ORACLES}"


@lru_cache(maxsize=1)
def read_oracle(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    with safe_open(path, "pt") as file:
        return json.loads(file.metadata()["config"]), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def build_pipeline(config: dict[str, Any], tensors: dict[str, torch.Tensor], tmp_path: Path) -> ARDiffusionPipeline:
    """The oracle's transformer in a pipeline without text encoder and VAE, loaded like an original checkpoint."""
    weights = {name: tensor for name, tensor in tensors.items() if name.startswith("model.")}
    checkpoint = tmp_path / "oracle.safetensors"
    save_file(weights, checkpoint)
    stripped = {name.removeprefix("model."): tensor for name, tensor in weights.items()}
    transformer = WanTransformer3DModel(**infer_transformer_config(stripped, attention_head_dim=config["head_dim"]))
    load_ar_checkpoint(transformer, checkpoint)
    return ARDiffusionPipeline(
        tokenizer=None,
        text_encoder=None,
        vae=None,
        scheduler=FlowMatchEulerDiscreteScheduler(),
        transformer=transformer.eval(),
        recipe=oracle_recipe(config),
    )


def oracle_recipe(config: dict[str, Any]) -> Recipe:
    window = window_from_peer(config["local_attn_size"], config["sink_size"])
    return Recipe(
        name="oracle",
        chunk_frames=config["frames_per_block"],
        first_chunk_frames=1 if config.get("independent_first_frame") else None,
        num_sink_frames=config["sink_size"],
        num_window_frames=window,
        max_latent_frames=config["max_frames"] if window is None else None,
        denoising_steps=tuple(config["denoising_step_list"]),
        shift=config["shift"],
        commit_timestep=config["context_noise"],
    )


def oracle_switches(config: dict[str, Any], text: torch.Tensor) -> list[PromptSwitch]:
    """Text-only switches at chunks, or switches with recache at frames; the first prompt is the call's own."""
    given, size = config.get("context_frames", 0), config["frames_per_block"]
    frames = config.get("switch_frames") or [given + chunk * size for chunk in config.get("switch_at") or []]
    mode = "recache" if config.get("switch_frames") else "text"
    return [
        PromptSwitch(latent_frame=frame, prompt_embeds=text[index : index + 1], mode=mode)
        for index, frame in enumerate(frames, start=1)
    ]


def run_oracle(pipe: ARDiffusionPipeline, config: dict[str, Any], tensors: dict[str, torch.Tensor], **options: Any):
    context = tensors.get("context_latents")
    recipe = pipe.recipe
    cache = pipe.create_cache(
        config["height"] * 8,
        config["width"] * 8,
        text_len=config["text_len"],
        decode=False,
        cache=CacheOptions(**options),
    )
    cache.storage.fill_(float("nan"))
    given = 0 if context is None else context.shape[1]
    num_latents = given + tensors["latents"].shape[1]
    out = pipe(
        prompt_embeds=tensors["text"][:1],
        height=config["height"] * 8,
        width=config["width"] * 8,
        num_frames=1 + 4 * (num_latents - 1),
        latents=tensors["noise"].transpose(1, 2),
        step_noise=tensors["renoise"].transpose(3, 4),
        context_latents=None if context is None else context.transpose(1, 2),
        prompt_schedule=oracle_switches(config, tensors["text"]),
        recipe=recipe,
        output_type="latent",
        cache=cache,
    )
    assert cache.allocator.num_used == 0
    return out.frames[:, :, given:].transpose(1, 2)


@pytest.mark.parametrize("shuffle_seed", [None, 11], ids=["contiguous", "shuffled"])
@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_oracle_rollout(path: Path, page_size: int, shuffle_seed: int | None, tmp_path: Path) -> None:
    config, tensors = read_oracle(path)
    pipe = build_pipeline(config, tensors, tmp_path)
    pipe.set_progress_bar_config(disable=True)
    latents = run_oracle(pipe, config, tensors, page_size=page_size, shuffle_seed=shuffle_seed)
    expected = tensors["latents"]
    assert latents.shape == expected.shape
    size = config["frames_per_block"]
    errors = [
        ((have - want).norm() / want.norm()).item()
        for have, want in zip(latents.split(size, dim=1), expected.split(size, dim=1), strict=True)
    ]
    assert max(errors) <= MAX_RELATIVE_ERROR, errors
