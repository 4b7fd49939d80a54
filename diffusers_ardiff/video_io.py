"""Video and image files: a writer that takes chunks as they come, readers, and a contact sheet.

    with VideoWriter("circle.mp4", fps=16) as writer:
        for chunk in chunks:
            writer.write(chunk)             # (T, H, W, 3), uint8 or float in [0, 1]

Files appear under their final name only when they are complete. T is frames, H x W the size in pixels.
"""

from __future__ import annotations

import itertools
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from fractions import Fraction
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import av
import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from .validation import check_int
from .video_formats import FORMATS
from .video_read import Frames, read_image, read_video

__all__ = [
    "Frames",
    "VideoWriter",
    "read_image",
    "read_video",
    "save_contact_sheet",
    "save_frames",
    "save_png_atomic",
]

_MAX_FPS = 1000
_MAX_SHEET_WIDTH = 1920
_part_numbers = itertools.count()


class VideoWriter:
    """Write a video file, chunk by chunk, in a ``with`` block: H.264 in .mp4, VP9 in .webm (both yuv420p, BT.709), or a .gif.

    The data goes to a hidden file in the same folder, which takes the final name when the block ends without an
    error. After an exception or an interrupt it is removed, and a file that was there before stays as it was.

    Args:
        path: ends in ``.mp4``, ``.webm`` or ``.gif``; its folder exists.
        fps: frames a second, above 0 and up to 1000; 23.976 and the like become the nearest fraction.
        crf: quality of x264 and VP9, 0 (lossless but for the colour conversion) to 51.
        comment: text kept in the file, under the metadata's key of that name; a .gif keeps none.

    Raises:
        ValueError: ``fps``, ``crf`` or the file name is not allowed.
        FileNotFoundError: the folder does not exist.
        IsADirectoryError: ``path`` is a folder.
    """

    def __init__(
        self, path: str | os.PathLike[str], fps: int | float | Fraction, *, crf: int = 18, comment: str = ""
    ) -> None:
        self.path = Path(path)
        self._comment = comment
        self.fps = as_rate(fps)
        self._crf = check_int("crf", crf, minimum=0, maximum=51)
        if self.path.suffix.lower() not in FORMATS:
            raise ValueError(f"A video file must end in {', '.join(FORMATS)}, got {self.path.name!r}.")
        self._format = FORMATS[self.path.suffix.lower()]
        self._part = _PartFile(self.path)
        self._container: av.container.OutputContainer | None = None
        self._stream: av.VideoStream | None = None
        self._num_frames = 0
        self._is_open = False

    @property
    def num_frames(self) -> int:
        """Frames written so far."""
        return self._num_frames

    def __enter__(self) -> Self:
        if self._is_open:
            raise RuntimeError("This VideoWriter is already open.")
        self._is_open = True
        self._num_frames = 0
        return self

    def write(self, frames: NDArray[Any] | torch.Tensor) -> None:
        """Append frames.

        Args:
            frames: (T, H, W, 3), numpy or torch on any device, uint8 or floating point in [0, 1]. H and W are
                the same in all calls, and even in an mp4 file.

        Raises:
            ValueError: wrong shape, dtype, range or size; nothing of ``frames`` is written.
            RuntimeError: outside of the ``with`` block.
        """
        if not self._is_open:
            raise RuntimeError('Use the writer in a block: `with VideoWriter("out.mp4", fps=16) as writer:`.')
        pixels = _as_uint8(frames)
        height, width = pixels.shape[1:3]
        if (height % 2 or width % 2) and not self._format.takes_odd_sizes:
            raise ValueError(
                f"H.264 (yuv420p) needs an even height and width, got {height} x {width}. Crop or pad it by one, or write "
                "a .webm file."
            )
        if self._stream is None:
            self._stream = self._open_stream(height, width)
        if (self._stream.height, self._stream.width) != (height, width):
            raise ValueError(
                f"The video is {self._stream.height} x {self._stream.width} (height x width), got {height} x {width}."
            )
        for image in pixels:
            self._encode(self._as_video_frame(image))
            self._num_frames += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_open = False
        try:
            if kind is None:
                self._finish()
        finally:
            self._discard()

    def _finish(self) -> None:
        if self._container is None or self._num_frames == 0:
            raise ValueError(f"No frames were written, so {self.path} was not made.")
        self._encode(None)
        self._container.close()
        self._part.commit()

    def _discard(self) -> None:
        container, self._container, self._stream = self._container, None, None
        try:
            # Closing a broken file fails too; the first error is the one to report.
            with suppress(av.error.FFmpegError):
                if container is not None:
                    container.close()
        finally:
            self._part.discard()

    def _open_stream(self, height: int, width: int) -> av.VideoStream:
        self._container = self._format.open(str(self._part.path))
        self._container.metadata["comment"] = self._comment
        return self._format.add_stream(self._container, (height, width), self.fps, self._crf)

    def _as_video_frame(self, image: Frames) -> av.VideoFrame:
        frame = self._format.frame(image)
        frame.pts, frame.time_base = self._num_frames, 1 / self.fps
        return frame

    def _encode(self, frame: av.VideoFrame | None) -> None:
        assert self._container is not None and self._stream is not None
        self._container.mux(self._stream.encode(frame))


def save_png_atomic(image: Frames | Image.Image, path: str | os.PathLike[str]) -> None:
    """Write a PNG file that appears under its name only when it is complete.

    Args:
        image: uint8 (H, W, 3), or a PIL image.
        path: the file; its folder exists.

    Raises:
        FileNotFoundError: the folder does not exist.
        ValueError: wrong shape or dtype.
    """
    if not isinstance(image, Image.Image):
        if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3 or image.size == 0:
            raise ValueError(f"image must be uint8 (height, width, 3), got {image.dtype} {image.shape}.")
        image = Image.fromarray(image)
    with _atomic_file(Path(path)) as part:
        image.save(part, format="PNG")


def save_frames(
    frames: NDArray[Any] | torch.Tensor | Iterable[NDArray[Any] | torch.Tensor], folder: str | os.PathLike[str]
) -> None:
    """Write frames as ``frame-00000.png`` and so on into a new folder, which appears when it is complete.

    Args:
        frames: (T, H, W, 3), uint8 or floating point in [0, 1]; or an iterable of such chunks, written as they come.
        folder: does not exist; the folder it is in does.

    Raises:
        FileExistsError: it exists.
        FileNotFoundError: the folder it is in does not.
        ValueError: wrong shape, dtype or range, another size than the first frame's, or no frames.
    """
    target = Path(folder)
    if target.exists():
        raise FileExistsError(f"{target} exists: give the name of a new folder.")
    part = _PartFile(target).path
    try:
        part.mkdir()
        for index, image in enumerate(_images(frames)):
            Image.fromarray(image).save(part / f"frame-{index:05d}.png")
        part.rename(target)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _images(frames: Any) -> Iterator[Frames]:
    """The frames of an array, or of chunks one by one; ValueError where they differ in size, or there are none."""
    size = None
    for chunk in [frames] if isinstance(frames, (np.ndarray, torch.Tensor)) else frames:
        for image in _as_uint8(chunk):
            size = size or image.shape
            if image.shape != size:
                raise ValueError(
                    f"The frames are {size[:2]} (height, width), and then {image.shape[:2]}; use one size."
                )
            yield image
    if size is None:
        raise ValueError("No frames were given, so nothing was written.")


def save_contact_sheet(
    frames: Frames,
    path: str | os.PathLike[str],
    *,
    columns: int = 9,
    max_frames: int = 27,
    scale: float | None = None,
    labels: Sequence[str] | None = None,
) -> None:
    """Write evenly spaced frames of a video, first and last included, as a grid with frame numbers, a PNG file.

    Args:
        frames: uint8 (T, H, W, 3).
        path: the file; its folder exists.
        columns: frames a row.
        max_frames: frames shown, at most.
        scale: size of a frame in the sheet, relative; None keeps the sheet within 1920 pixels of width.
        labels: text on each of the ``frames``; None: their indices.

    Raises:
        FileNotFoundError: the folder does not exist.
        ValueError: wrong shape or dtype, a number that is not positive, or labels of another number.
    """
    if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[3] != 3 or frames.size == 0:
        raise ValueError(f"frames must be uint8 (frames, height, width, 3), got {frames.dtype} {frames.shape}.")
    if labels is not None and len(labels) != len(frames):
        raise ValueError(f"{len(labels)} labels were given for {len(frames)} frames; give one each.")
    check_int("columns", columns, minimum=1)
    count = min(len(frames), check_int("max_frames", max_frames, minimum=1))
    columns = min(columns, count)
    height, width = frames.shape[1:3]
    if scale is None:
        scale = min(1.0, _MAX_SHEET_WIDTH / (columns * width))
    if not scale > 0 or math.isinf(scale):
        raise ValueError(f"scale must be a positive number, got {scale!r}.")
    size = max(1, round(width * scale)), max(1, round(height * scale))
    sheet = Image.new("RGB", (columns * size[0], -(-count // columns) * size[1]))
    for cell, index in enumerate(np.linspace(0, len(frames) - 1, count).round().astype(int)):
        corner = cell % columns * size[0], cell // columns * size[1]
        sheet.paste(_labelled(frames[index], size, str(index) if labels is None else labels[index]), corner)
    save_png_atomic(sheet, path)


def _labelled(image: Frames, size: tuple[int, int], label: str) -> Image.Image:
    picture = Image.fromarray(image).resize(size, Image.Resampling.LANCZOS)
    draw = ImageDraw.Draw(picture)
    draw.rectangle(draw.textbbox((2, 1), label), fill="black")
    draw.text((2, 1), label, fill="white")
    return picture


class _PartFile:
    """A hidden file beside ``target`` that becomes it on :meth:`commit`; a link is followed, and stays a link."""

    def __init__(self, target: Path) -> None:
        if target.is_symlink():
            target = Path(os.path.realpath(target))
        if not target.parent.is_dir():
            raise FileNotFoundError(f"The folder {target.parent} does not exist, so {target.name} cannot be written.")
        if target.is_dir():
            raise IsADirectoryError(f"{target} is a folder, not a file.")
        self._target = target
        self.path = target.with_name(f".{target.name}.part-{os.getpid()}-{next(_part_numbers)}")

    def commit(self) -> None:
        with self.path.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(self.path, self._target)

    def discard(self) -> None:
        self.path.unlink(missing_ok=True)


@contextmanager
def _atomic_file(target: Path) -> Iterator[Path]:
    part = _PartFile(target)
    try:
        yield part.path
        part.commit()
    finally:
        part.discard()


def as_rate(fps: int | float | Fraction) -> Fraction:
    """The frame rate as a fraction that a file can hold.

    Raises:
        ValueError: not above 0, or above 1000.
    """
    rate = Fraction(float(fps)).limit_denominator(65535) if math.isfinite(fps) else Fraction(0)
    if not 0 < rate <= _MAX_FPS:
        raise ValueError(f"fps must be a number above 0 and up to {_MAX_FPS}, got {fps!r}.")
    return rate


def _as_uint8(frames: NDArray[Any] | torch.Tensor) -> Frames:
    if isinstance(frames, torch.Tensor):
        frames = (frames.float() if frames.is_floating_point() else frames).detach().cpu().numpy()
    if not isinstance(frames, np.ndarray) or frames.ndim != 4 or frames.shape[3] != 3 or frames.size == 0:
        got = getattr(frames, "shape", type(frames).__name__)
        raise ValueError(f"frames must be an array or tensor (frames, height, width, 3), got {got}.")
    if np.issubdtype(frames.dtype, np.floating):
        low, high = frames.min(), frames.max()
        if not (low >= 0 and high <= 1):
            raise ValueError(
                f"Floating-point frames must be in [0, 1], got {low:.3g} .. {high:.3g}. "
                "Map [-1, 1] with `frames / 2 + 0.5`, or pass uint8."
            )
        frames = np.rint(frames.astype(np.float32) * 255).astype(np.uint8)
    if frames.dtype != np.uint8:
        raise ValueError(f"frames must be uint8 or floating point, got {frames.dtype}.")
    return np.ascontiguousarray(frames)
