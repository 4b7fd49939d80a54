"""The autoregressive pipeline and its parts."""

from .ar_pipeline import ARDiffusionPipeline
from .async_stream import AsyncARStream
from .control import EventQueueFullError
from .decoding import DecodeOptions
from .hook import ControlHook, ControlInputs
from .inputs import CacheOptions
from .light_decoder import LightDecoder
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
    "DecodeOptions",
    "EventQueueFullError",
    "LightDecoder",
    "PromptSwitch",
    "StreamBatch",
    "StreamBatchError",
]
