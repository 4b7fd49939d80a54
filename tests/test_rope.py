"""Rotary angles at any frame, against the float64 formula and the host's own module."""

import math

import pytest
import torch
from diffusers.models.transformers.transformer_wan import WanRotaryPosEmbed
from torch.testing import assert_close

from diffusers_ardiff.rope import VideoRope, apply_rotary

HEAD_DIMS = [12, 64, 128]


def angles(frame: int, row: int, column: int, head_dim: int) -> list[float]:
    """The formula, one Python float at a time: time, height, width parts of ``head_dim / 2`` angles."""
    spatial = 2 * (head_dim // 6)
    parts = [(frame, head_dim - 2 * spatial), (row, spatial), (column, spatial)]
    return [position / 10000.0 ** (2 * i / dim) for position, dim in parts for i in range(dim // 2)]


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("frames", [(0, 1, 2), (1022, 1023, 1024), (5000, 5001, 5002), (0, 997, 998)], ids=str)
def test_cosine_and_sine_within_1e_6_of_float64(head_dim: int, frames: tuple[int, ...]) -> None:
    """The host slices a table of 1024 frames and fails beyond it with a bare shape error (Causal-Forcing#2); angles in
    float32 are off by 5e-5 at frame 5000."""
    height, width = 2, 3
    cos, sin = VideoRope(head_dim=head_dim)([frames], height, width)
    assert cos.shape == sin.shape == (1, 3 * height * width, 1, head_dim)
    assert cos.dtype == sin.dtype == torch.float32
    rows = [angles(f, y, x, head_dim) for f in frames for y in range(height) for x in range(width)]
    for tensor, function in ((cos, math.cos), (sin, math.sin)):
        expected = torch.tensor([[function(a) for a in row for _ in range(2)] for row in rows], dtype=torch.float64)
        assert float((tensor[0, :, 0].double() - expected).abs().max()) < 1e-6


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_equals_the_host_within_its_table(head_dim: int) -> None:
    host = WanRotaryPosEmbed(head_dim, (1, 2, 2), 32)
    expected = host(torch.empty(1, 16, 20, 8, 6))
    actual = VideoRope(head_dim=head_dim)([range(20)], 4, 3)
    assert_close(actual, expected, rtol=0, atol=1e-6)


def test_rows_have_their_own_frames() -> None:
    rope = VideoRope(head_dim=12)
    both = rope([[0, 1], [7, 4000]], 2, 2)
    for index, frames in enumerate(([0, 1], [7, 4000])):
        for whole, alone in zip(both, rope([frames], 2, 2), strict=True):
            assert torch.equal(whole[index : index + 1], alone)


def test_neighbouring_far_frames_differ() -> None:
    """In bfloat16 positions above 256 alias (transformers PR#29285): frame 257 looked like 256."""
    cos, _ = VideoRope(head_dim=128)([[256, 257]], 1, 1)
    assert float((cos[0, 0] - cos[0, 1]).abs().max()) > 0.1


def rotated(states: torch.Tensor, row: list[float]) -> torch.Tensor:
    """Pairs as complex numbers, turned by the angles, in float64."""
    pairs = torch.view_as_complex(states.double().unflatten(-1, (-1, 2)))
    turn = torch.polar(torch.ones(len(row), dtype=torch.float64), torch.tensor(row, dtype=torch.float64))
    return torch.view_as_real(pairs * turn).flatten(-2)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_rotation_of_interleaved_pairs(dtype: torch.dtype, tolerance: float) -> None:
    states = torch.randn(1, 4, 2, 12).to(dtype)
    out = apply_rotary(states, *VideoRope(head_dim=12)([[1024]], 2, 2))
    assert out.dtype == dtype
    for token in range(4):
        expected = rotated(states[0, token], angles(1024, token // 2, token % 2, 12))
        assert_close(out[0, token].double(), expected, rtol=tolerance, atol=tolerance)


def test_scores_depend_on_the_distance_alone() -> None:
    """The same pair of tokens 3 frames apart scores the same at frame 3 and at frame 5003."""
    rope, (query, key) = VideoRope(head_dim=12), torch.randn(2, 1, 1, 1, 12)
    scores = [
        float((apply_rotary(query, *rope([[f + 3]], 1, 1)) * apply_rotary(key, *rope([[f]], 1, 1))).sum())
        for f in (0, 5000)
    ]
    assert scores[0] == pytest.approx(scores[1], abs=1e-5)
