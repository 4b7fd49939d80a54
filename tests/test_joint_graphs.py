"""Joint forwards captured in a warm-up of several streams: the bits of launched ones, and which of them are replayed.

The recorder keeps the function (tests/recorders.py), so a replay that misses an input computes with a stale one.
"""

from __future__ import annotations

from typing import Any

import pytest
import recorders
import torch
from counting import CountingBackend
from dense import relative_error
from live_streams import NEW, OLD, THIRD, stream_of, take
from recorders import replays
from test_warm_recipes import RECIPES
from tiny_components import QUICK, make_pipeline, record_forwards, record_pools, seed

from diffusers_ardiff import ARDiffusionPipeline, Recipe, StreamBatch
from diffusers_ardiff.pipelines import ARStream
from diffusers_ardiff.pipelines.warmup import WarmupReport

FILL_LEVELS = 2
"""S 1 + W 5 frames in chunks of 3."""
TEXTS = (OLD, NEW, THIRD)


def warm_up(pipe: ARDiffusionPipeline, num_streams: int = 2, **options: Any) -> WarmupReport:
    return recorders.warm_up(pipe, num_streams=num_streams, **options)


@pytest.fixture(scope="module")
def pipe() -> ARDiffusionPipeline:
    pipe = make_pipeline(QUICK)
    warm_up(pipe)
    return pipe


def streams_of(pipe: ARDiffusionPipeline, count: int = 2, **call: Any) -> list[ARStream]:
    """Streams of different prompts and noise; in the warm pool where there is one."""
    if pipe._warm is None and count > 1:
        guided = call.get("guidance_scale", 1.0) > 1.0
        call["cache"] = pipe.create_cache(num_videos=count, guided=guided)
    return [stream_of(pipe, prompt_embeds=TEXTS[n], generator=seed(n), **call) for n in range(count)]


def both(pipe: ARDiffusionPipeline, recipe: Recipe = QUICK, count: int = 2, **call: Any) -> list[StreamBatch]:
    """The same streams in the warm pool, and where everything is launched."""
    return [StreamBatch(streams_of(one, count, **call)) for one in (pipe, make_pipeline(recipe))]


def assert_same_rounds(warm: StreamBatch, plain: StreamBatch, count: int) -> None:
    for _ in range(count):
        for chunk, expected in zip(warm.step(), plain.step(), strict=True):
            assert torch.equal(chunk.latents, expected.latents)


def close(*batches: StreamBatch) -> None:
    for batch in batches:
        for stream in batch.streams:
            stream.close()


class TestReplay:
    def test_bits_of_launched_forwards_and_every_one_replayed(self, pipe: ARDiffusionPipeline) -> None:
        before = replays(pipe)
        warm, plain = both(pipe)
        assert_same_rounds(warm, plain, 6)
        assert replays(pipe) - before == 2 * 6 + 5
        close(warm, plain)

    def test_latents_of_single_streams(self, pipe: ARDiffusionPipeline) -> None:
        batch = StreamBatch(streams_of(pipe))
        rounds = [batch.step() for _ in range(5)]
        for number in range(2):
            (single,) = [stream_of(make_pipeline(QUICK), prompt_embeds=TEXTS[number], generator=seed(number))]
            latents = torch.cat([chunks[number].latents for chunks in rounds], dim=2)
            assert relative_error(latents, take(single, 5)) < 1e-4
        close(batch)

    def test_different_fill_levels_are_launched(self, pipe: ARDiffusionPipeline) -> None:
        """A graph fixes how many keys each row reads; once both windows are full, whatever their frames, they replay."""
        before = replays(pipe)
        warm, plain = both(pipe)
        for batch in (warm, plain):
            take(batch.streams[0], 2)
        alone = 2 * 2 + 1
        assert replays(pipe) - before == alone
        assert_same_rounds(warm, plain, 5)
        # Round 0: the first one's commit alone. Round 1: the commits at different levels, the steps alike.
        assert replays(pipe) - before == alone + 1 + 2 + 3 * 3
        starts = [stream.rollout.sessions[0].branch().committed_tokens for stream in warm.streams]
        assert starts[0] != starts[1]
        close(warm, plain)

    def test_whatever_the_order_of_the_streams(self, pipe: ARDiffusionPipeline) -> None:
        """Rows are put in the order of their pages; in the order given, a batch made the other way round was launched."""
        before = replays(pipe)
        first, second = streams_of(pipe)
        batch, twin = StreamBatch([second, first]), StreamBatch(streams_of(make_pipeline(QUICK)))
        for _ in range(3):
            chunks, expected = batch.step(), twin.step()
            for chunk, other in zip(chunks, reversed(expected), strict=True):
                assert torch.equal(chunk.latents, other.latents)
        assert replays(pipe) - before == 2 * 3 + 2
        close(batch, twin)

    def test_alone_and_together_in_turns(self, pipe: ARDiffusionPipeline) -> None:
        before = replays(pipe)
        warm, plain = both(pipe)
        for _ in range(2):
            assert_same_rounds(warm, plain, 1)
            for one, other in zip(warm.streams, plain.streams, strict=True):
                assert torch.equal(take(one, 1), take(other, 1))
        assert_same_rounds(warm, plain, 1)
        assert replays(pipe) - before == 3 * 2 + 2 * 2 * 2 + 2 * 2 + 2
        close(warm, plain)

    def test_text_is_joined_once_though_streams_run_alone_in_between(self, pipe: ARDiffusionPipeline) -> None:
        """A stream that ran alone took a new copy of its own text, so the batch joined all texts again every round."""
        batch = StreamBatch(streams_of(pipe))
        batch.step()
        joined = batch._forward._text._joined["positive"][1]
        for stream in batch.streams:
            next(stream)
        batch.step()
        assert batch._forward._text._joined["positive"][1] is joined
        close(batch)

    @pytest.mark.parametrize("mode", ["text", "recache"])
    def test_a_prompt_change_in_one(self, pipe: ARDiffusionPipeline, mode: str) -> None:
        warm, plain = both(pipe)
        assert_same_rounds(warm, plain, 2)
        for batch in (warm, plain):
            batch.streams[1].update(prompt_embeds=THIRD, mode=mode)
        before = replays(pipe)
        assert_same_rounds(warm, plain, 2)
        assert replays(pipe) - before == 2 * 3
        close(warm, plain)

    def test_one_batch_after_the_other(self, pipe: ARDiffusionPipeline) -> None:
        """The next batch's joined text must not be taken for the last one's."""
        for embeds in (TEXTS[:2], TEXTS[1:], TEXTS[:2]):
            batches = []
            for one in (pipe, make_pipeline(QUICK)):
                pool = {} if one is pipe else {"cache": one.create_cache(num_videos=2)}
                batches.append(StreamBatch(stream_of(one, prompt_embeds=text, **pool) for text in embeds))
            assert_same_rounds(*batches, 2)
            close(*batches)

    def test_the_end_of_one(self, pipe: ARDiffusionPipeline) -> None:
        first, second = streams_of(pipe)
        first.close()
        other = stream_of(pipe, prompt_embeds=THIRD, generator=seed(2), num_frames=21)
        batch = StreamBatch([second, other])
        before = replays(pipe)
        rounds = [batch.step() for _ in range(4)]
        assert [chunks[1] is None for chunks in rounds] == [False, False, True, True]
        assert replays(pipe) - before == 2 * 4 + 3
        expected = take(stream_of(make_pipeline(QUICK), prompt_embeds=NEW, generator=seed(1)), 4)
        assert relative_error(torch.cat([chunks[0].latents for chunks in rounds], dim=2), expected) < 1e-4
        close(batch)

    def test_a_fork_beside_its_parent(self, pipe: ARDiffusionPipeline) -> None:
        """The child lies in the other run of the warm pool."""
        parent, plain = stream_of(pipe), stream_of(make_pipeline(QUICK))
        take(parent, 3)
        expected = take(plain, 6)[:, :, 9:]
        batch = StreamBatch([parent, parent.fork()])
        rounds = [batch.step() for _ in range(3)]
        before = replays(pipe)
        batch.step()
        assert replays(pipe) - before == 3
        for number in range(2):
            latents = torch.cat([chunks[number].latents for chunks in rounds], dim=2)
            assert relative_error(latents, expected) < 1e-4
        close(batch)

    def test_guidance(self) -> None:
        pipe = make_pipeline(QUICK)
        assert warm_up(pipe, guided=True).num_graphs == 5 * 2 * FILL_LEVELS
        warm, plain = both(pipe, guidance_scale=3.0, negative_prompt_embeds=THIRD)
        assert_same_rounds(warm, plain, 4)
        assert replays(pipe) == 2 * (2 * 4 + 3)
        close(warm, plain)

    @pytest.mark.parametrize(("count", "num_replays"), [(2, 0), (3, 2 * 3 + 2)])
    def test_only_all_of_them_together(self, count: int, num_replays: int) -> None:
        """Of three streams, each alone and all three were captured; two of them are launched."""
        pipe = make_pipeline(QUICK)
        assert warm_up(pipe, 3).num_graphs == 7 * FILL_LEVELS
        warm, plain = both(pipe, count=count)
        assert_same_rounds(warm, plain, 3)
        assert replays(pipe) == num_replays
        close(warm, plain)

    @pytest.mark.parametrize("name", RECIPES)
    def test_every_recipe(self, name: str) -> None:
        """Turned sinks, contexts computed again; of a rolling window the first forward, of one chunk, and the commits."""
        recipe = RECIPES[name]
        pipe = make_pipeline(recipe)
        warm_up(pipe)
        warm, plain = both(pipe, recipe)
        assert_same_rounds(warm, plain, 6)
        assert replays(pipe) == {"rolling": 1 + 5, "recompute": 3 * 6 + 5}.get(name, 2 * 6 + 5)
        close(warm, plain)

    def test_full_history(self) -> None:
        recipe = QUICK.replace(num_window_frames=None, num_sink_frames=0, max_latent_frames=9)
        pipe = make_pipeline(recipe)
        assert warm_up(pipe).num_graphs == 5 * 3
        warm, plain = both(pipe, recipe)
        assert_same_rounds(warm, plain, 3)
        assert replays(pipe) == 2 * 3 + 2
        close(warm, plain)


class TestWarmup:
    def test_one_pool_for_all_and_another_for_one_more(self) -> None:
        pipe = make_pipeline(QUICK)
        with record_pools() as pools:
            report = warm_up(pipe)
            # Each alone, its commits apart; together, commits run as forwards that attend to the end.
            assert report.num_graphs == 5 * FILL_LEVELS
            # Alone with commit: 3 chunks each; together one more.
            assert len(report.chunk_seconds) == 3 + 3 + 4
            assert report.pool_bytes == 2 * pipe.create_cache().storage.num_bytes
            streams = streams_of(pipe)
            assert all(stream.rollout.runner.graphs is pipe._warm.graphs for stream in streams)
            num_pools = len(pools)
            with stream_of(pipe) as third:
                assert len(pools) == num_pools + 1 and third.rollout.runner.graphs is None
            close(StreamBatch(streams))

    def test_nothing_compiles_afterwards(self) -> None:
        torch._dynamo.reset()
        pipe, counting = make_pipeline(QUICK), CountingBackend("eager")
        report = warm_up(pipe, compile={"backend": counting})
        assert report.num_compiled_shapes == len(counting.graphs) == 2
        warm, plain = both(pipe)
        with torch._dynamo.config.patch(error_on_recompile=True):
            take(warm.streams[0], 1), take(plain.streams[0], 1)
            for _ in range(4):
                for chunk, expected in zip(warm.step(), plain.step(), strict=True):
                    assert relative_error(chunk.latents, expected.latents) < 1e-4
        assert len(counting.graphs) == 2
        close(warm, plain)
        torch._dynamo.reset()

    def test_with_merged_commits(self) -> None:
        """Alone, commits are merged and replayed; together they run apart, and are replayed too."""
        pipe = make_pipeline(QUICK)
        warm_up(pipe, merge_commits=True)
        warm, plain = both(pipe, merge_commits=True)
        assert_same_rounds(warm, plain, 4)
        assert replays(pipe) == 2 * 4 + 3
        for one, other in zip(warm.streams, plain.streams, strict=True):
            assert torch.equal(take(one, 2), take(other, 2))
        assert replays(pipe) == 2 * 4 + 3 + 2 * 2 * 2
        close(warm, plain)

    def test_streams_leave_nothing_behind(self) -> None:
        pipe = make_pipeline(QUICK)
        with record_forwards(pipe.transformer) as seen:
            warm_up(pipe, recorder=None)
        assert {len(latents) for latents in seen.inputs} == {1, 2}
        assert not pipe._warm.manager.sessions and pipe._warm.manager.allocator.num_used == 0

    @pytest.mark.parametrize("number", [0, True, 1.5])
    def test_bad_numbers(self, number: Any) -> None:
        pipe = make_pipeline(QUICK)
        with pytest.raises(ValueError, match="num_streams"):
            warm_up(pipe, number)
        assert pipe._warm is None

    def test_the_limit_is_that_of_all_streams(self) -> None:
        from diffusers_ardiff import CacheOptions, MemoryLimitError

        pipe = make_pipeline(QUICK)
        one = pipe.plan_memory(decode=False).total_bytes
        options = CacheOptions(limit_bytes=one + one // 2)
        warm_up(pipe, 1, cache=options, decode=False)
        with pytest.raises(MemoryLimitError):
            warm_up(pipe, 2, cache=options, decode=False)
