"""The example of a model of one's own: a plain DiT over the cache and the op."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from dense import relative_error
from tiny_families import window_mask

from diffusers_ardiff.rope import VideoRope, apply_rotary

EXAMPLE = Path(__file__).parents[1] / "examples" / "own_dit.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("own_dit", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def dense(example: ModuleType, model: torch.nn.Module, video: torch.Tensor) -> torch.Tensor:
    """The same model's clean forward over the whole video, with plain attention under the banded mask."""
    frames = video.shape[1] // example.TOKENS
    rotary = VideoRope(head_dim=example.HEAD_DIM)([range(frames)], *example.GRID)
    mask = window_mask([example.FRAMES] * (frames // example.FRAMES), 1, 4, example.TOKENS)
    x = model.embed(video) + model.time(torch.zeros(1))
    for block in model.blocks:
        heads = (3, example.HEADS, example.HEAD_DIM)
        query, key, value = block.qkv(block.norm1(x)).unflatten(2, heads).unbind(2)
        states = (apply_rotary(query, *rotary), apply_rotary(key, *rotary), value)
        query, key, value = (part.transpose(1, 2) for part in states)
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        x = x + block.out(out.transpose(1, 2).flatten(2))
        x = x + block.mlp(block.norm2(x))
    return model.head(x)


@torch.no_grad()
def test_its_clean_forwards_equal_one_masked_forward(example: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven chunks of 2 frames over a sink of 1 and a window of 4: the ring is overwritten more than twice."""
    torch.manual_seed(0)
    model, clean = example.DiT().eval(), []
    plain = example.DiT.forward

    def record(self, noisy, sigma, *args):
        out = plain(self, noisy, sigma, *args)
        clean.extend([out] if sigma == 0 else [])
        return out

    monkeypatch.setattr(example.DiT, "forward", record)
    video = example.generate(model, 7)
    assert relative_error(torch.cat(clean, dim=1), dense(example, model, video)) < 1e-5


def test_it_runs_from_the_command_line() -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE)], capture_output=True, text=True, timeout=200, cwd=EXAMPLE.parents[1]
    )
    assert done.stdout.strip() == "latents (1, 576, 8)", done.stderr
