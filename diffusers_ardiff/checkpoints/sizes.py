"""Sizes of a Wan transformer, read from the shapes of its weights."""

import math
import re
from collections.abc import Mapping
from typing import Any

import torch

from .names import map_names

_PATCH = "patch_embedding.weight"
_TEXT = "condition_embedder.text_embedder.linear_1.weight"
_TIME = "condition_embedder.time_embedder.linear_1.weight"
_FFN = "blocks.0.ffn.net.0.proj.weight"
_OUT = "proj_out.weight"
_IMAGE = "condition_embedder.image_embedder.norm1.weight"
_IMAGE_POSITIONS = "condition_embedder.image_embedder.pos_embed"
_IMAGE_KEYS = "blocks.0.attn2.add_k_proj.weight"
_BLOCK = re.compile(r"blocks\.(\d+)\.")

SIZE_WEIGHTS = (_PATCH, _TEXT, _TIME, _FFN, _OUT)
_SIZE_FIELDS = (
    "num_layers",
    "num_attention_heads",
    "ffn_dim",
    "in_channels",
    "out_channels",
    "patch_size",
    "text_dim",
    "freq_dim",
)


def infer_transformer_config(
    state_dict: Mapping[str, torch.Tensor], *, attention_head_dim: int = 128
) -> dict[str, Any]:
    """Constructor arguments of the `WanTransformer3DModel` that a state dict fits.

    The model width is `num_attention_heads * attention_head_dim`. Weights do not tell the head size: every public
    Wan model has 128.

    Args:
        state_dict: weights in original or diffusers layout, with or without training prefixes; only shapes are read.
            `patch_embedding.weight` is [dim, in_channels, *patch_size].
        attention_head_dim: channels of one attention head.

    Raises:
        ValueError: weights that carry the sizes are missing, or the shapes are not those of a Wan transformer.
    """
    names, _ = map_names(state_dict)
    shapes = {names[name]: tuple(tensor.shape) for name, tensor in state_dict.items()}
    missing = [name for name in SIZE_WEIGHTS if name not in shapes]
    if missing:
        raise ValueError(
            f"not a Wan transformer: {missing} are missing from weights such as {list(state_dict)[:5]}; give the "
            "state dict of the transformer itself, in original or diffusers layout."
        )
    dim, in_channels, *patch_size = shapes[_PATCH]
    if len(patch_size) != 3 or dim % attention_head_dim:
        raise ValueError(
            f"patch_embedding.weight is {shapes[_PATCH]}: allowed is [dim, in_channels, frames, rows, columns] with "
            f"dim a multiple of the head size {attention_head_dim}; pass the model's attention_head_dim, and weights "
            "of a Conv3d patch embedding."
        )
    blocks = {int(match[1]) for match in map(_BLOCK.match, shapes) if match}
    return {
        "patch_size": tuple(patch_size),
        "num_attention_heads": dim // attention_head_dim,
        "attention_head_dim": attention_head_dim,
        "in_channels": in_channels,
        "out_channels": shapes[_OUT][0] // math.prod(patch_size),
        "text_dim": shapes[_TEXT][1],
        "freq_dim": shapes[_TIME][1],
        "ffn_dim": shapes[_FFN][0],
        "num_layers": 1 + max(blocks),
        **_optional_parts(shapes),
    }


def check_same_size(file_config: Mapping[str, Any], base_config: Mapping[str, Any]) -> None:
    """Compare two inferred configs by the sizes that tell model sizes apart.

    Raises:
        ValueError: they differ; the message gives both sizes.
    """
    different = [field for field in _SIZE_FIELDS if file_config[field] != base_config[field]]
    if different:
        details = ", ".join(f"{field} {file_config[field]} against {base_config[field]}" for field in different)
        raise ValueError(
            f"file is {file_config['num_layers']} layers x {_width(file_config)}, the base is "
            f"{base_config['num_layers']} x {_width(base_config)}: use a base folder of the same size ({details})."
        )


def _width(config: Mapping[str, Any]) -> int:
    return int(config["num_attention_heads"] * config["attention_head_dim"])


def _optional_parts(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    return {
        "cross_attn_norm": "blocks.0.norm2.weight" in shapes,
        "image_dim": shapes[_IMAGE][0] if _IMAGE in shapes else None,
        "added_kv_proj_dim": shapes[_IMAGE_KEYS][1] if _IMAGE_KEYS in shapes else None,
        "pos_embed_seq_len": shapes[_IMAGE_POSITIONS][1] if _IMAGE_POSITIONS in shapes else None,
    }
