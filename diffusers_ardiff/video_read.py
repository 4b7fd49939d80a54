"""Reading videos and images as arrays: files of any format that FFmpeg reads, and folders of numbered pictures."""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import av
import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from .validation import check_int

Frames = NDArray[np.uint8]

_PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")


def read_video(
    path: str | os.PathLike[str], *, max_frames: int | None = None, fps: float | None = None
) -> tuple[Frames, float]:
    """Read a video: a file, sound ignored, or a folder of pictures in the order of the numbers in their names.

    Args:
        path: a file in any format that FFmpeg reads (mp4, webm, gif, ...), or a folder. A file whose metadata says that it
            is to be shown turned, as phones write them, is turned.
        max_frames: stop after so many frames.
        fps: the rate to take frames at, each the one that is shown at its time; None: every frame there is. A folder has
            no rate of its own, so there it is needed, and every picture is taken.

    Returns:
        ``(frames, fps)``: frames is uint8 (T, H, W, 3).

    Raises:
        FileNotFoundError: there is no such file or folder.
        ValueError: it is not a readable video, its pictures differ in size, a folder was given without ``fps``, or a number
            is not allowed.
    """
    if max_frames is not None:
        check_int("max_frames", max_frames, minimum=1)
    if fps is not None and not (math.isfinite(fps) and fps > 0):
        raise ValueError(f"fps must be a number above 0, got {fps!r}.")
    if Path(path).is_dir():
        return _read_folder(Path(path), max_frames, fps)
    source = _existing_file(path)
    try:
        with av.open(str(source)) as container:
            rate = _rate(container, source)
            timed = _timed_images(container, rate)
            if fps is not None:
                images = list(itertools.islice(timed_at(timed, fps, 1 / rate), max_frames))
            else:
                times, images = _split(itertools.islice(timed, max_frames))
                rate = _measured(rate, times) if container.format.name == "gif" else rate
    except av.error.FFmpegError as error:
        raise ValueError(f"{source} is not a readable video: {error}.") from error
    if not images:
        raise ValueError(f"{source} has no video frames or no frame rate.")
    return np.stack(images), rate if fps is None else float(fps)


def _split(timed: Iterable[tuple[float, Frames]]) -> tuple[list[float], list[Frames]]:
    pairs = list(timed)
    return [time for time, _ in pairs], [image for _, image in pairs]


def _measured(guess: float, times: list[float]) -> float:
    """The rate of a .gif, which holds none, only times in hundredths of a second: FFmpeg's guess where these agree."""
    if len(times) < 2 or times[-1] <= times[0]:
        return guess
    rate = (len(times) - 1) / (times[-1] - times[0])
    tolerance = 0.01 / (times[-1] - times[0])
    return guess if abs(guess / rate - 1) <= tolerance + 0.005 else rate


def timed_at(timed: Iterator[tuple[float, Frames]], fps: float, last: float) -> Iterator[Frames]:
    """Frames at times 0, 1 / fps, 2 / fps, ... after the first one, each the one that is shown then.

    Args:
        timed: (seconds, frame), in order.
        last: seconds that the last frame is shown.
    """
    shown: tuple[float, Frames] | None = None
    start, count = 0.0, 0
    for time, image in timed:
        if shown is None:
            start = time
        while shown is not None and count / fps < time - start - 1e-6:
            yield shown[1]
            count += 1
        shown = (time, image)
    while shown is not None and count / fps < shown[0] - start + last - 1e-6:
        yield shown[1]
        count += 1


def _rate(container: av.container.InputContainer, source: Path) -> float:
    if not container.streams.video:
        raise ValueError(f"{source} has no video track.")
    stream = container.streams.video[0]
    # Of a .gif FFmpeg gives the rate of the shortest frame as the average.
    is_gif = container.format.name == "gif"
    rate = (stream.guessed_rate if is_gif else stream.average_rate) or stream.guessed_rate
    if not rate:
        raise ValueError(f"{source} has no video frames or no frame rate.")
    return float(rate)


def _timed_images(container: av.container.InputContainer, rate: float) -> Iterator[tuple[float, Frames]]:
    for index, frame in enumerate(container.decode(container.streams.video[0])):
        time = float(frame.time) if frame.time is not None else index / rate
        image = np.asarray(frame.to_ndarray(format="rgb24"), dtype=np.uint8)
        # Both count in quarter turns against the clock.
        yield time, np.ascontiguousarray(np.rot90(image, round(frame.rotation / 90)))


def _read_folder(folder: Path, max_frames: int | None, fps: float | None) -> tuple[Frames, float]:
    if fps is None:
        raise ValueError(f"{folder} is a folder of pictures, which have no rate: give fps.")
    files = [file for file in folder.iterdir() if file.suffix.lower() in _PICTURES and not file.name.startswith(".")]
    if not files:
        raise ValueError(f"{folder} holds no pictures ({', '.join(_PICTURES)}).")
    images = [read_image(file) for file in sorted(files, key=_by_number)[:max_frames]]
    sizes = {image.shape[:2] for image in images}
    if len(sizes) > 1:
        raise ValueError(
            f"the pictures of {folder} differ in size (height, width): {sorted(sizes)}; one size is needed."
        )
    return np.stack(images), float(fps)


def _by_number(file: Path) -> tuple[list[int], str]:
    return [int(digits) for digits in re.findall(r"\d+", file.stem)], file.name


def read_image(path: str | os.PathLike[str]) -> Frames:
    """Read an image file as uint8 (H, W, 3); turned upright by its EXIF data, transparency dropped.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not a readable image.
    """
    source = _existing_file(path)
    try:
        with Image.open(source) as image:
            return np.array(ImageOps.exif_transpose(image).convert("RGB"))
    except (OSError, SyntaxError) as error:
        raise ValueError(f"{source} is not a readable image: {error}.") from error


def _existing_file(path: str | os.PathLike[str]) -> Path:
    source = Path(path)
    if not source.is_file():
        raise FileNotFoundError(f"There is no file {source}.")
    return source
