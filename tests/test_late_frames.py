"""Commands beside overlapped decoding and after a warm-up: when frames are read, what is written, what is replayed.

Overlap needs a CUDA device; here the frames are there at once, and whoever reads them is noted.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recorders import FunctionRecorder
from tiny_components import PROMPT, QUICK, make_pipeline, seed

from diffusers_ardiff import ARDiffusionPipeline, PromptSwitch
from diffusers_ardiff.generation import GenerationRequest
from diffusers_ardiff.interactive import InteractiveRequest, run_interactive
from diffusers_ardiff.jobs import Job, generate_videos
from diffusers_ardiff.late_frames import one_behind
from diffusers_ardiff.pipelines.output import FrameOutput, PendingFrames
from diffusers_ardiff.pipelines.warmup import run_warmup
from diffusers_ardiff.video_io import read_video

SCRIPT = Path(__file__).parent.parent / "scripts" / "interactive.py"
NUM_FORWARDS = 3
"""Of a chunk after the first one: a commit and two steps."""


class NotedFrames(PendingFrames):
    """Frames whose first reading is written into a log."""

    def __init__(self, frames: Any, log: list[str], index: int) -> None:
        self._frames, self._log, self._name = frames, log, f"read {index}"

    def result(self) -> Any:
        if self._name not in self._log:
            self._log.append(self._name)
        return self._frames


@pytest.fixture
def pipe() -> ARDiffusionPipeline:
    return make_pipeline(QUICK)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch, pipe: ARDiffusionPipeline) -> list[str]:
    """Forwards and first readings of frames, in their order."""
    noted: list[str] = []
    make, counts = FrameOutput.make, {}

    def deferred(output: FrameOutput, *args: Any) -> NotedFrames:
        counts[id(output)] = counts.get(id(output), -1) + 1
        return NotedFrames(make(output, *args), noted, counts[id(output)])

    monkeypatch.setattr(FrameOutput, "make", deferred)
    pipe.transformer.register_forward_pre_hook(lambda *_args: noted.append("forward"))
    return noted


def expected_log(num_chunks: int) -> list[str]:
    """Each chunk but the last is read when all work of the next one was handed to the device."""
    log = ["forward"] * (NUM_FORWARDS - 1)
    for index in range(1, num_chunks):
        log += ["forward"] * NUM_FORWARDS + [f"read {index - 1}"]
    return [*log, f"read {num_chunks - 1}"]


def request(folder: Path, **values: Any) -> GenerationRequest:
    return GenerationRequest(**{"prompts": [PROMPT], "output": folder / "clip.mp4", "num_frames": 33} | values)


# -- one behind -----------------------------------------------------------------------------------------------------


def test_a_video_file(pipe: ARDiffusionPipeline, log: list[str], tmp_path: Path) -> None:
    """Frames were read as soon as a chunk was handed out, so the device idled while the host encoded: no gain from overlap."""
    generate_videos(pipe, request(tmp_path))
    assert log == expected_log(3)
    (tmp_path / "plain").mkdir()
    generate_videos(make_pipeline(QUICK), request(tmp_path / "plain"))
    late, plain = (read_video(folder / "clip.mp4")[0] for folder in (tmp_path, tmp_path / "plain"))
    np.testing.assert_array_equal(late, plain)


def test_frames_that_are_there_come_at_once(pipe: ARDiffusionPipeline) -> None:
    with pipe.stream(PROMPT, num_frames=33, generator=seed(0), output_type="np") as stream:
        for index, chunk in enumerate(one_behind(stream)):
            assert chunk.index == index == stream._num_chunks - 1
    assert index == 2


def test_a_failure_leaves_no_file(
    pipe: ARDiffusionPipeline, log: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also that of reading the frames, which is where an error of the decoder shows."""
    result = NotedFrames.result

    def failing(frames: NotedFrames) -> Any:
        if frames._name == "read 1":
            raise RuntimeError("decoder failed")
        return result(frames)

    monkeypatch.setattr(NotedFrames, "result", failing)
    (made,) = generate_videos(pipe, request(tmp_path))
    assert (made.status, made.error) == ("failed", "RuntimeError: decoder failed")
    assert list(tmp_path.iterdir()) == []


def test_a_failed_chunk_leaves_no_file(
    pipe: ARDiffusionPipeline, log: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_in_chunk(pipe, monkeypatch, 2, RuntimeError("no memory"))
    (made,) = generate_videos(pipe, request(tmp_path))
    assert made.status == "failed" and "read 1" not in log
    assert list(tmp_path.iterdir()) == []


def fail_in_chunk(
    pipe: ARDiffusionPipeline, monkeypatch: pytest.MonkeyPatch, index: int, error: BaseException
) -> None:
    from diffusers_ardiff.pipelines import ARStream

    make = ARStream._make_chunk

    def failing(stream: ARStream, upcoming: Any) -> Any:
        if stream._num_chunks == index:
            raise error
        return make(stream, upcoming)

    monkeypatch.setattr(ARStream, "_make_chunk", failing)


class TestInteractive:
    @staticmethod
    def run(pipe: ARDiffusionPipeline, output: Path, lines: Any, said: list[str], **values: Any) -> int:
        return run_interactive(pipe, InteractiveRequest(prompt=PROMPT, output=output, **values), lines, said.append)

    def test_frames_are_read_late(self, pipe: ARDiffusionPipeline, log: list[str], tmp_path: Path) -> None:
        said: list[str] = []
        assert self.run(pipe, tmp_path / "clip.mp4", [], said, max_frames=33) == 33
        assert log == expected_log(3)
        assert said == ["chunk 0: 9 frames", "chunk 1: 21 frames", "chunk 2: 33 frames"]

    def test_an_interrupt_keeps_the_chunk_that_waits(
        self, pipe: ARDiffusionPipeline, log: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It was whole when the interrupt came."""
        fail_in_chunk(pipe, monkeypatch, 2, KeyboardInterrupt())
        said: list[str] = []
        assert self.run(pipe, tmp_path / "clip.mp4", [], said, max_frames=81) == 21
        assert said[-1] == "interrupted" and len(read_video(tmp_path / "clip.mp4")[0]) == 21

    def test_quit_keeps_the_chunk_that_waits(self, pipe: ARDiffusionPipeline, log: list[str], tmp_path: Path) -> None:
        """Chunk 1 had been handed out when the word came after chunk 0."""
        said, turn, done = [], threading.Event(), threading.Event()

        class Lines:
            def __iter__(self) -> Iterator[str]:
                assert turn.wait(timeout=60)
                try:
                    yield ":quit"
                finally:  # nobody asks for another line
                    done.set()

        def say(text: str) -> None:
            said.append(text)
            if text.startswith("chunk 0"):
                turn.set()
                assert done.wait(timeout=60)

        request = InteractiveRequest(prompt=PROMPT, output=tmp_path / "clip.mp4")
        assert run_interactive(pipe, request, Lines(), say) == 21
        assert said == ["chunk 0: 9 frames", "chunk 1: 21 frames"]


# -- warm-up --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("guidance_scale", [None, 3.0])
def test_the_warm_up_of_a_request_fits_its_streams(
    pipe: ARDiffusionPipeline, tmp_path: Path, guidance_scale: float | None
) -> None:
    """Same size, guidance, options and text length, so every forward of every video is replayed, recaches included."""
    switch = PromptSwitch(latent_frame=6, prompt="a blue square", mode="recache")
    many = request(
        tmp_path, prompts=[PROMPT, "a green circle"], height=48, guidance_scale=guidance_scale, switches=[switch]
    )
    arguments = many.warmup_arguments(pipe) | {"compile": False, "recorder": FunctionRecorder()}
    assert arguments["recache"] and arguments["guided"] == (guidance_scale is not None)
    run_warmup(pipe, **arguments)
    launched: list[int] = []
    pipe._warm.graphs.capture = lambda *args: launched.append(1)  # type: ignore[method-assign]
    generate_videos(pipe, many)
    branches = 2 if guidance_scale else 1
    # Three chunks of two steps, two commits, and the positive branch once more for the switch: in each of two videos.
    assert pipe._warm.graphs.num_replays == 2 * (branches * (3 * 2 + 2) + 1)
    assert not request(tmp_path).warmup_arguments(pipe)["recache"]


def test_the_warm_up_of_an_interactive_request_fits_its_stream(pipe: ARDiffusionPipeline, tmp_path: Path) -> None:
    live = InteractiveRequest(prompt=PROMPT, output=tmp_path / "clip.mp4", max_frames=21, width=64)
    run_warmup(pipe, **live.warmup_arguments(pipe), compile=False, recorder=FunctionRecorder())
    run_interactive(pipe, live, [], lambda text: None)
    assert pipe._warm.graphs.num_replays == 2 * 2 + 1


def test_a_job_on_the_cpu_refuses_to_warm_up(pipe: ARDiffusionPipeline, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"CUDA graphs, and the pipeline runs on cpu. Leave it out"):
        Job(pipe, request(tmp_path), warmup=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("option", ["--warmup", "--overlap"])
def test_interactive_script_on_the_cpu(tmp_path: Path, option: str) -> None:
    model = tmp_path / "model"
    make_pipeline(QUICK).save_pretrained(model)
    command = [sys.executable, str(SCRIPT), PROMPT, "--model", str(model), "--output", str(tmp_path / "a.mp4"), option]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, input="")
    assert done.returncode == 2
    assert len([line for line in done.stderr.splitlines() if line.startswith("error: ") and "cpu" in line]) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
