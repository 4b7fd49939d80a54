"""What the pipeline hands out."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from diffusers.utils.outputs import BaseOutput

if TYPE_CHECKING:
    from .decode_stream import DecodeStream
    from .settings import StreamSettings


@dataclass
class ARDiffusionPipelineOutput(BaseOutput):
    """Videos of one call.

    Args:
        frames: by ``output_type``: ``"np"`` array (videos, frames, height, width, 3) in [0, 1]; ``"pt"`` tensor
            (videos, frames, 3, height, width); ``"pil"`` list of lists of images; ``"latent"`` tensor
            (videos, channels, latent frames, height, width).
    """

    frames: Any


class PendingFrames(ABC):
    """Frames that are still being made."""

    @abstractmethod
    def result(self) -> Any:
        """The frames, safe to use where it is called; any thread may, as often as it likes."""


@dataclass(frozen=True, kw_only=True)
class ARChunk:
    """One chunk of a stream.

    Args:
        index: number of the chunk in the stream, given ones included.
        output: the chunk's frames, or what they will be read from; see ``frames``.
        latents: (videos, channels, latent frames, height, width) float32, clean.
        start_latent_frame: absolute latent frame of the first one.
        is_given: the chunk holds latents of a given image or video.
        last_event_id: id of the last event applied before this chunk; None: none yet.
    """

    index: int
    output: Any
    latents: torch.Tensor
    start_latent_frame: int
    is_given: bool = False
    last_event_id: int | None = None

    @property
    def frames(self) -> Any:
        """Pixel frames of this chunk, in the form of ``ARDiffusionPipelineOutput.frames``.

        Where decoding overlaps (``set_decoder(overlap=True)``), reading them waits until they are made.
        """
        return self.output.result() if isinstance(self.output, PendingFrames) else self.output

    @property
    def is_overlapped(self) -> bool:
        """Whether its frames are made beside the next chunk, so that reading them may wait."""
        return isinstance(self.output, PendingFrames)

    @property
    def num_latent_frames(self) -> int:
        """Latent frames of this chunk."""
        return self.latents.shape[2]


class FrameOutput:
    """Makes the frames that a stream hands out from its latents, as many in all as were asked for.

    Args:
        processor: diffusers' video processor.
        settings: output type and number of frames.
        decoder: state of the decoder; None for latents, unless somebody watches.

    Attributes:
        watch: gets every chunk's decoded frames (videos, 3, frames, H, W) in [-1, 1], also those beyond what was asked for.
    """

    def __init__(self, processor: Any, settings: StreamSettings, decoder: DecodeStream | None) -> None:
        self.num_frames = 0
        self.watch: Callable[[torch.Tensor], None] | None = None
        self._processor = processor
        self._settings = settings
        self._decoder = decoder

    @property
    def state_bytes(self) -> int:
        """Bytes the decoder's state holds now."""
        return self._decoder.state_bytes if self._decoder is not None else 0

    def make(self, latents: torch.Tensor, past: torch.Tensor) -> Any:
        """Frames of the next chunk; ``past`` holds the latents before it, the last frame at least if there is one."""
        settings = self._settings
        pixels = self._decode(latents, past) if self._decoder is not None else None
        if pixels is None or settings.output_type == "latent":
            return self._cut(latents, settings.total_latent_frames)
        return self._processor.postprocess_video(
            self._cut(pixels, settings.num_frames), output_type=settings.output_type
        )

    def _decode(self, latents: torch.Tensor, past: torch.Tensor) -> torch.Tensor:
        """All frames (videos, 3, frames, height, width) of these latents, in [-1, 1]."""
        decoder = self._decoder
        assert decoder is not None
        if decoder.num_latent_frames == 0 and past.shape[2]:
            # The decoder was reset on the way: the one short latent frame that it begins with comes from the past.
            decoder.decode(past[:, :, -1:])
        pixels = decoder.decode(latents)
        if self.watch is not None:
            self.watch(pixels)
        return pixels

    def fork(self) -> FrameOutput:
        """The same state once more."""
        other = copy.copy(self)
        other._decoder = self._decoder.fork() if self._decoder is not None else None
        return other

    def reset_decoder(self) -> None:
        """Forget the decoder's past."""
        if self._decoder is not None:
            self._decoder.reset()

    def fail(self, error: BaseException) -> None:
        """The stream will be closed because of this error; for outputs that somebody else waits for."""

    def close(self) -> None:
        """The stream is over."""
        self.reset_decoder()

    def _cut(self, frames: torch.Tensor, limit: int | None) -> torch.Tensor:
        kept = frames if limit is None else frames[:, :, : limit - self.num_frames]
        self.num_frames += kept.shape[2]
        return kept
