"""Float8 K/V pools on a GPU: the Triton kernels, SDPA over a widened window, masks, graphs, whole streams, memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from dense import TokenHistory, relative_error
from live_streams import stream_of, take
from masked_cases import FRAME, PIECES, masked_forward, open_rows, rows_on_device, shifted
from paged_cases import expected_attention, make_inputs
from rollouts import Rows, forward, make_manager
from tiny_components import QUICK, make_pipeline, make_transformer
from torch.testing import assert_close

from diffusers_ardiff import CacheOptions, KVScales
from diffusers_ardiff.attention import AttentionRequest, list_backends, select_backend
from diffusers_ardiff.cache import FLOAT8
from diffusers_ardiff.cache.float8 import store_as

pytestmark = pytest.mark.gpu

SCALES = KVScales(key=0.25, value=0.5)
BACKENDS = ["triton", "sdpa", "reference"]
HALF = 2e-2
LENGTHS = [1, 15, 16, 17, 257, 5000]


@pytest.fixture(autouse=True)
def float8_device() -> Iterator[None]:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs a CUDA device of compute capability 8.9")
    torch.manual_seed(0)
    yield
    torch.cuda.set_sync_debug_mode("default")


def stored(tensor: torch.Tensor, scale: float) -> torch.Tensor:
    return store_as(tensor, FLOAT8, scale).float() * scale


# -- the kernels ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("contiguous", [False, True])
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_paged_kernel(dtype: torch.dtype, contiguous: bool, head_dim: int) -> None:
    """Every length in a pool of NaN; log-sum-exp; room for 8192 tokens, so that the keys are split."""
    from diffusers_ardiff.attention.kernels.paged_attention import attend_pages

    for length in LENGTHS:
        inputs = make_inputs(
            [length, 40], head_dim=head_dim, capacity=8192, shuffled=not contiguous, dtype=FLOAT8, device="cuda"
        )
        query = torch.randn(2, 300, 2, head_dim, device="cuda").to(dtype)
        out, lse = attend_pages(query, inputs, page_size=16, softmax_scale=0.125, contiguous=contiguous, with_lse=True)
        expected, expected_lse = expected_attention(query, inputs, 16, 0.125)
        assert out.dtype == dtype
        assert relative_error(out, expected) < (1e-5 if dtype == torch.float32 else HALF)
        assert_close(lse, expected_lse, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("causal", [False, True])
def test_view_kernel(causal: bool) -> None:
    """Equal to the same kernel over the same values in bfloat16, up to the order of its tiles."""
    from diffusers_ardiff.attention.kernels.key_views import attend_keys

    pool = torch.full((2, 2000, 12, 128), float("nan"), device="cuda")
    pool[:, 3:1700] = torch.randn(2, 1697, 12, 128, device="cuda")
    narrow = pool.to(FLOAT8)
    query = torch.randn(1, 500, 12, 128, device="cuda", dtype=torch.bfloat16)
    outs = [
        attend_keys(query, *kept[:, None, 3:1700], causal=causal, softmax_scale=0.088)
        for kept in (narrow, narrow.to(torch.bfloat16))
    ]
    assert relative_error(outs[0].out, outs[1].out) < HALF
    assert_close(outs[0].lse, outs[1].lse, rtol=1e-3, atol=1e-3)


def test_graph_replay_at_other_lengths() -> None:
    """Lengths and pages are read on the device, whatever the pool's dtype."""
    from diffusers_ardiff.attention.kernels.paged_attention import attend_pages

    inputs = make_inputs([5000], head_dim=128, dtype=FLOAT8, device="cuda")
    inputs = inputs._replace(seq_lens=torch.tensor([40], dtype=torch.int32, device="cuda"))
    query = torch.randn(1, 300, 2, 128, device="cuda", dtype=torch.bfloat16)
    attend_pages(query, inputs, page_size=16, softmax_scale=0.1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attend_pages(query, inputs, page_size=16, softmax_scale=0.1).out
    for length in (40, 5000, 1777):
        inputs.seq_lens.fill_(length)
        graph.replay()
        assert torch.equal(captured, attend_pages(query, inputs, page_size=16, softmax_scale=0.1).out)
        assert captured.isfinite().all()


# -- through the op -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shuffle_seed", [None, 2])
def test_through_overwrites(backend: str, shuffle_seed: int | None) -> None:
    """Against an explicit list of the stored values and, looser, of the values themselves."""
    manager = make_manager(
        48, 400, heads=4, head_dim=128, dtype=FLOAT8, device="cuda", shuffle_seed=shuffle_seed, scales=SCALES
    )
    branches = manager.open_session().branches
    exact, history = TokenHistory(48, 400), TokenHistory(48, 400)
    for _ in range(12):
        rows = Rows(*(part.to(torch.bfloat16) for part in rows_on_device(branches, 100)))
        out = forward(branches, rows, backend=backend)
        query, keys, values = (part[0] for part in rows)
        rounded = (stored(keys, SCALES.key), stored(values, SCALES.value))
        expected = history.attend(query, keys, values)
        assert relative_error(out[0], exact.attend(query, *rounded)) < HALF
        assert float((out[0].float() - expected).norm() / expected.norm()) < 0.1
        exact.commit(*rounded)
        history.commit(keys, values)


@pytest.mark.parametrize("backend", ["triton", "sdpa"])
@pytest.mark.parametrize("shuffle_seed", [None, 2])
@pytest.mark.parametrize("pieces", ["causal", "mixed"])
def test_masks(backend: str, shuffle_seed: int | None, pieces: str) -> None:
    sizes = {"heads": 4, "head_dim": 64, "device": "cuda"}
    branches, _ = open_rows(frames=6, dtype=FLOAT8, shuffle_seed=shuffle_seed, scales=SCALES, **sizes)
    rows, spans = rows_on_device(branches, FRAME), shifted(PIECES[pieces], branches[0].committed_tokens)
    outs = [masked_forward(branches, rows, spans, backend=name, commit=False) for name in (backend, "reference")]
    assert relative_error(*outs) < 1e-3


def test_a_backend_is_found() -> None:
    for work in ("dense", "fragmented", "ragged"):
        request = AttentionRequest(device_type="cuda", dtype=FLOAT8, head_dim=128, page_size=16, work=work)
        assert select_backend(request).name in ("triton", "sdpa")
        assert not next(b for b in list_backends() if b.name == "triton").refusals(request)


# -- streams --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["triton", "sdpa"])
@pytest.mark.parametrize("shuffle_seed", [None, 2])
def test_a_stream(backend: str, shuffle_seed: int | None) -> None:
    """Latents of six chunks against a bfloat16 pool; sessions that go to host memory and back; a recache."""
    videos = []
    for dtype in (torch.bfloat16, FLOAT8):
        pipe = make_pipeline(QUICK, transformer=make_transformer(attention_head_dim=64)).to("cuda", torch.bfloat16)
        options = CacheOptions(kv_dtype=dtype, backend=backend, shuffle_seed=shuffle_seed)
        with stream_of(pipe, cache=options) as stream:
            latents = [take(stream, 3)]
            stream.switch_prompt(prompt="a blue square", mode="recache")
            for session in stream.rollout.sessions:
                session.offload()
                session.onload()
            videos.append(torch.cat([*latents, take(stream, 3)], dim=2))
    assert 0 < relative_error(videos[1], videos[0]) < 0.2


@pytest.mark.parametrize("backend", ["triton", "sdpa"])
def test_warm_streams_replay(backend: str) -> None:
    options = CacheOptions(kv_dtype=FLOAT8, kv_scales=SCALES, backend=backend)

    def make() -> object:
        return make_pipeline(QUICK, transformer=make_transformer(attention_head_dim=64)).to("cuda", torch.bfloat16)

    with stream_of(make(), cache=options) as stream:
        expected = take(stream, 5)
    pipe = make()
    pipe.warmup(compile=False, cache=options)
    with stream_of(pipe, cache=options) as stream:
        latents = take(stream, 5)
    assert pipe._warm.graphs.num_replays == 2 * 5 + 4
    assert torch.equal(latents, expected)


def test_half_the_bytes_are_allocated() -> None:
    """The allocator rounds a large block up to 2 MiB: a test that wanted its count to the byte failed at this size."""
    sizes: dict[str, Any] = {"heads": 12, "head_dim": 128, "layers": 4, "device": "cuda"}
    torch.cuda.synchronize()
    used: list[int] = []
    num_bytes: list[int] = []
    for dtype in (torch.bfloat16, FLOAT8):
        before = torch.cuda.memory_allocated()
        manager = make_manager(1600, 16000, dtype=dtype, **sizes)
        used.append(torch.cuda.memory_allocated() - before)
        num_bytes.append(manager.storage.num_bytes)
        assert num_bytes[-1] == manager.plan.pool_bytes
        assert 0 <= used[-1] - num_bytes[-1] <= 2 * sizes["layers"] * 2**21
        del manager
    assert num_bytes[0] == 2 * num_bytes[1]
