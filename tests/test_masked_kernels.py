"""Kernels that reach a piecewise mask by log-sum-exp: which calls they get, what they return, how parts are merged.

C 24 tokens a frame, pages of 16, sink 1 frame, window 3 frames.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch
from dense import TokenHistory, dense_attention, relative_error
from masked_cases import (
    FRAME,
    PIECES,
    advance,
    expected_masked,
    lse_backend,
    masked_forward,
    open_rows,
    row_of,
    shifted,
    torch_partial,
)
from rollouts import make_manager, random_rows
from torch.testing import assert_close

from diffusers_ardiff.attention import (
    registry,
)
from diffusers_ardiff.attention.backends import flash2, flash3
from diffusers_ardiff.attention.backends.libraries import Flash2Library, Flash3Library
from diffusers_ardiff.attention.merge import merge_partial_attention
from diffusers_ardiff.masks import paged

Call = tuple[int, int, int, bool]


@pytest.fixture(autouse=True)
def kernel_calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Call]]:
    """(rows, queries, keys, causal) of each call of the kernel behind the backend ``lse``."""
    calls: list[Call] = []

    def counted(query, keys, values, *, causal, softmax_scale):
        calls.append((*query.shape[:2], keys.shape[1], causal))
        return torch_partial(query, keys, values, causal=causal, softmax_scale=softmax_scale)

    monkeypatch.setattr(registry, "_backends", {**registry._backends, "lse": lse_backend(counted)})
    yield calls


# -- how many calls -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffle_seed", [None, 2])
@pytest.mark.parametrize(
    ("frames", "expected"),
    [
        (0, [(1, 5, 5, True), (1, 19, 24, False)]),
        (2, [(1, 5, 53, True), (1, 19, 72, False)]),
        (4, [(1, 24, 24, False), (1, 24, 48, False), (1, 5, 5, True), (1, 19, 24, False)]),
        (5, [(1, 24, 48, False), (1, 24, 24, False), (1, 5, 5, True), (1, 19, 24, False)]),
        (6, [(1, 5, 77, True), (1, 19, 96, False)]),
    ],
)
def test_calls_of_a_kernel(kernel_calls: list[Call], frames: int, expected: list, shuffle_seed: int | None) -> None:
    """In order: one call a segment over all keys up to its end. Else the history once for all queries, a call a range,
    then the new rows a segment at a time. Frames 4 and 5 lie before older ones in the ring, frame 6 lies last."""
    branches, (history,) = open_rows(frames=frames, shuffle_seed=shuffle_seed)
    begin = history.committed_end
    masked_forward(branches, random_rows(branches, FRAME), [(begin + 5, begin + FRAME)], backend="lse")
    assert kernel_calls == expected


@pytest.mark.parametrize("shuffle_seed", [None, 2])
@pytest.mark.parametrize(("frames", "num_calls"), [(0, 2), (5, 4), (6, 2)])
def test_guidance_rows_are_one_call(
    kernel_calls: list[Call], frames: int, num_calls: int, shuffle_seed: int | None
) -> None:
    manager = make_manager(FRAME, 3 * FRAME, branches_per_session=2, shuffle_seed=shuffle_seed)
    branches = manager.open_session(["positive", "negative"]).branches
    histories = [TokenHistory(FRAME, 3 * FRAME) for _ in branches]
    advance(branches, histories, frames)
    spans = [(FRAME * frames + 5, FRAME * (frames + 1))]
    rows = random_rows(branches, FRAME)
    out = masked_forward(branches, rows, spans, backend="lse")
    assert [call[0] for call in kernel_calls] == [2] * num_calls
    for row, history in enumerate(histories):
        assert_close(out[row], expected_masked(history, row_of(rows, row), spans), rtol=1e-5, atol=1e-5)


def test_dense_mask_is_made_once_a_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    original = paged.dense_mask
    monkeypatch.setattr(paged, "dense_mask", lambda *args: made.append(1) or original(*args))
    branches, _ = open_rows(frames=6, layers=4)
    masked_forward(branches, random_rows(branches, FRAME), [(150, 160)], backend="sdpa")
    assert made == [1]


# -- kernels of other libraries -------------------------------------------------------------------------------------


def flash_function(calls: list[str], *, asks: bool) -> Callable:
    """A ``flash_attn_func``: FlashAttention 3 of today returns the log-sum-exp when asked, older ones always; 2 a third
    tensor with it."""

    def newer(q, k, v, softmax_scale=None, causal=False, num_splits=1, return_attn_probs=False):
        assert num_splits == 1
        calls.append("newer")
        out, lse = torch_partial(q, k, v, causal=causal, softmax_scale=softmax_scale)
        return (out, lse) if return_attn_probs else out

    def older(q, k, v, softmax_scale=None, causal=False, num_splits=1):
        assert num_splits == 1
        calls.append("older")
        return tuple(torch_partial(q, k, v, causal=causal, softmax_scale=softmax_scale))

    return newer if asks else older


def flash2_function(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, return_attn_probs=False):
    out, lse = torch_partial(q, k, v, causal=causal, softmax_scale=softmax_scale)
    return (out, lse, None) if return_attn_probs else out


@pytest.mark.parametrize("library", ["flash3 newer", "flash3 older", "flash2"])
@pytest.mark.parametrize("frames", [2, 5])
@pytest.mark.parametrize("shuffle_seed", [None, 2])
def test_flash_libraries(monkeypatch: pytest.MonkeyPatch, library: str, frames: int, shuffle_seed: int | None) -> None:
    """Stub libraries of the published signatures, on CPU tensors."""
    calls: list[str] = []
    name, _, version = library.partition(" ")
    if name == "flash3":
        found = Flash3Library("stub", flash_function(calls, asks=version == "newer"), None, None)
        monkeypatch.setattr(flash3, "find_flash3", lambda: found)
    else:
        monkeypatch.setattr(flash2, "find_flash2", lambda: Flash2Library(flash2_function, None, None))
    module = flash3 if name == "flash3" else flash2
    backend = replace(module.BACKEND, device_types=frozenset({"cpu"}), unavailable=None)
    monkeypatch.setattr(registry, "_backends", {**registry._backends, name: backend})
    branches, (history,) = open_rows(frames=frames, dtype=torch.bfloat16, shuffle_seed=shuffle_seed)
    spans = shifted(PIECES["mixed"], history.committed_end)
    rows = random_rows(branches, FRAME)
    out = masked_forward(branches, rows, spans, backend=name)
    assert relative_error(out[0], expected_masked(history, row_of(rows), spans)) < 2e-2
    assert set(calls) == ({version} if version else set())


# -- merging --------------------------------------------------------------------------------------------------------


def parts_of(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, cuts: list[int]) -> tuple[list, list]:
    attend = partial(torch_partial, query, causal=False, softmax_scale=0.5)
    results = [attend(k, v) for k, v in zip(keys.split(cuts, 1), values.split(cuts, 1), strict=True)]
    return [result.out for result in results], [result.lse for result in results]


@pytest.mark.parametrize("cuts", [[9], [4, 5], [1, 1, 7], [1] * 9], ids=str)
def test_merging_parts_equals_the_whole(cuts: list[int]) -> None:
    query, keys, values = (torch.randn(2, length, 3, 4) for length in (5, 9, 9))
    merged = merge_partial_attention(*parts_of(query, keys, values, cuts))
    for row in range(2):
        assert_close(merged[row], dense_attention(query[row], keys[row], values[row]), rtol=1e-5, atol=1e-5)


def test_parts_without_keys_have_no_weight() -> None:
    """A kernel may leave NaN where a query saw nothing; scores of 1e4 would overflow an exponential."""
    query, keys, values = (torch.randn(1, length, 2, 4) for length in (5, 6, 6))
    outs, lses = parts_of(query * 1e4, keys, values, [3, 3])
    expected = merge_partial_attention(outs, lses)
    assert expected.isfinite().all()
    nothing = torch.full_like(outs[0], float("nan")), torch.full_like(lses[0], float("-inf"))
    for place in range(3):
        merged = merge_partial_attention(
            [*outs[:place], nothing[0], *outs[place:]], [*lses[:place], nothing[1], *lses[place:]]
        )
        assert torch.equal(merged, expected)
    assert not merge_partial_attention([nothing[0]] * 2, [nothing[1]] * 2).any()


def test_merging_half_precision_is_done_in_float32() -> None:
    """Only the result is rounded: within half a step of the float64 sum, and 63 equal parts of a value give that value."""
    outs = [torch.randn(2, 50, 3, 8).bfloat16() for _ in range(5)]
    lses = [torch.randn(2, 3, 50) for _ in outs]
    weights = torch.stack(lses).double().exp()
    shares = (weights / weights.sum(0)).transpose(-1, -2)[..., None]
    expected = sum(out.double() * share for out, share in zip(outs, shares, strict=True))
    assert_close(merge_partial_attention(outs, lses).double(), expected, rtol=1.01 * 2**-8, atol=1e-6)
    equal = [torch.full((1, 1, 1, 4), 1.0078125, dtype=torch.bfloat16)] * 63
    assert torch.equal(merge_partial_attention(equal, [torch.zeros(1, 1, 1)] * 63), equal[0])


def test_merging_needs_a_sum_for_each_part() -> None:
    for outs, lses in (([], []), ([torch.ones(1, 1, 1, 1)], [])):
        with pytest.raises(ValueError, match="one or more outputs"):
            merge_partial_attention(outs, lses)
