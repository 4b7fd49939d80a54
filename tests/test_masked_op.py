"""Piecewise masks in the paged op, with history behind them: against an explicit list of tokens and a 2-D mask.

C 24 tokens a frame, pages of 16, sink 1 frame, window 3 frames unless a test says otherwise.
"""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

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
    lse_backend,
    masked_forward,
    open_rows,
    random_spans,
    row_of,
    shifted,
    torch_partial,
)
from rollouts import Rows, forward, make_manager, pool_bytes, random_rows
from torch.testing import assert_close

from diffusers_ardiff.attention import (
    AttentionRequest,
    get_backend,
    list_backends,
    paged_attention,
    paged_write_attn,
    registry,
    select_backend,
)
from diffusers_ardiff.cache import RingGeometry
from diffusers_ardiff.cache.ring import RingState
from diffusers_ardiff.context import PagedForwardContext
from diffusers_ardiff.masks import build_paged_mask

BACKENDS = ["reference", "sdpa", "lse"]


@pytest.fixture(autouse=True)
def merging_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """``lse``: a backend that reaches its kernel only through the merge."""
    monkeypatch.setattr(registry, "_backends", {**registry._backends, "lse": lse_backend(torch_partial)})


# -- against dense --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shuffle_seed", [None, 2])
@pytest.mark.parametrize("num_extra", [0, 3])
@pytest.mark.parametrize("pieces", PIECES)
def test_six_frames_in(backend: str, shuffle_seed: int | None, num_extra: int, pieces: str) -> None:
    """The ring has wrapped: frame 6 lies between two ranges of history, in a pool of NaN. Two steps a chunk for three
    chunks, the second of each committed."""
    branches, (history,) = open_rows(frames=6, extra=num_extra, shuffle_seed=shuffle_seed)
    for _ in range(3):
        spans = shifted(PIECES[pieces], history.committed_end)
        for _ in range(2):
            rows = random_rows(branches, FRAME)
            extra = random_rows(branches, num_extra) if num_extra else None
            out = masked_forward(branches, rows, spans, extra=extra, backend=backend, commit=False)
            expected = expected_masked(history, row_of(rows), spans, extra=actions_of(extra))
            assert_close(out[0], expected, rtol=1e-5, atol=1e-5)
        branches[0].commit()
        history.commit(rows.keys[0], rows.values[0])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shuffle_seed", [None, 2])
@pytest.mark.parametrize("num_extra", [0, 3])
@pytest.mark.parametrize("length", [10, 24, 30, 50])
def test_from_empty_through_two_overwrites(
    backend: str, shuffle_seed: int | None, num_extra: int, length: int
) -> None:
    """Chunks of 30 or 50 tokens cross the sink's edge and the end of the ring: new rows in two ranges."""
    branches, (history,) = open_rows(extra=num_extra, shuffle_seed=shuffle_seed)
    rng = random.Random(length)
    for _ in range(240 // length):
        begin = history.committed_end
        spans = random_spans(rng, begin, begin + length)
        rows = random_rows(branches, length)
        extra = random_rows(branches, num_extra) if num_extra else None
        out = masked_forward(branches, rows, spans, extra=extra, backend=backend)
        expected = expected_masked(history, row_of(rows), spans, extra=actions_of(extra))
        history.commit(rows.keys[0], rows.values[0])
        assert_close(out[0], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("frames", [0, 2, 6])
def test_bfloat16(backend: str, frames: int) -> None:
    branches, (history,) = open_rows(frames=frames, dtype=torch.bfloat16)
    spans = shifted(PIECES["mixed"], history.committed_end)
    rows = random_rows(branches, FRAME)
    out = masked_forward(branches, rows, spans, backend=backend)
    assert out.dtype == torch.bfloat16
    assert relative_error(out[0], expected_masked(history, row_of(rows), spans)) < 2e-2


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("frames", [0, 2, 6])
def test_a_span_over_everything_is_no_mask(backend: str, frames: int) -> None:
    branches, (history,) = open_rows(frames=frames)
    end = history.committed_end + FRAME
    rows = random_rows(branches, FRAME)
    plain = forward(branches, rows, commit=False)
    for spans in ([(0, end)], [(history.committed_end, end)]):
        out = masked_forward(branches, rows, spans, backend=backend, commit=False)
        assert_close(out, plain, rtol=1e-5, atol=1e-5)
    causal = masked_forward(branches, rows, [], backend=backend, commit=False)
    assert relative_error(causal, plain) > 1e-2


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("frames", [2, 6])
def test_spans_elsewhere_do_nothing(backend: str, frames: int) -> None:
    """One list of all spans of a video serves every forward of it; of a span that began in the history only the end
    counts."""
    branches, (history,) = open_rows(frames=frames)
    begin = history.committed_end
    rows = random_rows(branches, FRAME)
    only = [(begin, begin + 5), (begin + 8, begin + 24)]
    everywhere = [(0, 3), (5, begin - 2), (begin - 2, begin + 5), only[1], (begin + 24, begin + 90)]
    outs = [masked_forward(branches, rows, s, backend=backend, commit=False) for s in (only, everywhere)]
    assert torch.equal(*outs)
    assert_close(outs[0][0], expected_masked(history, row_of(rows), only), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shuffle_seed", [None, 2])
@pytest.mark.parametrize("frames", [3, 7])
def test_recache(backend: str, shuffle_seed: int | None, frames: int) -> None:
    """All frames from position 0 while none has left, then the window's; a full span a frame."""
    branches, (history,) = open_rows(frames=frames, shuffle_seed=shuffle_seed)
    start, length = branches[0].ring.recache_span()
    assert (start, length) == ((0, 72) if frames == 3 else (96, 72))
    spans = [(p, p + FRAME) for p in range(0, 168, FRAME)]
    rows = random_rows(branches, length)
    out = masked_forward(branches, rows, spans, start=start, backend=backend, commit=False)
    assert_close(out[0], expected_masked(history, row_of(rows), spans, start=start), rtol=1e-5, atol=1e-5)
    history.commit(rows.keys[0], rows.values[0], start=start)
    after = random_rows(branches, FRAME)
    out = masked_forward(branches, after, spans, backend=backend)
    assert_close(out[0], expected_masked(history, row_of(after), spans), rtol=1e-5, atol=1e-5)


def test_a_wrong_mask_would_be_noticed() -> None:
    """One key more or less for one query is 100 times the tolerance of this file."""
    branches, (history,) = open_rows(frames=6)
    rows = row_of(random_rows(branches, FRAME))
    right = expected_masked(history, rows, [(146, 160)])
    for wrong in ([(147, 160)], [(146, 159)], [(146, 161)], []):
        assert relative_error(expected_masked(history, rows, wrong), right) > 1e-3


# -- several rows ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shuffle_seed", [None, 2])
@pytest.mark.parametrize("num_extra", [0, 3])
def test_rows_with_their_own_spans_and_fill(backend: str, shuffle_seed: int | None, num_extra: int) -> None:
    """Three sessions with 0, 2 and 7 frames behind them: causal, full, causal in each, cut at other tokens."""
    branches, histories = open_rows(3, extra=num_extra, shuffle_seed=shuffle_seed)
    for branch, history, frames in zip(branches, histories, (0, 2, 7), strict=True):
        advance([branch], [history], frames)
    pieces = [[(3, 9)], [(8, 20)], [(1, 23)]]
    for _ in range(3):
        spans = [shifted(p, history.committed_end) for p, history in zip(pieces, histories, strict=True)]
        rows = random_rows(branches, FRAME)
        extra = random_rows(branches, num_extra) if num_extra else None
        out = masked_forward(branches, rows, spans, extra=extra, backend=backend)
        for row, history in enumerate(histories):
            expected = expected_masked(history, row_of(rows, row), spans[row], extra=actions_of(extra, row))
            assert_close(out[row], expected, rtol=1e-5, atol=1e-5)
            history.commit(rows.keys[row], rows.values[row])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shuffle_seed", [None, 2])
@pytest.mark.parametrize("frames", [(4, 5), (7, 7), (6, 9)], ids=str)
@pytest.mark.parametrize("pieces", [([(5, 9)], [(5, 9)]), ([(5, 9)], [(2, 20)]), ([], [])], ids=str)
def test_rows_of_equal_length(
    backend: str, shuffle_seed: int | None, frames: tuple[int, int], pieces: tuple[Spans, Spans]
) -> None:
    """Equal numbers of keys are no batch yet: at frames 4 and 5 the new rows lie elsewhere in the ring, and at the same
    place they may be cut elsewhere."""
    branches, histories = open_rows(2, shuffle_seed=shuffle_seed)
    for branch, history, count in zip(branches, histories, frames, strict=True):
        advance([branch], [history], count)
    spans = [shifted(p, history.committed_end) for p, history in zip(pieces, histories, strict=True)]
    rows = random_rows(branches, FRAME)
    out = masked_forward(branches, rows, spans, backend=backend)
    for row, history in enumerate(histories):
        assert_close(out[row], expected_masked(history, row_of(rows, row), spans[row]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shuffle_seed", [None, 2])
def test_one_list_serves_rows_at_other_positions(backend: str, shuffle_seed: int | None) -> None:
    """A full span a frame for a whole video; the rows are at frames 0, 1 and 6, two frames a forward."""
    branches, histories = open_rows(3, shuffle_seed=shuffle_seed)
    for branch, history, frames in zip(branches, histories, (0, 1, 6), strict=True):
        advance([branch], [history], frames)
    spans = [(p, p + FRAME) for p in range(0, 20 * FRAME, FRAME)]
    rows = random_rows(branches, 2 * FRAME)
    out = masked_forward(branches, rows, spans, backend=backend)
    for row, history in enumerate(histories):
        assert_close(out[row], expected_masked(history, row_of(rows, row), spans), rtol=1e-5, atol=1e-5)


# -- extra rows as queries ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("frames", [0, 5])
def test_queries_of_extra_rows_see_everything(backend: str, frames: int) -> None:
    branches, (history,) = open_rows(frames=frames, extra=3)
    begin = history.committed_end
    spans = [(begin + 5, begin + 9)]
    rows, extra = random_rows(branches, FRAME), random_rows(branches, 3)
    both = Rows(torch.cat([rows.query, extra.query], 1), rows.keys, rows.values)
    out = masked_forward(branches, both, spans, extra=extra, backend=backend)
    expected = expected_masked(history, row_of(rows), spans, extra=actions_of(extra))
    assert_close(out[0, :FRAME], expected, rtol=1e-5, atol=1e-5)
    plain = history.attend(extra.query[0], rows.keys[0], rows.values[0], extra=actions_of(extra))
    assert_close(out[0, FRAME:], plain, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_reading_again_keeps_the_mask(backend: str) -> None:
    branches, _ = open_rows(frames=5)
    context = PagedForwardContext(branches, num_tokens=FRAME, backend=backend, full_attn_spans=[(125, 130)]).prepare()
    rows = random_rows(branches, FRAME)
    out = paged_write_attn(context.layer_inputs(0), *rows)
    assert torch.equal(paged_attention(rows.query, context.layer_inputs(0)), out)
    assert torch.equal(paged_attention(rows.query[0], context.layer_inputs(0)), out[0])


# -- refusals -------------------------------------------------------------------------------------------------------


def state_of(branch) -> tuple:
    ring = {name: value for name, value in vars(branch.ring).items() if name != "geometry"}
    return ring, branch.history, pool_bytes(branch.storage).tolist()


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ([(50, 73)], r"\(50, 73\) ends after this forward, whose tokens are \[48, 72\)"),
        ([(10, 90)], r"\(10, 90\) ends after"),
        ([(60, 64), (50, 52)], r"full_attn_spans\[1\]"),
        ([(50, 60), (59, 62)], r"full_attn_spans\[1\]"),
        ([(50, 50)], r"full_attn_spans\[0\]"),
        ([(-1, 50)], r"full_attn_spans\[0\]"),
        ((50, 60), "must be a pair"),
        ([[(50, 60)], [(50, 60)]], "one for each of the 1 rows, got 2 lists"),
        ([[(50, 60), (59, 62)]], r"full_attn_spans\[0\]\[1\]"),
    ],
)
def test_illegal_spans_change_nothing(spans: object, message: str) -> None:
    """Refused when the context is made, before anything is claimed or written."""
    (branch,), _ = open_rows(frames=2)
    forward([branch], random_rows([branch], FRAME), commit=False)
    before = state_of(branch)
    with pytest.raises(ValueError, match=message):
        PagedForwardContext([branch], num_tokens=FRAME, full_attn_spans=spans)
    assert state_of(branch) == before
    assert branch.commit() == FRAME


@pytest.mark.parametrize("make", [lambda: (span for span in [(4, 24)]), lambda: {(4, 24)}, lambda: 24])
def test_spans_that_are_no_list_are_refused(make: Callable[[], Any]) -> None:
    """A generator was empty when it was read a second time, so its spans were dropped in silence: the forward was causal."""
    (branch,), _ = open_rows()
    with pytest.raises(ValueError, match="full_attn_spans must be a list of spans"):
        PagedForwardContext([branch], num_tokens=FRAME, full_attn_spans=make())


def test_rows_cut_into_other_segments_are_refused() -> None:
    branches, _ = open_rows(2)
    with pytest.raises(ValueError, match="same sequence of segments"):
        PagedForwardContext(branches, num_tokens=FRAME, full_attn_spans=[[(0, 9)], [(3, 9)]])
    for branch in branches:
        branch.check_idle("a forward")


@pytest.fixture
def unmasked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend of the first rank that honours no mask."""
    plain = replace(get_backend("reference"), name="plain", rank=1, masks=False)
    monkeypatch.setattr(registry, "_backends", {**registry._backends, "plain": plain})


@pytest.mark.usefixtures("unmasked")
def test_backend_without_masks_refuses_before_a_write() -> None:
    """Masks were once dropped in silence (diffusers#12605)."""
    branches, (history,) = open_rows(frames=6)
    rows = random_rows(branches, FRAME)
    before = pool_bytes(branches[0].storage)
    with pytest.raises(ValueError, match="plain: honours no piecewise mask"):
        masked_forward(branches, rows, [], backend="plain")
    assert torch.equal(pool_bytes(branches[0].storage), before)
    assert branches[0].committed_tokens == 144
    out = masked_forward(branches, rows, [])
    assert_close(out[0], expected_masked(history, row_of(rows), []), rtol=1e-5, atol=1e-5)


def test_backends_say_whether_they_honour_masks() -> None:
    able = {backend.name for backend in list_backends() if backend.masks}
    assert able == {"flash3", "sdpa", "triton", "flash2", "reference", "lse"}
    assert all(get_backend(name).lse for name in ("flash3", "triton", "flash2"))
    request = AttentionRequest(device_type="cpu", dtype=torch.float32, head_dim=8, page_size=16, needs_mask=True)
    assert select_backend(request).name == "sdpa"
    for name in ("rocm", "varlen"):
        with pytest.raises(ValueError, match="honours no piecewise mask"):
            select_backend(request, name)


@pytest.mark.parametrize("num_queries", [1, 23, 25, 26, 48])
def test_queries_must_be_the_tokens(num_queries: int) -> None:
    branches, _ = open_rows(frames=6, extra=3)
    rows, extra = random_rows(branches, FRAME), random_rows(branches, 3)
    query = torch.randn(1, num_queries, 2, 8)
    before = pool_bytes(branches[0].storage)
    with pytest.raises(ValueError, match="one query a token"):
        masked_forward(branches, Rows(query, rows.keys, rows.values), [], extra=extra)
    assert torch.equal(pool_bytes(branches[0].storage), before)
    context = PagedForwardContext(branches, num_tokens=FRAME, full_attn_spans=[]).prepare()
    with pytest.raises(ValueError, match="one query a token"):
        paged_attention(query, context.layer_inputs(0))


# -- coordinates ----------------------------------------------------------------------------------------------------


def mask_after(num_tokens: int, sink: int, window: int, spans: Spans, num_extra: int = 0, *, behind: int):
    geometry = RingGeometry(sink_tokens=sink, window_tokens=window, page_size=4, max_extra_tokens=num_extra)
    ring = RingState(geometry)
    while ring.committed_end < behind:
        span = ring.plan_forward(min(behind - ring.committed_end, window))
        ring.begin(span)
        ring.finish(span, succeeded=True)
        ring.commit()
    return build_paged_mask(spans, [ring.plan_forward(num_tokens, num_extra)], geometry)


@pytest.mark.parametrize(
    ("behind", "num_extra", "num_history", "new", "shared", "in_order"),
    [
        (0, 0, 0, [(0, 3)], [], True),
        (1, 0, 1, [(1, 4)], [(0, 1)], True),
        (1, 2, 1, [(1, 4)], [(0, 1), (4, 6)], False),
        (5, 0, 5, [(5, 8)], [(0, 5)], True),
        (7, 0, 6, [(7, 9), (2, 3)], [(0, 2), (3, 7)], False),
        (8, 0, 6, [(8, 9), (2, 4)], [(0, 2), (4, 8)], False),
        (9, 0, 6, [(2, 5)], [(0, 2), (5, 9)], False),
        (9, 2, 6, [(2, 5)], [(0, 2), (5, 11)], False),
        (13, 0, 6, [(6, 9)], [(0, 6)], True),
        (13, 2, 6, [(6, 9)], [(0, 6), (9, 11)], False),
        (14, 2, 6, [(7, 9), (2, 3)], [(0, 2), (3, 7), (9, 11)], False),
    ],
)
def test_where_the_keys_lie(
    behind: int, num_extra: int, num_history: int, new: list, shared: list, in_order: bool
) -> None:
    """Three tokens; sink 2, window 7. One written over the sink's edge is one range, over the ring's end two."""
    (row,) = mask_after(3, 2, 7, [], num_extra, behind=behind).rows
    assert [(r.start, r.stop) for r in row.new] == new
    assert [(r.start, r.stop) for r in row.shared] == shared
    assert (row.num_history, row.in_order) == (num_history, in_order)


def test_spans_in_visible_coordinates() -> None:
    """20 tokens behind, 8 of them visible; 6 new ones at 20..25."""
    mask = mask_after(6, 2, 12, [(0, 4), (15, 22), (23, 26), (30, 33)], behind=20)
    assert mask.plan.spans == (((3, 10), (11, 14)),)
    cuts = [segment.row_segments[0] for segment in mask.plan.segments]
    assert cuts == [(8, 10, 10, "full"), (10, 11, 11, "causal"), (11, 14, 14, "full")]
    assert (mask.num_tokens, mask.num_extra, mask.is_batch) == (6, 0, True)


# -- everything at random -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_random_forwards_equal_dense_attention(backend: str) -> None:
    """120 caches of any geometry, whole and fragmented, 8 masked forwards each, recaches and flushes between them."""
    not_in_order = 0
    for seed in range(120):
        rng = random.Random(seed)
        torch.manual_seed(seed)
        sink, window, num_extra = rng.choice([0, 1, 3, 5]), rng.randint(2, 9), rng.choice([0, 3])
        branches = (
            make_manager(
                sink,
                window,
                page_size=rng.choice([1, 3, 4, 16]),
                extra=num_extra,
                heads=1,
                head_dim=4,
                shuffle_seed=rng.choice([None, seed]),
            )
            .open_session()
            .branches
        )
        (branch,), history = branches, TokenHistory(sink, window)
        for _ in range(8):
            span = branch.ring.recache_span() if rng.random() < 0.2 else None
            begin, length = span or (branch.committed_tokens, rng.randint(1, min(6, window)))
            spans = random_spans(rng, begin, begin + length)
            rows = random_rows(branches, length)
            extra = random_rows(branches, num_extra) if num_extra and rng.random() < 0.5 else None
            start = begin if span else None
            out = masked_forward(branches, rows, spans, start=start, extra=extra, backend=backend, commit=not span)
            expected = expected_masked(history, row_of(rows), spans, start=start, extra=actions_of(extra))
            assert_close(out[0], expected, rtol=1e-5, atol=1e-5)
            history.commit(rows.keys[0], rows.values[0], start=start)
            not_in_order += begin + length > sink + window
            if rng.random() < 0.1:
                keep = rng.choice([0, 1, 2, window])
                branch.flush(keep)
                history.flush(keep)
    assert not_in_order > 300
