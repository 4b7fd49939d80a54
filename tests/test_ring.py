"""The window policy against truth tables and an explicit list of (position, value)."""

import random

import pytest
from dense import visible_positions

from diffusers_ardiff.cache import ForwardSpan, RingGeometry, RingState, slot_of


def geometry(sink: int, window: int, page_size: int = 1, **kwargs) -> RingGeometry:
    return RingGeometry(sink_tokens=sink, window_tokens=window, page_size=page_size, **kwargs)


def run(ring: RingState, num_tokens: int, *, start: int | None = None, succeeded: bool = True) -> ForwardSpan:
    span = ring.plan_forward(num_tokens, start=start)
    ring.begin(span)
    ring.finish(span, succeeded=succeeded)
    return span


def advance(ring: RingState, *lengths: int) -> RingState:
    for length in lengths:
        run(ring, length)
        assert ring.commit() == length
    return ring


def written(ring: RingState, span: ForwardSpan) -> list[int]:
    return [index for part in span.written_ranges(ring.geometry) for index in part]


def state_of(ring: RingState) -> dict:
    return dict(vars(ring))


# -- addresses ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("index", "slot"), [(0, 112), (15, 127), (16, 48), (47, 159)])
def test_slot_of_storage_index(index: int, slot: int) -> None:
    assert slot_of(index, [7, 3, 9], 16) == slot


@pytest.mark.parametrize("page_size", [0, -16])
def test_page_size_must_be_positive(page_size: int) -> None:
    with pytest.raises(ValueError, match="page_size"):
        slot_of(0, [7, 3, 9], page_size)
    with pytest.raises(ValueError, match="page_size"):
        geometry(0, 1, page_size)


@pytest.mark.parametrize("index", [-1, 48])
def test_slot_outside_the_table(index: int) -> None:
    """Reading past a short table row once took a neighbour's page (vllm#53982)."""
    with pytest.raises(ValueError, match=rf"{index}.*3 pages of 16"):
        slot_of(index, [7, 3, 9], 16)


@pytest.mark.parametrize(
    ("sink", "window", "extra", "pages"),
    [(9 * 1560, 9 * 1560, 0, 1755), (24, 48, 0, 5), (24, 48, 8, 5), (24, 48, 9, 6), (0, 3 * 1560, 0, 293)],
)
def test_pages_of_a_branch(sink: int, window: int, extra: int, pages: int) -> None:
    """Rounding sink and window up to pages separately gave 1756 pages and unwritten slots that were read
    (vllm-omni PR#6481); three frames of 1560 tokens at page 16 were refused (vllm-omni#6475)."""
    policy = geometry(sink, window, 16, max_extra_tokens=extra)
    assert policy.num_pages == pages
    assert policy.max_seq_len == sink + window + extra


@pytest.mark.parametrize(
    ("name", "value"),
    [("sink_tokens", -1), ("window_tokens", 0), ("max_extra_tokens", -1), ("page_size", 1.0), ("sink_tokens", True)],
)
def test_geometry_refuses(name: str, value: object) -> None:
    numbers = {"sink_tokens": 0, "window_tokens": 1, "page_size": 1, "max_extra_tokens": 0, name: value}
    with pytest.raises(ValueError, match=name):
        RingGeometry(**numbers)


# -- what is visible ------------------------------------------------------------------------------------------------


class Memory:
    """Storage indices as a plain list: what is where, written and read as the ring says."""

    def __init__(self, policy: RingGeometry) -> None:
        self.cells: list[object] = ["unwritten"] * policy.max_seq_len
        self.ring = RingState(policy)

    def write(self, span: ForwardSpan, rows: list[object]) -> None:
        indices = written(self.ring, span)
        assert len(indices) == len(set(indices)) == len(rows) == span.num_tokens + span.num_extra
        for index, row in zip(indices, rows, strict=True):
            self.cells[index] = row

    def chunk(self, num_tokens: int) -> list[object]:
        """Commit the next tokens, each named by its position; returns what the forward read."""
        span = run(self.ring, num_tokens)
        self.write(span, list(range(span.start, span.end)))
        self.ring.commit()
        return sorted(self.cells[: span.seq_len])


@pytest.mark.parametrize(
    ("count", "visible"),
    [(8, [0, 1, 2, 3, 4, 5, 6, 7]), (9, [1, 2, 3, 4, 5, 6, 7, 8]), (10, [2, 3, 4, 5, 6, 7, 8, 9])],
)
def test_full_window_does_not_evict_early(count: int, visible: list[int]) -> None:
    """A cache that was just full rolled one step too early, by a comparison that included equality
    (transformers#37574)."""
    memory = Memory(geometry(0, 8))
    for _ in range(count):
        seen = memory.chunk(1)
    assert seen == visible


def test_a_forward_overwrites_what_leaves_its_window() -> None:
    """C 24, sink 1 frame, window 3: frame 5 lands in frame 2's slots and sees frames 0, 3, 4, 5."""
    memory = Memory(geometry(24, 72, 16))
    for _ in range(5):
        memory.chunk(24)
    span = memory.ring.plan_forward(24)
    assert [memory.cells[index] for index in written(memory.ring, span)] == list(range(48, 72))
    assert memory.chunk(24) == [*range(24), *range(72, 144)]


@pytest.mark.parametrize("frames", [3, 4, 5, 11])
@pytest.mark.parametrize("tokens_per_frame", [1, 24, 1508])
def test_visible_frames_at_the_edges(frames: int, tokens_per_frame: int) -> None:
    """The sink was once counted twice in the window, and no test scrolled past it (FastVideo PR#1677). Sink 1 and
    window 3 (a peer's "window 4"): totals of S+W-1, S+W, S+W+1 and 2(S+W)+3 frames."""
    memory = Memory(geometry(tokens_per_frame, 3 * tokens_per_frame, 16))
    for _ in range(frames):
        seen = memory.chunk(tokens_per_frame)
    expected = sorted({0, *range(max(frames - 3, 1), frames)})
    assert sorted({p // tokens_per_frame for p in seen}) == expected
    assert seen == [f * tokens_per_frame + i for f in expected for i in range(tokens_per_frame)]


def test_frame_ten_sees_sink_and_last_three() -> None:
    memory = Memory(geometry(24, 72, 16))
    for _ in range(11):
        seen = memory.chunk(24)
    assert sorted({p // 24 for p in seen}) == [0, 8, 9, 10]


def test_sink_setting_changes_what_is_visible() -> None:
    """Window and sink were once read from the wrong object and had no effect (FastVideo PR#1355)."""
    seen = {}
    for sink in (0, 1, 2):
        memory = Memory(geometry(sink, 3))
        for _ in range(10):
            seen[sink] = memory.chunk(1)
    assert seen == {0: [7, 8, 9], 1: [0, 7, 8, 9], 2: [0, 1, 7, 8, 9]}


def test_ragged_page_edges_show_no_stale_token() -> None:
    """Sink 24 tokens, window 24, page 16: a page-granular eviction showed slots 24..31, never written
    (vllm-omni PR#6481). Three pages, 48 keys, tokens 0..23 and 120..143 only."""
    memory = Memory(geometry(24, 24, 16))
    assert memory.ring.geometry.num_pages == 3
    for _ in range(6):
        seen = memory.chunk(24)
    assert seen == [*range(24), *range(120, 144)]
    assert len(seen) == 48


def test_variable_chunk_lengths() -> None:
    """First chunk one frame, then three, the last one short: always exactly the last four frames."""
    memory = Memory(geometry(0, 4 * 24, 16))
    total = 0
    for frames in (1, 3, 3, 2):
        total += frames
        assert memory.chunk(frames * 24) == list(range(max(total - 4, 0) * 24, total * 24))


def test_extra_rows_sit_right_after_the_video_and_vanish() -> None:
    """S 1, W 3, A 2: while the window fills they lie in cells the next chunk takes over."""
    memory = Memory(geometry(1, 3, max_extra_tokens=2))
    for expected_kv_len in (2, 4, 4):
        span = memory.ring.plan_forward(2, 2)
        assert (span.kv_len, span.seq_len) == (expected_kv_len, expected_kv_len + 2)
        memory.ring.begin(span)
        memory.write(span, [span.start, span.start + 1, "action", "action"])
        memory.ring.finish(span, succeeded=True)
        memory.ring.commit()
        assert memory.cells[span.kv_len : span.seq_len] == ["action", "action"]
        assert "action" not in memory.cells[: span.kv_len]
    with pytest.raises(ValueError, match="num_extra"):
        memory.ring.plan_forward(1, 3)


# -- legal and illegal forwards -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_tokens", "start", "message"),
    [
        (10, None, r"10 tokens at position 24 .*window holds 9 .*sink 3"),
        (0, None, "num_tokens"),
        (3, -1, "start"),
        (3, 20, r"3 tokens at position 20 .*committed end 24"),
        (3, 25, r"3 tokens at position 25 .*committed end 24"),
        (24, 0, r"24 tokens at position 0 .*21 tokens after the sink"),
    ],
)
def test_illegal_forward_names_the_numbers(num_tokens: int, start: int | None, message: str) -> None:
    ring = advance(RingState(geometry(3, 9)), *[3] * 8)
    before = state_of(ring)
    with pytest.raises(ValueError, match=message):
        ring.plan_forward(num_tokens, start=start)
    assert state_of(ring) == before


def test_shorter_retry_after_the_wrap_is_refused() -> None:
    """S 3, W 9, H 24: the aborted 3 rows overwrote tokens 15..17, which a retry of 1 row would have to see."""
    ring = advance(RingState(geometry(3, 9)), *[3] * 8)
    run(ring, 3, succeeded=False)
    before = state_of(ring)
    with pytest.raises(ValueError, match=r"1 tokens at position 24 ends before 27"):
        ring.plan_forward(1)
    assert state_of(ring) == before
    assert written(ring, ring.plan_forward(3)) == [6, 7, 8]
    assert ring.plan_forward(5).end == 29


def test_shorter_retry_while_the_window_fills_is_legal() -> None:
    ring = advance(RingState(geometry(3, 9)), 3, 3)
    run(ring, 3, succeeded=False)
    assert ring.plan_forward(1).kv_len == 7


def test_recache_of_everything_from_zero() -> None:
    ring = advance(RingState(geometry(3, 9)), *[3] * 4)
    span = ring.plan_forward(12, start=0)
    assert span.is_recache
    assert written(ring, span) == list(range(12))


def test_denoise_forwards_advance_nothing() -> None:
    """15 forwards of one chunk: the same cells each time, position unchanged."""
    ring = advance(RingState(geometry(3, 9)), *[3] * 8)
    spans = [run(ring, 3) for _ in range(15)]
    assert len({tuple(written(ring, span)) for span in spans}) == 1
    assert ring.committed_end == 24
    assert ring.commit() == 3
    assert ring.commit() == 0
    assert ring.committed_end == 27


def test_failed_forward_clears_what_could_be_committed() -> None:
    ring = advance(RingState(geometry(3, 9)), 3)
    run(ring, 3)
    run(ring, 3, succeeded=False)
    assert ring.commit() == 0
    assert ring.committed_end == 3


def test_refused_forward_does_not_clear_what_can_be_committed() -> None:
    ring = advance(RingState(geometry(3, 9)), 3)
    run(ring, 3)
    with pytest.raises(ValueError, match="window"):
        ring.plan_forward(10)
    assert ring.commit() == 3


def test_commit_of_an_overwritten_forward_is_refused() -> None:
    ring = RingState(geometry(3, 9))
    first, second = run(ring, 3), run(ring, 4)
    with pytest.raises(RuntimeError, match=r"0\.\.3 can't be committed.*0\.\.4"):
        ring.commit(first)
    assert ring.commit(second) == 4


# -- flush, reset, recache, full history ----------------------------------------------------------------------------


def test_reset_at_a_boundary() -> None:
    """S 1, W 9, H 21: the next 3 rows sit at storage 1..3 and 4 are read."""
    ring = advance(RingState(geometry(1, 9)), *[3] * 7)
    assert ring.flush(0).sources == ()
    span = ring.plan_forward(3)
    assert (span.start, span.kv_len, written(ring, span)) == (21, 4, [1, 2, 3])


def test_flush_to_sink_and_two() -> None:
    """S 1, W 9, H 21, n 2: tokens 19, 20 move to storage 1, 2; the next 3 rows to 3..5, 6 are read; recache P 19."""
    memory = Memory(geometry(1, 9))
    for _ in range(7):
        memory.chunk(3)
    move = memory.ring.flush(2)
    assert [memory.cells[index] for index in move.sources] == [19, 20]
    assert move.targets == (1, 2)
    assert memory.ring.recache_span() == (19, 2)
    span = memory.ring.plan_forward(3)
    assert (span.kv_len, written(memory.ring, span)) == (6, [3, 4, 5])


@pytest.mark.parametrize(
    ("sink", "window", "lengths", "span"),
    [
        (3, 9, [3] * 4, (0, 12)),
        (3, 9, [3] * 5, (6, 9)),
        (3, 9, [1], (0, 1)),
        (3, 9, [], None),
        (0, 4, [1, 3], (0, 4)),
        (0, 4, [1, 3, 3], (3, 4)),
    ],
)
def test_recache_span(sink: int, window: int, lengths: list[int], span: tuple[int, int] | None) -> None:
    ring = advance(RingState(geometry(sink, window)), *lengths)
    assert ring.recache_span() == span
    if span is not None:
        run(ring, span[1], start=span[0])
        assert not ring.stale
        assert ring.commit() == 0


def test_nothing_to_recache_after_a_boundary_reset() -> None:
    ring = advance(RingState(geometry(1, 9)), *[3] * 7)
    ring.flush(0)
    assert ring.recache_span() is None


def test_reset_inside_the_sink_never_reads_the_unwritten() -> None:
    """S 3, W 9, H 1: the reset comes while the sink itself is not full."""
    memory = Memory(geometry(3, 9))
    memory.chunk(1)
    memory.ring.flush(0)
    for end in range(2, 16):
        assert memory.chunk(1) == visible_positions(end - 1, 1, 3, 9)


def test_session_reset_starts_at_zero() -> None:
    """After a reset in mid rollout the write range came out empty (Self-Forcing#39, scope#921)."""
    ring = advance(RingState(geometry(3, 9)), *[3] * 8)
    ring.reset()
    span = ring.plan_forward(3)
    assert (span.start, span.kv_len, written(ring, span)) == (0, 3, [0, 1, 2])


@pytest.mark.parametrize("sink", [0, 3])
def test_full_history_has_a_limit(sink: int) -> None:
    """21 frames, no window, 24 asked for: once a broadcast error about size 0 (Self-Forcing#39)."""
    memory = Memory(geometry(sink, 21 - sink, full_history=True))
    for _ in range(7):
        seen = memory.chunk(3)
    assert seen == list(range(21))
    before = state_of(memory.ring)
    with pytest.raises(ValueError, match=r"holds 21 tokens.*would need 24"):
        memory.ring.plan_forward(3)
    assert state_of(memory.ring) == before


def test_failed_recache_makes_the_branch_stale_until_it_succeeds() -> None:
    ring = advance(RingState(geometry(3, 9)), *[3] * 5)
    run(ring, 9, start=6, succeeded=False)
    assert ring.stale
    for call in (lambda: ring.plan_forward(3), ring.commit, lambda: ring.flush(2)):
        before = state_of(ring)
        with pytest.raises(RuntimeError, match="stale"):
            call()
        assert state_of(ring) == before
    run(ring, 9, start=6)
    assert not ring.stale
    assert ring.plan_forward(3).start == 15


def test_shorter_recache_does_not_heal_a_stale_branch() -> None:
    ring = advance(RingState(geometry(3, 9)), *[3] * 5)
    run(ring, 9, start=6, succeeded=False)
    with pytest.raises(RuntimeError, match="from position 6"):
        ring.plan_forward(3, start=12)


@pytest.mark.parametrize(("lengths", "span", "heals"), [([3] * 5, (6, 9), True), ([3] * 4, (0, 12), False)])
def test_boundary_reset_heals_only_an_intact_sink(lengths: list[int], span: tuple[int, int], heals: bool) -> None:
    ring = advance(RingState(geometry(3, 9)), *lengths)
    run(ring, span[1], start=span[0], succeeded=False)
    if heals:
        ring.flush(0)
        assert not ring.stale
    else:
        with pytest.raises(RuntimeError, match="stale"):
            ring.flush(0)
        ring.reset()
        assert not ring.stale


def test_negative_flush_is_refused() -> None:
    with pytest.raises(ValueError, match="keep_tokens"):
        RingState(geometry(1, 3)).flush(-1)


# -- everything at random -------------------------------------------------------------------------------------------


class ExplicitBranch:
    """The rules as an explicit list: which (position, version) every cell must hold, and which forwards can be right.

    ``truth[p]`` is the version of position p that a forward must see; ``cells[i]`` what storage index i holds. A
    forward is possible if all it must see and does not write itself is still in the cells.
    """

    def __init__(self, policy: RingGeometry) -> None:
        self.policy = policy
        self.cells: list[object] = [None] * policy.max_seq_len
        self.truth: dict[int, int] = {}
        self.end = 0
        self.origin = policy.sink_tokens
        self.stale_start: int | None = None
        self.pending: tuple[int, dict[int, int]] | None = None

    def visible(self, start: int, length: int) -> list[int]:
        return visible_positions(start, length, self.policy.sink_tokens, self.policy.window_tokens, self.origin)

    def allows(self, start: int, length: int, extra: int) -> bool:
        sink, window, end = self.policy.sink_tokens, self.policy.window_tokens, start + length
        if length < 1 or start < 0 or not 0 <= extra <= self.policy.max_extra_tokens:
            return False
        recache = start != self.end
        if recache and (end != self.end or (start < self.origin and self.origin != sink)):
            return False
        if self.stale_start is not None and not (recache and start <= self.stale_start):
            return False
        if sum(p >= sink for p in range(start, end)) > window:
            return False
        if self.policy.full_history and end - self.origin > window:
            return False
        kept = [p for p in self.visible(start, length) if p < start]
        return all((p, self.truth[p]) in self.cells for p in kept)

    def write(self, indices: list[int], start: int, length: int, version: int) -> None:
        rows: list[object] = [(p, version) for p in range(start, start + length)]
        rows += ["extra"] * (len(indices) - length)
        for index, row in zip(indices, rows, strict=True):
            self.cells[index] = row

    def finish(self, start: int, length: int, version: int, succeeded: bool) -> None:
        rows = dict.fromkeys(range(start, start + length), version)
        recache, self.pending = start != self.end, None
        if not recache:
            self.pending = (start + length, rows) if succeeded else None
            return
        self.truth.update(rows)
        self.stale_start = None if succeeded else start

    def commit(self) -> None:
        if self.pending is not None:
            self.end, rows = self.pending
            self.truth.update(rows)
            self.pending = None

    def flush(self, keep: int) -> None:
        self.origin = max(self.origin, self.end - min(keep, self.policy.window_tokens))
        self.stale_start = self.pending = None


def random_policy(rng: random.Random) -> RingGeometry:
    return geometry(
        rng.choice([0, 0, 1, 2, 3, 5]),
        rng.randint(1, 9),
        rng.choice([1, 2, 3, 4, 16]),
        max_extra_tokens=rng.choice([0, 0, 3]),
        full_history=rng.random() < 0.15,
    )


class RandomRun:
    """One random sequence of requests to a ring and its explicit twin."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.policy = random_policy(self.rng)
        self.ring, self.twin = RingState(self.policy), ExplicitBranch(self.policy)
        self.version = 0
        self.refused = self.accepted = 0

    def forward(self, start: int | None, length: int, extra: int) -> None:
        begin = self.twin.end if start is None else start
        before = state_of(self.ring)
        try:
            span = self.ring.plan_forward(length, extra, start)
        except (ValueError, RuntimeError):
            assert not self.twin.allows(begin, length, extra), (self.policy, before, begin, length, extra)
            assert state_of(self.ring) == before
            self.refused += 1
            return
        assert self.twin.allows(begin, length, extra), (self.policy, before, begin, length, extra)
        self.accepted += 1
        self.version += 1
        succeeded = self.rng.random() < 0.75
        self.ring.begin(span)
        self.twin.write(written(self.ring, span), begin, length, self.version)
        self.check_read(span)
        self.ring.finish(span, succeeded=succeeded)
        self.twin.finish(begin, length, self.version, succeeded)

    def check_read(self, span: ForwardSpan) -> None:
        rows = range(span.start, span.end)
        expected = [
            (p, self.version if p in rows else self.twin.truth[p])
            for p in self.twin.visible(span.start, span.num_tokens)
        ]
        read = self.twin.cells[: span.seq_len]
        assert sorted(read[: span.kv_len]) == expected
        assert read[span.kv_len :] == ["extra"] * span.num_extra

    def recache(self) -> None:
        span = self.ring.recache_span()
        if span is not None:
            self.forward(span[0], span[1], 0)

    def flush(self) -> None:
        keep = self.rng.choice([0, 0, 1, 2, 3, self.policy.window_tokens + 1])
        stale, before = self.twin.stale_start, state_of(self.ring)
        try:
            move = self.ring.flush(keep)
        except RuntimeError:
            assert stale is not None and (keep > 0 or stale < self.policy.sink_tokens)
            assert state_of(self.ring) == before
            return
        assert stale is None or (keep == 0 and stale >= self.policy.sink_tokens)
        moved = [self.twin.cells[index] for index in move.sources]
        for index, row in zip(move.targets, moved, strict=True):
            self.twin.cells[index] = row
        self.twin.flush(keep)

    def commit(self) -> None:
        if self.twin.stale_start is not None:
            with pytest.raises(RuntimeError, match="stale"):
                self.ring.commit()
            return
        self.ring.commit()
        self.twin.commit()

    def reset(self) -> None:
        self.ring.reset()
        cells = self.twin.cells
        self.twin = ExplicitBranch(self.policy)
        self.twin.cells = cells

    def step(self) -> None:
        rng, end = self.rng, self.twin.end
        match rng.choices(["next", "wild", "recache", "flush", "commit", "reset"], [8, 3, 1.5, 1, 8, 0.2])[0]:
            case "next":
                self.forward(None, rng.randint(1, 5), rng.randint(0, self.policy.max_extra_tokens))
            case "wild":
                start = rng.choice([0, end, max(end - rng.randint(0, 12), 0), end + 1, -1])
                length = rng.choice([end - start, rng.randint(0, 12)])
                self.forward(start, length, rng.choice([0, 0, 3]))
            case action:
                getattr(self, action)()
        assert (self.ring.committed_end, self.ring.origin) == (self.twin.end, self.twin.origin)


def test_random_requests_against_an_explicit_list() -> None:
    """3,000 sequences of 40 requests: what is read is the visible set to the token; a request is refused exactly where
    something it must see is gone, and then nothing has changed."""
    accepted = refused = 0
    for seed in range(3000):
        sequence = RandomRun(seed)
        for _ in range(40):
            sequence.step()
        accepted += sequence.accepted
        refused += sequence.refused
    assert accepted > 20_000
    assert refused > 5_000
