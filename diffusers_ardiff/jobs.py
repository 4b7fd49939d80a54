"""Many prompts over many processes: none twice, none lost, finished ones kept, an index of all, the right exit code."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections import deque
from collections.abc import Generator, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import av
import torch.distributed as dist
from tqdm.auto import tqdm

from .generation import GenerationRequest, check_warmup, write_video
from .parallel import all_processes
from .pipelines import ARChunk, ARDiffusionPipeline, ARStream


@dataclass(frozen=True, kw_only=True)
class VideoResult:
    """What became of one prompt.

    Args:
        index: of the prompt.
        prompt, seed: what it was made from.
        file: name of its video, beside the index.
        status: "made", "kept" (it was there already), "failed", or "pending".
        error: the exception of a failed one.
    """

    index: int
    prompt: str
    seed: int
    file: str
    status: str
    error: str | None = None


class Job:
    """The prompts of a request, dealt out to the teams of processes that run.

    Args:
        pipeline: on this process's device, parallelism enabled where several processes make a video.
        request: the same on all processes.
        resume: keep videos that were made from the same request before.
        warmup: compile and capture once, before the first video of this process; needs a CUDA device.

    Collective: all processes make a job, then run it.

    Raises:
        ValueError: ``resume`` with .gif files; ``warmup`` without a CUDA device, or with a rank that only decodes; what is
            written would replace what the videos begin with.
        IsADirectoryError, NotADirectoryError: a video or its contact sheet can't be written there.
    """

    def __init__(
        self, pipeline: ARDiffusionPipeline, request: GenerationRequest, *, resume: bool = False, warmup: bool = False
    ) -> None:
        if resume and request.output.suffix.lower() == ".gif":
            raise ValueError(
                f"{request.output.name}: a .gif can't hold what it was made from, so resuming would not know finished ones; "
                "write .mp4 or .webm, or leave resume out."
            )
        request.check_targets()
        if warmup:
            check_warmup(pipeline)
        self.pipeline, self.request, self.warmup = pipeline, request, warmup
        self.layout = pipeline.parallel_layout
        self._group = all_processes()
        self.rank = dist.get_rank(self._group) if self._group is not None else 0
        self.num_processes = dist.get_world_size(self._group) if self._group is not None else 1
        # One process looks: another may be about to finish a file already.
        finished = self._share(self._finished() if resume and self.rank == 0 else [])
        self.pending = [index for index in range(len(request.prompts)) if index not in finished]
        self._kept = [self._result(index, "kept") for index in finished]

    @property
    def mine(self) -> list[int]:
        """Prompts of this process's team: every n-th of those that are to be made."""
        team_size = self.layout.team_size
        return self.pending[self.rank // team_size :: self.num_processes // team_size]

    def run(self) -> list[VideoResult]:
        """Make this process's share, wait for the others, and write the index; returns the results of all, in order.

        A prompt that fails after its video has begun is reported with its traceback, and the next one is made; but where
        several processes make a video, a failure ends the job.

        Raises:
            ValueError, TypeError, OSError, MemoryLimitError: bad input, before a video is begun.
        """
        if self.warmup and self.mine:
            report = self.pipeline.warmup(**self.request.warmup_arguments(self.pipeline))
            print(f"rank {self.rank}: {report}", file=sys.stderr)
        self._write_index([*self._kept, *(self._result(index, "pending") for index in self.pending)])
        results = self._make_mine() if self.mine else []
        everyone = self._gather(results if self.layout.writes_frames else [])
        results = sorted([*self._kept, *everyone], key=lambda result: result.index)
        self._write_index(results)
        return results

    def _make_mine(self) -> list[VideoResult]:
        recipe = self.pipeline.recipe
        num_frames = self.request.num_frames if self.request.num_frames is not None else recipe.num_frames
        total = num_frames * len(self.mine)
        results = []
        shows = self.layout.writes_frames and self.rank < self.layout.team_size
        with tqdm(total=total, unit="frame", disable=not shows) as bar:
            for number, index in enumerate(self.mine):
                bar.set_description(self._progress(number, index))
                results.append(self._make_one(index, bar))
        return results

    def _progress(self, number: int, index: int) -> str:
        name = self.request.path(index).name
        if len(self.pending) == 1:
            return name
        return f"{name} ({number + 1} of {len(self.mine)} here, {len(self.pending)} in all)"

    def _make_one(self, index: int, bar: Any) -> VideoResult:
        chunks = self._open(index)
        try:
            # Both kinds close: a stream gives its memory back and tells its decoder of an error, a receiver its state.
            with chunks if isinstance(chunks, ARStream) else closing(chunks):
                if self.layout.writes_frames:
                    write_video(chunks, self.pipeline, self.request, index, bar)
                else:
                    deque(chunks, maxlen=0)
        except Exception as error:
            if self.layout.team_size > 1:
                raise
            print(f"rank {self.rank}, prompt {index} failed; the next one is made:", file=sys.stderr)
            traceback.print_exc()
            return self._result(index, "failed", f"{type(error).__name__}: {error}")
        return self._result(index, "made")

    def _open(self, index: int) -> ARStream | Generator[ARChunk]:
        if self.layout.is_decoder:
            return self.pipeline.receive_chunks()
        decode = self.layout.writes_frames and not self.layout.decode_rank
        return self.request.open(self.pipeline, index, decode=decode)

    def _result(self, index: int, status: str, error: str | None = None) -> VideoResult:
        return VideoResult(
            index=index,
            prompt=self.request.prompts[index],
            seed=self.request.seed + index,
            file=self.request.path(index).name,
            status=status,
            error=error,
        )

    def _finished(self) -> list[int]:
        """Prompts whose file is there and says that it was made from this request."""
        found = []
        for index in range(len(self.request.prompts)):
            path = self.request.path(index)
            if path.is_file() and read_comment(path) == self.request.record(index, self.pipeline.recipe):
                found.append(index)
        return found

    def _write_index(self, results: Sequence[VideoResult]) -> None:
        """``NAME-index.json`` beside the videos, by the first process; none for a single prompt."""
        if self.rank != 0 or len(self.request.prompts) == 1:
            return
        path = index_path(self.request.output)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.{os.getpid()}.part")
        try:
            listed = [asdict(result) for result in sorted(results, key=lambda result: result.index)]
            part.write_text(json.dumps({"videos": listed}, indent=2) + "\n")
            part.replace(path)
        finally:
            with suppress(FileNotFoundError):
                part.unlink()

    def _share(self, value: Any) -> Any:
        if self._group is None:
            return value
        held = [value]
        dist.broadcast_object_list(held, src=0, group=self._group)
        return held[0]

    def _gather(self, results: list[VideoResult]) -> list[VideoResult]:
        if self._group is None:
            return results
        everyone: list[list[VideoResult]] = [[] for _ in range(self.num_processes)]
        dist.all_gather_object(everyone, results, group=self._group)
        return [result for theirs in everyone for result in theirs]


def generate_videos(
    pipeline: ARDiffusionPipeline, request: GenerationRequest, *, resume: bool = False, warmup: bool = False
) -> list[VideoResult]:
    """``Job(...).run()``: the results of all prompts, on all processes."""
    return Job(pipeline, request, resume=resume, warmup=warmup).run()


def index_path(output: Path) -> Path:
    """Where the index of a request with this output lies."""
    return output.with_name(f"{output.stem}-index.json")


def read_comment(path: Path) -> str:
    """The comment that a video file was written with; empty where it has none or can't be read."""
    # A file of somebody else may hold bytes that are no UTF-8.
    with suppress(av.error.FFmpegError), av.open(str(path), metadata_errors="replace") as container:
        # Matroska, and so webm, writes keys in capitals.
        return {key.lower(): value for key, value in container.metadata.items()}.get("comment", "")
    return ""
