"""Piecewise masks on a CUDA device: every backend that honours them, through the op, in pools of NaN.

C 24 tokens a frame, pages of 16, sink 1 frame, window 3 frames unless a test says otherwise.
"""

import random
from collections.abc import Iterator

import pytest
import torch
from dense import TokenHistory, relative_error
from masked_cases import (
    FRAME,
    PIECES,
    Spans,
    actions_of,
    advance,
    expected_masked,
    masked_forward,
    open_rows,
    random_spans,
    row_of,
    rows_on_device,
    shifted,
)
from rollouts import Rows, make_manager
from torch.testing import assert_close

from diffusers_ardiff.attention import AttentionRequest, list_backends
from diffusers_ardiff.attention.piecewise import dense_mask

pytestmark = pytest.mark.gpu

TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 1e-5}
HEADS, HEAD_DIM = 2, 128


def usable_backends(dtype: torch.dtype) -> list[str]:
    """Backends that serve masked calls of this dtype at head size 128 and pages of 16 here."""
    if not torch.cuda.is_available():
        return []
    request = AttentionRequest(
        device_type="cuda",
        dtype=dtype,
        head_dim=HEAD_DIM,
        page_size=16,
        is_hip=torch.version.hip is not None,
        needs_mask=True,
    )
    return [backend.name for backend in list_backends() if not backend.refusals(request)]


CASES = [(name, dtype) for dtype in TOLERANCE for name in usable_backends(dtype)]
KERNELS = [case for case in CASES if case[0] != "reference"]
MERGING = [name for name in usable_backends(torch.bfloat16) if name not in ("sdpa", "reference")]


@pytest.fixture(autouse=True)
def cuda_device() -> Iterator[None]:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    torch.cuda.manual_seed(0)
    yield
    torch.cuda.set_sync_debug_mode("default")


def on_gpu(dtype: torch.dtype = torch.bfloat16, **kwargs: object) -> dict[str, object]:
    return {"heads": HEADS, "head_dim": HEAD_DIM, "dtype": dtype, "device": "cuda", **kwargs}


@pytest.mark.parametrize(("backend", "dtype"), CASES, ids=str)
@pytest.mark.parametrize("shuffle_seed", [None, 2])
@pytest.mark.parametrize("num_extra", [0, 3])
@pytest.mark.parametrize("pieces", PIECES)
def test_from_empty_to_wrapped(
    backend: str, dtype: torch.dtype, shuffle_seed: int | None, num_extra: int, pieces: str
) -> None:
    """Nine frames: the window fills, then each place in the ring is overwritten."""
    branches, (history,) = open_rows(**on_gpu(dtype, extra=num_extra, shuffle_seed=shuffle_seed))
    for _ in range(9):
        spans = shifted(PIECES[pieces], history.committed_end)
        rows = rows_on_device(branches, FRAME)
        extra = rows_on_device(branches, num_extra) if num_extra else None
        out = masked_forward(branches, rows, spans, extra=extra, backend=backend)
        expected = expected_masked(history, row_of(rows), spans, extra=actions_of(extra))
        history.commit(rows.keys[0], rows.values[0])
        assert relative_error(out[0], expected) < TOLERANCE[dtype]


@pytest.mark.parametrize(("backend", "dtype"), CASES, ids=str)
@pytest.mark.parametrize("shuffle_seed", [None, 2])
@pytest.mark.parametrize("length", [30, 50])
def test_new_rows_that_wrap(backend: str, dtype: torch.dtype, shuffle_seed: int | None, length: int) -> None:
    branches, (history,) = open_rows(**on_gpu(dtype, shuffle_seed=shuffle_seed))
    rng = random.Random(length)
    for _ in range(240 // length):
        spans = random_spans(rng, history.committed_end, history.committed_end + length)
        rows = rows_on_device(branches, length)
        out = masked_forward(branches, rows, spans, backend=backend)
        expected = expected_masked(history, row_of(rows), spans)
        history.commit(rows.keys[0], rows.values[0])
        assert relative_error(out[0], expected) < TOLERANCE[dtype]


@pytest.mark.parametrize(("backend", "dtype"), CASES, ids=str)
@pytest.mark.parametrize("shuffle_seed", [None, 2])
def test_rows_with_their_own_spans_and_fill(backend: str, dtype: torch.dtype, shuffle_seed: int | None) -> None:
    branches, histories = open_rows(3, **on_gpu(dtype, shuffle_seed=shuffle_seed))
    for branch, history, frames in zip(branches, histories, (0, 2, 7), strict=True):
        advance([branch], [history], frames)
    pieces = [[(3, 9)], [(8, 20)], [(1, 23)]]
    for _ in range(3):
        spans = [shifted(p, history.committed_end) for p, history in zip(pieces, histories, strict=True)]
        rows = rows_on_device(branches, FRAME)
        out = masked_forward(branches, rows, spans, backend=backend)
        for row, history in enumerate(histories):
            expected = expected_masked(history, row_of(rows, row), spans[row])
            assert relative_error(out[row], expected) < TOLERANCE[dtype]
            history.commit(rows.keys[row], rows.values[row])


@pytest.mark.parametrize(("backend", "dtype"), CASES, ids=str)
@pytest.mark.parametrize("frames", [2, 5])
def test_guidance_rows(backend: str, dtype: torch.dtype, frames: int) -> None:
    """Two branches of a session, one call for both: rows of a view at equal stride."""
    manager = make_manager(FRAME, 3 * FRAME, branches_per_session=2, **on_gpu(dtype))
    branches = manager.open_session(["positive", "negative"]).branches
    histories = [TokenHistory(FRAME, 3 * FRAME) for _ in branches]
    advance(branches, histories, frames)
    spans = shifted(PIECES["mixed"], FRAME * frames)
    rows = rows_on_device(branches, FRAME)
    out = masked_forward(branches, rows, spans, backend=backend)
    for row, history in enumerate(histories):
        assert relative_error(out[row], expected_masked(history, row_of(rows, row), spans)) < TOLERANCE[dtype]


def dense_over_ring(branch, rows: Rows, spans: Spans) -> torch.Tensor:
    """Float64 softmax over the whole window, whose committed keys are read back from the pool."""
    storage, ring, length = branch.storage, branch.ring, rows.keys.shape[1]
    start, end = ring.committed_end, ring.committed_end + length
    sink, window = ring.geometry.sink_tokens, ring.geometry.window_tokens
    seen = [p for p in range(start) if p < sink or p >= end - window]
    indices = torch.tensor([ring.geometry.storage_index(p, ring.origin) for p in seen])
    slots = storage.slots(indices, branch.run).cuda()
    keys, values = (
        torch.cat([pool[slots], new[0]]).double()
        for pool, new in ((storage.key_pools[0], rows.keys), (storage.value_pools[0], rows.values))
    )
    own = dense_mask([(a - start, b - start) for a, b in spans], 0, length, length, "cuda")
    mask = torch.cat([torch.ones(length, len(seen), dtype=torch.bool, device="cuda"), own], dim=1)
    scores = torch.einsum("qhd,khd->hqk", rows.query[0].double(), keys) / HEAD_DIM**0.5
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~mask, float("-inf")).softmax(-1), values)


@pytest.mark.parametrize(("backend", "dtype"), CASES, ids=str)
@pytest.mark.parametrize("chunks", [2, 7])
def test_long_chunks(backend: str, dtype: torch.dtype, chunks: int) -> None:
    """Many tiles: 1000 tokens a chunk over a window of 3700, in order and wrapped."""
    branches = make_manager(300, 3400, **on_gpu(dtype)).open_session().branches
    for _ in range(chunks):
        masked_forward(branches, rows_on_device(branches, 1000), [], backend=backend)
    start = branches[0].committed_tokens
    spans = shifted([(100, 430), (430, 650), (900, 1000)], start)
    rows = rows_on_device(branches, 1000)
    expected = dense_over_ring(branches[0], rows, spans)
    out = masked_forward(branches, rows, spans, backend=backend)
    assert relative_error(out[0], expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("backend", MERGING)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("num_queries", "num_keys"), [(1, 1), (1, 300), (127, 129), (300, 300), (130, 1000)])
def test_partial_results(backend: str, causal: bool, num_queries: int, num_keys: int) -> None:
    """Output and log-sum-exp of a kernel over a slice of a pool whose other slots are NaN."""
    from functools import partial

    from diffusers_ardiff.attention.backends.libraries import find_flash2, find_flash3
    from diffusers_ardiff.attention.backends.packing import attend_with_lse
    from diffusers_ardiff.attention.kernels.key_views import attend_keys

    finders = {"flash3": find_flash3, "flash2": find_flash2}
    kernel = partial(attend_with_lse, finders[backend]().dense) if backend in finders else attend_keys
    pool = torch.full((2, 1, num_keys + 50, HEADS, HEAD_DIM), float("nan"), dtype=torch.bfloat16, device="cuda")
    pool[:, :, 7 : 7 + num_keys] = torch.randn(2, 1, num_keys, HEADS, HEAD_DIM, device="cuda")
    keys, values = pool[:, :, 7 : 7 + num_keys]
    query = torch.randn(1, num_queries, HEADS, HEAD_DIM, device="cuda").bfloat16()
    out, lse = kernel(query, keys, values, causal=causal, softmax_scale=0.1)
    scores = torch.einsum("blhd,bnhd->bhln", query.double(), keys.double()) * 0.1
    if causal:
        ends = torch.arange(num_keys - num_queries + 1, num_keys + 1, device="cuda")
        scores = scores.masked_fill(torch.arange(num_keys, device="cuda") >= ends[:, None], float("-inf"))
    expected = torch.einsum("bhln,bnhd->blhd", scores.softmax(-1), values.double())
    assert relative_error(out, expected) < 2e-2
    assert lse.shape == (1, HEADS, num_queries)
    assert_close(lse.double(), scores.logsumexp(-1), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("backend", "dtype"), KERNELS, ids=str)
@pytest.mark.parametrize("shuffle_seed", [None, 2])
def test_no_stream_sync(backend: str, dtype: torch.dtype, shuffle_seed: int | None) -> None:
    """Neither the plan nor the masked op waits for the device."""
    branches, _ = open_rows(frames=5, **on_gpu(dtype, shuffle_seed=shuffle_seed))
    rows, spans = rows_on_device(branches, FRAME), [(125, 130), (133, 140)]
    masked_forward(branches, rows, spans, backend=backend, commit=False)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    masked_forward(branches, rows, spans, backend=backend, commit=False)
    torch.cuda.set_sync_debug_mode("default")
