"""From a prompt to a video file: streamed to disk chunk by chunk, a contact sheet beside it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from .late_frames import one_behind
from .pipelines import ARChunk, ARDiffusionPipeline, ARStream, CacheOptions, PromptSwitch
from .recipes import Recipe
from .validation import check_int
from .video_formats import FORMATS
from .video_io import Frames, VideoWriter, as_rate, read_image, read_video, save_contact_sheet

SHEET_FRAMES = 27
MAX_SEED = 2**63 - 1


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """What to generate. One video a prompt; a seed and a given image or video serve all of them.

    Args:
        prompts: at least one.
        output: an .mp4, .webm or .gif file; several prompts give ``NAME-000.mp4``, ``NAME-001.mp4``, ...
        num_frames: pixel frames of each video, a given image or video included; None: the recipe's.
        height, width: pixels; None: the recipe's.
        seed: of the first prompt; the next ones count on from it.
        image, video: file (for a video, also a folder of pictures) whose frame, or frames, the video begins with; those of
            a file are taken at the recipe's rate.
        video_frames: take so many frames of ``video``, its first ones; None: all.
        switches: prompt changes on the way.
        fps: of the file; None: the recipe's.
        limit_bytes: refuse to allocate more for a video's cache and decoder.
        guidance_scale, negative_prompt: as in a call.
        model: name of what makes the videos; only recorded.

    Raises:
        ValueError: no prompt, a blank one, a bad number or file name, both an image and a video, or frames of none.
    """

    prompts: Sequence[str]
    output: Path
    num_frames: int | None = None
    height: int | None = None
    width: int | None = None
    seed: int = 0
    image: Path | None = None
    video: Path | None = None
    video_frames: int | None = None
    switches: Sequence[PromptSwitch] = ()
    fps: float | None = None
    limit_bytes: int | None = None
    guidance_scale: float | None = None
    negative_prompt: str | None = None
    model: str = ""

    def __post_init__(self) -> None:
        if not self.prompts or not all(prompt.strip() for prompt in self.prompts):
            raise ValueError(f"every prompt needs some text, got {list(self.prompts)}.")
        if self.num_frames is not None:
            check_int("num_frames", self.num_frames, minimum=1)
        if self.output.suffix.lower() not in FORMATS:
            raise ValueError(f"the output must be a file ending in {', '.join(FORMATS)}, got {self.output.name!r}.")
        check_int("seed", self.seed, minimum=0, maximum=MAX_SEED)
        if self.fps is not None:
            as_rate(self.fps)
        if self.image is not None and self.video is not None:
            raise ValueError("give an image or a video to begin with, not both.")
        if self.video_frames is not None:
            check_int("video_frames", self.video_frames, minimum=1)
            if self.video is None:
                raise ValueError(f"video_frames = {self.video_frames} says how much of a video to take; give one.")

    def path(self, index: int) -> Path:
        """File of the prompt with that index."""
        if len(self.prompts) == 1:
            return self.output
        return self.output.with_name(f"{self.output.stem}-{index:03d}{self.output.suffix}")

    def sheet_path(self, index: int) -> Path:
        """Contact sheet of the prompt with that index."""
        return self.path(index).with_suffix(".png")

    def check_targets(self) -> None:
        """Look at the files that are to be written, before any work.

        Raises:
            IsADirectoryError: a folder has the name of one.
            NotADirectoryError: their folder can't be made.
            ValueError: one would replace the given image or video, or join the pictures of a given folder.
        """
        folders = (self.output.parent, *self.output.parent.parents)
        nearest = next(folder for folder in folders if folder.exists())
        if not nearest.is_dir():
            raise NotADirectoryError(f"{nearest} is a file, so {self.output} can't be written; give another output.")
        for index in range(len(self.prompts)):
            for path in (self.path(index), self.sheet_path(index)):
                if path.is_dir():
                    raise IsADirectoryError(f"{path} is a folder; give another output, or remove it.")
                given = self.image or self.video
                if given is not None and given.resolve() in (path.resolve(), self.sheet_path(index).parent.resolve()):
                    raise ValueError(
                        f"{path} is to be written, and the video begins with {given}: give an output elsewhere, whose "
                        "contact sheet (.png) replaces nothing either."
                    )

    def record(self, index: int, recipe: Recipe) -> str:
        """What the video of that prompt is made from, as JSON; it is kept in the file, so that a later run knows it."""
        made_from = asdict(self) | {
            "prompt": self.prompts[index],
            "seed": self.seed + index,
            "recipe": recipe.to_dict(),
        }
        for name in ("prompts", "output", "limit_bytes"):
            del made_from[name]
        return json.dumps(made_from, sort_keys=True, default=str)

    def warmup_arguments(self, pipeline: ARDiffusionPipeline) -> dict[str, Any]:
        """Arguments of ``pipeline.warmup`` that fit the streams of this request."""
        return {
            "height": self.height,
            "width": self.width,
            "guided": pipeline.recipe.call_guidance(self.guidance_scale) > 1.0,
            "recache": any(switch.mode == "recache" for switch in self.switches),
            "decode": pipeline.parallel_layout.writes_frames,
            "cache": CacheOptions(limit_bytes=self.limit_bytes),
        }

    def open(self, pipeline: ARDiffusionPipeline, index: int, *, decode: bool = True) -> ARStream:
        """The stream of the prompt with that index; ``decode=False`` makes latents only.

        Raises:
            ValueError, TypeError, OSError, MemoryLimitError: bad input, before anything is allocated.
        """
        return pipeline.stream(
            self.prompts[index],
            self.negative_prompt,
            num_frames=self.num_frames if self.num_frames is not None else pipeline.recipe.num_frames,
            height=self.height,
            width=self.width,
            guidance_scale=self.guidance_scale,
            generator=torch.Generator("cpu").manual_seed(self.seed + index),
            prompt_schedule=self.switches,
            output_type="np" if decode else "latent",
            cache=CacheOptions(limit_bytes=self.limit_bytes),
            **_given_frames(self, pipeline),
        )


def check_negative_prompt(negative_prompt: str | None, guidance_scale: float | None, recipe: Recipe) -> None:
    """Raise ValueError where a command got a negative prompt and no guidance, so that nothing would read it."""
    scale = recipe.call_guidance(guidance_scale)
    if negative_prompt is not None and scale <= 1.0:
        raise ValueError(
            f"--negative-prompt needs guidance: the scale must be above 1 and is {scale}. Give --guidance-scale, or leave "
            "--negative-prompt out."
        )


def check_warmup(pipeline: ARDiffusionPipeline) -> None:
    """Raise ValueError where a command can't warm up: no CUDA device, or a rank that only decodes."""
    device = pipeline._execution_device
    if device.type != "cuda":
        raise ValueError(
            f"a warm-up compiles the transformer and captures CUDA graphs, and the pipeline runs on {device}. Leave it "
            "out there: everything works without, kernel by kernel."
        )
    if pipeline.parallel_layout.decode_rank:
        raise ValueError("a rank that only decodes can't take part in a warm-up; leave out one of the two.")


def write_video(
    chunks: Iterable[ARChunk], pipeline: ARDiffusionPipeline, request: GenerationRequest, index: int, bar: Any = None
) -> None:
    """Write the frames of chunks as they come; the file appears under its name only when it is whole.

    Overlapped frames are read when the next chunk has been begun.

    Args:
        chunks: of a stream that ``request.open`` made, or received from one.
        pipeline: that it comes from.
        request, index: what it is of.
        bar: progress bar that counts its frames.
    """
    path, recipe = request.path(index), pipeline.recipe
    sheet = _ContactSheet(request.num_frames if request.num_frames is not None else recipe.num_frames)
    path.parent.mkdir(parents=True, exist_ok=True)
    fps = request.fps if request.fps is not None else recipe.fps
    with VideoWriter(path, fps, comment=request.record(index, recipe)) as writer:
        for chunk in one_behind(chunks):
            frames = (chunk.frames[0] * 255).round().astype(np.uint8)
            writer.write(frames)
            sheet.add(frames)
            if bar is not None:
                bar.update(len(frames))
    sheet.save(request.sheet_path(index))


def _given_frames(request: GenerationRequest, pipeline: ARDiffusionPipeline) -> dict[str, Any]:
    if request.image is not None:
        return {"image": Image.fromarray(read_image(request.image))}
    if request.video is None:
        return {}
    recipe, factor = pipeline.recipe, pipeline.vae_scale_factor_temporal
    num_frames = request.num_frames if request.num_frames is not None else recipe.num_frames
    # Of a long file no more is read than it takes to be refused for its length.
    enough = 1 + factor * -(-num_frames // factor)
    wanted = request.video_frames if request.video_frames is not None else enough
    frames, _ = read_video(request.video, fps=recipe.fps, max_frames=wanted)
    return {"video": [Image.fromarray(frame) for frame in frames]}


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
