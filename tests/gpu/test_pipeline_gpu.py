"""The pipeline on a CUDA device: the reference rollouts, streams, memory, and no hidden waiting."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_oracle_rollout import FILES, MAX_RELATIVE_ERROR, build_pipeline, read_oracle, run_oracle
from tiny_components import PROMPT, make_pipeline

from diffusers_ardiff.pipelines.denoise import FrameStep

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def exact_float32() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


@pytest.mark.parametrize("write", ["torch", "fused"])
@pytest.mark.parametrize("shuffle_seed", [None, 11], ids=["contiguous", "shuffled"])
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_oracle_rollout_on_gpu(path: Path, shuffle_seed: int | None, write: str, tmp_path: Path) -> None:
    config, tensors = read_oracle(path)
    pipe = build_pipeline(config, tensors, tmp_path).to("cuda")
    pipe.set_progress_bar_config(disable=True)
    latents = run_oracle(pipe, config, tensors, page_size=16, shuffle_seed=shuffle_seed, write=write).cpu()
    expected = tensors["latents"]
    assert ((latents - expected).norm() / expected.norm()).item() <= MAX_RELATIVE_ERROR


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stream_equals_call(dtype: torch.dtype) -> None:
    pipe = make_pipeline().to("cuda", dtype)
    pipe.set_progress_bar_config(disable=True)
    whole = pipe(PROMPT, num_frames=33, generator=torch.Generator().manual_seed(0), output_type="pt").frames
    with pipe.stream(PROMPT, num_frames=33, generator=torch.Generator().manual_seed(0), output_type="pt") as stream:
        parts = [chunk.frames for chunk in stream]
    assert torch.isfinite(whole).all()
    assert [part.shape[1] for part in parts] == [9, 12, 12]
    assert torch.equal(torch.cat(parts, dim=1), whole)


def test_stopped_stream_gives_memory_back() -> None:
    pipe = make_pipeline().to("cuda")
    next(iter(pipe.stream(PROMPT))).frames  # noqa: B018  (kernels and workspaces are loaded once)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    stream = pipe.stream(PROMPT)
    for _ in range(4):
        next(stream)
    assert torch.cuda.memory_allocated() > before
    stream.close()
    assert torch.cuda.memory_allocated() == before


def test_a_forward_never_waits_for_the_device() -> None:
    """Preparing a forward and running it copies metadata through pinned memory; any stream sync raises here."""
    pipe = make_pipeline().to("cuda")
    with pipe.stream(PROMPT, output_type="latent") as stream:
        for _ in range(4):
            chunk = next(stream)
        stream.rollout.commit_held()
        noise = torch.randn_like(chunk.latents)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            with torch.no_grad():
                stream.rollout.predict(FrameStep(latents=noise, timestep=1000.0), 1.0)
        finally:
            torch.cuda.set_sync_debug_mode("default")
