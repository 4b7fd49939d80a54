"""The Triton kernels on a GPU: every length, dtype and layout against float64, huge pools, graphs, fused writes."""

import pytest
import torch
from paged_cases import (
    expected_attention,
    make_inputs,
    make_states,
    relative_error,
    row_slots,
    with_slots,
)
from torch.testing import assert_close

from diffusers_ardiff.context import PagedLayerInputs
from diffusers_ardiff.rope import VideoRope, apply_rotary

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device"),
]
PAGE = 16
LENGTHS = [1, PAGE - 1, PAGE, PAGE + 1, 257]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-2}
DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)


def attend(query: torch.Tensor, inputs: PagedLayerInputs, *, page_size: int = PAGE, scale: float = 0.125, **kwargs):
    from diffusers_ardiff.attention.kernels.paged_attention import attend_pages

    return attend_pages(query, inputs, page_size=page_size, softmax_scale=scale, **kwargs)


def randn(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(size, device="cuda").to(dtype)


def check(query: torch.Tensor, inputs: PagedLayerInputs, *, page_size: int = PAGE, contiguous: bool = False) -> None:
    out, lse = attend(query, inputs, page_size=page_size, contiguous=contiguous, with_lse=True)
    expected, expected_lse = expected_attention(query, inputs, page_size, 0.125)
    assert relative_error(out, expected) < TOLERANCE[query.dtype]
    assert_close(lse, expected_lse, rtol=1e-4, atol=1e-4)


@DTYPES
@pytest.mark.parametrize("layout", ["fragmented", "contiguous by table", "contiguous"])
def test_lengths(dtype: torch.dtype, layout: str) -> None:
    """Table tails and unwritten slots hold NaN (vllm#42494); room for 8192 tokens makes the launch split its keys."""
    for length in [*LENGTHS, 4097]:
        inputs = make_inputs(
            [length], head_dim=128, capacity=8192, shuffled=layout == "fragmented", dtype=dtype, device="cuda"
        )
        check(randn(1, 300, 2, 128, dtype=dtype), inputs, contiguous=layout == "contiguous")


@pytest.mark.parametrize(
    ("dtype", "head_dim"),
    [(torch.bfloat16, d) for d in (12, 16, 48, 64, 80, 128, 192, 256)]
    + [(torch.float16, 64), (torch.float32, 12), (torch.float32, 48), (torch.float32, 256)],
    ids=str,
)
def test_head_sizes(dtype: torch.dtype, head_dim: int) -> None:
    for shuffled in (True, False):
        inputs = make_inputs([257], heads=3, head_dim=head_dim, shuffled=shuffled, dtype=dtype, device="cuda")
        check(randn(1, 130, 3, head_dim, dtype=dtype), inputs, contiguous=not shuffled)


@pytest.mark.parametrize("page_size", [16, 48, 64, 128, 256])
@pytest.mark.parametrize("num_queries", [1, 17, 129])
def test_page_sizes_and_query_counts(page_size: int, num_queries: int) -> None:
    inputs = make_inputs([700], head_dim=128, page_size=page_size, dtype=torch.bfloat16, device="cuda")
    check(randn(1, num_queries, 2, 128), inputs, page_size=page_size)


@DTYPES
def test_full_window(dtype: torch.dtype) -> None:
    """21 frames of 832x480, a chunk of three; fewer heads in float32, whose exact products are slow."""
    heads = 2 if dtype == torch.float32 else 12
    for shuffled in (True, False):
        inputs = make_inputs([32760], heads=heads, head_dim=128, shuffled=shuffled, dtype=dtype, device="cuda")
        query = randn(1, 4680, heads, 128, dtype=dtype)
        out = attend(query, inputs, contiguous=not shuffled).out
        part = torch.cat([torch.arange(200), torch.arange(4480, 4680)]).cuda()
        expected, _ = expected_attention(query[:, part], inputs, PAGE, 0.125)
        assert relative_error(out[:, part], expected) < TOLERANCE[dtype]
        assert out.isfinite().all()


def test_batch_of_two_with_large_pages() -> None:
    """The second sequence came out as NaN or unwritten (pytorch#194167): two rows, four pages of 256."""
    inputs = make_inputs([1024, 1000], heads=4, head_dim=64, page_size=256, dtype=torch.bfloat16, device="cuda")
    check(randn(2, 256, 4, 64), inputs, page_size=256)


@pytest.mark.parametrize("contiguous", [False, True])
def test_rows_of_random_length(contiguous: bool) -> None:
    """One launch; each row also equals the same row alone."""
    lengths = [*torch.randint(1, 3000, (6,)).tolist(), 1, 1, 128]
    inputs = make_inputs(lengths, head_dim=128, shuffled=not contiguous, dtype=torch.bfloat16, device="cuda")
    query = randn(len(lengths), 150, 2, 128)
    check(query, inputs, contiguous=contiguous)
    together = attend(query, inputs, contiguous=contiguous).out
    for row in range(len(lengths)):
        alone = inputs._replace(block_table=inputs.block_table[row : row + 1], seq_lens=inputs.seq_lens[row : row + 1])
        out = attend(query[row : row + 1], alone, contiguous=contiguous).out
        assert relative_error(together[row : row + 1], out) < 1e-2


@DTYPES
def test_zero_query_gives_the_mean_value(dtype: torch.dtype) -> None:
    """Padding lanes took softmax mass on the non-causal path (flashinfer#3716)."""
    for length in LENGTHS:
        inputs = make_inputs([length], head_dim=64, capacity=320, shuffled=False, dtype=dtype, device="cuda")
        out = attend(torch.zeros(1, 9, 2, 64, dtype=dtype, device="cuda"), inputs).out
        expected = inputs.value_pool[:length].float().mean(0).expand(1, 9, 2, 64)
        assert relative_error(out, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("frames", [1, 2, 3, 4])
def test_exact_number_of_keys_has_weight(frames: int) -> None:
    """One key too many, or twice the window (transformers#39408): each of N one-hot values weighs 1/N, no other."""
    length = frames * 24
    inputs = make_inputs([length], heads=1, head_dim=128, capacity=128, dtype=torch.float32, device="cuda")
    slots = row_slots(inputs.block_table[0], PAGE, length)
    inputs.value_pool[slots, 0] = torch.eye(128, device="cuda")[:length]
    out = attend(torch.zeros(1, 1, 1, 128, device="cuda"), inputs).out.flatten()
    assert_close(out[:length], torch.full_like(out[:length], 1 / length))
    assert not out[length:].any()


def test_many_queries_over_a_long_window() -> None:
    """The first 128 of 300 query rows once came out wrong over 4096 keys (flashinfer#4972)."""
    inputs = make_inputs([4096], head_dim=128, dtype=torch.bfloat16, device="cuda")
    query = randn(1, 300, 2, 128)
    expected, _ = expected_attention(query, inputs, PAGE, 0.125)
    out = attend(query, inputs).out
    for part in (slice(0, 128), slice(128, 300)):
        assert relative_error(out[:, part], expected[:, part]) < 2e-2


@pytest.mark.parametrize("contiguous", [False, True])
def test_pool_of_more_than_2_31_elements(contiguous: bool) -> None:
    """The last pages give the same bits as page 1: addresses are 64-bit."""
    heads, head_dim, length = 12, 128, 1000
    num_pages = 2**31 // (heads * head_dim * PAGE) + 100
    pools = [torch.empty((num_pages * PAGE, heads, head_dim), dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    assert pools[0].numel() > 2**31
    width = -(-length // PAGE)
    first = torch.arange(1, 1 + width)
    last = torch.arange(num_pages - width, num_pages)
    new = [randn(length, heads, head_dim) for _ in pools]
    outs, query = [], randn(1, 200, heads, head_dim)
    for pages in (first, last):
        for pool, rows in zip(pools, new, strict=True):
            pool[row_slots(pages, PAGE, length).cuda()] = rows
        inputs = make_inputs([1], device="cuda")._replace(
            key_pool=pools[0],
            value_pool=pools[1],
            block_table=pages[None].int().cuda(),
            seq_lens=torch.tensor([length], dtype=torch.int32, device="cuda"),
        )
        outs.append(attend(query, inputs, contiguous=contiguous).out)
    assert torch.equal(*outs)
    assert outs[0].isfinite().all() and outs[0].any()


@pytest.mark.parametrize("contiguous", [False, True])
def test_graph_replay_with_other_lengths_and_pages(contiguous: bool) -> None:
    """Captured at 40 keys in one place, replayed at 5000 in another; equal to eager bit for bit."""
    small, large = (
        make_inputs(lengths, head_dim=128, capacity=5008, shuffled=not contiguous, dtype=torch.bfloat16, device="cuda")
        for lengths in ([40, 3], [5000, 1777])
    )
    inputs = large._replace(block_table=large.block_table.clone(), seq_lens=small.seq_lens.clone())
    query = randn(2, 300, 2, 128)
    attend(query, inputs, contiguous=contiguous)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attend(query, inputs, contiguous=contiguous).out
    for order, lengths in (([0, 1], [40, 3]), ([0, 1], [5000, 1777]), ([1, 0], [1777, 4000])):
        inputs.block_table.copy_(large.block_table[order])
        inputs.seq_lens.copy_(torch.tensor(lengths))
        graph.replay()
        assert torch.equal(captured, attend(query, inputs, contiguous=contiguous).out)
        assert captured.isfinite().all()


# -- rotate and write -----------------------------------------------------------------------------------------------


@DTYPES
@pytest.mark.parametrize(("heads", "head_dim"), [(12, 128), (3, 12), (40, 128)])
def test_rope_write_equals_the_plain_path(dtype: torch.dtype, heads: int, head_dim: int) -> None:
    from diffusers_ardiff.attention.kernels.rope_write import rope_write

    inputs = with_slots(make_inputs([200, 200], heads=heads, head_dim=head_dim, dtype=dtype, device="cuda"), 12, 2)
    query, keys, values = make_states(2, 12, heads, head_dim, dtype=dtype, device="cuda")
    rotary = VideoRope(head_dim=head_dim)([[0, 1], [7, 4000]], 2, 3, device="cuda")
    pools = [pool.clone() for pool in inputs[:2]]
    slots = inputs.slot_mapping[:, :12]
    pools[0][slots], pools[1][slots] = apply_rotary(keys, *rotary), values
    rotated = rope_write(inputs, query, keys, values, rotary)
    assert torch.equal(rotated, apply_rotary(query, *rotary))
    for actual, expected in zip(inputs[:2], pools, strict=True):
        assert torch.equal(actual.view(torch.uint8), expected.view(torch.uint8))


@DTYPES
@pytest.mark.parametrize("heads", [12, 40])
def test_norm_rope_write_equals_the_plain_path(dtype: torch.dtype, heads: int) -> None:
    from diffusers_ardiff.attention.kernels.rope_write import QKNorm, norm_rope_write

    inputs = with_slots(make_inputs([200], heads=heads, head_dim=128, dtype=dtype, device="cuda"), 12)
    query, keys, values = make_states(1, 12, heads, 128, dtype=dtype, device="cuda")
    rotary = VideoRope(head_dim=128)([[3, 4]], 2, 3, device="cuda")
    weights = [randn(heads * 128, dtype=dtype) for _ in range(2)]
    rotated = norm_rope_write(inputs, query, keys, values, rotary, QKNorm(*weights, 1e-6))
    expected = [
        apply_rotary(
            torch.nn.functional.rms_norm(states.flatten(2), (heads * 128,), weight, 1e-6).view_as(states), *rotary
        )
        for states, weight in zip((query, keys), weights, strict=True)
    ]
    # The sums of squares are taken in another order, so a rounding may fall the other way.
    assert relative_error(rotated, expected[0]) < TOLERANCE[dtype]
    assert relative_error(inputs.key_pool[inputs.slot_mapping], expected[1]) < TOLERANCE[dtype]
    assert torch.equal(inputs.value_pool[inputs.slot_mapping], values)
