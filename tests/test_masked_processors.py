"""``full_attn_spans`` through the processors, against the stock transformer under the same 2-D mask.

Frames have 6 tokens, so frame n is [6 n, 6 n + 6).
"""

from collections.abc import Sequence

import pytest
import torch
from dense import relative_error
from diffusers import WanTransformer3DModel
from masked_cases import Spans
from test_compile import CountingBackend
from tiny_wan import (
    HEIGHT,
    TOKENS,
    WIDTH,
    PagedRun,
    latents_of,
    masked_copy,
    masked_forward,
    run_host,
    text_of,
    tiny_transformer,
    window_mask,
)

from diffusers_ardiff.attention import list_backends, registry
from diffusers_ardiff.attention.piecewise import dense_mask
from diffusers_ardiff.context import PagedForwardContext

CHUNKS = [1, 3, 2]
PER_FRAME = [(p, p + TOKENS) for p in range(0, 100 * TOKENS, TOKENS)]
SPANS = {
    "causal": [],
    "per frame": PER_FRAME[:6],
    "per chunk": [(0, 6), (6, 24), (24, 36)],
    "text then video": [(9, 24), (24, 36)],
    "mixed": [(1, 4), (6, 11), (11, 17), (20, 24), (30, 35)],
}
"""None crosses the end of a chunk, at 6, 24 and 36."""


@pytest.fixture
def transformer() -> WanTransformer3DModel:
    return tiny_transformer()


def forward(
    run: PagedRun, latents: torch.Tensor, timestep: float, text: torch.Tensor, spans: object, *, commit: bool = True
) -> torch.Tensor:
    """One forward of all branches as rows."""
    frames = latents.shape[2]
    context = PagedForwardContext(run.branches, num_tokens=TOKENS * frames, full_attn_spans=spans)
    rotary = run.rope([range(s // TOKENS, s // TOKENS + frames) for s in context.starts], HEIGHT // 2, WIDTH // 2)
    with context, run.paged.bind(context, rotary, run.paged.compute_text_kv(text)):
        out = run_host(run.transformer, latents, timestep, text)
    if commit:
        context.mark_committed()
    return out


def square_mask(spans: Spans, frames: int) -> torch.Tensor:
    return dense_mask(spans, 0, TOKENS * frames, TOKENS * frames)


def split(latents: torch.Tensor, chunks: Sequence[int]) -> list[torch.Tensor]:
    return list(latents.split(list(chunks), dim=2))


@pytest.mark.parametrize("spans", SPANS)
@pytest.mark.parametrize("backend", ["reference", "sdpa"])
@pytest.mark.parametrize("shuffle_seed", [None, 3])
def test_one_forward_equals_stock(transformer, spans: str, backend: str, shuffle_seed: int | None) -> None:
    mask = square_mask(SPANS[spans], 6)
    expected = run_host(masked_copy(transformer, mask), latents_of(6), 500, text_of())
    plain = run_host(transformer, latents_of(6), 500, text_of())
    run = PagedRun(transformer, 0, 6, backend=backend, shuffle_seed=shuffle_seed)
    out = forward(run, latents_of(6), 500, text_of(), SPANS[spans])
    assert relative_error(out, expected) < 1e-5
    assert relative_error(plain, expected) > 1e-3


@pytest.mark.parametrize("spans", SPANS)
@pytest.mark.parametrize("shuffle_seed", [None, 3])
def test_chunk_by_chunk_equals_the_whole(transformer, spans: str, shuffle_seed: int | None) -> None:
    """Clean forwards, each chunk at a timestep of its own and with the spans of the whole video, against all frames in
    one masked stock forward; two noisy forwards before each commit change nothing."""
    latents, frame_times = latents_of(6), [0.0, 250.0, 250.0, 250.0, 900.0, 900.0]
    whole = masked_forward(transformer, latents, frame_times, text_of(), square_mask(SPANS[spans], 6))
    run = PagedRun(transformer, 0, 6, shuffle_seed=shuffle_seed)
    done = 0
    for chunk, expected in zip(split(latents, CHUNKS), split(whole, CHUNKS), strict=True):
        for time in (800, 400):
            forward(run, latents_of(chunk.shape[2], seed=50 + time), time, text_of(), SPANS[spans], commit=False)
        out = forward(run, chunk, frame_times[done], text_of(), SPANS[spans])
        assert relative_error(out, expected) < 1e-5
        done += chunk.shape[2]


@pytest.mark.parametrize("pieces", [[], [(0, 6), (6, 12), (12, 18)], [(2, 9), (9, 13)]], ids=str)
@pytest.mark.parametrize(("sink", "window"), [(1, 4), (0, 5), (2, 3)])
@pytest.mark.parametrize("shuffle_seed", [None, 3])
def test_after_the_ring_has_wrapped(
    transformer, pieces: Spans, sink: int, window: int, shuffle_seed: int | None
) -> None:
    """Chunks of 3 frames until the window has been overwritten twice; with windows of 4 and 5 frames their rows wrap.
    The stock mask is the band of sink and window, less what the spans hide."""
    chunks = [3] * 5
    spans = [(18 * n + a, 18 * n + b) for n in range(5) for a, b in pieces]
    latents = latents_of(15)
    mask = window_mask(chunks, sink, window) & square_mask(spans, 15)
    whole = masked_forward(transformer, latents, [0.0] * 15, text_of(), mask)
    run = PagedRun(transformer, sink, window, shuffle_seed=shuffle_seed)
    for chunk, expected in zip(split(latents, chunks), split(whole, chunks), strict=True):
        assert relative_error(forward(run, chunk, 0, text_of(), spans), expected) < 1e-5


def test_sessions_as_rows_of_one_forward(transformer) -> None:
    """Two sessions, one of them a frame ahead, each with spans and a text of its own, equal each alone."""
    run = PagedRun(transformer, 1, 6, max_sessions=2)
    alone = [PagedRun(tiny_transformer(), 1, 6) for _ in range(2)]
    both, ahead = run.branches, latents_of(1, seed=50)
    run.branches = both[:1]
    for side in (run, alone[0]):
        forward(side, ahead, 0, text_of(), [])
    run.branches = both
    text = torch.cat([text_of(), text_of(seed=3)])
    for chunk in range(3):
        spans = [[(p + 3, p + 8)] for p in (6 + 18 * chunk, 18 * chunk)]
        spans[1] = [(spans[1][0][0] + 2, spans[1][0][1] + 5)]
        latents = latents_of(3, rows=2, seed=chunk)
        out = forward(run, latents, 0, text, spans)
        for row, single in enumerate(alone):
            expected = forward(single, latents[row : row + 1], 0, text[row : row + 1], spans[row])
            assert relative_error(out[row : row + 1], expected) < 1e-5


def test_refusal_leaves_the_transformer_and_the_branch(transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    """No backend honours masks: the first layer says so, nothing was written, and the chunk runs without a mask."""
    run = PagedRun(transformer, 0, 6)
    none = {b.name: b for b in list_backends() if not b.masks}
    with monkeypatch.context() as patch:
        patch.setattr(registry, "_backends", none)
        with pytest.raises(ValueError, match="honours no piecewise mask"):
            forward(run, latents_of(3), 500, text_of(), [])
    assert run.manager.storage.key_pools[0].isnan().all()
    assert run.branches[0].commit() == 0
    expected = run_host(masked_copy(transformer, square_mask([], 3)), latents_of(3), 500, text_of())
    assert relative_error(forward(run, latents_of(3), 500, text_of(), []), expected) < 1e-5


def test_masked_forwards_share_the_compiled_graph(transformer) -> None:
    """The mask stays inside the op: with and without it, and with other spans, the blocks are one graph."""
    torch._dynamo.reset()
    run, counting = PagedRun(transformer, 1, 6), CountingBackend("eager")
    plain = PagedRun(tiny_transformer(), 1, 6)
    transformer.compile_repeated_blocks(fullgraph=True, backend=counting)
    for chunk, spans in enumerate([None, [], PER_FRAME, [(56, 70)], None]):
        latents = latents_of(3, seed=chunk)
        with torch._dynamo.config.patch(error_on_recompile=chunk > 0):
            out = forward(run, latents, 0, text_of(), spans)
        assert relative_error(out, forward(plain, latents, 0, text_of(), spans)) < 1e-4
    assert len(counting.graphs) == 1
    torch._dynamo.reset()
