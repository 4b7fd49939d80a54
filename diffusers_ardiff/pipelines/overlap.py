"""Decoding on a CUDA stream of its own: the frames of a chunk are made while the next chunk is denoised.

Order is kept by events alone, so neither stream waits on the host. A tensor that one stream allocated and another reads
is recorded on the reader, or the allocator could hand its memory out again while it is still read.
"""

from __future__ import annotations

import threading
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from .output import FrameOutput, PendingFrames

if TYPE_CHECKING:
    from .decode_stream import DecodeStream
    from .settings import StreamSettings


class OverlappedFrames(PendingFrames):
    """Frames that a CUDA stream is making.

    Args:
        video: (videos, frames, 3, height, width) in [0, 1]: on the device for "pt", else pinned host memory.
        done: recorded behind the last work on it.
        processor: diffusers' video processor.
        output_type: form of the frames.
    """

    def __init__(self, video: torch.Tensor, done: torch.cuda.Event, processor: Any, output_type: str) -> None:
        self.done = done
        self._video: torch.Tensor | None = video
        self._processor = processor
        self._output_type = output_type
        self._frames: Any = None
        self._lock = threading.Lock()

    def result(self) -> Any:
        """The frames. "pt": the caller's current CUDA stream waits, the host does not; else the host waits."""
        with self._lock:
            if self._output_type == "pt":
                return self._for_current_stream()
            if self._video is not None:
                self.done.synchronize()
                self._frames = host_frames(self._processor, self._video, self._output_type)
                self._video = None
            return self._frames

    def _for_current_stream(self) -> torch.Tensor:
        assert self._video is not None
        current = torch.cuda.current_stream(self._video.device)
        current.wait_event(self.done)
        self._video.record_stream(current)
        return self._video


def decode_lane(device: torch.device) -> torch.cuda.Stream:
    """The stream that all decoding on a CUDA device takes; libraries keep a workspace for every stream they have seen."""
    return _decode_lane(torch.cuda.current_device() if device.index is None else device.index)


@cache
def _decode_lane(device_index: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device_index)


class OverlappedOutput(FrameOutput):
    """Makes frames on a CUDA stream of its own, the device's decode stream.

    Args:
        processor, settings, decoder: as in ``FrameOutput``; there is a decoder.
        device: where it runs.
    """

    def __init__(
        self, processor: Any, settings: StreamSettings, decoder: DecodeStream, *, device: torch.device
    ) -> None:
        super().__init__(processor, settings, decoder)
        self._lane = decode_lane(device)

    def make(self, latents: torch.Tensor, past: torch.Tensor) -> OverlappedFrames:
        """Begin to make the frames of the next chunk, behind what the current stream has been given so far."""
        # The caller may edit the latents it is handed, so the decoder reads its own copy.
        latents = latents.clone()
        self._lane.wait_stream(torch.cuda.current_stream(latents.device))
        for tensor in (latents, past):
            tensor.record_stream(self._lane)
        with torch.cuda.stream(self._lane):
            video = self._processor.postprocess_video(
                self._cut(self._decode(latents, past), self._settings.num_frames), output_type="pt"
            )
            if self._settings.output_type != "pt":
                host = torch.empty(video.shape, dtype=video.dtype, pin_memory=True)
                video = host.copy_(video, non_blocking=True)
            # With times, so that a benchmark can place it between others.
            done = torch.cuda.Event(enable_timing=True)
            done.record(self._lane)
        return OverlappedFrames(video, done, self._processor, self._settings.output_type)

    def reset_decoder(self) -> None:
        """Forget the decoder's past, once no work reads it or the weights; frames that are under way are finished."""
        self._lane.synchronize()
        super().reset_decoder()


def host_frames(processor: Any, video: torch.Tensor, output_type: str) -> Any:
    """What ``postprocess_video`` makes of "np" and "pil", from its "pt" result in host memory."""
    arrays = [processor.pt_to_numpy(frames) for frames in video]
    return np.stack(arrays) if output_type == "np" else [processor.numpy_to_pil(array) for array in arrays]
