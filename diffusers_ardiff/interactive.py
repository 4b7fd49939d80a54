"""A video that never ends and is told what to show: lines of text become events of a running stream."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from PIL import Image

from .late_frames import one_behind
from .pipelines import ARChunk, ARDiffusionPipeline, ARStream, EventQueueFullError
from .validation import check_int
from .video_formats import FORMATS
from .video_io import Frames, VideoWriter, save_png_atomic

HELP = "TEXT | :recache TEXT | :flush FRAMES TEXT | :blend CHUNKS TEXT | :quit"
_NUMBERS = {"flush": "keep_frames", "blend": "blend_chunks"}


@dataclass(frozen=True, kw_only=True)
class InteractiveRequest:
    """What to generate.

    Args:
        prompt: of the first chunk.
        output: an .mp4, .webm or .gif file, written whole at the end; or a folder without PNG files, which gets a numbered
            one a frame at once.
        max_frames: pixel frames to stop after; None: until ``:quit`` or the end of the input.
        height, width: pixels; None: the recipe's.
        seed: of the noise.
        guidance_scale, negative_prompt: as in a call.
        preview: also draw each chunk's last frame with coloured characters.

    Raises:
        ValueError: a blank prompt, a bad number or another kind of file.
    """

    prompt: str
    output: Path
    max_frames: int | None = None
    height: int | None = None
    width: int | None = None
    seed: int = 0
    guidance_scale: float | None = None
    negative_prompt: str | None = None
    preview: bool = False

    def __post_init__(self) -> None:
        if not self.prompt.strip():
            raise ValueError("the first prompt needs some text.")
        if self.max_frames is not None:
            check_int("max_frames", self.max_frames, minimum=1)
        if self.output.suffix.lower() not in ("", *FORMATS):
            raise ValueError(
                f"the output must be a file ending in {', '.join(FORMATS)}, or a folder, got {self.output.name!r}."
            )

    def warmup_arguments(self, pipeline: ARDiffusionPipeline) -> dict[str, Any]:
        """Arguments of ``pipeline.warmup`` that fit the stream of this request, recaches included."""
        return {
            "height": self.height,
            "width": self.width,
            "guided": pipeline.recipe.call_guidance(self.guidance_scale) > 1.0,
            "recache": True,
        }


def parse_line(line: str) -> dict[str, Any]:
    """Arguments of ``ARStream.update`` for a line of text, ``HELP`` says which lines there are.

    Raises:
        ValueError: unknown command, or one without its number or text.
    """
    text = line.strip()
    if not text.startswith(":"):
        return {"prompt": text}
    mode, _, rest = text[1:].partition(" ")
    arguments: dict[str, Any] = {"mode": mode}
    if mode in _NUMBERS:
        number, _, rest = rest.strip().partition(" ")
        if not number.isdecimal():
            raise ValueError(f":{mode} takes a whole number and a text, got {text!r}.")
        arguments[_NUMBERS[mode]] = int(number)
    elif mode != "recache":
        raise ValueError(f"unknown command {text!r}; known: {HELP}")
    if not rest.strip():
        raise ValueError(f":{mode} needs a text, got {text!r}.")
    return arguments | {"prompt": rest.strip()}


@dataclass
class _Listener:
    """Sends lines to a stream as events, until one says stop. Runs in a thread of its own."""

    stream: ARStream
    lines: Iterable[str]
    say: Callable[[str], None]
    stop: threading.Event
    stops_at_end: bool

    def run(self) -> None:
        for line in self.lines:
            if line.strip() == ":quit":
                self.stop.set()
            if self.stop.is_set():
                return
            if line.strip():
                self._send(line)
        if self.stops_at_end:
            self.stop.set()

    def _send(self, line: str) -> None:
        try:
            self.stream.update(**parse_line(line))
        except (ValueError, EventQueueFullError) as error:
            self.say(f"not sent: {error}")
        except RuntimeError:
            self.stop.set()
        else:
            self.say(f"event {self.stream.inbox.mailbox.last_id}: {line.strip()}")


def run_interactive(
    pipeline: ARDiffusionPipeline, request: InteractiveRequest, lines: Iterable[str], say: Callable[[str], None]
) -> int:
    """Generate until told to stop; returns the number of frames written.

    Args:
        lines: what the user types, see ``HELP``; read in a thread, may block for as long as it likes.
        say: shows a line to the user; called from two threads.

    A line takes effect at the next chunk. ``:quit``, the end of the lines (unless ``max_frames`` bounds the video) and
    KeyboardInterrupt end the video after the last whole chunk.

    Raises:
        ValueError, OSError: bad input, before anything is written, or an interrupt before the first chunk.
    """
    stream = pipeline.stream(
        request.prompt,
        request.negative_prompt,
        num_frames=request.max_frames,
        height=request.height,
        width=request.width,
        guidance_scale=request.guidance_scale,
        generator=torch.Generator("cpu").manual_seed(request.seed),
        output_type="np",
    )
    stop = threading.Event()
    listener = _Listener(stream, lines, say, stop, stops_at_end=request.max_frames is None)
    with stream, _open_sink(request.output, pipeline.recipe.fps) as sink:
        threading.Thread(target=listener.run, daemon=True).start()
        try:
            _write_chunks(stream, sink, stop, say, preview=request.preview)
        except KeyboardInterrupt:
            say("interrupted")
        stop.set()
        return sink.num_frames


def _write_chunks(
    stream: ARStream,
    sink: VideoWriter | PngFolder,
    stop: threading.Event,
    say: Callable[[str], None],
    *,
    preview: bool,
) -> None:
    for chunk in one_behind(_until(stream, stop)):
        frames = np.rint(chunk.frames[0] * 255).astype(np.uint8)
        sink.write(frames)
        if preview:
            say(draw(frames[-1], shutil.get_terminal_size().columns))
        applied = "" if chunk.last_event_id is None else f", after event {chunk.last_event_id}"
        say(f"chunk {chunk.index}: {sink.num_frames} frames{applied}")


def _until(stream: ARStream, stop: threading.Event) -> Iterator[ARChunk]:
    """Chunks until told to stop; those that were handed out by then are whole and stay."""
    for chunk in stream:
        yield chunk
        if stop.is_set():
            return


class PngFolder:
    """Writes frames as ``000000.png``, ``000001.png``, ... into a folder, each file whole; same use as ``VideoWriter``.

    Entering raises FileExistsError where the folder holds PNG files: those beyond the new frames would look like theirs.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.num_frames = 0

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True)
        if any(self._folder.glob("*.png")):
            raise FileExistsError(f"{self._folder} holds PNG files already; give another folder, or empty it.")
        return self

    def write(self, frames: Frames) -> None:
        """Append frames, uint8 (T, H, W, 3)."""
        for frame in frames:
            save_png_atomic(frame, self._folder / f"{self.num_frames:06d}.png")
            self.num_frames += 1

    def __exit__(self, *exc_info: object) -> None:
        pass


def _open_sink(output: Path, fps: float) -> VideoWriter | PngFolder:
    if not output.suffix:
        return PngFolder(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    return VideoWriter(output, fps)


def draw(frame: Frames, columns: int) -> str:
    """An image, uint8 (H, W, 3), as lines of half blocks with ANSI colours, two pixels a character."""
    height, width = frame.shape[:2]
    columns = min(columns, width)
    rows = max(1, round(height * columns / width / 2))
    pixels = np.asarray(Image.fromarray(frame).resize((columns, 2 * rows), Image.Resampling.BOX))
    lines = []
    for upper, lower in zip(pixels[::2], pixels[1::2], strict=True):
        cells = (
            "\x1b[38;2;{};{};{}m\x1b[48;2;{};{};{}m\u2580".format(*a, *b) for a, b in zip(upper, lower, strict=True)
        )
        lines.append("".join(cells) + "\x1b[0m")
    return "\n".join(lines)
