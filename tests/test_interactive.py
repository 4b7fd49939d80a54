"""The interactive command: typed lines change the video that runs. Chunks are 9, then 12 frames."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_components import PROMPT, seed

from diffusers_ardiff import ARDiffusionPipeline
from diffusers_ardiff.interactive import InteractiveRequest, draw, parse_line, run_interactive
from diffusers_ardiff.video_io import VideoWriter, read_image, read_video

SCRIPT = Path(__file__).parent.parent / "scripts" / "interactive.py"


@pytest.fixture(scope="module")
def model(pipe: ARDiffusionPipeline, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    pipe.save_pretrained(folder)
    return folder


class Typist:
    """Types each line when the chunk before it has been reported; the next chunk waits until it was sent."""

    def __init__(self, *lines: str) -> None:
        self._lines = lines
        self._turn = threading.Semaphore(0)
        self._sent = threading.Semaphore(0)
        self.said: list[str] = []

    def __iter__(self) -> Iterator[str]:
        for line in self._lines:
            assert self._turn.acquire(timeout=60)
            try:
                yield line
            finally:  # also where nobody asks for another line
                self._sent.release()

    def say(self, text: str) -> None:
        self.said.append(text)
        if text.startswith("chunk") and self.num_chunks <= len(self._lines):
            self._turn.release()
            assert self._sent.acquire(timeout=60)

    @property
    def num_chunks(self) -> int:
        return sum(text.startswith("chunk") for text in self.said)


def run(pipe: ARDiffusionPipeline, typist: Typist, output: Path, **request: Any) -> int:
    return run_interactive(pipe, InteractiveRequest(prompt=PROMPT, output=output, **request), typist, typist.say)


def test_guidance_and_negative_prompt_reach_the_stream(pipe: ARDiffusionPipeline, tmp_path: Path) -> None:
    """The command had no way to turn off, or to use, the guidance of its model's recipe."""
    calls: dict[str, dict[str, Any]] = {
        "plain": {},
        "guided": {"guidance_scale": 3.0},
        "negative": {"guidance_scale": 3.0, "negative_prompt": "a blue square"},
    }
    for name, call in calls.items():
        run(pipe, Typist(), tmp_path / name, max_frames=9, **call)
        request = InteractiveRequest(prompt=PROMPT, output=tmp_path / "none", **call)
        assert request.warmup_arguments(pipe)["guided"] == (name != "plain")
    plain, guided, negative = (frames_in(tmp_path / name) for name in calls)
    assert (plain != guided).any() and (guided != negative).any()


def frames_in(folder: Path) -> np.ndarray:
    return np.stack([read_image(path) for path in sorted(folder.iterdir())])


@pytest.mark.parametrize(
    ("line", "switch"),
    [
        ("blue square", {}),
        (":recache blue square", {"mode": "recache"}),
        (":flush 1 blue square", {"mode": "flush", "keep_frames": 1}),
        (":blend 2  blue square", {"mode": "blend", "blend_chunks": 2}),
    ],
)
def test_line_is_a_switch_at_the_next_chunk(
    pipe: ARDiffusionPipeline, tmp_path: Path, line: str, switch: dict[str, Any]
) -> None:
    typist = Typist("", line)
    assert run(pipe, typist, tmp_path / "frames", max_frames=45) == 45
    with pipe.stream(PROMPT, generator=seed(0)) as stream:
        expected = [next(stream).frames, next(stream).frames]
        stream.switch_prompt("blue square", **switch)
        expected += [next(stream).frames, next(stream).frames]
    pixels = np.rint(np.concatenate(expected, axis=1)[0] * 255).astype(np.uint8)
    np.testing.assert_array_equal(frames_in(tmp_path / "frames"), pixels)
    assert typist.said == [
        "chunk 0: 9 frames",
        "chunk 1: 21 frames",
        f"event 0: {line}",
        "chunk 2: 33 frames, after event 0",
        "chunk 3: 45 frames, after event 0",
    ]


class TestParse:
    def test_texts(self) -> None:
        assert parse_line("  a red circle \n") == {"prompt": "a red circle"}
        assert parse_line(":recache  a b") == {"prompt": "a b", "mode": "recache"}

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            (":fork", "unknown command ':fork'; known: TEXT | :recache TEXT"),
            (":recache", ":recache needs a text"),
            (":flush red", ":flush takes a whole number and a text, got ':flush red'"),
            (":blend -1 red", ":blend takes a whole number"),
            (":blend 4", ":blend needs a text"),
        ],
    )
    def test_refused(self, line: str, message: str) -> None:
        with pytest.raises(ValueError) as raised:
            parse_line(line)
        assert message in str(raised.value)

    def test_bad_lines_change_nothing(self, pipe: ARDiffusionPipeline, tmp_path: Path) -> None:
        typist = Typist(":fork", ":blend 0 red")
        run(pipe, typist, tmp_path / "frames", max_frames=33)
        assert [text.split(":")[0] for text in typist.said] == [
            "chunk 0",
            "not sent",
            "chunk 1",
            "not sent",
            "chunk 2",
        ]


class TestEnd:
    @pytest.mark.parametrize("name", ["clip.mp4", "clip.webm", "clip.gif"])
    def test_quit(self, pipe: ARDiffusionPipeline, tmp_path: Path, name: str) -> None:
        """After the chunk that is there when the word comes. Formats that the writer knows were refused."""
        assert run(pipe, Typist("", ":quit"), tmp_path / name) == 9 + 12
        assert read_video(tmp_path / name)[0].shape == (21, 32, 48, 3)

    def test_end_of_the_input(self, pipe: ARDiffusionPipeline, tmp_path: Path) -> None:
        """Nobody could say :quit any more; a bounded video goes on to its end."""
        reading, readers = threading.Event(), []

        def lines() -> Iterator[str]:
            readers.append(threading.current_thread())
            reading.set()
            yield "blue square"

        def say(text: str) -> None:
            if text.startswith("chunk 0"):
                assert reading.wait(timeout=60)
                readers[-1].join(timeout=60)

        for max_frames, expected in ((None, 9), (40, 40)):
            request = InteractiveRequest(prompt=PROMPT, output=tmp_path / str(expected), max_frames=max_frames)
            assert run_interactive(pipe, request, lines(), say) == expected
            reading.clear()

    def test_folder_with_pictures_is_refused(self, pipe: ARDiffusionPipeline, tmp_path: Path) -> None:
        """A second, shorter video was written over the first one's frames, and the rest of those stayed behind it."""
        (tmp_path / "000050.png").write_bytes(b"old")
        with pytest.raises(FileExistsError, match="holds PNG files already; give another folder"):
            run(pipe, Typist(), tmp_path, max_frames=9)
        assert [path.name for path in tmp_path.iterdir()] == ["000050.png"]

    def test_interrupt_keeps_what_is_there(
        self, pipe: ARDiffusionPipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write = VideoWriter.write

        def interrupted(writer: VideoWriter, frames: Any) -> None:
            if writer.num_frames == 21:
                raise KeyboardInterrupt
            write(writer, frames)

        monkeypatch.setattr(VideoWriter, "write", interrupted)
        assert run(pipe, Typist(), tmp_path / "clip.mp4", max_frames=81) == 21
        assert len(read_video(tmp_path / "clip.mp4")[0]) == 21
        assert [path.name for path in tmp_path.iterdir()] == ["clip.mp4"]


class TestRequest:
    @pytest.mark.parametrize(
        ("request_", "message"),
        [
            ({"prompt": " "}, "first prompt needs some text"),
            ({"max_frames": 0}, "max_frames must be a whole number >= 1"),
            (
                {"output": Path("clip.avi")},
                r"must be a file ending in \.mp4, \.webm, \.gif, or a folder, got 'clip\.avi'",
            ),
        ],
    )
    def test_refused(self, request_: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            InteractiveRequest(**{"prompt": PROMPT, "output": Path("clip.mp4")} | request_)


class TestPreview:
    def test_two_pixels_a_character(self) -> None:
        frame = np.array([[[255, 0, 0], [1, 2, 3]], [[0, 0, 255], [4, 5, 6]]], dtype=np.uint8)
        left, right = "\x1b[38;2;255;0;0m\x1b[48;2;0;0;255m\u2580", "\x1b[38;2;1;2;3m\x1b[48;2;4;5;6m\u2580"
        assert draw(frame, 80) == f"{left}{right}\x1b[0m"

    def test_no_wider_than_the_terminal(self) -> None:
        lines = draw(np.zeros((32, 48, 3), dtype=np.uint8), 24).splitlines()
        assert len(lines) == 8 and all(line.count("\u2580") == 24 for line in lines)

    def test_shown_with_each_chunk(self, pipe: ARDiffusionPipeline, tmp_path: Path) -> None:
        typist = Typist()
        run(pipe, typist, tmp_path / "frames", max_frames=21, preview=True)
        assert ["\u2580" in text for text in typist.said] == [True, False, True, False]


class TestScript:
    @staticmethod
    def start(*arguments: object) -> subprocess.Popen[str]:
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            [sys.executable, str(SCRIPT), *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def test_prompts_from_a_pipe(self, pipe: ARDiffusionPipeline, model: Path, tmp_path: Path) -> None:
        """The input ends long before the video does; what was typed is in it."""
        process = self.start(PROMPT, "--model", model, "--max-frames", 45, "--output", tmp_path / "told")
        output, errors = process.communicate("blue square\n:recache green circle moving left\n", timeout=240)
        assert process.returncode == 0, errors
        assert "after event 1" in output
        run(pipe, Typist(), tmp_path / "plain", max_frames=45)
        told, plain = frames_in(tmp_path / "told"), frames_in(tmp_path / "plain")
        assert told.shape == plain.shape == (45, 32, 48, 3)
        assert (told[-12:] != plain[-12:]).any()

    def test_typed_while_it_runs(self, model: Path, tmp_path: Path) -> None:
        process = self.start(PROMPT, "--model", model, "--output", tmp_path / "new" / "live.mp4")
        assert process.stdin is not None and process.stdout is not None
        for wait_for, typed in (("chunk 0", ":blend 2 blue square"), ("after event 0", ":quit")):
            assert any(wait_for in line for line in process.stdout)
            process.stdin.write(typed + "\n")
            process.stdin.flush()
        output, errors = process.communicate(timeout=240)
        assert process.returncode == 0, errors
        video, fps = read_video(tmp_path / "new" / "live.mp4")
        assert len(video) % 12 == 9 and len(video) >= 21 and fps == 16
        assert output.splitlines()[-1].endswith("live.mp4")

    def test_ends_while_the_input_stays_open(self, model: Path, tmp_path: Path) -> None:
        """A thread that still reads standard input must not keep the process, or crash it, when the video is done."""
        process = self.start(PROMPT, "--model", model, "--max-frames", 9, "--output", tmp_path / "live.mp4")
        assert process.wait(timeout=240) == 0
        process.communicate()

    def test_bad_input_is_one_line(self, model: Path, tmp_path: Path) -> None:
        process = self.start(PROMPT, "--model", model, "--max-frames", 0, "--output", tmp_path / "live.mp4")
        _, errors = process.communicate("", timeout=240)
        assert process.returncode == 2
        assert [line for line in errors.splitlines() if line.startswith("error: max_frames must be")]
        assert list(tmp_path.iterdir()) == []

    def test_negative_prompt_without_guidance(self, model: Path, tmp_path: Path) -> None:
        """A negative prompt that nothing would read was accepted."""
        process = self.start(
            PROMPT, "--model", model, "--negative-prompt", "a square", "--output", tmp_path / "live.mp4"
        )
        _, errors = process.communicate("", timeout=240)
        assert process.returncode == 2
        assert [line for line in errors.splitlines() if line.startswith("error: --negative-prompt needs guidance")]
