"""Merged forwards: the commit of one chunk and the first step of the next in one pass, equal to two."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from counting import CountingBackend
from dense import relative_error
from live_streams import NEW, stream_of, take
from recorders import FunctionRecorder
from rollouts import pool_bytes
from session_runs import CHUNK, make_pool, rows_of, run, stored
from tiny_components import QUICK, RECIPE, failing, make_pipeline, random_embeds

from diffusers_ardiff import ARDiffusionPipeline, PagedForwardContext
from diffusers_ardiff.attention import paged_write_attn, write_attn_in_turn
from diffusers_ardiff.cache import Branch, RingGeometry, RingState
from diffusers_ardiff.cache.merged import begin_merged, finish_merged, plan_merged
from diffusers_ardiff.merged import MergedForwardContext, MergedLayerInputs
from diffusers_ardiff.pipelines.denoise import FrameStep
from diffusers_ardiff.pipelines.warmup import run_warmup


def merged(branches: list[Branch], committed: int, upcoming: int, **options: Any) -> torch.Tensor:
    """Commit one numbered chunk and denoise the next; the last layer's output of both halves."""
    halves = [rows_of(number) for number in (committed, upcoming)]
    rows = [torch.cat([half[i] for half in halves for _ in branches]) for i in range(3)]
    with MergedForwardContext(branches, num_tokens=CHUNK, **options) as context:
        for layer in range(context.storage.shape.num_layers):
            out = write_attn_in_turn(context.layer_inputs(layer), *rows)
    return out


def apart(branches: list[Branch], committed: int, upcoming: int) -> torch.Tensor:
    outs = []
    for number in (committed, upcoming):
        rows = [torch.cat([t for _ in branches]) for t in rows_of(number)]
        with PagedForwardContext(branches, num_tokens=CHUNK) as context:
            for layer in range(context.storage.shape.num_layers):
                out = paged_write_attn(context.layer_inputs(layer), *rows)
        if number == committed:
            context.mark_committed()
        outs.append(out)
    return torch.cat(outs)


class TestOp:
    @pytest.mark.parametrize("backend", [None, "reference"])
    @pytest.mark.parametrize("shuffle_seed", [None, 4])
    def test_equals_a_commit_and_a_denoise_forward(self, shuffle_seed: int | None, backend: str | None) -> None:
        """Fill, first overwrite, steady state: S 24, W 72, chunks of 24. Outputs, pool, position."""
        pools = [make_pool(2, shuffle_seed=shuffle_seed) for _ in range(2)]
        left, right = ([pool.open_session().branch() for _ in range(2)] for pool in pools)
        for number in range(8):
            together = merged(left, number, 100 + number, backend=backend)
            torch.testing.assert_close(together, apart(right, number, 100 + number), rtol=1e-5, atol=1e-5)
            assert [branch.committed_tokens for branch in left] == [CHUNK * (number + 1)] * 2
            assert left[0].ring.written_end == right[0].ring.written_end
            for one, other in zip(left, right, strict=True):
                num_tokens = min(CHUNK * (number + 2), 96)
                assert torch.equal(stored(one, num_tokens), stored(other, num_tokens))

    def test_the_order_matters(self) -> None:
        """In the steady state the next chunk's keys land on tokens that the first half still sees."""
        branch = make_pool(1).open_session().branch()
        run_chunks(branch, 5)
        halves = [rows_of(5), rows_of(6)]
        rows = [torch.cat([half[i] for half in halves]) for i in range(3)]
        with MergedForwardContext([branch], num_tokens=CHUNK) as context:
            inputs = [context.layer_inputs(layer) for layer in range(2)]
            right = write_attn_in_turn(inputs[0], *rows)[0]
            swapped = write_attn_in_turn(MergedLayerInputs(*reversed(inputs[1])), *(t.flip(0) for t in rows))[1]
            write_attn_in_turn(inputs[1], *rows)
        assert relative_error(swapped, right) > 1e-2

    def test_a_second_layer_left_unwritten_is_seen(self) -> None:
        branch = make_pool(1).open_session().branch()
        rows = [torch.cat([a, b]) for a, b in zip(rows_of(0), rows_of(1), strict=True)]
        context = MergedForwardContext([branch], num_tokens=CHUNK).prepare()
        write_attn_in_turn(context.layer_inputs(0), *rows)
        paged_write_attn(context.layer_inputs(1).committed, *rows_of(0))
        assert context.unwritten_layers == (1,)
        context.close(succeeded=False)

    def test_it_commits_by_itself(self) -> None:
        branch = make_pool(1).open_session().branch()
        with MergedForwardContext([branch], num_tokens=CHUNK) as context:
            pass
        with pytest.raises(RuntimeError, match="commits its first chunk by itself"):
            context.mark_committed()
        assert branch.committed_tokens == CHUNK
        assert branch.commit() == CHUNK, "the second chunk was denoised, and its last forward may be committed"


def run_chunks(branch: Branch, count: int) -> None:
    for number in range(count):
        rows = rows_of(number)
        with PagedForwardContext([branch], num_tokens=CHUNK) as context:
            for layer in range(2):
                paged_write_attn(context.layer_inputs(layer), *rows)
        context.mark_committed()


class TestFailure:
    @pytest.mark.parametrize("num_before", [1, 3, 6])
    def test_stale_until_recached(self, num_before: int) -> None:
        session = make_pool(1).open_session()
        branch = session.branch()
        run(session, *range(num_before))
        with pytest.raises(OSError), MergedForwardContext([branch], num_tokens=CHUNK):
            raise OSError
        assert branch.committed_tokens == CHUNK * num_before
        for refused in (
            lambda: PagedForwardContext([branch], num_tokens=CHUNK),
            lambda: MergedForwardContext([branch], num_tokens=CHUNK),
            session.commit,
            session.fork,
            lambda: session.flush(CHUNK),
        ):
            with pytest.raises(RuntimeError, match="stale"):
                refused()
        start, length = branch.ring.recache_span()
        with PagedForwardContext([branch], num_tokens=length, start=start):
            pass
        merged([branch], num_before, num_before + 1)

    def test_without_history_there_is_nothing_to_lose(self) -> None:
        branch = make_pool(1).open_session().branch()
        with pytest.raises(OSError), MergedForwardContext([branch], num_tokens=CHUNK):
            raise OSError
        assert not branch.ring.stale and branch.committed_tokens == 0
        merged([branch], 0, 1)

    def test_refused_before_anything_is_written(self) -> None:
        """Full history with room for one of the two chunks."""
        manager = make_pool(1)
        branch = manager.open_session().branch()
        branch.ring.geometry = RingGeometry(sink_tokens=24, window_tokens=24, page_size=16, full_history=True)
        run_chunks(branch, 1)
        before = pool_bytes(manager.storage)
        with pytest.raises(ValueError, match="full history holds 48 tokens"):
            MergedForwardContext([branch], num_tokens=CHUNK)
        assert torch.equal(pool_bytes(manager.storage), before) and branch.is_idle and not branch.ring.stale


def test_ring_state_after_a_merge_is_that_of_two_forwards() -> None:
    rng = random.Random(0)
    for _ in range(300):
        geometry = RingGeometry(sink_tokens=rng.randint(0, 6), window_tokens=rng.randint(2, 12), page_size=4)
        left, right = RingState(geometry), RingState(geometry)
        for _ in range(6):
            length = rng.randint(1, geometry.window_tokens)
            try:
                spans = plan_merged(left, length)
            except ValueError:
                continue
            begin_merged(left, spans)
            finish_merged(left, spans, succeeded=True)
            for is_commit in (True, False):
                span = right.plan_forward(length)
                right.begin(span)
                right.finish(span, succeeded=True)
                if is_commit:
                    right.commit()
            assert vars(left) == vars(right)


# -- pipeline -------------------------------------------------------------------------------------------------------


class TestPipeline:
    @pytest.mark.parametrize("num_prompts", [1, 2])
    @pytest.mark.parametrize("recipe", [QUICK, RECIPE.replace(denoising_steps=(1000,))], ids=["2 steps", "1 step"])
    def test_same_latents_with_fewer_forwards(self, num_prompts: int, recipe: Any) -> None:
        pipe = make_pipeline(recipe)
        embeds, steps = random_embeds(1, rows=num_prompts), len(recipe.denoising_steps)
        latents, shapes = [], []
        for merge in (True, False):
            with (
                record_shapes(pipe) as seen,
                stream_of(pipe, prompt_embeds=embeds, merge_commits=merge) as stream,
            ):
                latents.append(take(stream, 7))
            shapes.append(seen)
        assert relative_error(latents[0], latents[1]) < 1e-4
        assert shapes[1] == [num_prompts] * (7 * steps + 6)
        one_chunk = [2 * num_prompts] + [num_prompts] * (steps - 1)
        assert shapes[0] == [num_prompts] * steps + one_chunk * 6

    def test_a_whole_call(self, pipe: ARDiffusionPipeline) -> None:
        call = {"prompt_embeds": NEW, "num_frames": 45, "output_type": "latent"}
        outs = [
            pipe(**call, generator=torch.Generator().manual_seed(1), merge_commits=merge).frames
            for merge in (True, False)
        ]
        assert relative_error(*outs) < 1e-4

    @pytest.mark.parametrize(
        "switch", [{"mode": "text"}, {"mode": "recache"}, {"mode": "flush"}, {"mode": "blend", "blend_chunks": 2}]
    )
    def test_not_at_a_prompt_change(self, pipe: ARDiffusionPipeline, switch: dict[str, Any]) -> None:
        """The chunk held is committed with its own text, and so alone."""
        latents = []
        for merge in (True, False):
            with stream_of(pipe, merge_commits=merge) as stream:
                parts = [take(stream, 3)]
                stream.switch_prompt(prompt_embeds=NEW, **switch)
                with record_shapes(pipe) as shapes:
                    parts.append(take(stream, 1))
                assert 2 not in shapes
                latents.append(torch.cat([*parts, take(stream, 3)], dim=2))
        assert relative_error(*latents) < 1e-4

    def test_embeddings_replaced_between_chunks(self, pipe: ARDiffusionPipeline) -> None:
        """The commit that was due ran under the new text, whose chunk it was not."""
        latents = []
        for early_commit in (True, False):
            with stream_of(pipe) as stream:
                take(stream, 2)
                if early_commit:
                    stream.rollout.commit_held()
                stream.set_embeds({"positive": NEW})
                latents.append(take(stream, 1))
        assert torch.equal(*latents)

    def test_fork_and_given_frames(self, pipe: ARDiffusionPipeline) -> None:
        given = torch.randn(1, 16, 4, 4, 6, generator=torch.Generator().manual_seed(3))
        latents = []
        for merge in (True, False):
            pool = pipe.create_cache(num_videos=2)
            with stream_of(pipe, context_latents=given, merge_commits=merge, cache=pool) as stream:
                parts = [take(stream, 4)]
                with stream.fork() as child:
                    parts += [take(child, 2), take(stream, 2)]
            latents.append(torch.cat(parts, dim=2))
        assert relative_error(*latents) < 1e-4

    def test_failure_and_recache(self, pipe: ARDiffusionPipeline) -> None:
        """The rollout refuses to go on, a recache heals it, and the chunk that was held is committed after all."""
        with stream_of(pipe) as plain, stream_of(pipe, merge_commits=True) as stream:
            for one in (plain, stream):
                take(one, 3)
            rollout, text = stream.rollout, stream.rollout._text_of([stream.rollout.sessions[0].branch()])
            noise = torch.randn(rollout.shape.chunk(3), generator=torch.Generator().manual_seed(5))
            with torch.no_grad():
                with failing(pipe.transformer.blocks[1].ffn, OSError()), pytest.raises(OSError):
                    rollout.predict(FrameStep(latents=noise, timestep=1000.0), 1.0)
                with pytest.raises(RuntimeError, match="stale"):
                    rollout.predict(FrameStep(latents=noise, timestep=1000.0), 1.0)
                rollout.recache({"positive": text})
                plain.rollout._rewrite_window({"positive": None})
                plain.rollout.recache({"positive": plain.rollout._text_of([plain.rollout.sessions[0].branch()])})
                outs = [one.rollout.predict(FrameStep(latents=noise, timestep=1000.0), 1.0) for one in (stream, plain)]
            assert rollout.sessions[0].branch().committed_tokens == 9 * 6
            assert relative_error(rollout.recent_latents, plain.rollout.recent_latents) < 1e-4
            assert relative_error(*outs) < 1e-4

    @pytest.mark.parametrize(
        ("call", "message"),
        [
            ({"guidance_scale": 3.0}, "guidance .*got 3.0.*guidance_scale=1"),
            ({"control_hook": lambda _inputs: {}}, "a control_hook"),
            ({"merge_commits": 1}, "True or False, got 1"),
        ],
    )
    def test_refusals(self, pipe: ARDiffusionPipeline, call: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            stream_of(pipe, **{"merge_commits": True} | call)

    def test_guidance_of_the_recipe(self) -> None:
        """The refusal spoke of guidance to callers who had asked for none, and did not say that it is the recipe's."""
        pipe = make_pipeline(recipe=QUICK.replace(guidance_scale=2.0))
        with pytest.raises(ValueError, match=f"recipe '{QUICK.name}' has 2.0.*give guidance_scale=1"):
            stream_of(pipe, merge_commits=True)


class TestWarm:
    def test_merged_forwards_are_captured_too(self) -> None:
        pipe = make_pipeline(QUICK)
        report = run_warmup(pipe, None, None, compile=False, recorder=FunctionRecorder(), merge_commits=True)
        assert report.num_graphs == 2 + 2, "6 and 6 keys, 3 and 6; each length alone"
        with stream_of(pipe, merge_commits=True) as stream, stream_of(make_pipeline(QUICK)) as plain:
            assert relative_error(take(stream, 6), take(plain, 6)) < 1e-4
        assert pipe._warm.graphs.num_replays == 6 * 2

    def test_one_more_graph_when_compiled(self) -> None:
        torch._dynamo.reset()
        pipe, counting = make_pipeline(QUICK), CountingBackend("eager")
        pipe.warmup(compile={"backend": counting}, cuda_graphs=False, merge_commits=True)
        assert len(counting.graphs) == 2
        with (
            torch._dynamo.config.patch(error_on_recompile=True),
            stream_of(pipe, merge_commits=True) as stream,
            stream_of(make_pipeline(QUICK)) as plain,
        ):
            latents, expected = take(stream, 6), take(plain, 6)
        assert relative_error(latents, expected) < 1e-4
        assert len(counting.graphs) == 2
        torch._dynamo.reset()


class record_shapes:
    """Rows of every forward of the transformer."""

    def __init__(self, pipe: ARDiffusionPipeline) -> None:
        self.transformer = pipe.transformer

    def __enter__(self) -> list[int]:
        rows: list[int] = []
        self.handle = self.transformer.register_forward_pre_hook(
            lambda _module, _args, kwargs: rows.append(len(kwargs["hidden_states"])), with_kwargs=True
        )
        return rows

    def __exit__(self, *_exc: object) -> None:
        self.handle.remove()
