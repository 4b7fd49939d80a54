"""Every Triton kernel once at ragged sizes, for a memory checker; run from the repository's root:

PYTHONPATH=tests PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --error-exitcode 1 python -m gpu.sanitize_triton
"""

import torch
from paged_cases import make_inputs, make_states, with_slots

from diffusers_ardiff.attention.kernels.key_views import attend_keys
from diffusers_ardiff.attention.kernels.paged_attention import attend_pages
from diffusers_ardiff.attention.kernels.rope_write import QKNorm, norm_rope_write, rope_write
from diffusers_ardiff.rope import VideoRope


def attend_ragged(dtype: torch.dtype, head_dim: int, *, contiguous: bool) -> None:
    """Lengths on both sides of a page's end; pools end with the last row's last page."""
    inputs = make_inputs(
        [1, 15, 17, 257, 2049],
        heads=3,
        head_dim=head_dim,
        capacity=2064,
        shuffled=not contiguous,
        dtype=dtype,
        device="cuda",
    )
    query = torch.randn((5, 131, 3, head_dim), device="cuda").to(dtype)
    result = attend_pages(query, inputs, page_size=16, softmax_scale=0.1, contiguous=contiguous, with_lse=True)
    assert result.out.isfinite().all() and result.lse is not None and result.lse.isfinite().all()


def attend_causal(dtype: torch.dtype, head_dim: int) -> None:
    """Views that end where their allocation does; the last tile of queries and of keys is cut."""
    for num_queries, num_keys in ((1, 1), (17, 17), (131, 300)):
        query, keys, values = (
            torch.randn((1, length, 3, head_dim), device="cuda").to(dtype)
            for length in (num_queries, num_keys, num_keys)
        )
        result = attend_keys(query, keys, values, causal=True, softmax_scale=0.1)
        assert result.out.isfinite().all() and result.lse.isfinite().all()


def write_ragged(dtype: torch.dtype, heads: int, head_dim: int) -> None:
    """With and without the norm, extra rows behind the tokens' slots."""
    inputs = with_slots(make_inputs([33, 33], heads=heads, head_dim=head_dim, dtype=dtype, device="cuda"), 6, 1)
    states = make_states(2, 6, heads, head_dim, dtype=dtype, device="cuda")
    rotary = VideoRope(head_dim=head_dim)([[5]], 2, 3, device="cuda")
    weight = torch.ones(heads * head_dim, dtype=dtype, device="cuda")
    rope_write(inputs, *states, rotary)
    norm_rope_write(inputs, *states, rotary, QKNorm(weight, weight, 1e-6))


def main() -> None:
    """Run all of it."""
    for dtype in (torch.bfloat16, torch.float32):
        for head_dim in (12, 48, 128):
            for contiguous in (False, True):
                attend_ragged(dtype, head_dim, contiguous=contiguous)
            if head_dim != 48:
                attend_causal(dtype, head_dim)
            write_ragged(dtype, 3, head_dim)
    torch.cuda.synchronize()
    print("all kernels ran")


if __name__ == "__main__":
    main()
