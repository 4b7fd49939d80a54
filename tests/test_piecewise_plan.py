"""Paged piecewise plans: what is refused, how queries are addressed, how outputs come back."""

import random

import pytest
import torch
from dense import dense_attention
from test_piecewise import explicit_mask, never_called

from diffusers_ardiff.attention.piecewise import (
    PagedPiecewisePlan,
    PagedPiecewiseSegment,
    Segment,
    build_paged_piecewise_plan,
    run_paged_piecewise_plan,
    sdpa_attn_func,
)

HEADS, SIZE = 2, 8


def three_segments(rows: int = 2) -> PagedPiecewisePlan:
    """Queries 0..6 with the span (2, 5) in the first row, each further row two positions later."""
    shift = range(0, 2 * rows, 2)
    return build_paged_piecewise_plan(
        [[(2 + s, 5 + s)] for s in shift], list(shift), [6] * rows, [6 + s for s in shift]
    )


def queries(plan: PagedPiecewisePlan) -> torch.Tensor:
    return torch.randn(plan.num_query_tokens, HEADS, SIZE)


def double(query: torch.Tensor, *args: object) -> torch.Tensor:
    return 2 * query


def run(plan: PagedPiecewisePlan, query: torch.Tensor, runner, buffer=None, metadata=None, **options) -> torch.Tensor:
    """Keys and values are the runner's own business."""
    metadata = [None] * len(plan.segments) if metadata is None else metadata
    return run_paged_piecewise_plan(query, None, None, plan, metadata, runner, buffer, **options)


class HistoryRunner:
    """Attends to each row's own keys, as a paged backend does; the metadata of a segment is the segment."""

    def __init__(self, row_keys: list[torch.Tensor], row_values: list[torch.Tensor]) -> None:
        self.row_keys, self.row_values = row_keys, row_values

    def __call__(self, query, key, value, segment: PagedPiecewiseSegment, output_buffer) -> torch.Tensor:
        lengths = [part.q_end - part.q_start for part in segment.row_segments]
        outputs = []
        for row, (part, rows) in enumerate(zip(segment.row_segments, query.split(lengths), strict=True)):
            keys, values = self.row_keys[row][: part.kv_end], self.row_values[row][: part.kv_end]
            causal = segment.mode == "causal"
            outputs.append(
                sdpa_attn_func(rows[None], keys[None], values[None], causal=causal, softmax_scale=SIZE**-0.5)[0]
            )
        return torch.cat(outputs) if output_buffer is None else torch.cat(outputs, out=output_buffer)


# -- building -----------------------------------------------------------------------------------------------------


def test_equal_new_rows_behind_different_histories() -> None:
    plan = build_paged_piecewise_plan([[(33, 50)], [(37, 54)]], [33, 37], [17, 17], [50, 54])
    (segment,) = plan.segments
    assert plan.num_query_tokens == 34
    assert plan.homogeneous_batch_shape == (2, 17)
    assert plan.segments_cover_query_contiguously
    assert plan.spans == (((33, 50),), ((37, 54),))
    assert segment.row_segments == (Segment(33, 50, 50, "full"), Segment(37, 54, 54, "full"))
    assert (segment.query_range, segment.local_query_range) == ((0, 34), (0, 17))
    assert torch.equal(segment.query_indices, torch.arange(34))


def test_one_row_is_slices_in_order() -> None:
    plan = build_paged_piecewise_plan([[(12, 15)]], [10], [6], [20], device="cpu")
    assert [segment.query_range for segment in plan.segments] == [(0, 2), (2, 5), (5, 6)]
    assert [segment.mode for segment in plan.segments] == ["causal", "full", "causal"]
    assert [segment.num_query_tokens for segment in plan.segments] == [2, 3, 1]
    assert plan.segments_cover_query_contiguously
    assert plan.homogeneous_batch_shape is None


def test_several_segments_of_several_rows_are_scattered() -> None:
    plan = three_segments()
    indices = [[0, 1, 6, 7], [2, 3, 4, 8, 9, 10], [5, 11]]
    assert [segment.query_indices.tolist() for segment in plan.segments] == indices
    assert all(segment.query_indices.dtype == torch.int64 for segment in plan.segments)
    assert [segment.query_range for segment in plan.segments] == [None, None, None]
    assert [segment.local_query_range for segment in plan.segments] == [(0, 2), (2, 5), (5, 6)]
    assert [segment.num_query_tokens for segment in plan.segments] == [4, 6, 2]
    assert not plan.segments_cover_query_contiguously
    assert plan.homogeneous_batch_shape == (2, 6)


def test_rows_with_other_local_ranges_are_no_batch() -> None:
    plan = build_paged_piecewise_plan([[(2, 4)], [(1, 4)]], [0, 0], [4, 4], [4, 4])
    assert plan.homogeneous_batch_shape is None
    assert [segment.local_query_range for segment in plan.segments] == [None, None]
    assert [segment.query_indices.tolist() for segment in plan.segments] == [[0, 1, 4], [2, 3, 5, 6, 7]]


def test_one_segment_of_rows_of_different_lengths_is_a_slice() -> None:
    plan = build_paged_piecewise_plan([[], []], [4, 0], [3, 5], [7, 5])
    assert plan.segments[0].query_range == (0, 8)
    assert plan.segments_cover_query_contiguously
    assert plan.homogeneous_batch_shape is None


def test_indices_are_made_on_the_device() -> None:
    plan = build_paged_piecewise_plan([[], []], [0, 0], [2, 2], [2, 2], device="meta")
    assert plan.segments[0].query_indices.device.type == "meta"


@pytest.mark.parametrize(
    ("spans", "offsets", "lengths", "seq_lens", "message"),
    [
        ([], [], [], [], "got 0, 0, 0 and 0 entries"),
        ([[]], [0, 0], [1], [1], "got 1, 2, 1 and 1 entries"),
        ([[]], [0], [1, 1], [1], "got 1, 1, 2 and 1 entries"),
        ([[]], [0], [1], [1, 1], "got 1, 1, 1 and 2 entries"),
        ([[], []], [0], [1], [1], "got 2, 1, 1 and 1 entries"),
        ([[(1, 3), (2, 4)]], [0], [4], [4], r"row 0: full_attn_spans\[1\].*3 <= start.*got \(2, 4\)"),
        ([[], [(2, 4), (0, 1)]], [0, 0], [4, 4], [4, 4], r"row 1: full_attn_spans\[1\].*got \(0, 1\)"),
        ([[(1, 5)]], [0], [4], [4], r"row 0: full_attn_spans\[0\].*end <= 4, got \(1, 5\)"),
        ([[(3, 3)]], [0], [4], [4], r"row 0.*got \(3, 3\)"),
        ([[(-1, 3)]], [0], [4], [4], r"row 0.*got \(-1, 3\)"),
        ([[], []], [0, 1], [4, 4], [4, 4], r"row 1: the queries.*its 4 keys, got \[1, 5\)"),
        ([[]], [-1], [4], [4], "row 0: query_offset.*-1"),
        ([[]], [0], [0], [4], "row 0: query_len.*>= 1, got 0"),
        ([[]], [0], [1], [0], "row 0: seq_len.*>= 1, got 0"),
        ([[(1, 3)], [(2, 4)]], [0, 0], [4, 4], [4, 4], r"\['causal', 'full', 'causal'\] for row 0 .*for row 1"),
        ([[(0, 2)], [(2, 4)]], [0, 0], [4, 4], [4, 4], r"\['full', 'causal'\] for row 0 and \['causal', 'full'\]"),
        ([[(0, 2)], [(0, 2)], []], [0] * 3, [4] * 3, [4] * 3, r"\['causal'\] for row 2"),
    ],
)
def test_what_a_plan_refuses(spans: list, offsets: list, lengths: list, seq_lens: list, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_paged_piecewise_plan(spans, offsets, lengths, seq_lens)


# -- running ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("use_homogeneous_batch", [False, True])
def test_the_runner_gets_the_rows_of_its_segment(use_homogeneous_batch: bool) -> None:
    plan = three_segments()
    query = queries(plan)
    seen = []

    def runner(rows, key, value, metadata, output_buffer) -> torch.Tensor:
        assert torch.equal(key, rows + 100) and torch.equal(value, rows + 200)
        assert output_buffer is None
        seen.append((metadata, rows))
        return rows

    out = run_paged_piecewise_plan(
        query, query + 100, query + 200, plan, ["a", "b", "c"], runner, use_homogeneous_batch=use_homogeneous_batch
    )
    assert torch.equal(out, query)
    assert [metadata for metadata, _ in seen] == ["a", "b", "c"]
    for (_, rows), indices in zip(seen, ([0, 1, 6, 7], [2, 3, 4, 8, 9, 10], [5, 11]), strict=True):
        assert torch.equal(rows, query[indices])


def test_contiguous_segments_are_views_and_keys_may_be_absent() -> None:
    plan = three_segments(rows=1)
    query = queries(plan)
    starts = []

    def runner(rows, key, value, metadata, output_buffer) -> torch.Tensor:
        assert key is None and value is None
        starts.append(rows.storage_offset() // (HEADS * SIZE))
        assert rows.untyped_storage().data_ptr() == query.untyped_storage().data_ptr()
        return 2 * rows

    assert torch.equal(run(plan, query, runner), 2 * query)
    assert starts == [0, 2, 5]


@pytest.mark.parametrize(
    ("rows", "use_homogeneous_batch", "uses_indices"), [(1, False, False), (2, False, True), (2, True, False)]
)
@pytest.mark.parametrize("buffered", [False, True])
def test_indices_are_used_only_where_rows_are_scattered(
    rows: int, use_homogeneous_batch: bool, uses_indices: bool, buffered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = three_segments(rows)
    used = []
    for name in ("index_select", "index_copy_"):
        original = getattr(torch.Tensor, name)
        monkeypatch.setattr(
            torch.Tensor, name, lambda *args, name=name, original=original: used.append(name) or original(*args)
        )
    query = queries(plan)
    buffer = torch.empty_like(query) if buffered else None
    out = run(plan, query, double, buffer, use_homogeneous_batch=use_homogeneous_batch)
    assert torch.equal(out, 2 * query)
    assert set(used) == ({"index_select", "index_copy_"} if uses_indices else set())


def test_a_plan_without_a_batch_runs_by_index() -> None:
    plan = build_paged_piecewise_plan([[(2, 4)], [(1, 4)]], [0, 0], [4, 4], [4, 4])
    query = queries(plan)
    out = run(plan, query, double, use_homogeneous_batch=True)
    assert torch.equal(out, 2 * query)


@pytest.mark.parametrize("use_homogeneous_batch", [False, True])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("in_place", [False, True])
def test_the_output_buffer_is_written_and_returned(rows: int, use_homogeneous_batch: bool, in_place: bool) -> None:
    plan = three_segments(rows)
    query = queries(plan)
    buffer = torch.full_like(query, float("nan"))
    targets = []

    def runner(part, key, value, metadata, output_buffer) -> torch.Tensor:
        targets.append(output_buffer)
        if output_buffer is None or not in_place:
            return 2 * part
        return torch.mul(part, 2, out=output_buffer)

    out = run(plan, query, runner, buffer, use_homogeneous_batch=use_homogeneous_batch)
    assert out is buffer
    assert torch.equal(buffer, 2 * query)
    expected = [None] * 3 if rows == 2 else [buffer[0:2].shape, buffer[2:5].shape, buffer[5:6].shape]
    assert [None if target is None else target.shape for target in targets] == expected


@pytest.mark.parametrize("use_homogeneous_batch", [False, True])
@pytest.mark.parametrize("rows", [1, 2])
def test_the_output_buffer_keeps_its_dtype(rows: int, use_homogeneous_batch: bool) -> None:
    query, buffer = torch.randn(6 * rows, HEADS, SIZE), torch.empty(6 * rows, HEADS, SIZE, dtype=torch.float64)
    run(three_segments(rows), query, double, buffer, use_homogeneous_batch=use_homogeneous_batch)
    assert torch.equal(buffer, 2 * query.double())


def test_one_segment_costs_no_copy() -> None:
    plan = build_paged_piecewise_plan([[], []], [4, 0], [3, 5], [7, 5])
    outputs = []
    query = queries(plan)
    assert run(plan, query, lambda rows, *_: outputs.append(2 * rows) or outputs[0]) is outputs[0]


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("buffered", [False, True])
def test_values_may_have_another_head_size(rows: int, buffered: bool) -> None:
    plan = three_segments(rows)
    query = queries(plan)
    buffer = torch.empty(len(query), HEADS, 3) if buffered else None
    out = run(plan, query, lambda rows, *_: rows[..., :3], buffer)
    assert torch.equal(out, query[..., :3])


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("buffered", [False, True])
@pytest.mark.parametrize("use_homogeneous_batch", [False, True])
@pytest.mark.parametrize(
    "spoil",
    [
        lambda rows: rows[:-1],
        lambda rows: torch.cat([rows, rows[:1]]),
        lambda rows: rows[:, :1],
        lambda rows: rows.flatten(1),
        lambda rows: rows[None],
        lambda rows: rows[..., : SIZE - 1],
    ],
    ids=["row missing", "row too many", "heads", "flattened", "batched", "head size"],
)
def test_runner_output_is_counted_and_shaped(rows: int, buffered: bool, use_homogeneous_batch: bool, spoil) -> None:
    """The last segment is the bad one, so that a wrong head size contradicts the segments before it."""
    plan = three_segments(rows)
    query = queries(plan)
    buffer = torch.empty_like(query) if buffered else None

    def runner(part, key, value, metadata, output_buffer) -> torch.Tensor:
        return spoil(part) if metadata == 2 else part

    expected = rf"\({rows}, {HEADS}, {SIZE}\).*segment 2"
    with pytest.raises(ValueError, match=expected if spoil(query).dim() == 3 else "segment 2"):
        run(plan, query, runner, buffer, [0, 1, 2], use_homogeneous_batch=use_homogeneous_batch)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"query": torch.zeros(11, HEADS, SIZE)}, "query.*12 tokens.*got 11"),
        ({"key": torch.zeros(13, HEADS, SIZE)}, "key.*12 tokens.*got 13"),
        ({"value": torch.zeros(2, 6, HEADS, SIZE)}, "value.*12 tokens.*got 2"),
        ({"segment_metadata": [None] * 2}, "3 segments, got 2"),
        ({"segment_metadata": [None] * 4}, "3 segments, got 4"),
        ({"output_buffer": torch.zeros(11, HEADS, SIZE)}, r"output_buffer.*\(12, 2\).*\(11, 2, 8\)"),
        ({"output_buffer": torch.zeros(12, HEADS * SIZE)}, r"output_buffer.*\(12, 2\).*\(12, 16\)"),
    ],
)
def test_arguments_are_checked_before_the_first_call(changed: dict, message: str) -> None:
    tokens = torch.zeros(12, HEADS, SIZE)
    arguments = {"query": tokens, "key": tokens, "value": tokens, "segment_metadata": [None] * 3}
    with pytest.raises(ValueError, match=message):
        run_paged_piecewise_plan(plan=three_segments(), segment_runner=never_called, **(arguments | changed))


# -- numbers ------------------------------------------------------------------------------------------------------


def random_row(rng: random.Random, modes: list[str]) -> tuple[list[tuple[int, int]], int, int, int]:
    """Spans, query offset, query length and sequence length of a row that is cut into these modes."""
    offset = end = rng.randrange(12)
    spans = [(0, rng.randrange(1, offset + 1))] if offset and rng.random() < 0.5 else []
    for mode in modes:
        start, end = end, end + rng.randrange(1, 6)
        if mode == "full":
            begins_earlier = start == offset and spans == [] and rng.random() < 0.5
            spans.append((rng.randrange(offset + 1) if begins_earlier else start, end))
    query_end = end
    if modes[-1] == "full":
        end += rng.randrange(4)
        spans[-1] = (spans[-1][0], end)
    return spans, offset, query_end - offset, end + rng.randrange(3)


@pytest.mark.parametrize("use_homogeneous_batch", [False, True])
@pytest.mark.parametrize("buffered", [False, True])
@pytest.mark.parametrize("seed", range(10))
def test_random_rows_equal_the_explicit_mask(seed: int, buffered: bool, use_homogeneous_batch: bool) -> None:
    rng = random.Random(seed)
    for _ in range(6):
        modes = rng.choice(
            [["causal"], ["full"], ["causal", "full"], ["full", "full", "causal"], ["causal", "full", "causal"]]
        )
        row = random_row(rng, modes)
        num_rows = rng.randrange(1, 4)
        rows = [row] * num_rows if rng.random() < 0.3 else [random_row(rng, modes) for _ in range(num_rows)]
        spans, offsets, lengths, seq_lens = map(list, zip(*rows, strict=True))
        plan = build_paged_piecewise_plan(spans, offsets, lengths, seq_lens)
        keys, values = ([torch.randn(length, HEADS, SIZE) for length in seq_lens] for _ in range(2))
        query = queries(plan)
        buffer = torch.empty_like(query) if buffered else None
        runner = HistoryRunner(keys, values)
        out = run(plan, query, runner, buffer, plan.segments, use_homogeneous_batch=use_homogeneous_batch)
        expected = [
            dense_attention(q, k, v, explicit_mask(row_spans, list(range(offset, offset + len(q))), len(k)))
            for q, k, v, row_spans, offset in zip(query.split(lengths), keys, values, spans, offsets, strict=True)
        ]
        assert [segment.mode for segment in plan.segments] == modes
        assert torch.allclose(out, torch.cat(expected), rtol=1e-5, atol=1e-5)
