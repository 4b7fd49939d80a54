"""Checkpoints of autoregressive Wan models, in the layout their authors published, into diffusers transformers.

    report = load_ar_checkpoint(pipe.transformer, "self_forcing_dmd.pt")

Covered: tensors under `generator_ema`, `generator`, `model`, `state_dict` or flat, original or diffusers names,
float32, float16 and bfloat16. Not covered: pickled code, packed fp8 / nvfp4 files, LoRA files, models with layers
that the stock transformer lacks.
"""

from .load import CheckpointReport, load_ar_checkpoint
from .sizes import infer_transformer_config

__all__ = ["CheckpointReport", "infer_transformer_config", "load_ar_checkpoint"]
