"""A pipeline by name, on a device, for the commands. It needs no video library."""

from __future__ import annotations

import torch

from .pipelines import ARDiffusionPipeline


def load_pipeline(
    model: str,
    device: torch.device,
    *,
    recipe: str | None = None,
    checkpoint: str | None = None,
    lora: str | None = None,
) -> ARDiffusionPipeline:
    """A pipeline on a device: bfloat16 on an accelerator, float32 on the CPU.

    Args:
        model: built-in model, diffusers folder or hub id.
        recipe: name or .json file; None: the model's own.
        checkpoint: original-layout weights to load over the transformer.
        lora: LoRA file that belongs to the checkpoint, merged into it.
    """
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    pipeline = ARDiffusionPipeline.from_pretrained(
        model, recipe=recipe, ar_checkpoint=checkpoint, ar_lora=lora, dtype=dtype
    )
    return pipeline.to(device)
