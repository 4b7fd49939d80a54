"""Causal and full segments against an explicit 2-D mask, in coordinates and in numbers."""

import random

import pytest
import torch
from dense import dense_attention

from diffusers_ardiff.attention.piecewise import (
    QueryRange,
    Segment,
    build_segments,
    dense_mask,
    piecewise_attn,
    sdpa_attn_func,
)

SPAN_CASES = [[], [(0, 10)], [(10, 30), (54, 64)]]


def explicit_mask(spans: list[tuple[int, int]], positions: list[int], num_keys: int) -> torch.Tensor:
    """One rule a cell: a query sees itself, all before it, and the spans it is in."""
    return torch.tensor(
        [
            [key <= query or any(a <= query < b and key < b for a, b in spans) for key in range(num_keys)]
            for query in positions
        ]
    )


def masked_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    spans: list[tuple[int, int]],
    positions: list[int] | None = None,
) -> torch.Tensor:
    """Sample by sample with the explicit mask; the queries are the last rows by default."""
    num_keys = key.shape[1]
    mask = explicit_mask(spans, positions or list(range(num_keys - query.shape[1], num_keys)), num_keys)
    return torch.stack([dense_attention(q, k, v, mask) for q, k, v in zip(query, key, value, strict=True)])


def random_spans(rng: random.Random, length: int) -> list[tuple[int, int]]:
    """Sorted and disjoint; neighbours may touch."""
    edges = sorted(rng.choices(range(length + 1), k=2 * rng.randrange(4)))
    return [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]


def qkv(batch: int, num_queries: int, num_keys: int, heads: int = 2, size: int = 16) -> list[torch.Tensor]:
    return [torch.randn(batch, length, heads, size) for length in (num_queries, num_keys, num_keys)]


def never_called(*args, **kwargs) -> torch.Tensor:
    raise AssertionError("attention ran before the arguments were checked")


# -- segments -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spans", "offset", "length", "expected"),
    [
        ([], 0, 4, [(0, 4, 4, "causal")]),
        ([], 3, 0, []),
        ([(2, 7)], 4, 2, [(4, 6, 7, "full")]),
        ([(2, 7)], 5, 0, []),
        ([(2, 7)], 7, 2, [(7, 9, 9, "causal")]),
        ([(2, 7)], 0, 2, [(0, 2, 2, "causal")]),
        ([(5, 10)], 15, 15, [(15, 30, 30, "causal")]),
        ([(1, 3), (3, 5)], 0, 6, [(0, 1, 1, "causal"), (1, 3, 3, "full"), (3, 5, 5, "full"), (5, 6, 6, "causal")]),
        ([(1, 3), (5, 9)], 2, 5, [(2, 3, 3, "full"), (3, 5, 5, "causal"), (5, 7, 9, "full")]),
    ],
)
def test_segments_of_a_query(spans: list, offset: int, length: int, expected: list) -> None:
    assert build_segments(spans, offset, length) == [Segment(*segment) for segment in expected]


@pytest.mark.parametrize("seed", range(10))
def test_segments_cover_random_queries_once(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(30):
        offset, length = rng.randrange(20), rng.randrange(1, 30)
        segments = build_segments(random_spans(rng, 60), query_offset=offset, query_len=length)
        rows = [row for segment in segments for row in range(segment.q_start, segment.q_end)]
        assert rows == list(range(offset, offset + length))
        assert all(segment.q_start < segment.q_end for segment in segments)


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ([(1, 3), (2, 4)], r"full_attn_spans\[1\].*3 <= start.*got \(2, 4\)"),
        ([(4, 6), (1, 3)], r"full_attn_spans\[1\].*6 <= start.*got \(1, 3\)"),
        ([(3, 3)], r"full_attn_spans\[0\].*got \(3, 3\)"),
        ([(-1, 3)], r"0 <= start.*got \(-1, 3\)"),
        ([(0, 2.5)], r"full_attn_spans\[0\] end must be a whole number.*2\.5"),
        ([(0, 2, 4)], r"full_attn_spans\[0\] must be a pair.*\(0, 2, 4\)"),
        ([0, 2], r"full_attn_spans\[0\] must be a pair.*got 0"),
    ],
)
def test_malformed_spans_are_refused(spans: list, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_segments(spans, 0, 8)


@pytest.mark.parametrize(("offset", "length", "name"), [(-1, 2, "query_offset"), (0, -1, "query_len")])
def test_negative_query_is_refused(offset: int, length: int, name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be.*got -1"):
        build_segments([], offset, length)


# -- the dense mask -----------------------------------------------------------------------------------------------


def test_dense_mask_of_one_span() -> None:
    expected = [[1, 0, 0, 0], [1, 1, 1, 0], [1, 1, 1, 0], [1, 1, 1, 1]]
    mask = dense_mask([(1, 3)], query_offset=0, query_len=4, kv_len=4)
    assert mask.dtype == torch.bool
    assert mask.int().tolist() == expected
    assert dense_mask([(1, 3)], 1, 1, 5, device="cpu").int().tolist() == [[1, 1, 1, 0, 0]]


@pytest.mark.parametrize("seed", range(10))
def test_dense_mask_of_random_spans(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(10):
        spans = random_spans(rng, 24)
        offset = rng.randrange(24)
        length = rng.randrange(1, 25 - offset)
        expected = explicit_mask(spans, list(range(offset, offset + length)), 24)
        assert torch.equal(dense_mask(spans, offset, length, 24), expected)


@pytest.mark.parametrize(("spans", "length"), [([], 5), ([(2, 5)], 3)])
def test_dense_mask_needs_every_visible_key(spans: list, length: int) -> None:
    with pytest.raises(ValueError, match=r"keys \[0, 5\), got 4 keys"):
        dense_mask(spans, 0, length, 4)


# -- the dense form -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spans", SPAN_CASES)
@pytest.mark.parametrize("first_query", [0, 53])
@pytest.mark.parametrize("batch", [1, 2])
def test_equals_the_explicit_mask(spans: list, first_query: int, batch: int) -> None:
    query, key, value = qkv(batch, 64 - first_query, 64)
    out = piecewise_attn(query, key, value, [spans] * batch, 16**-0.5, sdpa_attn_func)
    assert torch.allclose(out, masked_attention(query, key, value, spans), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("seed", range(20))
def test_random_spans_equal_the_explicit_mask(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(10):
        num_keys = rng.randrange(1, 40)
        spans = random_spans(rng, num_keys)
        query, key, value = qkv(2, rng.randrange(1, num_keys + 1), num_keys, size=8)
        out = piecewise_attn(query, key, value, [spans, spans], 8**-0.5, sdpa_attn_func)
        assert torch.allclose(out, masked_attention(query, key, value, spans), rtol=1e-5, atol=1e-5)


def test_spans_before_the_query_do_nothing() -> None:
    query, key, value = qkv(1, 15, 30)
    out = piecewise_attn(query, key, value, [[(5, 10)]], 16**-0.5, sdpa_attn_func)
    assert torch.equal(out, piecewise_attn(query, key, value, [[]], 16**-0.5, sdpa_attn_func))
    assert torch.allclose(out, masked_attention(query, key, value, [(5, 10)]), rtol=1e-5, atol=1e-5)


def test_calls_are_what_each_segment_says() -> None:
    """By keyword, queries and keys cut to the segment; the scale is handed on untouched."""
    calls = []

    def record(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **kwargs: object) -> torch.Tensor:
        calls.append((query.shape[1], key.shape[1], value.shape[1], kwargs))
        return query

    query, key, value = qkv(1, 8, 10)
    assert torch.equal(piecewise_attn(query, key, value, [[(4, 7)]], 0.5, record), query)
    assert calls == [
        (2, 4, 4, {"causal": True, "softmax_scale": 0.5}),
        (3, 7, 7, {"causal": False, "softmax_scale": 0.5}),
        (3, 10, 10, {"causal": True, "softmax_scale": 0.5}),
    ]


def test_no_queries_no_calls() -> None:
    query, key, value = qkv(1, 0, 4)
    assert piecewise_attn(query, key, value, [[]], 1.0, never_called).shape == query.shape


def test_one_list_of_spans_serves_all_samples() -> None:
    query, key, value = qkv(3, 8, 8)
    one = piecewise_attn(query, key, value, [[(2, 5)]], 0.25, sdpa_attn_func)
    assert torch.equal(one, piecewise_attn(query, key, value, [[(2, 5)]] * 3, 0.25, sdpa_attn_func))


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ([[(0, 2)], [(0, 3)]], r"\(0, 2\).*sample 0.*\(0, 3\).*sample 1"),
        ([[(0, 2)], []], "sample 1"),
        ([], "2 samples.*got 0 lists"),
        ([[], [], []], "2 samples.*got 3 lists"),
        ([[], [(2, 1)]], r"full_attn_spans\[1\]\[0\]"),
        ([[(2, 9)]] * 2, r"keys \[0, 9\), got 8 keys"),
    ],
)
def test_spans_of_a_batch_are_checked(spans: list, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        piecewise_attn(*qkv(2, 8, 8), spans, 1.0, never_called)


def test_lengths_are_checked() -> None:
    query, key, value = qkv(1, 5, 4)
    with pytest.raises(ValueError, match="5 queries and only 4 keys"):
        piecewise_attn(query, key, value, [[]], 1.0, never_called)
    with pytest.raises(ValueError, match="equal lengths, got 4 and 3"):
        piecewise_attn(query[:, :2], key, value[:, :3], [[]], 1.0, never_called)


# -- query ranges -------------------------------------------------------------------------------------------------


def test_query_ranges_place_the_rows() -> None:
    query, key, value = qkv(1, 4, 8)
    ranges = (QueryRange(0, 1, 0), QueryRange(1, 4, 4))
    out = piecewise_attn(query, key, value, [[(2, 7)]], 16**-0.5, sdpa_attn_func, ranges)
    assert torch.allclose(out, masked_attention(query, key, value, [(2, 7)], [0, 4, 5, 6]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("seed", range(10))
def test_random_query_ranges_equal_the_explicit_mask(seed: int) -> None:
    """Ranges in any global order, as context parallel shards have them."""
    rng = random.Random(seed)
    for _ in range(10):
        spans = random_spans(rng, 32)
        ranges, positions = [], []
        for _ in range(rng.randrange(1, 4)):
            start = rng.randrange(32)
            length = rng.randrange(1, 33 - start)
            ranges.append(QueryRange(len(positions), len(positions) + length, start))
            positions += range(start, start + length)
        query, key, value = qkv(1, len(positions), 32, size=8)
        out = piecewise_attn(query, key, value, [spans], 8**-0.5, sdpa_attn_func, ranges)
        expected = masked_attention(query, key, value, spans, positions)
        assert torch.allclose(out, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("ranges", "message"),
    [
        ([QueryRange(1, 4, 1)], r"range 0 must begin at row 0.*\[1, 4\)"),
        ([QueryRange(0, 1, 0), QueryRange(2, 4, 4)], r"range 1 must begin at row 1.*\[2, 4\)"),
        ([QueryRange(0, 3, 0), QueryRange(2, 4, 4)], r"range 1 must begin at row 3.*\[2, 4\)"),
        ([QueryRange(0, 4, 0), QueryRange(4, 3, 0)], r"range 1.*\[4, 3\)"),
        ([QueryRange(0, 3, 0)], "4 rows, got ranges for 3"),
        ([QueryRange(0, 5, 0)], "4 rows, got ranges for 5"),
        ([], "4 rows, got ranges for 0"),
        ([QueryRange(0, 4, 5)], r"keys \[0, 9\), got 8 keys"),
        ([QueryRange(0, 2, 0), QueryRange(2, 4, -1)], "query_offset.*-1"),
    ],
)
def test_query_ranges_must_cover_the_query(ranges: list, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        piecewise_attn(*qkv(1, 4, 8), [[]], 1.0, never_called, ranges)


# -- torch's attention as attn_func -------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("num_queries", "num_keys"), [(5, 5), (3, 7), (1, 4)])
def test_sdpa_is_bottom_right_aligned(causal: bool, num_queries: int, num_keys: int) -> None:
    query, key, value = qkv(2, num_queries, num_keys)
    spans = [] if causal else [(0, num_keys)]
    out = sdpa_attn_func(query, key, value, causal=causal, softmax_scale=16**-0.5)
    assert torch.allclose(out, masked_attention(query, key, value, spans), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_sdpa_takes_its_scale_and_fewer_key_heads(causal: bool) -> None:
    query, key, value = torch.randn(1, 3, 4, 8), torch.randn(1, 5, 2, 8), torch.randn(1, 5, 2, 8)
    spans = [] if causal else [(0, 5)]
    expected = masked_attention(2 * query, key.repeat_interleave(2, 2), value.repeat_interleave(2, 2), spans)
    out = sdpa_attn_func(query, key, value, causal=causal, softmax_scale=2 * 8**-0.5)
    assert torch.allclose(out, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("key_heads", [1, 2])
@pytest.mark.parametrize(("num_queries", "num_keys"), [(64, 64), (33, 257)])
def test_sdpa_on_a_gpu(causal: bool, key_heads: int, num_queries: int, num_keys: int) -> None:
    query, key, value = (tensor.bfloat16() for tensor in qkv(2, num_queries, num_keys, size=64))
    key, value = key[:, :, :key_heads], value[:, :, :key_heads]
    out = sdpa_attn_func(query.cuda(), key.cuda(), value.cuda(), causal=causal, softmax_scale=64**-0.5)
    spans = [] if causal else [(0, num_keys)]
    expected = masked_attention(query, key.expand(2, -1, 2, -1), value.expand(2, -1, 2, -1), spans)
    assert torch.allclose(out.float().cpu(), expected, rtol=2e-2, atol=2e-2)


def test_sdpa_refuses_queries_that_see_nothing() -> None:
    with pytest.raises(ValueError, match="4 keys and 5 queries"):
        sdpa_attn_func(*qkv(1, 5, 4), causal=True, softmax_scale=1.0)
