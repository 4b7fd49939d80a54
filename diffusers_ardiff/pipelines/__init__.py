"""The autoregressive pipeline and its parts."""

from .ar_pipeline import ARDiffusionPipeline
from .inputs import CacheOptions
from .output import ARChunk, ARDiffusionPipelineOutput
from .stream import ARStream, PromptSwitch

__all__ = ["ARChunk", "ARDiffusionPipeline", "ARDiffusionPipelineOutput", "ARStream", "CacheOptions", "PromptSwitch"]
