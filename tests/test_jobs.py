"""Prompts over processes: each made once, finished ones kept, failures told, and no process left waiting."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import run_ranks
from test_docs import blocks
from tiny_components import PROMPT, QUICK, make_pipeline

from diffusers_ardiff.generation import GenerationRequest
from diffusers_ardiff.jobs import Job, generate_videos, index_path, read_comment
from diffusers_ardiff.load import load_pipeline
from diffusers_ardiff.parallel import ParallelLayout
from diffusers_ardiff.pipelines import ARStream
from diffusers_ardiff.video_io import VideoWriter, read_video

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "scripts" / "generate.py"
PROMPTS = [PROMPT, "a blue square", "a green circle"]
LAUNCH = (sys.executable, "-m", "accelerate.commands.launch")
TWO = ("--multi_gpu", "--num_processes", "2", "--num_machines", "1", "--main_process_port", "0")

PLANTED = """
import os, runpy, signal, sys
from diffusers_ardiff.pipelines import ARStream

next_chunk = ARStream._next_chunk
calls = []

def fails(stream):
    calls.append(1)
    if os.environ["RANK"] == "1" and len(calls) == 2:
        {failure}
    return next_chunk(stream)

ARStream._next_chunk = fails
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_pipeline(recipe=QUICK).save_pretrained(folder)
    return folder


def launch(*arguments: object, options: tuple[str, ...] = TWO) -> subprocess.CompletedProcess[str]:
    """The script on processes that accelerate starts."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = str(ROOT)
    command = [*LAUNCH, *options, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)


def request(folder: Path, prompts: list[str] = PROMPTS, **values: object) -> GenerationRequest:
    return GenerationRequest(prompts=prompts, output=folder / "clip.mp4", **{"num_frames": 9} | values)


def statuses(folder: Path) -> list[str]:
    videos = json.loads(index_path(folder / "clip.mp4").read_text())["videos"]
    assert [video["index"] for video in videos] == list(range(len(videos)))
    return [video["status"] for video in videos]


def planted(folder: Path, failure: str) -> Path:
    script = folder / "planted.py"
    script.write_text(PLANTED.format(failure=failure))
    return script


# -- processes ------------------------------------------------------------------------------------------------------


@pytest.mark.multi_process
def test_accelerate_splits_prompts_without_loss(model: Path, tmp_path: Path) -> None:
    """Two processes share three prompts of a file: each is made once, and as a single process makes it."""
    (tmp_path / "prompts.txt").write_text("\n\n".join(PROMPTS) + "\n")
    arguments = ("--prompts", tmp_path / "prompts.txt", "--model", model, "--num-frames", 9)
    done = launch(SCRIPT, *arguments, "--output", tmp_path / "two" / "clip.mp4")
    assert done.returncode == 0, done.stderr
    names = [f"clip-{index:03d}.mp4" for index in range(3)]
    assert [Path(line).name for line in done.stdout.split() if line.endswith(".mp4")] == names
    assert statuses(tmp_path / "two") == ["made"] * 3
    assert "clip-000.mp4" in done.stderr and "clip-001.mp4" not in done.stderr  # one bar, of the first process
    generate_videos(load_pipeline(str(model), torch.device("cpu")), request(tmp_path / "one"))
    for name in names:
        np.testing.assert_array_equal(*(read_video(tmp_path / folder / name)[0] for folder in ("one", "two")))


@pytest.mark.multi_process
def test_a_failed_prompt_is_told_and_made_by_a_resumed_run(model: Path, tmp_path: Path) -> None:
    script = planted(tmp_path, 'raise RuntimeError("planted")')
    arguments = ("--model", model, "--num-frames", 21, "--output", tmp_path / "clip.mp4")
    done = launch(script, SCRIPT, *PROMPTS, *arguments)
    assert done.returncode == 1
    assert "RuntimeError: planted" in done.stderr and "Traceback" in done.stderr
    assert statuses(tmp_path) == ["made", "failed", "made"]
    assert sorted(path.name for path in tmp_path.glob("*.mp4")) == ["clip-000.mp4", "clip-002.mp4"]
    before = (tmp_path / "clip-000.mp4").stat().st_mtime_ns
    done = subprocess.run(
        [sys.executable, SCRIPT, *PROMPTS, *map(str, arguments), "--resume"], check=False, timeout=120
    )
    assert done.returncode == 0
    assert statuses(tmp_path) == ["kept", "made", "kept"]
    assert (tmp_path / "clip-000.mp4").stat().st_mtime_ns == before


@pytest.mark.multi_process
def test_a_process_that_dies_ends_the_job_of_many_prompts(model: Path, tmp_path: Path) -> None:
    """The other process would wait for its results for a week; what was made stays, and a resumed run makes the rest."""
    start = time.monotonic()
    arguments = (*PROMPTS, "--model", model, "--num-frames", 21, "--output", tmp_path / "clip.mp4")
    done = launch(planted(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)"), SCRIPT, *arguments)
    assert done.returncode != 0
    assert "SIGKILL" in done.stderr
    assert time.monotonic() - start < 60
    assert not (tmp_path / "clip-001.mp4").exists()
    done = launch(SCRIPT, *arguments, "--resume")
    assert done.returncode == 0, done.stderr
    assert statuses(tmp_path)[1] == "made" and set(statuses(tmp_path)) <= {"made", "kept"}
    assert sorted(path.name for path in tmp_path.glob("*.mp4")) == [f"clip-{index:03d}.mp4" for index in range(3)]


def resumed_job(rank: int, model: Path, folder: Path) -> list[str]:
    pipe = load_pipeline(str(model), torch.device("cpu"))
    return [result.status for result in generate_videos(pipe, request(folder), resume=True)]


def test_two_processes_resume(model: Path, tmp_path: Path) -> None:
    """Both deal out what is missing, and all that was there is kept."""
    generate_videos(load_pipeline(str(model), torch.device("cpu")), request(tmp_path))
    (tmp_path / "clip-001.mp4").unlink()
    before = (tmp_path / "clip-002.mp4").stat().st_mtime_ns
    assert run_ranks(2, tmp_path / "ranks", resumed_job, model, tmp_path) == [["kept", "made", "kept"]] * 2
    assert statuses(tmp_path) == ["kept", "made", "kept"]
    assert (tmp_path / "clip-002.mp4").stat().st_mtime_ns == before


@pytest.mark.multi_process
@pytest.mark.parametrize(
    ("failure", "words"),
    [("os.kill(os.getpid(), signal.SIGKILL)", "SIGKILL"), ('raise ZeroDivisionError("planted")', "planted")],
    ids=["killed", "raises"],
)
def test_a_rank_that_dies_ends_the_job_of_a_team(model: Path, tmp_path: Path, failure: str, words: str) -> None:
    """Both ranks make one video; the one that is left does not wait for ever, and leaves no half file."""
    output = tmp_path / "out"
    start = time.monotonic()
    arguments = (PROMPT, "--model", model, "--num-frames", 21, "--output", output / "clip.mp4", "--ulysses", 2)
    done = launch(planted(tmp_path, failure), SCRIPT, *arguments)
    assert done.returncode != 0
    assert words in done.stderr
    assert time.monotonic() - start < 60
    assert list(output.iterdir()) == []


@pytest.mark.multi_process
def test_the_process_group_ends_with_the_command(model: Path, tmp_path: Path) -> None:
    """It was left to the interpreter's end, where its threads now and then aborted a process that had done its work."""
    wrapper = tmp_path / "wrapper.py"
    wrapper.write_text(
        "import runpy, sys, torch.distributed as dist\n"
        "try:\n"
        f"    runpy.run_path({str(SCRIPT)!r}, run_name='__main__')\n"
        "except SystemExit as end:\n"
        "    assert end.code == 0\n"
        "assert not dist.is_initialized()\n"
    )
    done = launch(wrapper, PROMPT, "--model", model, "--num-frames", 9, "--ulysses", 2, "--output", tmp_path / "c.mp4")
    assert done.returncode == 0, done.stderr


@pytest.mark.multi_process
def test_two_processes_make_one_video(model: Path, tmp_path: Path) -> None:
    arguments = (PROMPT, "--model", model, "--num-frames", 21, "--guidance-scale", 3)
    done = launch(SCRIPT, *arguments, "--ulysses", 2, "--output", tmp_path / "clip.mp4")
    assert done.returncode == 0, done.stderr
    generate_videos(
        load_pipeline(str(model), torch.device("cpu")),
        request(tmp_path / "one", [PROMPT], num_frames=21, guidance_scale=3),
    )
    two, one = (read_video(folder / "clip.mp4")[0].astype(int) for folder in (tmp_path, tmp_path / "one"))
    assert np.abs(two - one).mean() < 0.5


def job_with_decoder(rank: int, model: Path, folder: Path) -> list[str]:
    pipe = load_pipeline(str(model), torch.device("cpu"))
    pipe.enable_parallelism(decode_rank=True)
    return [result.status for result in generate_videos(pipe, request(folder))]


def test_a_team_with_a_rank_that_decodes(model: Path, tmp_path: Path) -> None:
    """The decoder writes the files, of the frames that one process makes."""
    assert run_ranks(2, tmp_path / "ranks", job_with_decoder, model, tmp_path) == [["made"] * 3] * 2
    assert statuses(tmp_path) == ["made"] * 3
    generate_videos(load_pipeline(str(model), torch.device("cpu")), request(tmp_path / "one"))
    for path in tmp_path.glob("*.mp4"):
        np.testing.assert_array_equal(read_video(path)[0], read_video(tmp_path / "one" / path.name)[0])


def failing_job_with_decoder(rank: int, model: Path, folder: Path) -> str:
    pipe = load_pipeline(str(model), torch.device("cpu"))
    pipe.enable_parallelism(decode_rank=True)
    plain, calls = ARStream._next_chunk, []

    def fails(stream: ARStream) -> Any:
        calls.append(1)
        return plain(stream) if len(calls) == 1 else pipe.transformer(None)

    ARStream._next_chunk = fails
    with pytest.raises(Exception) as caught:
        generate_videos(pipe, request(folder, [PROMPT], num_frames=33))
    return str(caught.value)


def test_no_file_where_the_ranks_that_denoise_fail(model: Path, tmp_path: Path) -> None:
    """9 of 33 frames stood under the video's name, said to be made from this request, so resuming kept them."""
    output = tmp_path / "out"
    output.mkdir()
    _, told = run_ranks(2, tmp_path / "ranks", failing_job_with_decoder, model, output)
    assert "breaks off" in told
    assert list(output.iterdir()) == []


@pytest.mark.multi_process
@pytest.mark.parametrize("configured", [False, True], ids=["command line", "config file"])
def test_a_launch_with_fewer_processes_is_refused(model: Path, tmp_path: Path, configured: bool) -> None:
    config, output = tmp_path / "config.yaml", tmp_path / "out"
    lines = ["compute_environment: LOCAL_MACHINE", "distributed_type: 'NO'", "mixed_precision: 'no'"]
    config.write_text("\n".join([*lines, "num_processes: 2", "use_cpu: true", "debug: false"]) + "\n")
    options = ("--config_file", str(config)) if configured else ("--cpu", "--num_processes", "2")
    done = launch(SCRIPT, PROMPT, "--model", model, "--output", output / "clip.mp4", options=options)
    assert done.returncode != 0
    assert "2 processes were asked for, 1 runs" in done.stderr and "--multi_gpu" in done.stderr
    assert not output.exists()


def test_the_docs_lines_run_on_two_processes(tmp_path: Path) -> None:
    page = ROOT / "docs" / "several_gpus.md"
    (block,) = [block for block in blocks(page) if block.needs == ("processes",)]
    script = tmp_path / "lines.py"
    script.write_text(f"{block.code}\nprint(layout.ulysses_degree, output_type, video.shape[0])\n")
    done = launch(script)
    assert done.returncode == 0, done.stderr
    assert "2 np 1" in done.stdout and "2 latent 1" in done.stdout


# -- one process ----------------------------------------------------------------------------------------------------


def test_resume_makes_what_was_made_otherwise(model: Path, tmp_path: Path) -> None:
    """A file of another seed, prompt or length is no finished one; nor is one that some other program made."""
    pipe = load_pipeline(str(model), torch.device("cpu"))

    def run(**values: object) -> list[str]:
        return [result.status for result in generate_videos(pipe, request(tmp_path, **values), resume=True)]

    assert run() == ["made"] * 3
    assert run() == ["kept"] * 3
    assert run(prompts=[PROMPTS[0], "a red square", PROMPTS[2]]) == ["kept", "made", "kept"]
    assert run(seed=1) == ["made"] * 3
    assert run(seed=1, num_frames=13) == ["made"] * 3
    with VideoWriter(tmp_path / "clip-001.mp4", 16) as writer:
        writer.write(np.zeros((1, 32, 48, 3), dtype=np.uint8))
    (tmp_path / "clip-002.mp4").write_bytes(b"no video")
    assert run(seed=1, num_frames=13) == ["kept", "made", "made"]


def test_a_failed_prompt_does_not_take_the_next_one_along(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write, calls = VideoWriter.write, []

    def fails_once(writer: VideoWriter, frames: np.ndarray) -> None:
        calls.append(1)
        if len(calls) == 1:
            raise OSError("the disk is full")
        write(writer, frames)

    monkeypatch.setattr(VideoWriter, "write", fails_once)
    results = generate_videos(load_pipeline(str(model), torch.device("cpu")), request(tmp_path))
    assert [result.status for result in results] == statuses(tmp_path) == ["failed", "made", "made"]
    assert results[0].error == "OSError: the disk is full"
    assert "Traceback" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.glob("*.mp4")) == ["clip-001.mp4", "clip-002.mp4"]


def test_the_index_says_what_is_to_come(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stops(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(VideoWriter, "write", stops)
    with pytest.raises(KeyboardInterrupt):
        generate_videos(load_pipeline(str(model), torch.device("cpu")), request(tmp_path))
    assert statuses(tmp_path) == ["pending"] * 3
    assert [path.name for path in tmp_path.iterdir()] == ["clip-index.json"]


@pytest.mark.parametrize(("num_processes", "degree"), [(1, 1), (2, 1), (3, 1), (8, 2), (4, 4)])
def test_every_prompt_has_one_team(model: Path, tmp_path: Path, num_processes: int, degree: int) -> None:
    job = Job(load_pipeline(str(model), torch.device("cpu")), request(tmp_path, [f"prompt {i}" for i in range(7)]))
    shares: dict[int, list[int]] = {}
    for rank in range(num_processes):
        job.rank, job.num_processes = rank, num_processes
        job.layout = ParallelLayout(ulysses_degree=degree, world_size=num_processes, rank=rank)
        assert shares.setdefault(job.layout.team, job.mine) == job.mine
    assert sorted(index for share in shares.values() for index in share) == list(range(7))
    assert len(shares) == num_processes // degree


def test_resume_of_webm_files(model: Path, tmp_path: Path) -> None:
    pipe = load_pipeline(str(model), torch.device("cpu"))
    webm = GenerationRequest(prompts=PROMPTS[:2], output=tmp_path / "clip.webm", num_frames=9)
    for expected in ("made", "kept"):
        assert [result.status for result in generate_videos(pipe, webm, resume=True)] == [expected] * 2


def test_gif_files_cannot_be_resumed(model: Path, tmp_path: Path) -> None:
    pipe = load_pipeline(str(model), torch.device("cpu"))
    gif = GenerationRequest(prompts=[PROMPT], output=tmp_path / "clip.gif", num_frames=9)
    with pytest.raises(ValueError, match=r"clip\.gif.*can't hold.*\.mp4 or \.webm"):
        Job(pipe, gif, resume=True)
    assert [result.status for result in generate_videos(pipe, gif)] == ["made"]


def test_resume_reads_no_index(model: Path, tmp_path: Path) -> None:
    """What is finished stands in the videos; a damaged index is written anew."""
    pipeline = load_pipeline(str(model), torch.device("cpu"))
    generate_videos(pipeline, request(tmp_path))
    (tmp_path / "clip-001.mp4").write_bytes((tmp_path / "clip-001.mp4").read_bytes()[:200])
    (tmp_path / "clip-index.json").write_text('{"videos": [{"ind')
    results = generate_videos(pipeline, request(tmp_path), resume=True)
    assert [result.status for result in results] == statuses(tmp_path) == ["kept", "made", "kept"]


def test_resume_beside_a_file_of_somebody_else(tmp_path: Path) -> None:
    """Metadata that is no UTF-8 was a UnicodeDecodeError."""
    path = tmp_path / "clip.mp4"
    with VideoWriter(path, fps=16, comment="written in latin one") as writer:
        writer.write(np.zeros((1, 16, 16, 3), np.uint8))
    path.write_bytes(path.read_bytes().replace(b"latin one", b"l\xe4t\xefn \xf6ne"))
    assert read_comment(path).startswith("written in l")
