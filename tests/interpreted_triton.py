"""The Triton kernels on the CPU, by Triton's interpreter. Run by test_triton.py with TRITON_INTERPRET=1."""

from dataclasses import replace

import pytest
import torch
from masked_cases import FRAME, PIECES, actions_of, expected_masked, masked_forward, open_rows, row_of, shifted
from paged_cases import expected_attention, make_inputs, make_states, relative_error, with_slots
from rollouts import random_rows
from torch.testing import assert_close
from triton.runtime import interpreter

from diffusers_ardiff.attention import registry
from diffusers_ardiff.attention.backends import triton_paged
from diffusers_ardiff.attention.kernels import key_views
from diffusers_ardiff.attention.kernels.key_views import attend_keys
from diffusers_ardiff.attention.kernels.paged_attention import attend_pages
from diffusers_ardiff.attention.kernels.rope_write import QKNorm, norm_rope_write, rope_write
from diffusers_ardiff.attention.kernels.tiles import AttentionConfig
from diffusers_ardiff.cache import FLOAT8, KVScales
from diffusers_ardiff.context import PagedLayerInputs
from diffusers_ardiff.rope import VideoRope, apply_rotary

PAGE = 16
LENGTHS = [1, PAGE - 1, PAGE, PAGE + 1, 257]
SMALL = {"block_m": 16, "block_n": 32, "num_warps": 4, "num_stages": 2}


@pytest.fixture(autouse=True)
def scalars_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton 3.6 takes ``int`` of an array of one element, which numpy 2.4 refuses; harmless once that is fixed."""
    original = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)


def check(
    query: torch.Tensor,
    inputs: PagedLayerInputs,
    *,
    page_size: int = PAGE,
    contiguous: bool = False,
    **options: object,
) -> None:
    config = AttentionConfig(**{**SMALL, **options})
    scale = query.shape[-1] ** -0.5
    out, lse = attend_pages(
        query,
        inputs,
        page_size=page_size,
        softmax_scale=scale,
        contiguous=contiguous,
        with_lse=True,
        config=config,
    )
    expected, expected_lse = expected_attention(query, inputs, page_size, scale)
    assert relative_error(out, expected) < 1e-5
    assert_close(lse, expected_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("length", LENGTHS)
def test_lengths(length: int, shuffled: bool, num_splits: int) -> None:
    """Unwritten slots and the table's tail hold NaN (vllm#42494); three splits of one key leave two empty."""
    inputs = make_inputs([length], capacity=288, shuffled=shuffled)
    query = torch.randn(1, 17, 2, 16)
    check(query, inputs, num_splits=num_splits)
    if not shuffled:
        check(query, inputs, contiguous=True, num_splits=num_splits)
        check(query, inputs, contiguous=True, num_splits=num_splits, descriptors=True)


@pytest.mark.parametrize("head_dim", [12, 16, 48, 64, 128])
def test_head_sizes(head_dim: int) -> None:
    inputs = make_inputs([41], head_dim=head_dim, heads=3)
    check(torch.randn(1, 5, 3, head_dim), inputs)


@pytest.mark.parametrize("num_queries", [1, 17, 48])
def test_query_counts(num_queries: int) -> None:
    check(torch.randn(1, num_queries, 2, 16), make_inputs([70]))


@pytest.mark.parametrize("page_size", [16, 48, 64])
def test_page_sizes(page_size: int) -> None:
    check(torch.randn(1, 17, 2, 16), make_inputs([200], page_size=page_size), page_size=page_size)


@pytest.mark.parametrize("num_splits", [1, 2])
@pytest.mark.parametrize("shuffled", [False, True])
def test_rows_of_different_length(shuffled: bool, num_splits: int) -> None:
    inputs = make_inputs([100, 1, 33, 64], shuffled=shuffled)
    check(torch.randn(4, 17, 2, 16), inputs, contiguous=not shuffled, num_splits=num_splits)


def test_zero_query_gives_the_mean_value() -> None:
    """Padding lanes took softmax mass on the non-causal path (flashinfer#3716)."""
    for length in LENGTHS:
        inputs = make_inputs([length], capacity=288, shuffled=False)
        out, _ = attend_pages(
            torch.zeros(1, 3, 2, 16), inputs, page_size=PAGE, softmax_scale=1.0, config=AttentionConfig(**SMALL)
        )
        assert_close(out, inputs.value_pool[:length].mean(0).expand_as(out), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_splits", [1, 2])
def test_row_without_keys(num_splits: int) -> None:
    inputs = make_inputs([20, 20])
    inputs.seq_lens[1] = 0
    config = AttentionConfig(**SMALL, num_splits=num_splits)
    out, lse = attend_pages(
        torch.randn(2, 3, 2, 16), inputs, page_size=PAGE, softmax_scale=1.0, with_lse=True, config=config
    )
    assert not out[1].any() and (lse[1] == float("-inf")).all()
    assert out[0].isfinite().all() and lse[0].isfinite().all()


# -- causal, over a view --------------------------------------------------------------------------------------------


def check_view(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *, causal: bool, **options) -> None:
    """Query i of L sees the first N - L + i + 1 of N keys, or all of them; float64 softmax and log-sum-exp."""
    config = AttentionConfig(**{**SMALL, **options})
    out, lse = attend_keys(query, keys, values, causal=causal, softmax_scale=0.3, config=config)
    num_queries, num_keys = query.shape[1], keys.shape[1]
    scores = torch.einsum("blhd,bnhd->bhln", query.double(), keys.double()) * 0.3
    if causal:
        ends = torch.arange(num_keys - num_queries + 1, num_keys + 1)
        scores = scores.masked_fill(torch.arange(num_keys) >= ends[:, None], float("-inf"))
    expected = torch.einsum("bhln,bnhd->blhd", scores.softmax(-1), values.double())
    assert relative_error(out, expected) < 1e-5
    assert_close(lse.double(), scores.logsumexp(-1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("descriptors", [False, True])
@pytest.mark.parametrize(
    ("num_queries", "num_keys"), [(1, 1), (1, 40), (16, 16), (17, 17), (33, 70), (48, 96), (50, 257), (5, 130)]
)
def test_causal_is_bottom_right(num_queries: int, num_keys: int, num_splits: int, descriptors: bool) -> None:
    """Tiles of 16 queries over tiles of 32 keys; splits that hide all of their keys from some queries of a tile. What
    lies around the keys is NaN."""
    pool = torch.full((2, 3 + num_keys + 40, 2, 16), float("nan"))
    pool[:, 3 : 3 + num_keys] = torch.randn(2, num_keys, 2, 16)
    keys, values = pool[:, None, 3 : 3 + num_keys]
    query = torch.randn(1, num_queries, 2, 16)
    for causal in (True, False):
        check_view(query, keys, values, causal=causal, num_splits=num_splits, descriptors=descriptors)


def test_rows_of_a_view_at_any_stride() -> None:
    """A slice of each row, as a history range is; the rest of the pool is NaN."""
    pool = torch.full((2, 3, 60, 2, 16), float("nan"))
    pool[:, :, 7:48] = torch.randn(2, 3, 41, 2, 16)
    keys, values = pool[:, :, 7:48]
    for causal in (True, False):
        check_view(torch.randn(3, 20, 2, 16), keys, values, causal=causal)


def test_causal_needs_contiguous_rows() -> None:
    with pytest.raises(ValueError, match="contiguous rows only"):
        attend_pages(torch.randn(1, 3, 2, 16), make_inputs([20]), page_size=PAGE, softmax_scale=1.0, causal=True)


@pytest.mark.parametrize("shuffle_seed", [None, 2])
@pytest.mark.parametrize("frames", [1, 5])
def test_masked_op(monkeypatch: pytest.MonkeyPatch, shuffle_seed: int | None, frames: int) -> None:
    """Through the op on CPU tensors, in order and wrapped, beside and without extra rows; the pool is NaN."""
    config = AttentionConfig(**SMALL)
    monkeypatch.setattr(key_views, "choose_config", lambda *args, **kwargs: config)
    backend = replace(triton_paged.BACKEND, device_types=frozenset({"cpu"}), unavailable=None)
    monkeypatch.setattr(registry, "_backends", {**registry._backends, "triton": backend})
    for num_extra in (0, 3):
        branches, (history,) = open_rows(frames=frames, extra=num_extra, shuffle_seed=shuffle_seed)
        spans = shifted(PIECES["mixed"], history.committed_end)
        rows = random_rows(branches, FRAME)
        extra = random_rows(branches, num_extra) if num_extra else None
        out = masked_forward(branches, rows, spans, extra=extra, backend="triton")
        expected = expected_masked(history, row_of(rows), spans, extra=actions_of(extra))
        assert_close(out[0], expected, rtol=1e-5, atol=1e-5)


def test_half_precision() -> None:
    """Float16 alone: the interpreter multiplies bfloat16 matrices as integers."""
    inputs = make_inputs([257], dtype=torch.float16)
    query = torch.randn(1, 17, 2, 16).half()
    out, lse = attend_pages(
        query, inputs, page_size=PAGE, softmax_scale=0.25, with_lse=True, config=AttentionConfig(**SMALL)
    )
    expected, expected_lse = expected_attention(query, inputs, PAGE, 0.25)
    assert out.dtype == torch.float16
    assert relative_error(out, expected) < 2e-2
    assert_close(lse, expected_lse, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("length", LENGTHS)
def test_float8_pool(length: int, shuffled: bool, num_splits: int) -> None:
    """Converted as it is loaded, so exact over the stored values; the rest of the pool is NaN. A contiguous run is asked
    for by descriptors too, which are for tiles that need no conversion: they must be left out."""
    inputs = make_inputs([length], capacity=288, shuffled=shuffled, dtype=torch.float8_e4m3fn)
    query = torch.randn(1, 17, 2, 16)
    check(query, inputs, num_splits=num_splits)
    if not shuffled:
        check(query, inputs, contiguous=True, num_splits=num_splits, descriptors=True)


@pytest.mark.parametrize("causal", [False, True])
def test_float8_view(causal: bool) -> None:
    pool = torch.full((2, 100, 2, 16), float("nan"))
    pool[:, 3:73] = torch.randn(2, 70, 2, 16)
    keys, values = pool.to(torch.float8_e4m3fn)[:, None, 3:73]
    query, wide = torch.randn(1, 33, 2, 16), [part.float() for part in (keys, values)]
    options = {"causal": causal, "softmax_scale": 0.3, "config": AttentionConfig(**SMALL)}
    for part, expected in zip(
        attend_keys(query, keys, values, **options), attend_keys(query, *wide, **options), strict=True
    ):
        assert torch.equal(part, expected)


@pytest.mark.parametrize("shuffle_seed", [None, 2])
def test_float8_masked_op(monkeypatch: pytest.MonkeyPatch, shuffle_seed: int | None) -> None:
    """Through the op on CPU tensors, wrapped, with scales."""
    config, scales = AttentionConfig(**SMALL), KVScales(key=0.25, value=0.5)
    monkeypatch.setattr(key_views, "choose_config", lambda *args, **kwargs: config)
    backend = replace(triton_paged.BACKEND, device_types=frozenset({"cpu"}), unavailable=None)
    monkeypatch.setattr(registry, "_backends", {**registry._backends, "triton": backend})
    branches, _ = open_rows(frames=5, dtype=FLOAT8, scales=scales, shuffle_seed=shuffle_seed)
    rows = random_rows(branches, FRAME)
    spans = shifted(PIECES["mixed"], branches[0].committed_tokens)
    outs = [masked_forward(branches, rows, spans, backend=b, commit=False) for b in ("triton", "reference")]
    assert_close(*outs, rtol=1e-5, atol=1e-5)


def test_wrong_arguments_are_refused() -> None:
    inputs = make_inputs([20])
    query = torch.randn(1, 3, 2, 16)
    with pytest.raises(ValueError, match="one dtype"):
        attend_pages(query.half(), inputs, page_size=PAGE, softmax_scale=1.0)
    with pytest.raises(ValueError, match="one dtype"):
        attend_pages(query.to(FLOAT8), make_inputs([20], dtype=FLOAT8), page_size=PAGE, softmax_scale=1.0)
    with pytest.raises(ValueError, match="must be positive"):
        attend_pages(query, inputs, page_size=PAGE, softmax_scale=0.0)
    with pytest.raises(ValueError, match="2 query rows"):
        attend_pages(query.expand(2, -1, -1, -1), inputs, page_size=PAGE, softmax_scale=1.0)


# -- rotate and write -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head_dim", [12, 64])
@pytest.mark.parametrize("frames", [[[0, 1]], [[0, 1], [7, 4000]]], ids=["shared", "own"])
@pytest.mark.parametrize("num_extra", [0, 2])
def test_rope_write_equals_the_plain_path(head_dim: int, frames: list[list[int]], num_extra: int) -> None:
    """Bit for bit in float32: products are rounded before they are added, as torch does."""
    inputs = with_slots(make_inputs([30, 30], heads=3, head_dim=head_dim), 8, num_extra)
    query, keys, values = make_states(2, 8, 3, head_dim)
    rotary = VideoRope(head_dim=head_dim)(frames, 2, 2)
    pools = [pool.clone() for pool in inputs[:2]]
    slots = inputs.slot_mapping[:, :8]
    pools[0][slots], pools[1][slots] = apply_rotary(keys, *rotary), values
    rotated = rope_write(inputs, query, keys, values, rotary)
    assert torch.equal(rotated, apply_rotary(query, *rotary))
    for actual, expected in zip(inputs[:2], pools, strict=True):
        assert torch.equal(actual.view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize("heads", [2, 3])
def test_norm_rope_write_equals_the_plain_path(heads: int) -> None:
    inputs = with_slots(make_inputs([30, 30], heads=heads, head_dim=12), 8)
    query, keys, values = make_states(2, 8, heads, 12)
    rotary = VideoRope(head_dim=12)([[0, 1], [7, 4000]], 2, 2)
    norms = [torch.nn.RMSNorm(heads * 12, eps=1e-6) for _ in range(2)]
    for norm in norms:
        torch.nn.init.normal_(norm.weight)
    weights = QKNorm(norms[0].weight.detach(), norms[1].weight.detach(), 1e-6)
    rotated = norm_rope_write(inputs, query, keys, values, rotary, weights)
    normed = [norm(states.flatten(2)).view_as(states) for norm, states in zip(norms, (query, keys), strict=True)]
    assert_close(rotated, apply_rotary(normed[0], *rotary), rtol=1e-5, atol=1e-6)
    assert_close(inputs.key_pool[inputs.slot_mapping], apply_rotary(normed[1], *rotary), rtol=1e-5, atol=1e-6)
    assert torch.equal(inputs.value_pool[inputs.slot_mapping], values)


def test_rope_write_to_a_float8_pool() -> None:
    """Scaled and saturated. Values that float8 holds, since the interpreter's cast forgets to carry and makes 384 of NaN."""
    scales = KVScales(key=0.25, value=0.5)
    inputs = with_slots(make_inputs([30, 30], heads=3, head_dim=12, dtype=FLOAT8), 8)
    query, keys, values = (part.to(FLOAT8).float() for part in make_states(2, 8, 3, 12))
    keys[1, 2], values[0, 0], values[0, 1] = -1e6, 1e6, float("inf")
    unturned = torch.ones(1, 8, 1, 12), torch.zeros(1, 8, 1, 12)
    rope_write(inputs, query, keys * scales.key, values * scales.value, unturned, scales)
    for pool, rows in zip(inputs[:2], (keys, values), strict=True):
        assert torch.equal(pool.float()[inputs.slot_mapping], rows.clamp(-448, 448))


def test_negative_slot_is_not_written() -> None:
    """A position past a short table row wrote into the neighbour's page (vllm#53982)."""
    inputs = with_slots(make_inputs([16]), 4)
    inputs.slot_mapping[0, 2] = -1
    before = inputs.key_pool.clone()
    rope_write(inputs, *make_states(1, 4, 2, 16), VideoRope(head_dim=16)([[3]], 2, 2))
    changed = (inputs.key_pool.view(torch.int32) != before.view(torch.int32)).flatten(1).any(1).nonzero().flatten()
    assert changed.tolist() == sorted(inputs.slot_mapping[0, [0, 1, 3]].tolist())


def test_wrong_shapes_are_refused_before_a_write() -> None:
    inputs = with_slots(make_inputs([16]), 4)
    states, rotary = make_states(1, 4, 2, 16), VideoRope(head_dim=16)([[3]], 2, 2)
    with pytest.raises(ValueError, match="need a slot each"):
        rope_write(inputs._replace(slot_mapping=inputs.slot_mapping[:, :3]), *states, rotary)
    with pytest.raises(ValueError, match="cos and sin"):
        rope_write(inputs, *states, VideoRope(head_dim=16)([[3, 4]], 2, 2))
    with pytest.raises(ValueError, match="norm weights"):
        norm_rope_write(inputs, *states, rotary, QKNorm(torch.ones(16), torch.ones(32), 1e-6))
