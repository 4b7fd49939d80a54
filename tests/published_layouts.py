"""Files of exactly the layout in which a family publishes its checkpoints, with weights of the test's choice."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from test_checkpoints import to_original

from diffusers_ardiff.checkpoints import CheckpointFamily

Weights = dict[str, torch.Tensor]
LORA_RANK = 4


def is_lora_target(name: str, weight: torch.Tensor) -> bool:
    """LongLive's LoRA is on every linear layer of the blocks."""
    return name.startswith("blocks.") and name.endswith(".weight") and weight.ndim == 2


def make_lora(weights: Weights, rank: int = LORA_RANK) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """(A, B) by diffusers weight name."""
    random = torch.Generator().manual_seed(7)
    targets = {name: weight for name, weight in weights.items() if is_lora_target(name, weight)}
    return {
        name: (
            0.1 * torch.randn(rank, weight.shape[1], generator=random),
            0.1 * torch.randn(weight.shape[0], rank, generator=random),
        )
        for name, weight in targets.items()
    }


def lora_entries(lora: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> Weights:
    """As PEFT names them over original weight names."""
    entries = {}
    for name, (down, up) in lora.items():
        module = f"base_model.model.{to_original(name).removesuffix('.weight')}"
        entries[f"{module}.lora_A.weight"] = down
        entries[f"{module}.lora_B.weight"] = up
    return entries


def write_lora(path: Path, lora: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> Path:
    torch.save({"generator_lora": lora_entries(lora), "step": 3000}, path)
    return path


def write_file(family: CheckpointFamily, folder: Path, weights: Weights) -> Path:
    """One file of a family; ``weights`` have diffusers names."""
    dtype = getattr(torch, family.dtype)
    rename = to_original if family.layout == "original" else str
    content = {f"{family.prefix}{rename(name)}": weight.to(dtype) for name, weight in weights.items()}
    path = folder / f"model{family.suffix}"
    if family.suffix == ".safetensors":
        save_file(content, path)
    elif family.wrapper is None:
        torch.save(content, path)
    else:
        other = "generator" if family.wrapper == "generator_ema" else "critic"
        rest = {name: weight.float() + 1 for name, weight in content.items()}
        torch.save({other: rest, family.wrapper: content, "step": 600}, path)
    return path


def rename_class(folder: Path, class_name: str) -> None:
    """Make a diffusers folder one whose transformer is of a class that diffusers lacks."""
    for file in (folder / "model_index.json", folder / "transformer" / "config.json"):
        values = json.loads(file.read_text(encoding="utf-8"))
        if file.name == "config.json":
            values["_class_name"] = class_name
        else:
            values["transformer"] = ["diffusers", class_name]
            values["_class_name"] = "WanDMDPipeline"
        file.write_text(json.dumps(values), encoding="utf-8")
