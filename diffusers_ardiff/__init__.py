"""Autoregressive video diffusion for Hugging Face diffusers: paged K/V cache, fused write-and-attend, streaming."""

from pathlib import Path

from .cache import KVScales, MemoryLimitError
from .checkpoints import load_ar_checkpoint
from .context import PagedForwardContext
from .fp8 import quantize_linears
from .gelu import fuse_gelu, unfuse_gelu
from .pipelines import (
    ARChunk,
    ARDiffusionPipeline,
    ARDiffusionPipelineOutput,
    CacheOptions,
    ControlInputs,
    EventQueueFullError,
    LightDecoder,
    PromptSwitch,
    StreamBatch,
    StreamBatchError,
)
from .processors import attach_paged_attention
from .recipes import Recipe

__version__ = "0.1.0"

HUB_SHIM = str(Path(__file__).parent / "hub_shim")
"""For ``DiffusionPipeline.from_pretrained(folder, custom_pipeline=HUB_SHIM, trust_remote_code=True)``."""

__all__ = [
    "HUB_SHIM",
    "ARChunk",
    "ARDiffusionPipeline",
    "ARDiffusionPipelineOutput",
    "CacheOptions",
    "ControlInputs",
    "EventQueueFullError",
    "KVScales",
    "LightDecoder",
    "MemoryLimitError",
    "PagedForwardContext",
    "PromptSwitch",
    "Recipe",
    "StreamBatch",
    "StreamBatchError",
    "attach_paged_attention",
    "fuse_gelu",
    "load_ar_checkpoint",
    "quantize_linears",
    "unfuse_gelu",
]
