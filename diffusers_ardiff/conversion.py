"""A published checkpoint into a plain diffusers folder with its recipe inside, one shard in memory at a time.

    convert_checkpoint("self_forcing_dmd.pt", "sf", base="Wan2.1-T2V-1.3B-Diffusers", recipe="self-forcing")
    pipe = ARDiffusionPipeline.from_pretrained("sf")

The folder appears under its name only when it is whole. `WanPipeline` reads it too.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from safetensors.torch import save_file

from .checkpoints import CheckpointReport, infer_transformer_config
from .checkpoints.load import MatchedWeights, match_checkpoint
from .checkpoints.stored import stored_weights
from .pipelines.loading import check_model_folder
from .recipes import Recipe, load_recipe

COPIED_PARTS = ("tokenizer", "text_encoder", "vae", "scheduler")
DEFAULT_SHARD_BYTES = 5 * 1000**3
_WEIGHTS = "diffusion_pytorch_model"


@dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """How a checkpoint becomes a folder.

    Args:
        use_ema: prefer `generator_ema` where the file has both.
        lora: a LoRA file to merge into the weights.
        dtype: of the weights written; None: as in the file. Parts that diffusers keeps in float32 keep the file's.
        max_shard_bytes: largest shard, and so about the memory that a conversion takes.
    """

    use_ema: bool = True
    lora: str | os.PathLike[str] | None = None
    dtype: torch.dtype | None = None
    max_shard_bytes: int = DEFAULT_SHARD_BYTES

    def __post_init__(self) -> None:
        if self.max_shard_bytes < 1:
            raise ValueError(
                f"max_shard_bytes = {self.max_shard_bytes}: allowed is at least 1; leave it out for 5 GB."
            )
        if self.dtype is not None and self.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise ValueError(f"dtype = {self.dtype}: allowed are float32, float16 and bfloat16.")


def convert_checkpoint(
    checkpoint: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    base: str | os.PathLike[str],
    recipe: str | Recipe | Mapping[str, Any],
    options: ConvertOptions | None = None,
) -> CheckpointReport:
    """Write a diffusers folder of a checkpoint's transformer and a base folder's other parts.

    Args:
        checkpoint: file or folder, in any layout that ``load_ar_checkpoint`` reads.
        output: the folder to make; must not exist.
        base: diffusers folder of the Wan model that the checkpoint was trained from. Its transformer weights are not
            read and may be missing; its transformer's config is, where it is there.
        recipe: how the checkpoint is sampled; becomes part of the folder.

    Raises:
        FileExistsError: the output exists.
        FileNotFoundError, OSError: no checkpoint, or an incomplete base.
        ValueError: a checkpoint that does not load, or an unknown recipe. Nothing is left behind.
    """
    options = options or ConvertOptions()
    chosen, base, output = load_recipe(recipe), Path(base), Path(output)
    if output.exists():
        raise FileExistsError(f"'{output}' exists: give the name of a folder that is to be made, or remove it first.")
    check_model_folder(os.fspath(base), given={"transformer": None})
    transformer = _empty_transformer(base, checkpoint)
    targets = transformer.state_dict()
    matched = match_checkpoint(transformer, targets, checkpoint, use_ema=options.use_ema, lora=options.lora)
    with _whole_folder(output) as folder:
        transformer.save_config(folder / "transformer")
        _write_weights(folder / "transformer", matched, list(targets), transformer, options)
        for part in COPIED_PARTS:
            shutil.copytree(base / part, folder / part)
        _write_index(folder, base, chosen)
    return matched.report


def _empty_transformer(base: Path, checkpoint: str | os.PathLike[str]) -> WanTransformer3DModel:
    """The transformer without memory for its weights, of the base's config or, where it has none, of the file's sizes."""
    config_file = base / "transformer" / "config.json"
    if config_file.is_file():
        config = json.loads(config_file.read_text(encoding="utf-8"))
        config = {name: value for name, value in config.items() if not name.startswith("_")}
    else:
        config = infer_transformer_config(stored_weights(checkpoint))
    with torch.device("meta"):
        return WanTransformer3DModel.from_config(config)


@contextmanager
def _whole_folder(output: Path) -> Iterator[Path]:
    """A hidden folder beside ``output`` that takes its name at the end, or is removed."""
    output.parent.mkdir(parents=True, exist_ok=True)
    part = output.with_name(f".{output.name}.part-{os.getpid()}")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    try:
        yield part
        part.rename(output)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _write_weights(
    folder: Path,
    matched: MatchedWeights,
    names: list[str],
    transformer: WanTransformer3DModel,
    options: ConvertOptions,
) -> None:
    dtypes = {name: _written_dtype(name, matched.state[name].dtype, transformer, options.dtype) for name in names}
    sizes = {name: matched.state[name].numel() * dtypes[name].itemsize for name in names}
    shards = plan_shards(sizes, options.max_shard_bytes)
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        suffix = "" if len(shards) == 1 else f"-{number:05d}-of-{len(shards):05d}"
        file = f"{_WEIGHTS}{suffix}.safetensors"
        save_file({n: _materialised(matched, n, dtypes[n]) for n in shard}, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, file))
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        (folder / f"{_WEIGHTS}.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")


def _materialised(matched: MatchedWeights, name: str, dtype: torch.dtype) -> torch.Tensor:
    return matched.weight(name).to(dtype, copy=True).contiguous()


def _written_dtype(
    name: str, dtype: torch.dtype, transformer: WanTransformer3DModel, wanted: torch.dtype | None
) -> torch.dtype:
    kept = transformer._keep_in_fp32_modules or []
    return dtype if wanted is None or any(part in name.split(".") for part in kept) else wanted


def plan_shards(sizes: Mapping[str, int], max_bytes: int) -> list[list[str]]:
    """Names in order, cut so that no shard is larger than ``max_bytes``; a larger tensor is a shard of its own."""
    shards: list[list[str]] = []
    room = -1
    for name, size in sizes.items():
        if not shards or size > room:
            shards.append([])
            room = max_bytes
        shards[-1].append(name)
        room -= size
    return shards


def _write_index(folder: Path, base: Path, recipe: Recipe) -> None:
    listed = json.loads((base / "model_index.json").read_text(encoding="utf-8"))
    index = {
        "_class_name": "ARDiffusionPipeline",
        "_diffusers_version": diffusers.__version__,
        **{part: listed[part] for part in COPIED_PARTS},
        "transformer": ["diffusers", "WanTransformer3DModel"],
        "transformer_2": [None, None],
        "recipe": recipe.to_dict(),
    }
    (folder / "model_index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
