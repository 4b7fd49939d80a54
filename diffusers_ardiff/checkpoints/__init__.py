"""Checkpoints of autoregressive Wan models, in the layout their authors published, into diffusers transformers.

    report = load_ar_checkpoint(pipe.transformer, "self_forcing_dmd.pt")

Covered: tensors under `generator_ema`, `generator`, `model`, `state_dict` or flat, original or diffusers names,
float32, float16 and bfloat16, with a LoRA file merged in on request. Not covered: pickled code, packed fp8 / nvfp4
files, models with layers that the stock transformer lacks. `FAMILIES` lists the published ones.
"""

from .families import FAMILIES, CheckpointFamily
from .load import CheckpointReport, load_ar_checkpoint
from .lora import ar_lora_state_dict
from .sizes import infer_transformer_config

__all__ = [
    "FAMILIES",
    "CheckpointFamily",
    "CheckpointReport",
    "ar_lora_state_dict",
    "infer_transformer_config",
    "load_ar_checkpoint",
]
