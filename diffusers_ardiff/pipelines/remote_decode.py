"""Decoding on a rank of its own: the team's leader sends each chunk's clean latents, and its last rank makes the frames
while the others denoise the next chunk."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ..parallel import DecodeLink, ParallelLayout, VideoGroups
from .live import EventRules
from .output import ARChunk, FrameOutput
from .settings import StreamSettings

if TYPE_CHECKING:
    from .decoding import Decoding

_NO_EVENTS = EventRules(num_videos=1, text_len=1, text_dim=1, encodes_text=False, takes_controls=False)


class Closable(Protocol):
    """A stream, of which only this is asked here."""

    @property
    def closed(self) -> bool:
        """Whether it has given everything back."""
        ...


class RemoteOutput(FrameOutput):
    """Hands out latents, and sends each chunk's to the rank that decodes.

    Args:
        processor, settings: as in ``FrameOutput``; the output is latents.
        link: to the decoder.
    """

    def __init__(self, processor: Any, settings: StreamSettings, link: DecodeLink) -> None:
        super().__init__(processor, settings, None)
        self._link = link
        self._closed = False
        self._error: str | None = None
        link.tell(("open", settings.num_frames))

    def make(self, latents: torch.Tensor, past: torch.Tensor) -> Any:
        """The latents; on their way to the decoder too. Waits where that one is a chunk behind."""
        self._link.tell(("chunk", (tuple(latents.shape), past.shape[2] > 0)))
        self._link.send(latents)
        return super().make(latents, past)

    def fork(self) -> FrameOutput:
        """Refused: the decoder has one past.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("a stream whose frames are decoded on another rank can't be forked; decode here.")

    def reset_decoder(self) -> None:
        """Let the decoder forget its past."""
        self._link.tell(("reset", None))

    def fail(self, error: BaseException) -> None:
        """Let the decoder raise where the video breaks off, so that nobody there takes it for whole."""
        self._error = repr(error)

    def close(self) -> None:
        """Tell the decoder that the video is over; calling it again does nothing."""
        if not self._closed:
            self._closed = True
            self._link.tell(("end", self._error))


def check_role(layout: ParallelLayout, output_type: str, known: Closable | None) -> None:
    """Raise ValueError where this rank can't run such a call: it decodes only, or another one does.

    Args:
        layout: of the ranks.
        output_type: of the call.
        known: the last stream whose frames another rank decodes.
    """
    if layout.is_decoder:
        raise ValueError("this rank decodes for its team: iterate over pipe.receive_chunks() in place of a call.")
    if layout.decode_rank and output_type != "latent":
        raise ValueError(
            f"output_type={output_type!r}: frames of this team are made on its last rank. Give output_type='latent' here, and "
            "take frames from pipe.receive_chunks() there."
        )
    if layout.decode_rank and known is not None and not known.closed:
        raise ValueError(
            "another stream of this team is open, and decode_rank=True decodes one stream at a time. Close that one first, "
            "or enable_parallelism(decode_rank=False)."
        )


def receive_chunks(
    groups: VideoGroups | None, decoding: Decoding, processor: Any, device: torch.device, output_type: str
) -> Generator[ARChunk]:
    """``Parallelism.receive_chunks``; see there."""
    link = groups.decoder if groups is not None else None
    if groups is None or link is None or not groups.layout.is_decoder:
        raise ValueError(
            "this rank decodes for nobody: enable_parallelism(decode_rank=True) makes a team's last rank do so."
        )
    _, num_frames = link.hear()
    settings = StreamSettings(
        given=(), num_frames=num_frames, total_latent_frames=None, output_type=output_type, rules=_NO_EVENTS
    )
    output = FrameOutput(processor, settings, decoding.open(device))
    past = torch.empty(0)
    index = start = 0
    while (message := link.hear())[0] != "end":
        if message[0] == "reset":
            output.reset_decoder()
            continue
        shape, has_past = message[1]
        latents = link.receive(shape, device)
        if not has_past:  # a video begins
            output.num_frames = index = start = 0
            past = latents[:, :, :0]
        frames = output.make(latents, past)
        yield ARChunk(index=index, output=frames, latents=latents, start_latent_frame=start)
        past, index, start = latents[:, :, -1:], index + 1, start + latents.shape[2]
    if message[1] is not None:
        raise RuntimeError(f"the video breaks off here: on rank {link.leader}, its stream failed with {message[1]}.")
