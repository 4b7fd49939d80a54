"""The autoregressive pipeline and its parts."""

from .ar_pipeline import ARDiffusionPipeline
from .async_stream import AsyncARStream
from .control import EventQueueFullError
from .hook import ControlHook, ControlInputs
from .inputs import CacheOptions
from .output import ARChunk, ARDiffusionPipelineOutput
from .prompts import PromptSwitch
from .stream import ARStream
from .together import StreamBatch, StreamBatchError

__all__ = [
    "ARChunk",
    "ARDiffusionPipeline",
    "ARDiffusionPipelineOutput",
    "ARStream",
    "AsyncARStream",
    "CacheOptions",
    "ControlHook",
    "ControlInputs",
    "EventQueueFullError",
    "PromptSwitch",
    "StreamBatch",
    "StreamBatchError",
]
