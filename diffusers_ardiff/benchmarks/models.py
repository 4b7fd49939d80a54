"""Pipelines of the real shapes with random weights, built on the device: speed and memory without a download."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel

from ..pipelines import ARDiffusionPipeline, LightDecoder
from ..recipes import Recipe, load_recipe

WAN_SHAPES: dict[str, dict[str, int]] = {
    "wan-1.3b": {"num_layers": 30, "num_attention_heads": 12, "ffn_dim": 8960},
    "wan-14b": {"num_layers": 40, "num_attention_heads": 40, "ffn_dim": 13824},
    "toy": {"num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 16, "ffn_dim": 64},
}
"""What distinguishes the transformers of Wan 2.1, each with heads of 128; and one for a CPU, whose VAE is small too."""
TOY_VAE = partial(
    AutoencoderKLWan,
    base_dim=3,
    z_dim=16,
    dim_mult=[1, 1, 1, 1],
    num_res_blocks=1,
    temperal_downsample=[False, True, True],
)
TEXT_LEN = 512


def build_pipeline(
    name: str, device: torch.device, dtype: torch.dtype = torch.bfloat16, *, share_blocks: bool = False
) -> ARDiffusionPipeline:
    """A pipeline with random weights, without tokenizer and text encoder: it takes ``prompt_embeds``.

    Args:
        name: a key of ``WAN_SHAPES``.
        device: where the weights are made.
        dtype: of transformer and VAE, but for the parts that diffusers keeps in float32.
        share_blocks: all blocks have the same weights, made once, in pinned memory where the host has a GPU: what is
            moved to the GPU block by block takes the same time and room there, but is there in a second.

    Raises:
        ValueError: unknown name.
    """
    if name not in WAN_SHAPES:
        raise ValueError(
            f"unknown model {name!r}; known: {sorted(WAN_SHAPES)}, a diffusers folder or a built-in model."
        )
    torch.manual_seed(0)
    with made_on(device, dtype):
        shape = WAN_SHAPES[name] | ({"num_layers": 1} if share_blocks else {})
        transformer = WanTransformer3DModel(cross_attn_norm=True, **shape)
    keep_float32(transformer)
    if share_blocks:
        _repeat_block(transformer, WAN_SHAPES[name]["num_layers"])
    no_text: Any = None
    pipe = ARDiffusionPipeline(
        tokenizer=no_text,
        text_encoder=no_text,
        vae=build_vae(device, dtype, toy=name == "toy"),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=5.0),
        transformer=transformer.eval().requires_grad_(False),
        recipe=load_recipe("self-forcing"),
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _repeat_block(transformer: Any, num_layers: int) -> None:
    """Blocks like the first one, on the same storage."""
    block = transformer.blocks[0].requires_grad_(False)
    if torch.cuda.is_available():
        for parameter in block.parameters():
            if parameter.device.type == "cpu":
                parameter.data = parameter.data.pin_memory()
    for _ in range(num_layers - 1):
        own = {id(p): torch.nn.Parameter(p.data, requires_grad=False) for p in block.parameters()}
        transformer.blocks.append(copy.deepcopy(block, own))
    transformer.register_to_config(num_layers=num_layers)


def build_vae(device: torch.device, dtype: torch.dtype = torch.bfloat16, *, toy: bool = False) -> AutoencoderKLWan:
    """The VAE of Wan 2.1 with random weights; ``toy``: the smallest one of its kind."""
    with made_on(device, dtype):
        vae = TOY_VAE() if toy else AutoencoderKLWan()
    return vae.eval().requires_grad_(False)


def build_light_decoder(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> LightDecoder:
    """A light decoder of the published sizes for Wan 2.1 with random weights."""
    with made_on(device, dtype):
        return LightDecoder().eval().requires_grad_(False)


def random_embeds(pipeline: ARDiffusionPipeline, device: torch.device, num_videos: int = 1) -> torch.Tensor:
    """Prompt embeddings (num_videos, text_len, text_dim), the same every time."""
    size = (num_videos, TEXT_LEN, pipeline.transformer.config["text_dim"])
    generator = torch.Generator(device).manual_seed(1)
    return torch.randn(size, generator=generator, device=device, dtype=pipeline.transformer.dtype)


def windowed(recipe: Recipe, sink_frames: int | None, window_frames: int | None) -> Recipe:
    """The recipe with another window; None: as it is.

    Raises:
        ValueError: the result keeps the full history, which has no steady state.
    """
    changes: dict[str, Any] = {} if sink_frames is None else {"num_sink_frames": sink_frames}
    if window_frames is not None:
        changes |= {"num_window_frames": window_frames, "max_latent_frames": None}
    recipe = recipe.replace(**changes)
    if recipe.num_window_frames is None:
        raise ValueError(
            f"recipe {recipe.name!r} keeps the full history, so no chunk costs what the one before did. Give a window: "
            "--window-frames 9 --sink-frames 3, or 21 and 0."
        )
    return recipe


@contextmanager
def made_on(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """Modules made inside are on that device and of that dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


def keep_float32(model: Any) -> None:
    """What ``from_pretrained`` does: the parts a model lists stay in float32."""
    for name, parameter in model.named_parameters():
        if any(part in name.split(".") for part in model._keep_in_fp32_modules or ()):
            parameter.data = parameter.data.float()
