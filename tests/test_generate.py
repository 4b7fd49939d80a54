"""The command line: files appear whole or not at all, prompts are split without loss, bad input is one clear line."""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_components import PROMPT, QUICK, make_pipeline

from diffusers_ardiff import PromptSwitch
from diffusers_ardiff.generation import GenerationRequest
from diffusers_ardiff.jobs import generate_videos
from diffusers_ardiff.load import load_pipeline
from diffusers_ardiff.video_io import VideoWriter, read_image, read_video

SCRIPT = Path(__file__).parent.parent / "scripts" / "generate.py"
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_pipeline(recipe=QUICK).save_pretrained(folder)
    return folder


def run_main(*arguments: object) -> int:
    """The script's entry point in this process."""
    return runpy.run_path(str(SCRIPT))["main"]([str(argument) for argument in arguments])


def run_script(*arguments: object, launcher: tuple[str, ...] = (sys.executable,)) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [*launcher, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240, check=False)


def generate(model: Path, **request: object) -> list[Path]:
    request = GenerationRequest(**request)
    results = generate_videos(load_pipeline(str(model), CPU), request)
    assert [result.status for result in results] == ["made"] * len(request.prompts)
    return [request.path(result.index) for result in results]


def test_script_writes_video_and_contact_sheet(model: Path, tmp_path: Path) -> None:
    output = tmp_path / "new" / "clip.mp4"
    done = run_script(PROMPT, "--model", model, "--num-frames", 10, "--output", output)
    assert done.returncode == 0, done.stderr
    frames, fps = read_video(output)
    assert frames.shape == (10, 32, 48, 3)
    assert fps == 16
    assert read_image(output.with_suffix(".png")).shape[0] >= 32
    assert sorted(path.name for path in output.parent.iterdir()) == ["clip.mp4", "clip.png"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--num-frames", -3], ["num_frames", "-3"]),
        (["--height", 40], ["height", "40", "multiple"]),
        (["--recipe", "nonsense"], ["nonsense", "self-forcing"]),
        (["--checkpoint", "missing.pt"], ["missing.pt"]),
        (["--model", "./no-such-folder"], ["no-such-folder"]),
        (["--image", "missing.png"], ["missing.png"]),
        (["--limit-bytes", 1000], ["1,000", "bytes"]),
        (["--fps", 0], ["fps", "0"]),
        (["--fps", 2000], ["fps", "1000", "2000"]),
        (["--fps", "inf"], ["fps", "inf"]),
        (["--seed", -1], ["seed", "-1"]),
        (["--seed", 10**30], ["seed", str(10**30)]),
        (["--video-frames", 5], ["video_frames = 5", "give one"]),
        (["--warmup"], ["warm-up", "cpu", "Leave it out"]),
        (["--overlap"], ["overlap=True", "cpu"]),
        (["--guidance-scale", 1, "--negative-prompt", "a blue square"], ["--negative-prompt", "above 1", "is 1.0"]),
        (["--switch", "one", "a blue square"], ["--switch", "latent frame number", "'one'"]),
    ],
    ids=lambda value: str(value[0]) if isinstance(value, list) else None,
)
def test_bad_input_is_one_line_and_no_file(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[object], words: list[str]
) -> None:
    defaults = [] if "--model" in arguments else ["--model", model]
    assert run_main(PROMPT, *defaults, "--output", tmp_path / "clip.mp4", *arguments) == 2
    message = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(message) == 1, message
    assert all(word in message[0] for word in words), message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("prompts", [[], [" "]])
def test_prompts_need_text(tmp_path: Path, prompts: list[str]) -> None:
    with pytest.raises(ValueError, match="prompt"):
        GenerationRequest(prompts=prompts, output=tmp_path / "clip.mp4")


def test_each_prompt_has_its_own_seed_and_file(model: Path, tmp_path: Path) -> None:
    """Video i of several equals the video of its prompt made alone with seed + i."""
    several = generate(model, prompts=[PROMPT, PROMPT], output=tmp_path / "clip.mp4", num_frames=9, seed=4)
    assert [path.name for path in several] == ["clip-000.mp4", "clip-001.mp4"]
    (alone,) = generate(model, prompts=[PROMPT], output=tmp_path / "alone.mp4", num_frames=9, seed=5)
    first, second = (read_video(path)[0] for path in several)
    np.testing.assert_array_equal(second, read_video(alone)[0])
    assert (first != second).any()


def test_image_and_video_begin_the_result(model: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    frames = rng.integers(0, 255, (5, 32, 48, 3), dtype=np.uint8)
    Image.fromarray(frames[0]).save(tmp_path / "first.png")
    with VideoWriter(tmp_path / "given.mp4", 16) as writer:
        writer.write(frames)
    plain, image, video = (
        read_video(generate(model, prompts=[PROMPT], output=tmp_path / f"{name}.mp4", num_frames=13, **given)[0])[0]
        for name, given in (
            ("plain", {}),
            ("image", {"image": tmp_path / "first.png"}),
            ("video", {"video": tmp_path / "given.mp4"}),
        )
    )
    assert plain.shape == image.shape == video.shape == (13, 32, 48, 3)
    assert (plain != image).any() and (image != video).any()


def test_prompt_switch_changes_what_follows(model: Path, tmp_path: Path) -> None:
    switch = PromptSwitch(latent_frame=3, prompt="a blue square", mode="recache")
    plain, switched = (
        read_video(generate(model, prompts=[PROMPT], output=tmp_path / f"{len(s)}.mp4", num_frames=21, switches=s)[0])[
            0
        ]
        for s in ([], [switch])
    )
    assert (plain[9:] != switched[9:]).any()


def test_switch_options(model: Path, tmp_path: Path) -> None:
    blend = ("--switch", 3, "a blue square", "--switch-mode", "blend", "--blend-chunks", 2)
    arguments = ("--model", model, "--num-frames", 33, "--output", tmp_path / "options.mp4")
    assert run_main(PROMPT, *arguments, *blend) == 0
    switch = PromptSwitch(latent_frame=3, prompt="a blue square", mode="blend", blend_chunks=2)
    generate(model, prompts=[PROMPT], output=tmp_path / "switch.mp4", num_frames=33, switches=[switch])
    np.testing.assert_array_equal(*(read_video(tmp_path / f"{name}.mp4")[0] for name in ("options", "switch")))


def test_failure_in_the_middle_keeps_the_old_file(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that died in its second chunk must not leave half a video under the final name."""
    output = tmp_path / "clip.mp4"
    output.write_bytes(b"precious")
    write, calls = VideoWriter.write, []

    def fails_at_second_chunk(writer: VideoWriter, frames: np.ndarray) -> None:
        calls.append(len(frames))
        if len(calls) == 2:
            raise KeyboardInterrupt
        write(writer, frames)

    monkeypatch.setattr(VideoWriter, "write", fails_at_second_chunk)
    with pytest.raises(KeyboardInterrupt):
        generate(model, prompts=[PROMPT], output=output, num_frames=21)
    assert calls == [9, 12]
    assert output.read_bytes() == b"precious"
    assert [path.name for path in tmp_path.iterdir()] == ["clip.mp4"]


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_signals_leave_nothing_half_written(model: Path, tmp_path: Path, number: int, status: int) -> None:
    """A terminated run (a scheduler's time limit, a closed terminal) left its hidden part file; Ctrl-C gave a traceback."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPT), PROMPT, "--model", str(model), "--num-frames", "100000"]
    command += ["--num-window-frames", "3", "--output", str(tmp_path / "clip.mp4")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        deadline = time.monotonic() + 120
        while not any(tmp_path.iterdir()):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(number)
        _, errors = process.communicate(timeout=120)
    assert process.returncode == status
    assert list(tmp_path.iterdir()) == []
    assert "Traceback" not in errors
    assert ("--resume goes on" in errors) == (number == signal.SIGINT)


def test_window_of_the_command_line(model: Path, tmp_path: Path) -> None:
    """A recipe with the full history could not be given a window without a recipe file of one's own."""
    full = QUICK.replace(num_sink_frames=0, num_window_frames=None, max_latent_frames=6)
    recipe = tmp_path / "full.json"
    recipe.write_text(json.dumps(full.to_dict()))
    arguments = (PROMPT, "--model", model, "--recipe", recipe, "--num-frames", 33, "--output", tmp_path / "clip.mp4")
    assert run_main(*arguments) == 2
    assert run_main(*arguments, "--num-window-frames", 5, "--num-sink-frames", 1) == 0
    (expected,) = generate(model, prompts=[PROMPT], output=tmp_path / "same.mp4", num_frames=33)
    np.testing.assert_array_equal(read_video(tmp_path / "clip.mp4")[0], read_video(expected)[0])


def test_folder_with_the_name_of_the_video(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It was noticed when the first chunk was there, with a traceback, as if the video had failed."""
    (tmp_path / "clip.mp4").mkdir()
    assert run_main(PROMPT, "--model", model, "--num-frames", 9, "--output", tmp_path / "clip.mp4") == 2
    assert (
        capsys.readouterr().err.splitlines()[-1].endswith("clip.mp4 is a folder; give another output, or remove it.")
    )


@pytest.mark.parametrize(
    ("given", "output"),
    [
        ("--image cat.png", "cat.mp4"),
        ("--image clip-001.png", "clip.mp4"),
        ("--video cat.mp4", "cat.mp4"),
        ("--video cat.gif", "cat.gif"),
        ("--video .", "clip.mp4"),
    ],
)
def test_nothing_that_a_video_begins_with_is_replaced(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    given: str,
    output: str,
) -> None:
    """`--image cat.png --output cat.mp4` put the contact sheet in the place of the cat."""
    monkeypatch.chdir(tmp_path)
    name = given.split()[1]
    if name != ".":
        Path(name).write_bytes(b"precious")
    prompts = [PROMPT, PROMPT] if "001" in name else [PROMPT]
    assert run_main(*prompts, "--model", model, "--num-frames", 13, *given.split(), "--output", output) == 2
    (message,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert "give an output elsewhere" in message and name in message
    assert [path.read_bytes() for path in tmp_path.iterdir()] == ([b"precious"] if name != "." else [])


@pytest.mark.parametrize(
    ("there", "output", "message"),
    [("clip.png/x", "clip.mp4", "clip.png is a folder"), ("file", "file/new/clip.mp4", "file is a file, so")],
)
def test_outputs_that_cannot_be_written(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], there: str, output: str, message: str
) -> None:
    """Noticed when the first chunk was there, or after the last one, with a traceback."""
    (tmp_path / there).parent.mkdir(exist_ok=True)
    (tmp_path / there).write_bytes(b"")
    before = sorted(tmp_path.rglob("*"))
    assert run_main(PROMPT, "--model", model, "--num-frames", 9, "--output", tmp_path / output) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(("fps", "written"), [(8, 5), (16, 9), (32, 17)])
def test_a_video_is_continued_at_the_rate_of_the_recipe(model: Path, tmp_path: Path, fps: float, written: int) -> None:
    """Every frame of a file was taken, so one of 32 frames a second went on at half its speed."""
    bar = np.zeros((written, 32, 48, 3), np.uint8)
    for index, frame in enumerate(bar):
        left = round(index * 16 / fps) * 4
        frame[:, left : left + 8] = 255
    with VideoWriter(tmp_path / "given.mp4", fps) as writer:
        writer.write(bar)
    seen: list[torch.Tensor] = []
    pipe = load_pipeline(str(model), CPU)
    pipe.vae.encoder.register_forward_pre_hook(lambda module, args: seen.append(args[0].clone()))
    request = GenerationRequest(
        prompts=[PROMPT], output=tmp_path / "clip.mp4", num_frames=21, video=tmp_path / "given.mp4", video_frames=9
    )
    generate_videos(pipe, request)
    given = torch.cat(seen, dim=2)[0, 0].mean(dim=1)  # (frames, width)
    assert given.shape[0] == 9
    places = [int(torch.nonzero(row > 0)[0]) for row in given]
    expected = [round(int(n * fps / 16 + 1e-6) * 16 / fps) * 4 for n in range(9)]
    assert places == pytest.approx(expected, abs=1)


def test_a_file_longer_than_the_result_is_not_read_to_its_end(model: Path, tmp_path: Path) -> None:
    with VideoWriter(tmp_path / "long.mp4", 16) as writer:
        writer.write(np.zeros((200, 32, 48, 3), np.uint8))
    request = GenerationRequest(
        prompts=[PROMPT], output=tmp_path / "clip.mp4", num_frames=11, video=tmp_path / "long.mp4"
    )
    with pytest.raises(ValueError, match=r"num_frames=11 .* includes the given .* which has 4 latent frames"):
        generate_videos(load_pipeline(str(model), CPU), request)


def test_link_is_followed(model: Path, tmp_path: Path) -> None:
    """The link was replaced by the file, and what it led to stayed as it was."""
    (tmp_path / "large").mkdir()
    for suffix in (".mp4", ".png"):
        (tmp_path / f"clip{suffix}").symlink_to(Path("large") / f"real{suffix}")
    generate(model, prompts=[PROMPT], output=tmp_path / "clip.mp4", num_frames=9)
    assert all((tmp_path / f"clip{suffix}").is_symlink() for suffix in (".mp4", ".png"))
    assert sorted(path.name for path in (tmp_path / "large").iterdir()) == ["real.mp4", "real.png"]
    assert len(read_video(tmp_path / "clip.mp4")[0]) == 9
