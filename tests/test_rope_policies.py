"""RoPE policies: what each makes of a video is what a dense implementation makes that rotates every key at each read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dense import relative_error
from dense_video import DenseVideo, Positions, absolute, capped, few_steps, relative, window_of
from rollouts import forward
from session_runs import CHUNK as CHUNK_TOKENS
from session_runs import SHUFFLES, make_pool, rows_of
from tiny_components import QUICK, TOKENS_PER_FRAME, failing, make_pipeline, random_embeds, seed

from diffusers_ardiff import ARDiffusionPipeline, CacheOptions, Recipe, StreamBatch
from diffusers_ardiff.cache import KVManager
from diffusers_ardiff.cache.sink import SinkKeys, turn_keys
from diffusers_ardiff.pipelines import ARStream
from diffusers_ardiff.rope_policies import CappedPolicy, RelativePolicy, make_policy

SINK, WINDOW, CHUNK, LIMIT = 2, 5, 2, 10
TEXT = random_embeds(1)
BASE = QUICK.replace(chunk_frames=CHUNK, num_sink_frames=SINK, num_window_frames=WINDOW)
POLICIES: dict[str, tuple[dict[str, Any], Positions]] = {
    "absolute": ({}, absolute),
    "relative": ({"rope_policy": "relative"}, relative),
    "capped": ({"rope_policy": "capped", "rope_limit_frames": LIMIT}, capped(LIMIT, SINK)),
}


@pytest.fixture(scope="module")
def pipe() -> ARDiffusionPipeline:
    return make_pipeline(BASE)


def noise_of(chunk: int, step: int, shape: tuple[int, ...]) -> torch.Tensor:
    """The same for everybody: step -1 is a chunk's initial noise."""
    return torch.randn(shape, generator=seed(1000 + 10 * chunk + step))


def recipe_of(policy: str) -> Recipe:
    return BASE.replace(**POLICIES[policy][0])


def stream_of(pipe: ARDiffusionPipeline, policy: str, chunks: int = 12, **call: Any) -> ARStream:
    latents = torch.cat([noise_of(chunk, -1, (1, 16, CHUNK, 4, 6)) for chunk in range(chunks)], dim=2)
    call = {"prompt_embeds": TEXT, "recipe": recipe_of(policy), "latents": latents, "step_noise": noise_of} | call
    return pipe.stream(output_type="latent", **call)


class DenseRollout:
    """Chunks of a video through ``DenseVideo``, from the same noise."""

    def __init__(self, pipe: ARDiffusionPipeline, policy: str) -> None:
        self.video = DenseVideo(pipe.transformer, TEXT, POLICIES[policy][1])
        self.start = self.origin = self.num_chunks = 0

    def chunk(self) -> torch.Tensor:
        own = range(self.start, self.start + CHUNK)
        seen = window_of(own, SINK, WINDOW, self.origin)
        noise = [noise_of(self.num_chunks, step, (1, 16, CHUNK, 4, 6)) for step in (-1, 0)]
        clean = few_steps(
            lambda latents, timestep: self.video.forward(latents, timestep, own, seen),
            noise[0],
            noise[1:],
            BASE.timesteps(),
            BASE.sigmas(),
        )
        self.video.forward(clean, 0.0, own, seen, keep=True)
        self.start, self.num_chunks = self.start + CHUNK, self.num_chunks + 1
        return clean


def skip_to(stream: ARStream, frame: int) -> None:
    """Go on at a far frame with nothing but the sink behind; the chunk held is committed first."""
    stream.rollout.commit_held()
    stream.rollout.flush(0)
    ring = stream.rollout.sessions[0].branch().ring
    ring.committed_end = ring.origin = ring.written_end = frame * TOKENS_PER_FRAME
    stream.rollout.num_latent_frames = frame


@pytest.mark.parametrize("shuffle_seed", SHUFFLES)
@pytest.mark.parametrize("policy", POLICIES)
def test_fill_and_overwrite(pipe: ARDiffusionPipeline, policy: str, shuffle_seed: int | None) -> None:
    """Ten chunks over a window of two and a half: the sink's distance grows, is capped, or stays."""
    dense = DenseRollout(pipe, policy)
    with stream_of(pipe, policy, cache=CacheOptions(shuffle_seed=shuffle_seed)) as stream:
        for _ in range(10):
            assert relative_error(next(stream).latents, dense.chunk()) < 1e-4


@pytest.mark.parametrize("policy", POLICIES)
def test_frame_5000(pipe: ARDiffusionPipeline, policy: str) -> None:
    dense = DenseRollout(pipe, policy)
    with stream_of(pipe, policy) as stream:
        for _ in range(2):
            assert relative_error(next(stream).latents, dense.chunk()) < 1e-4
        skip_to(stream, 5000)
        dense.start = dense.origin = 5000
        for _ in range(5):
            assert relative_error(next(stream).latents, dense.chunk()) < 1e-4


def test_policies_differ(pipe: ARDiffusionPipeline) -> None:
    """While nothing has left the window they are one video; afterwards three. The tests above would pass otherwise."""
    videos = {}
    for policy in POLICIES:
        with stream_of(pipe, policy) as stream:
            videos[policy] = [next(stream).latents for _ in range(8)]
    for policy in ("relative", "capped"):
        assert torch.equal(videos[policy][2], videos["absolute"][2])
        assert relative_error(videos[policy][7], videos["absolute"][7]) > 1e-3
    assert relative_error(videos["relative"][7], videos["capped"][7]) > 1e-3


def test_a_limit_of_all_that_is_visible_is_the_relative_policy(pipe: ARDiffusionPipeline) -> None:
    tight = BASE.replace(rope_policy="capped", rope_limit_frames=SINK + WINDOW)
    with stream_of(pipe, "relative") as first, stream_of(pipe, "capped", recipe=tight) as second:
        for _ in range(6):
            assert torch.equal(next(first).latents, next(second).latents)


class TestOffsets:
    def test_of_each_policy(self) -> None:
        """Sink 3, window 9: at frames 0..11 nothing is missing; at 30..32 the window begins at 24."""
        near, far = {"num_sink": 3, "oldest": 3, "end": 12}, {"num_sink": 3, "oldest": 24, "end": 33}
        assert [make_policy("absolute").sink_offset(**place) for place in (near, far)] == [0, 0]
        assert [RelativePolicy().sink_offset(**place) for place in (near, far)] == [0, 21]
        assert [CappedPolicy(20).sink_offset(**place) for place in (near, far)] == [0, 13]
        assert CappedPolicy(12).sink_offset(**far) == 21

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"rope_policy": "spiral"}, "allowed is one of"),
            ({"rope_policy": "capped"}, "rope_limit_frames = None: a limit goes with 'capped'"),
            ({"rope_limit_frames": 12}, "a limit goes with 'capped', and only with it"),
            ({"rope_policy": "capped", "rope_limit_frames": 6}, "rope_limit_frames = 6: allowed is at least .* = 7"),
            (
                {"num_window_frames": None, "max_latent_frames": 21, "rope_policy": "capped", "rope_limit_frames": 21},
                "'capped' needs a window",
            ),
        ],
    )
    def test_recipes_that_are_refused(self, change: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            BASE.replace(**change)


class TestSessions:
    """Forks, offload, failures, batches and prompt changes while the sink is turned."""

    NUM_BEFORE = 5

    def expected(self, pipe: ARDiffusionPipeline, count: int) -> list[torch.Tensor]:
        dense = DenseRollout(pipe, "relative")
        return [dense.chunk() for _ in range(count)]

    def started(self, pipe: ARDiffusionPipeline, pool: KVManager) -> ARStream:
        stream = stream_of(pipe, "relative", cache=pool)
        for _ in range(self.NUM_BEFORE):
            next(stream)
        return stream

    @pytest.fixture
    def pool(self, pipe: ARDiffusionPipeline) -> KVManager:
        return pipe.create_cache(recipe=recipe_of("relative"), num_videos=3)

    def test_fork(self, pipe: ARDiffusionPipeline, pool: KVManager) -> None:
        """The parent turns its sink first; the child's copy is from before, and it turns its own."""
        parent = self.started(pipe, pool)
        child = parent.fork()
        expected = self.expected(pipe, self.NUM_BEFORE + 3)[self.NUM_BEFORE :]
        for stream in (parent, child):
            for latents in expected:
                assert relative_error(next(stream).latents, latents) < 1e-4
        pool.check_integrity()

    def test_restore(self, pipe: ARDiffusionPipeline, pool: KVManager) -> None:
        stream = self.started(pipe, pool)
        stream.rollout.commit_held()
        session = stream.rollout.sessions[0]
        save = session.snapshot()
        expected = [next(stream).latents for _ in range(2)]
        stream.rollout.commit_held()
        session.restore(save)
        stream.rollout.num_latent_frames, stream._num_generated = self.NUM_BEFORE * CHUNK, self.NUM_BEFORE
        stream._generated_frames = self.NUM_BEFORE * CHUNK
        assert all(torch.equal(next(stream).latents, latents) for latents in expected)

    def test_offload(self, pipe: ARDiffusionPipeline, pool: KVManager) -> None:
        stream, twin = self.started(pipe, pool), self.started(pipe, pool)
        held = stream.rollout.sessions[0].branch()
        stream.offload()
        assert held.host_bytes == 2 * 2 * 7 * TOKENS_PER_FRAME * 24 * 4 + 2 * SINK * TOKENS_PER_FRAME * 24 * 4
        stream.onload()
        for _ in range(3):
            assert torch.equal(next(stream).latents, next(twin).latents)

    def test_an_aborted_chunk_again(self, pipe: ARDiffusionPipeline, pool: KVManager) -> None:
        """A forward that fails after the turn: the same forward gives the same bits."""
        stream, twin = self.started(pipe, pool), self.started(pipe, pool)
        with failing(pipe.transformer.blocks[1], OSError("gone")), pytest.raises(OSError, match="gone"):
            stream.rollout.commit_held()
        for _ in range(2):
            assert torch.equal(next(stream).latents, next(twin).latents)

    def test_a_turn_that_fails_half_way(self, pipe: ARDiffusionPipeline, pool: KVManager, monkeypatch: Any) -> None:
        stream, twin = self.started(pipe, pool), self.started(pipe, pool)
        branch = stream.rollout.sessions[0].branch()
        monkeypatch.setattr("diffusers_ardiff.cache.storage.turn_keys", self.broken_turn)
        with pytest.raises(MemoryError):
            branch.turn_sink(9, torch.ones(2, 1, 1, 1, 12).unbind())
        assert branch.sink.offset is None
        monkeypatch.undo()
        assert torch.equal(next(stream).latents, next(twin).latents)

    @staticmethod
    def broken_turn(pools: list[torch.Tensor], rows: Any, *_: Any) -> None:
        pools[0][rows] = 0
        raise MemoryError

    def test_batch_of_streams(self, pipe: ARDiffusionPipeline, pool: KVManager) -> None:
        """Two policies and two fill levels in one forward."""
        first = self.started(pipe, pool)
        second = stream_of(pipe, "absolute", cache=pool)
        batch = StreamBatch([first, second])
        expected = self.expected(pipe, self.NUM_BEFORE + 6)[self.NUM_BEFORE :]
        dense = DenseRollout(pipe, "absolute")
        for latents in expected:
            chunks = batch.step()
            assert relative_error(chunks[0].latents, latents) < 1e-4
            assert relative_error(chunks[1].latents, dense.chunk()) < 1e-4

    def test_recache(self, pipe: ARDiffusionPipeline, pool: KVManager) -> None:
        """All frames of the window again under another text; the sink, turned nearer, keeps its old keys."""
        stream, dense, new = self.started(pipe, pool), DenseRollout(pipe, "relative"), random_embeds(4)
        clean = torch.cat([dense.chunk() for _ in range(self.NUM_BEFORE)], dim=2)
        own = range(dense.start - WINDOW, dense.start)
        dense.video.text = new
        dense.video.forward(clean[:, :, -WINDOW:], 0.0, own, range(SINK), keep=True)
        stream.switch_prompt(prompt_embeds=new, mode="recache")
        assert stream.rollout.sessions[0].branch().sink.offset == dense.start - WINDOW - SINK
        for _ in range(3):
            assert relative_error(next(stream).latents, dense.chunk()) < 1e-4

    def test_recache_from_the_start(self, pipe: ARDiffusionPipeline, pool: KVManager) -> None:
        """While all frames are visible the sink is rewritten, also after somebody turned it."""
        first, second = stream_of(pipe, "relative", cache=pool), stream_of(pipe, "relative", cache=pool)
        for stream in (first, second):
            for _ in range(2):
                next(stream)
            stream.rollout.commit_held()
        branch = first.rollout.sessions[0].branch()
        branch.turn_sink(5, first.rollout.calls.angles._rope.turn(5))
        for stream in (first, second):
            stream.switch_prompt(prompt_embeds=random_embeds(4), mode="recache")
        assert branch.sink.written == ()
        for _ in range(3):
            assert torch.equal(next(first).latents, next(second).latents)

    def test_reset(self, pipe: ARDiffusionPipeline, pool: KVManager) -> None:
        stream = self.started(pipe, pool)
        stream.reset()
        assert stream.rollout.sessions[0].branch().sink.written == ()
        for latents in self.expected(pipe, 3):
            assert relative_error(next(stream).latents, latents) < 1e-4

    def test_guidance(self, pipe: ARDiffusionPipeline) -> None:
        """Both branches turn."""
        call = {"guidance_scale": 2.0, "negative_prompt_embeds": TEXT}
        with stream_of(pipe, "relative", **call) as guided, stream_of(pipe, "relative") as plain:
            for _ in range(6):
                # With the same text on both sides guidance changes nothing.
                assert relative_error(next(guided).latents, next(plain).latents) < 1e-4


class TestTurns:
    """Single turns of one branch, by a "rotation" that doubles."""

    TWICE = (torch.full((1, 1, 1, 8), 2.0), torch.zeros(1, 1, 1, 8))

    @pytest.mark.parametrize("shuffle_seed", SHUFFLES)
    def test_a_rewrite_of_half_the_sink(self, shuffle_seed: int | None) -> None:
        """The half that stays is as it was written, since nothing is turned any more."""
        branch = make_pool(1, shuffle_seed=shuffle_seed).open_session().branch()
        for number in range(2):
            forward([branch], rows_of(number))
        branch.turn_sink(1, self.TWICE)
        before = 2 * rows_of(0).keys[0]
        storage = branch.storage
        slots = storage.slots(torch.arange(CHUNK_TOKENS), branch.run)
        assert torch.equal(storage.key_pools[1][slots], before)
        forward([branch], rows_of(5, 36), start=12, commit=False)
        assert torch.equal(storage.key_pools[1][slots[:12]], rows_of(0).keys[0, :12])
        assert branch.sink.offset == 0

    def test_a_rewrite_of_half_the_sink_is_staged_whole(self) -> None:
        """The half that stayed was put back in the pages, but its staged copy was still turned: only the rows of the
        forward were staged again, and attention was off by more than its values."""
        outs = []
        for shuffle_seed, turned in ((4, True), (None, False)):
            branch = make_pool(1, shuffle_seed=shuffle_seed).open_session().branch()
            for number in range(2):
                forward([branch], rows_of(number), backend="sdpa")
            if turned:
                branch.turn_sink(1, self.TWICE)
                forward([branch], rows_of(3), backend="sdpa", commit=False)
            outs.append(forward([branch], rows_of(5, 36), start=12, backend="sdpa", commit=False))
        assert relative_error(*outs) < 1e-5

    @pytest.mark.parametrize("shuffle_seed", SHUFFLES)
    @pytest.mark.parametrize("turns_before", [0, 1])
    def test_a_turn_that_fails_in_the_second_layer(
        self, turns_before: int, shuffle_seed: int | None, monkeypatch: Any
    ) -> None:
        """At the very first turn the keys as written were kept only when all layers were done, so the next attempt took
        layer 0's, turned already, for those written, and turned them twice."""
        branch = make_pool(1, shuffle_seed=shuffle_seed).open_session().branch()
        for number in range(2):
            forward([branch], rows_of(number))
        if turns_before:
            branch.turn_sink(2, self.TWICE)
        with monkeypatch.context() as patch:
            patch.setattr("diffusers_ardiff.cache.storage.turn_keys", self.turn_of_one_layer)
            with pytest.raises(MemoryError):
                branch.turn_sink(3, self.TWICE)
        storage = branch.storage
        slots = storage.slots(torch.arange(CHUNK_TOKENS), branch.run)
        for offset, factor in ((1, 2.0), (0, 1.0)):
            branch.turn_sink(offset, self.TWICE if offset else None)
            for pool in storage.key_pools:
                assert torch.equal(pool[slots], factor * rows_of(0).keys[0])

    def test_a_sink_half_put_back_is_turned_again(self, monkeypatch: Any) -> None:
        """A forward that rewrites rows of the sink puts the others back first. Where that failed half-way the sink still
        counted as turned, so the next forward did not turn the layers that were put back."""
        branch = make_pool(1).open_session().branch()
        for number in range(2):
            forward([branch], rows_of(number))
        branch.turn_sink(1, self.TWICE)
        with monkeypatch.context() as patch:
            patch.setattr("diffusers_ardiff.cache.storage.turn_keys", self.turn_of_one_layer)
            with pytest.raises(MemoryError):
                forward([branch], rows_of(5, 36), start=12)
        branch.turn_sink(1, self.TWICE)
        slots = branch.storage.slots(torch.arange(CHUNK_TOKENS), branch.run)
        for pool in branch.storage.key_pools:
            assert torch.equal(pool[slots], 2.0 * rows_of(0).keys[0])

    @staticmethod
    def turn_of_one_layer(pools: list[torch.Tensor], rows: Any, written: SinkKeys, rotary: Any) -> None:
        turn_keys(pools[:1], rows, SinkKeys(written=written.written[:1]), rotary)
        raise MemoryError

    def test_a_staged_window_is_staged_again(self) -> None:
        """Nothing was committed between two forwards, but the sink has moved."""
        first, second = (make_pool(1, shuffle_seed=4).open_session().branch() for _ in range(2))
        for branch in (first, second):
            for number in range(2):
                forward([branch], rows_of(number), backend="sdpa")
        forward([first], rows_of(7), backend="sdpa", commit=False)
        outs = []
        for branch in (first, second):
            branch.turn_sink(1, self.TWICE)
            outs.append(forward([branch], rows_of(8), backend="sdpa", commit=False))
        assert torch.equal(*outs)


def test_cost_is_in_the_plan(pipe: ARDiffusionPipeline) -> None:
    """One copy of the sink's keys a branch, counted before and allocated at the first turn."""
    plans = {policy: pipe.plan_memory(recipe=recipe_of(policy), guided=True) for policy in POLICIES}
    written = 2 * SINK * TOKENS_PER_FRAME * 24 * 4
    assert [plan.sink_bytes for plan in plans.values()] == [0, 2 * written, 2 * written]
    assert plans["relative"].total_bytes == plans["absolute"].total_bytes + 2 * written
    assert "sink keys" in str(plans["relative"])
    with stream_of(pipe, "relative") as stream:
        branch = stream.rollout.sessions[0].branch()
        held = [(next(stream), branch.sink.num_bytes)[1] for _ in range(5)]
    assert held == [0, 0, 0, written, written]


def test_turning_needs_a_whole_sink(pipe: ARDiffusionPipeline) -> None:
    with stream_of(pipe, "relative") as stream:
        branch = stream.rollout.sessions[0].branch()
        turn = stream.rollout.calls.angles._rope.turn(3)
        with pytest.raises(ValueError, match="0 of its 12 tokens are committed"):
            branch.turn_sink(3, turn)
        for _ in range(2):
            next(stream)
        with pytest.raises(ValueError, match="give the rotation"):
            branch.turn_sink(3, None)
