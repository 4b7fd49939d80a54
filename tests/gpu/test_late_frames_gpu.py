"""The commands with overlapped decoding and a warm-up, on a GPU with a video library."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_components import PROMPT, QUICK, make_pipeline, make_transformer

from diffusers_ardiff import ARDiffusionPipeline

pytestmark = pytest.mark.gpu


def gpu_pipeline() -> ARDiffusionPipeline:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    pytest.importorskip("av")
    transformer = make_transformer(attention_head_dim=64)
    return make_pipeline(QUICK, transformer=transformer).to("cuda", torch.bfloat16)


def test_overlapped_file_equals_the_plain_one(tmp_path: Path) -> None:
    pipe = gpu_pipeline()
    from diffusers_ardiff.generation import GenerationRequest
    from diffusers_ardiff.jobs import generate_videos
    from diffusers_ardiff.video_io import read_video

    videos = []
    for overlap in (False, True):
        pipe.set_decoder(overlap=overlap)
        output = tmp_path / f"{overlap}.mp4"
        (result,) = generate_videos(pipe, GenerationRequest(prompts=[PROMPT], output=output, num_frames=81))
        assert result.status == "made", result.error
        videos.append(read_video(output)[0])
    assert videos[0].shape[0] == 81 and (videos[0] == videos[1]).all()


def test_warm_and_overlapped(tmp_path: Path) -> None:
    """Two videos, the second as warm as the first; then the interactive command in the same way."""
    pipe = gpu_pipeline()
    from diffusers_ardiff.generation import GenerationRequest
    from diffusers_ardiff.interactive import InteractiveRequest, run_interactive
    from diffusers_ardiff.jobs import generate_videos

    torch._dynamo.reset()
    pipe.set_decoder(overlap=True)
    request = GenerationRequest(prompts=[PROMPT, "a blue square"], output=tmp_path / "clip.mp4", num_frames=33)
    results = generate_videos(pipe, request, warmup=True)
    assert [result.status for result in results] == ["made", "made"], results
    assert pipe._warm.graphs.num_replays == 2 * (3 * 2 + 2)
    live = InteractiveRequest(prompt=PROMPT, output=tmp_path / "live.mp4", max_frames=45)
    pipe.warmup(**live.warmup_arguments(pipe))
    assert run_interactive(pipe, live, [":recache a blue square"], lambda text: None) == 45
    torch._dynamo.reset()
