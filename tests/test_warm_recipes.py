"""Warm-up and merged commits under every recipe, and beside streams that share forwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from counting import CountingBackend
from dense import relative_error
from live_streams import NEW, OLD, stream_of, take
from recorders import FunctionRecorder, replays, warm_up
from tiny_components import QUICK, make_pipeline, record_forwards, seed

from diffusers_ardiff import ARDiffusionPipeline, Recipe, StreamBatch
from diffusers_ardiff.pipelines import ARStream
from diffusers_ardiff.pipelines.warmup import run_warmup
from diffusers_ardiff.recipes import load_recipe

SMALL = {"height": 32, "width": 48, "num_frames": 21}
RECIPES: dict[str, Recipe] = {
    "relative": QUICK.replace(rope_policy="relative"),
    "capped": QUICK.replace(rope_policy="capped", rope_limit_frames=8),
    "recompute": load_recipe("krea").replace(**SMALL, denoising_steps=(1000, 500)),
    "rolling": load_recipe("rolling-forcing").replace(**SMALL, denoising_steps=(1000, 700, 400)),
}
NUM_CHUNKS = 7


def warm_pipeline(recipe: Recipe, **options: Any) -> ARDiffusionPipeline:
    pipe = make_pipeline(recipe)
    warm_up(pipe, **options)
    return pipe


@pytest.mark.parametrize(
    ("name", "num_replays"),
    [
        ("relative", 2 * NUM_CHUNKS + NUM_CHUNKS - 1),
        ("capped", 2 * NUM_CHUNKS + NUM_CHUNKS - 1),
        ("recompute", 3 * NUM_CHUNKS + NUM_CHUNKS - 1),
        ("rolling", 1 + NUM_CHUNKS - 1),
    ],
)
def test_replayed_forwards_see_the_sink_where_it_is_now(name: str, num_replays: int) -> None:
    """Sinks are turned before a replay as before a launch; contexts that are computed again are replayed too. Forwards of
    a rolling window have extra rows and are launched, but for the very first, which holds one chunk; commits have none."""
    pipe = warm_pipeline(RECIPES[name])
    with stream_of(pipe) as stream, stream_of(make_pipeline(RECIPES[name])) as plain:
        assert torch.equal(take(stream, NUM_CHUNKS), take(plain, NUM_CHUNKS))
        sink = stream.rollout.sessions[0].branch().sink
        assert (sink.offset != 0) == (name in ("relative", "capped", "rolling"))
    assert replays(pipe) == num_replays


@pytest.mark.parametrize("name", RECIPES)
def test_nothing_compiles_after_the_warmup(name: str) -> None:
    torch._dynamo.reset()
    pipe, counting = make_pipeline(RECIPES[name]), CountingBackend("eager")
    pipe.warmup(compile={"backend": counting}, cuda_graphs=False)
    num_graphs = len(counting.graphs)
    call = {"num_frames": 81}
    with (
        torch._dynamo.config.patch(error_on_recompile=True),
        stream_of(pipe, **call) as stream,
        stream_of(make_pipeline(RECIPES[name]), **call) as plain,
    ):
        latents, expected = ([chunk.latents for chunk in one] for one in (stream, plain))
    assert relative_error(torch.cat(latents, dim=2), torch.cat(expected, dim=2)) < 1e-4
    assert len(counting.graphs) == num_graphs > 0
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("relative", "rope_policy is 'relative'"),
        ("capped", "rope_policy is 'capped'"),
        ("recompute", "context_mode is 'recompute'"),
        ("rolling", "context_mode is 'rolling'"),
    ],
)
def test_commits_are_not_merged(name: str, message: str) -> None:
    """The commit's frames, or the sink's position in it, are not those of the next step."""
    pipe = make_pipeline(RECIPES[name])
    with record_forwards(pipe.transformer) as seen:
        for call in (stream_of, ARDiffusionPipeline.__call__):
            with pytest.raises(ValueError, match=f"merge_commits=True does not go with recipe .*{message}"):
                call(pipe, prompt_embeds=OLD, merge_commits=True)
        with pytest.raises(ValueError, match=message):
            run_warmup(pipe, None, None, compile=False, recorder=FunctionRecorder(), merge_commits=True)
    assert pipe._warm is None and not seen.inputs


class TestJoint:
    @staticmethod
    def streams(pipe: ARDiffusionPipeline, pool: Any, **call: Any) -> list[ARStream]:
        return [
            stream_of(pipe, prompt_embeds=embeds, generator=seed(number), cache=pool, **call)
            for number, embeds in enumerate((OLD, NEW))
        ]

    def expected(self, recipe: Recipe, ahead: int, count: int) -> list[torch.Tensor]:
        pipe = make_pipeline(recipe)
        first, second = self.streams(pipe, pipe.create_cache(num_videos=2))
        return [take(first, ahead + count)[:, :, -3 * count :], take(second, count)]

    @pytest.mark.parametrize("name", [None, "relative"])
    @pytest.mark.parametrize("ahead", [0, 2])
    def test_in_a_warm_pool(self, ahead: int, name: str | None) -> None:
        """Rows of two streams are those of a warm call of two videos, as soon as their windows are equally full."""
        recipe = QUICK if name is None else RECIPES[name]
        pipe = warm_pipeline(recipe, num_videos=2)
        streams = self.streams(pipe, pipe._warm.manager)
        if ahead:
            take(streams[0], ahead)
        assert replays(pipe) == 0, "one row has no graph"
        batch = StreamBatch(streams)
        chunks = [batch.step() for _ in range(4)]
        for number, expected in enumerate(self.expected(recipe, ahead, 4)):
            latents = torch.cat([row[number].latents for row in chunks], dim=2)
            assert relative_error(latents, expected) < 1e-4
        # One ahead: its own commit, then steps at different fill levels, then a commit at different ones, are launched.
        assert replays(pipe) == (2 + 3 + 3 if ahead else 2 * 4 + 3)

    def test_compiles_nothing(self) -> None:
        """A pool of another size than the warm one, and rows at different frames: eager."""
        torch._dynamo.reset()
        pipe, counting = make_pipeline(QUICK), CountingBackend("eager")
        pipe.warmup(compile={"backend": counting}, cuda_graphs=False)
        num_graphs = len(counting.graphs)
        batch = StreamBatch(self.streams(pipe, pipe.create_cache(num_videos=2)))
        with torch._dynamo.config.patch(error_on_recompile=True):
            take(batch.streams[0], 1)
            chunks = [batch.step() for _ in range(3)]
        for number, expected in enumerate(self.expected(QUICK, 1, 3)):
            assert relative_error(torch.cat([row[number].latents for row in chunks], dim=2), expected) < 1e-4
        assert len(counting.graphs) == num_graphs
        torch._dynamo.reset()

    def test_streams_that_merge_their_commits(self) -> None:
        """In a batch commits run apart from the steps, all together; alone they are merged again."""
        pipe = make_pipeline(QUICK)
        batch = StreamBatch(self.streams(pipe, pipe.create_cache(num_videos=2), merge_commits=True))
        with record_forwards(pipe.transformer) as seen:
            chunks = [batch.step() for _ in range(3)]
        assert [len(latents) for latents in seen.inputs] == [2] * (2 + 3 + 3)
        chunks.append([next(stream) for stream in batch.streams])
        assert [stream.rollout.sessions[0].branch().committed_tokens for stream in batch.streams] == [9 * 6] * 2
        for number, expected in enumerate(self.expected(QUICK, 0, 4)):
            assert relative_error(torch.cat([row[number].latents for row in chunks], dim=2), expected) < 1e-4


@pytest.mark.parametrize("name", ["recompute", "rolling"])
def test_warmed_up_recaches_of_other_context_modes(name: str) -> None:
    pipe = warm_pipeline(RECIPES[name], recache=True)
    num_graphs = len(pipe._warm.graphs)
    with stream_of(pipe) as stream, stream_of(make_pipeline(RECIPES[name])) as plain:
        for num_chunks in (2, 3, 2):
            assert torch.equal(take(stream, num_chunks), take(plain, num_chunks))
            for one in (stream, plain):
                one.switch_prompt(prompt_embeds=NEW, mode="recache")
        assert torch.equal(take(stream, 2), take(plain, 2))
    assert len(pipe._warm.graphs) == num_graphs
