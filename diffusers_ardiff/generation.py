"""From prompts to video files: streamed to disk chunk by chunk, a contact sheet beside each, prompts split over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from PIL import Image
from tqdm.auto import tqdm

from .pipelines import ARDiffusionPipeline, CacheOptions, PromptSwitch
from .validation import check_int
from .video_formats import FORMATS
from .video_io import Frames, VideoWriter, read_image, read_video, save_contact_sheet

SHEET_FRAMES = 27


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """What to generate. One video a prompt; a seed and a given image or video serve all of them.

    Args:
        prompts: at least one.
        output: an .mp4, .webm or .gif file; several prompts give ``NAME-000.mp4``, ``NAME-001.mp4``, ...
        num_frames: pixel frames of each video, a given image or video included; None: the recipe's.
        height, width: pixels; None: the recipe's.
        seed: of the first prompt; the next ones count on from it.
        image, video: file (for a video, also a folder of pictures) whose frame, or frames, the video begins with.
        switches: prompt changes on the way.
        fps: of the file; None: the recipe's.
        limit_bytes: refuse to allocate more for a video's cache and decoder.

    Raises:
        ValueError: no prompt, a blank one, a bad number or file name, or both an image and a video.
    """

    prompts: Sequence[str]
    output: Path
    num_frames: int | None = None
    height: int | None = None
    width: int | None = None
    seed: int = 0
    image: Path | None = None
    video: Path | None = None
    switches: Sequence[PromptSwitch] = ()
    fps: float | None = None
    limit_bytes: int | None = None

    def __post_init__(self) -> None:
        if not self.prompts or not all(prompt.strip() for prompt in self.prompts):
            raise ValueError(f"every prompt needs some text, got {list(self.prompts)}.")
        if self.num_frames is not None:
            check_int("num_frames", self.num_frames, minimum=1)
        if self.output.suffix.lower() not in FORMATS:
            raise ValueError(f"the output must be a file ending in {', '.join(FORMATS)}, got {self.output.name!r}.")
        if self.fps is not None and not self.fps > 0:
            raise ValueError(f"fps must be above 0, got {self.fps}.")
        if self.image is not None and self.video is not None:
            raise ValueError("give an image or a video to begin with, not both.")

    def path(self, index: int) -> Path:
        """File of the prompt with that index."""
        if len(self.prompts) == 1:
            return self.output
        return self.output.with_name(f"{self.output.stem}-{index:03d}{self.output.suffix}")


def generate_videos(pipeline: ARDiffusionPipeline, request: GenerationRequest, state: PartialState) -> list[Path]:
    """Generate this process's share of the prompts; returns the files it wrote.

    A file appears under its name only when it is whole.

    Raises:
        ValueError, TypeError, OSError, MemoryLimitError: bad input, before anything is written.
    """
    written = []
    with state.split_between_processes(list(range(len(request.prompts)))) as indices:
        for index in indices:
            _generate_video(pipeline, request, index, show_progress=state.is_main_process)
            written.append(request.path(index))
    return written


def _generate_video(
    pipeline: ARDiffusionPipeline, request: GenerationRequest, index: int, *, show_progress: bool
) -> None:
    path = request.path(index)
    num_frames = request.num_frames if request.num_frames is not None else pipeline.recipe.num_frames
    sheet = _ContactSheet(num_frames)
    stream = pipeline.stream(
        request.prompts[index],
        num_frames=num_frames,
        height=request.height,
        width=request.width,
        generator=torch.Generator("cpu").manual_seed(request.seed + index),
        prompt_schedule=request.switches,
        output_type="np",
        cache=CacheOptions(limit_bytes=request.limit_bytes),
        **_given_frames(request),
    )
    with stream, tqdm(total=num_frames, unit="frame", desc=path.name, disable=not show_progress) as bar:
        path.parent.mkdir(parents=True, exist_ok=True)
        with VideoWriter(path, request.fps if request.fps is not None else pipeline.recipe.fps) as writer:
            for chunk in stream:
                frames = (chunk.frames[0] * 255).round().astype(np.uint8)
                writer.write(frames)
                sheet.add(frames)
                bar.update(len(frames))
    sheet.save(path.with_suffix(".png"))


def _given_frames(request: GenerationRequest) -> dict[str, Any]:
    if request.image is not None:
        return {"image": Image.fromarray(read_image(request.image))}
    if request.video is not None:
        # A folder of pictures has no rate; its pictures are the frames.
        frames, _ = read_video(request.video, fps=16 if request.video.is_dir() else None)
        return {"video": [Image.fromarray(frame) for frame in frames]}
    return {}


class _ContactSheet:
    """Keeps evenly spaced frames of a video that is never whole in memory."""

    def __init__(self, num_frames: int) -> None:
        wanted = np.linspace(0, num_frames - 1, min(num_frames, SHEET_FRAMES)).round().astype(int)
        self._wanted = set(wanted.tolist())
        self._kept: dict[int, Frames] = {}
        self._seen = 0

    def add(self, frames: Frames) -> None:
        for frame in frames:
            if self._seen in self._wanted:
                self._kept[self._seen] = frame.copy()
            self._seen += 1

    def save(self, path: Path) -> None:
        frames = np.stack(list(self._kept.values()))
        save_contact_sheet(frames, path, labels=[str(index) for index in self._kept], max_frames=SHEET_FRAMES)
