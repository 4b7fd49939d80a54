"""Whole forwards captured in a warm-up and replayed later: same numbers, the right keys, and refusals.

The recorder keeps the function (tests/recorders.py), so a replay that misses an input computes with a stale one.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dense import relative_error
from live_streams import NEW, OLD, stream_of, take
from recorders import FunctionRecorder, replays, warm_up
from tiny_components import QUICK, RECIPE, make_pipeline, random_embeds, record_pools

from diffusers_ardiff import ARDiffusionPipeline, CacheOptions, Recipe
from diffusers_ardiff.pipelines.denoise import FrameStep

NUM_CHUNKS = 6
FILL_LEVELS = 2
"""S 1 + W 5 frames in chunks of 3."""


@pytest.fixture(scope="module")
def pipe() -> ARDiffusionPipeline:
    pipe = make_pipeline(QUICK)
    warm_up(pipe)
    return pipe


class TestReplay:
    def test_same_latents_and_every_forward_replayed(self, pipe: ARDiffusionPipeline) -> None:
        """Fill, first overwrite, steady state; a stale slot, angle, timestep or latent would change the video."""
        before = replays(pipe)
        with stream_of(pipe) as stream, stream_of(make_pipeline(QUICK)) as plain:
            latents, expected = take(stream, NUM_CHUNKS), take(plain, NUM_CHUNKS)
        assert torch.equal(latents, expected)
        assert replays(pipe) - before == 2 * NUM_CHUNKS + NUM_CHUNKS - 1

    def test_text_of_another_prompt_is_copied_in(self, pipe: ARDiffusionPipeline) -> None:
        with stream_of(pipe) as stream, stream_of(make_pipeline(QUICK)) as plain:
            for one in (stream, plain):
                take(one, 3)
                one.switch_prompt(prompt_embeds=NEW)
            latents, expected = take(stream, 2), take(plain, 2)
        assert torch.equal(latents, expected)

    def test_a_recache_runs_plainly_and_what_follows_replays(self, pipe: ARDiffusionPipeline) -> None:
        with stream_of(pipe) as stream, stream_of(make_pipeline(QUICK)) as plain:
            for one in (stream, plain):
                take(one, 3)
            before = replays(pipe)
            for one in (stream, plain):
                one.switch_prompt(prompt_embeds=NEW, mode="recache")
            assert replays(pipe) == before + 1, "the commit that was due"
            latents, expected = take(stream, 2), take(plain, 2)
            assert replays(pipe) == before + 1 + 5
        assert torch.equal(latents, expected)

    def test_one_stream_after_the_other(self, pipe: ARDiffusionPipeline) -> None:
        """The next stream's text must not be taken for the last one's, though its tensors may lie where those lay."""
        firsts = []
        for embeds in (OLD, NEW, OLD):
            with stream_of(pipe, prompt_embeds=embeds) as stream:
                firsts.append(take(stream, 2))
        assert torch.equal(firsts[0], firsts[2])
        assert not torch.equal(firsts[0], firsts[1])

    def test_an_output_outlives_the_next_replay(self, pipe: ARDiffusionPipeline) -> None:
        """Both come from one captured forward, whose output tensor is one and the same."""
        with stream_of(pipe) as stream, torch.no_grad():
            noise = torch.randn(2, *stream.rollout.shape.chunk(3), generator=torch.Generator().manual_seed(4))
            first = stream.rollout.predict(FrameStep(latents=noise[0], timestep=1000.0), 1.0)
            kept = first.clone()
            stream.rollout.predict(FrameStep(latents=noise[1], timestep=500.0), 1.0)
        assert torch.equal(first, kept)

    def test_no_gradients_whoever_asks(self, pipe: ARDiffusionPipeline) -> None:
        """A commit that a caller runs outside of ``no_grad`` kept a graph of the whole model, and compiled it again."""
        trained = make_pipeline(QUICK)
        trained.transformer.requires_grad_(True)
        with stream_of(trained) as stream:
            take(stream, 1)
            stream.set_embeds({"positive": NEW})
            assert stream.rollout.sessions[0].branch().committed_tokens > 0, "the commit that was due"
            step = FrameStep(latents=torch.zeros(stream.rollout.shape.chunk(3)), timestep=500.0)
            assert not stream.rollout.predict(step, 1.0).requires_grad
            assert not stream.rollout.sessions[0].branch().storage.key_pools[0].requires_grad

    def test_a_second_stream_has_a_pool_of_its_own(self, pipe: ARDiffusionPipeline) -> None:
        with stream_of(pipe) as first, record_pools() as pools, stream_of(pipe) as second:
            assert len(pools) == 1
            before = replays(pipe)
            expected = take(first, 3)
            count = replays(pipe) - before
            assert torch.equal(take(second, 3), expected)
            assert replays(pipe) - before == count == 2 * 3 + 2
            assert second.rollout.runner.graphs is None

    def test_a_fork_runs_in_pages_without_graphs(self) -> None:
        pipe = make_pipeline(QUICK)
        warm_up(pipe, num_videos=1)
        pool = pipe.create_cache(num_videos=2)
        with stream_of(pipe, cache=pool) as stream:
            assert stream.rollout.runner.graphs is None
            take(stream, 2)
            with stream.fork() as child:
                assert torch.equal(take(child, 1), take(stream, 1))

    def test_guidance_and_two_videos(self) -> None:
        """Both branches have graphs of their own, and the text of each row is its own."""
        pipe = make_pipeline(QUICK)
        report = warm_up(pipe, num_videos=2, guided=True)
        assert report.num_graphs == 2 * 2 * FILL_LEVELS
        call = {"prompt_embeds": random_embeds(1, rows=2), "negative_prompt_embeds": NEW, "guidance_scale": 3.0}
        with stream_of(pipe, **call) as stream, stream_of(make_pipeline(QUICK), **call) as plain:
            assert torch.equal(take(stream, 4), take(plain, 4))
        assert replays(pipe) == 2 * (2 * 4 + 3)

    def test_a_hook_that_edits_latents_replays_and_one_that_adds_arguments_does_not(
        self, pipe: ARDiffusionPipeline
    ) -> None:
        for hook, num_replays in (
            (lambda inputs: {"hidden_states": inputs.latents * 0.5}, 5),
            (lambda inputs: {"hidden_states": inputs.latents * 0.5, "attention_kwargs": {}}, 0),
        ):
            before = replays(pipe)
            with (
                stream_of(pipe, control_hook=hook) as stream,
                stream_of(make_pipeline(QUICK), control_hook=hook) as plain,
            ):
                assert torch.equal(take(stream, 2), take(plain, 2))
            assert replays(pipe) - before == num_replays

    def test_full_history_has_a_graph_for_every_length(self) -> None:
        recipe = RECIPE.replace(num_window_frames=None, num_sink_frames=0, max_latent_frames=9)
        pipe = make_pipeline(recipe)
        assert warm_up(pipe).num_graphs == 2 * 3
        with stream_of(pipe) as stream, stream_of(make_pipeline(recipe)) as plain:
            assert torch.equal(take(stream, 3), take(plain, 3))
        assert replays(pipe) == 4 * 3 + 2


class TestWarmup:
    def test_report_and_pool(self) -> None:
        pipe, recorder = make_pipeline(QUICK), FunctionRecorder()
        with record_pools() as pools:
            report = warm_up(pipe, recorder=recorder)
            with stream_of(pipe) as stream:
                take(stream, 1)
            assert len(pools) == 1, "the stream lives in the warm pool"
        assert report.num_graphs == recorder.num_recorded == 2 * FILL_LEVELS
        assert len(report.chunk_seconds) == 3 and report.num_compiled_shapes == 0
        assert report.pool_bytes == pipe._warm.manager.storage.num_bytes
        assert "4 forwards captured" in str(report)

    def test_another_resolution_runs_plainly_and_captures_anew(self) -> None:
        pipe = make_pipeline(QUICK)
        warm_up(pipe)
        with stream_of(pipe, height=48) as stream:
            expected = take(stream, 3)
        assert replays(pipe) == 0
        warm_up(pipe, height=48)
        with stream_of(pipe, height=48) as stream:
            assert torch.equal(take(stream, 3), expected)
        assert replays(pipe) == 8
        with stream_of(pipe) as stream:
            take(stream, 1)
        assert replays(pipe) == 8

    def test_another_window_runs_plainly_and_captures_anew(self) -> None:
        pipe, recipe = make_pipeline(QUICK), QUICK.replace(num_window_frames=8)
        warm_up(pipe)
        with stream_of(pipe, recipe=recipe) as stream:
            expected = take(stream, 5)
        assert replays(pipe) == 0
        report = warm_up(pipe, recipe=recipe)
        assert report.num_graphs == 2 * 3, "3, 6 and 9 frames of keys, commits apart"
        with stream_of(pipe, recipe=recipe) as stream:
            assert torch.equal(take(stream, 5), expected)
        assert replays(pipe) == 5 * 3 - 1

    def test_cooldown_gives_the_pool_back(self) -> None:
        pipe = make_pipeline(QUICK)
        with record_pools() as pools:
            warm_up(pipe, recorder=None)
            assert pools[0]() is not None
            pipe.cooldown()
            assert pools[0]() is None
        pipe.cooldown()
        with stream_of(pipe) as stream:
            take(stream, 1)

    def test_the_global_noise_is_left_alone(self) -> None:
        pipe = make_pipeline(QUICK)
        torch.manual_seed(5)
        expected = torch.rand(3)
        torch.manual_seed(5)
        warm_up(pipe)
        assert torch.equal(torch.rand(3), expected)

    def test_a_failed_warmup_leaves_nothing(self) -> None:
        pipe = make_pipeline(QUICK)

        def refuse(_function: Any) -> Any:
            raise RuntimeError("out of graphs")

        with record_pools() as pools, pytest.raises(RuntimeError, match="out of graphs"):
            warm_up(pipe, recorder=refuse)
        assert pipe._warm is None
        assert all(pool() is None or not pool().sessions for pool in pools)
        with stream_of(pipe) as stream, stream_of(make_pipeline(QUICK)) as plain:
            assert torch.equal(take(stream, 2), take(plain, 2))


class TestRefusals:
    def test_graphs_without_a_cuda_device(self) -> None:
        pipe = make_pipeline(QUICK)
        with pytest.raises(RuntimeError, match=r"CUDA graphs need a CUDA device.*cuda_graphs=False"):
            pipe.warmup()
        assert pipe._warm is None

    def test_moved_pool(self) -> None:
        """In the middle of a stream: refused before anything is claimed or written."""
        pipe = make_pipeline(QUICK)
        warm_up(pipe)
        stream = stream_of(pipe)
        take(stream, 1)
        storage = pipe._warm.manager.storage
        storage.value_pools[1] = storage.value_pools[1].clone()
        branch = stream.rollout.sessions[0].branch()
        with pytest.raises(RuntimeError, match=r"pools have moved.*warmup\(\)"):
            stream.rollout.commit_held()
        assert branch.is_idle and branch.ring.written_end == 3 * 6
        stream.close()
        with pytest.raises(RuntimeError, match="pools have moved"):
            stream_of(pipe)
        assert not pipe._warm.manager.sessions
        warm_up(pipe)
        with stream_of(pipe) as stream:
            take(stream, 1)

    @pytest.mark.parametrize("change", ["moved", "added"])
    def test_other_weights(self, change: str) -> None:
        pipe = make_pipeline(QUICK)
        warm_up(pipe)
        linear = pipe.transformer.blocks[1].ffn.net[2]
        if change == "moved":
            linear.weight = torch.nn.Parameter(linear.weight.clone())
        else:
            linear.register_buffer("lora", torch.zeros(1))
        with pytest.raises(RuntimeError, match="weights were moved, replaced or added"):
            stream_of(pipe)
        assert not pipe._warm.manager.sessions
        pipe.cooldown()
        with stream_of(pipe) as stream:
            take(stream, 1)

    @pytest.mark.parametrize("change", ["scale", "off"])
    def test_a_lora_that_is_scaled_or_switched_off(self, change: str) -> None:
        """No tensor moves then, but a captured product would keep its factor."""
        pytest.importorskip("peft")
        from peft import LoraConfig

        pipe = make_pipeline(QUICK)
        pipe.transformer.add_adapter(LoraConfig(r=2, target_modules=["to_q"]), adapter_name="style")
        warm_up(pipe)
        with stream_of(pipe) as stream:
            take(stream, 1)
        if change == "scale":
            pipe.transformer.set_adapters("style", 0.5)
        else:
            pipe.transformer.disable_lora()
        with pytest.raises(RuntimeError, match="a LoRA or its scale"):
            stream_of(pipe)

    def test_another_transformer(self) -> None:
        pipe = make_pipeline(QUICK)
        warm_up(pipe)
        pipe.transformer = make_pipeline(QUICK).transformer
        with pytest.raises(RuntimeError, match="transformer or its blocks were replaced"):
            stream_of(pipe)

    def test_fragmented_pool(self) -> None:
        pipe = make_pipeline(QUICK)
        with pytest.raises(RuntimeError, match="shuffle_seed"):
            warm_up(pipe, cache=CacheOptions(shuffle_seed=3))

    def test_cached_blocks(self) -> None:
        from diffusers import FirstBlockCacheConfig

        pipe = make_pipeline(QUICK)
        pipe.transformer.enable_cache(FirstBlockCacheConfig())
        with pytest.raises(RuntimeError, match="enable_cache"):
            warm_up(pipe)


@pytest.fixture(scope="module")
def recache_pipe() -> ARDiffusionPipeline:
    pipe = make_pipeline(QUICK)
    report = warm_up(pipe, recache=True)
    # At 3 frames it has the shape and length of the first commit; then 6 frames, and the window of 5 ever after.
    assert report.num_graphs == 2 * FILL_LEVELS + 2
    return pipe


class TestRecache:
    """Prompt switches whose recache was warmed up too."""

    @pytest.mark.parametrize("num_chunks", [1, 2, 3, 4, 6])
    def test_every_fill_level_is_replayed(self, recache_pipe: ARDiffusionPipeline, num_chunks: int) -> None:
        """Positions, slots and text of the recache are its own; a stale one would change what follows."""
        pipe, num_graphs = recache_pipe, len(recache_pipe._warm.graphs)
        with stream_of(pipe) as stream, stream_of(make_pipeline(QUICK)) as plain:
            for one in (stream, plain):
                take(one, num_chunks)
            before = replays(pipe)
            for one in (stream, plain):
                one.switch_prompt(prompt_embeds=NEW, mode="recache")
            assert replays(pipe) == before + 2, "the commit that was due, and the recache"
            latents, expected = take(stream, 3), take(plain, 3)
        assert torch.equal(latents, expected)
        assert len(pipe._warm.graphs) == num_graphs, "nothing is captured after the warm-up"

    def test_one_switch_after_the_other(self, recache_pipe: ARDiffusionPipeline) -> None:
        with stream_of(recache_pipe) as stream, stream_of(make_pipeline(QUICK)) as plain:
            for one in (stream, plain):
                take(one, 4)
                one.switch_prompt(prompt_embeds=NEW, mode="recache")
                one.switch_prompt(prompt_embeds=OLD, mode="recache")
            assert torch.equal(take(stream, 2), take(plain, 2))

    def test_both_branches(self) -> None:
        pipe = make_pipeline(QUICK)
        assert warm_up(pipe, guided=True, recache=True).num_graphs == 2 * (2 * FILL_LEVELS + 2)
        call = {"negative_prompt_embeds": NEW, "guidance_scale": 3.0}
        with stream_of(pipe, **call) as stream, stream_of(make_pipeline(QUICK), **call) as plain:
            for one in (stream, plain):
                take(one, 4)
                one.switch_prompt(prompt_embeds=NEW, negative_prompt_embeds=OLD, mode="recache")
            assert torch.equal(take(stream, 2), take(plain, 2))
        assert replays(pipe) == 2 * (4 * 2 + 4 + 1 + 2 * 2 + 1)

    def test_beside_merged_commits(self) -> None:
        pipe = make_pipeline(QUICK)
        warm_up(pipe, merge_commits=True, recache=True)
        with stream_of(pipe, merge_commits=True) as stream, stream_of(make_pipeline(QUICK)) as plain:
            for one in (stream, plain):
                take(one, 4)
            before, num_graphs = replays(pipe), len(pipe._warm.graphs)
            for one in (stream, plain):
                one.switch_prompt(prompt_embeds=NEW, mode="recache")
            assert replays(pipe) == before + 2
            assert relative_error(take(stream, 3), take(plain, 3)) < 1e-4
            assert len(pipe._warm.graphs) == num_graphs

    @pytest.mark.parametrize(
        "recipe",
        [
            RECIPE.replace(num_window_frames=None, num_sink_frames=0, max_latent_frames=9),
            QUICK.replace(rope_policy="relative"),
            QUICK.replace(rope_policy="capped", rope_limit_frames=8),
        ],
        ids=["full history", "relative", "capped"],
    )
    def test_recipes(self, recipe: Recipe) -> None:
        pipe = make_pipeline(recipe)
        warm_up(pipe, recache=True)
        with stream_of(pipe) as stream, stream_of(make_pipeline(recipe)) as plain:
            for one in (stream, plain):
                take(one, 2)
            before = replays(pipe)
            for one in (stream, plain):
                one.switch_prompt(prompt_embeds=NEW, mode="recache")
            assert replays(pipe) == before + 2
            assert torch.equal(take(stream, 1), take(plain, 1))
