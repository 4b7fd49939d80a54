"""Offloading and quantisation where there are two devices: the plain run's video, the pool on the GPU, peak memory below."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_components import PROMPT, QUICK, make_pipeline, make_transformer, record_pools, seed

from diffusers_ardiff import ARDiffusionPipeline

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
CALL: dict[str, Any] = {"num_frames": 33, "output_type": "pt"}


def frames_of(pipe: ARDiffusionPipeline) -> torch.Tensor:
    return pipe(PROMPT, generator=seed(0), **CALL).frames.cpu()


@pytest.fixture(scope="module")
def plain() -> torch.Tensor:
    return frames_of(make_pipeline(QUICK).to(CUDA))


WAYS: dict[str, Any] = {
    "model": lambda pipe: pipe.enable_model_cpu_offload(),
    "sequential": lambda pipe: pipe.enable_sequential_cpu_offload(),
    "leaf": lambda pipe: pipe.enable_group_offload(CUDA, offload_type="leaf_level"),
    "leaf, stream": lambda pipe: pipe.enable_group_offload(CUDA, offload_type="leaf_level", use_stream=True),
    "blocks": lambda pipe: pipe.enable_group_offload(CUDA, offload_type="block_level", num_blocks_per_group=1),
    "blocks, stream": lambda pipe: pipe.enable_group_offload(
        CUDA, offload_type="block_level", num_blocks_per_group=1, use_stream=True
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_offload(way: str, plain: torch.Tensor) -> None:
    pipe = make_pipeline(QUICK)
    WAYS[way](pipe)
    with record_pools() as pools:
        for _ in range(2):
            assert (frames_of(pipe) - plain).abs().max() < 1e-3
            assert torch.isfinite(frames_of(pipe)).all()
    assert len(pools) == 4
    assert pipe.transformer.blocks[1].attn1.to_q.weight.device.type in ("cpu", "meta")


@pytest.mark.parametrize("way", WAYS)
def test_pool_stays_on_the_gpu(way: str) -> None:
    pipe = make_pipeline(QUICK)
    WAYS[way](pipe)
    pool = pipe.create_cache()
    tensors = [*pool.storage.key_pools, *pool.storage.value_pools]
    before = [tensor.data_ptr() for tensor in tensors]
    assert all(tensor.is_cuda for tensor in tensors)
    pipe(PROMPT, generator=seed(0), cache=pool, **CALL)
    assert [tensor.data_ptr() for tensor in (*pool.storage.key_pools, *pool.storage.value_pools)] == before


def test_group_offload_needs_less_memory() -> None:
    """A transformer of 200 MB, one block of sixteen on the GPU at a time, text keys and values included."""
    size = {"num_attention_heads": 8, "attention_head_dim": 64, "ffn_dim": 2048, "num_layers": 16}
    peaks = {}
    for way in ("none", "blocks"):
        pipe = make_pipeline(QUICK, transformer=make_transformer(**size))
        if way == "none":
            pipe.to(CUDA)
        else:
            WAYS[way](pipe)
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        pipe(PROMPT, generator=seed(0), **CALL)
        peaks[way] = torch.cuda.max_memory_allocated()
        del pipe
    assert peaks["blocks"] < peaks["none"] - 100e6, peaks


@pytest.mark.parametrize("library", ["torchao", "bitsandbytes"])
def test_quantised(library: str, tmp_path: Path, plain: torch.Tensor) -> None:
    pytest.importorskip(library, reason=f"{library} is not installed")
    from diffusers import BitsAndBytesConfig, PipelineQuantizationConfig, TorchAoConfig

    if library == "torchao":
        from torchao.quantization import Int8WeightOnlyConfig

        config: Any = TorchAoConfig(Int8WeightOnlyConfig())
    else:
        config = BitsAndBytesConfig(load_in_8bit=True)
    make_pipeline(QUICK).save_pretrained(tmp_path / "model")
    pipe = ARDiffusionPipeline.from_pretrained(
        tmp_path / "model", quantization_config=PipelineQuantizationConfig(quant_mapping={"transformer": config})
    ).to(CUDA)
    pipe.set_progress_bar_config(disable=True)
    frames = frames_of(pipe)
    assert torch.isfinite(frames).all() and 0 < (frames - plain).abs().mean() < 0.1
