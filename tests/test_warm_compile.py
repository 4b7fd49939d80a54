"""Blocks compiled in a warm-up: one graph a shape, nothing compiled afterwards, other shapes run eagerly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from counting import CountingBackend, op_calls
from dense import relative_error
from live_streams import NEW, stream_of, take
from recorders import FunctionRecorder
from tiny_components import QUICK, make_pipeline, random_embeds
from torch._dynamo.utils import counters

from diffusers_ardiff import ARDiffusionPipeline, CacheOptions
from diffusers_ardiff.pipelines import ARStream

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def warm_pipeline(**call: Any) -> tuple[ARDiffusionPipeline, CountingBackend]:
    pipe, counting = make_pipeline(QUICK), CountingBackend("eager")
    pipe.warmup(compile={"backend": counting}, cuda_graphs=False, **call)
    return pipe, counting


def switch_every_way(stream: ARStream) -> torch.Tensor:
    """Fill, first overwrite and steady state, then each kind of prompt switch."""
    parts = [take(stream, 4)]
    for switch in ({"mode": "text"}, {"mode": "recache"}, {"mode": "flush"}, {"mode": "blend", "blend_chunks": 2}):
        stream.switch_prompt(prompt_embeds=random_embeds(len(parts)), **switch)
        parts.append(take(stream, 3))
    return torch.cat(parts, dim=2)


def test_one_graph_and_nothing_compiled_after_the_warmup() -> None:
    pipe, counting = warm_pipeline()
    assert len(counting.graphs) == 1 and op_calls(counting.graphs[0]) == 1
    with (
        torch._dynamo.config.patch(error_on_recompile=True),
        stream_of(pipe) as stream,
        stream_of(make_pipeline(QUICK)) as plain,
    ):
        latents, expected = switch_every_way(stream), switch_every_way(plain)
    assert relative_error(latents, expected) < 1e-4
    assert len(counting.graphs) == counters["stats"]["unique_graphs"] == 1
    assert sum(counters["graph_break"].values()) == 0


def test_the_chunks_after_the_warmup_run_compiled() -> None:
    """Else nothing would ever compile again either."""
    calls = 0

    def backend(graph: torch.fx.GraphModule, _inputs: list[Any]) -> Any:
        def run(*args: Any) -> Any:
            nonlocal calls
            calls += 1
            return graph.forward(*args)

        return run

    pipe = make_pipeline(QUICK)
    pipe.warmup(compile={"backend": backend}, cuda_graphs=False)
    calls = 0
    with stream_of(pipe) as stream:
        take(stream, 2)
        assert calls == 2 * (2 + 1 + 2), "two layers of denoise, commit, denoise"
        stream.switch_prompt(prompt_embeds=NEW, mode="recache")
        assert calls == 2 * 6, "a commit; the recache has another shape"


def test_recaches_that_were_warmed_up_compile_nothing_and_run_compiled() -> None:
    """Three shapes: the chunk's, 6 frames while the window fills, its 5 frames ever after."""
    pipe, counting = make_pipeline(QUICK), CountingBackend("eager")
    report = pipe.warmup(compile={"backend": counting}, cuda_graphs=False, recache=True)
    assert report.num_compiled_shapes == len(counting.graphs) == 3
    with (
        torch._dynamo.config.patch(error_on_recompile=True),
        stream_of(pipe) as stream,
        stream_of(make_pipeline(QUICK)) as plain,
    ):
        assert relative_error(switch_every_way(stream), switch_every_way(plain)) < 1e-4
    assert len(counting.graphs) == counters["stats"]["unique_graphs"] == 3
    assert sum(counters["graph_break"].values()) == 0


def test_guidance_and_batches_are_one_graph() -> None:
    pipe, counting = warm_pipeline(guided=True, num_videos=2)
    call = {"prompt_embeds": random_embeds(1, rows=2), "negative_prompt_embeds": NEW, "guidance_scale": 3.0}
    with (
        torch._dynamo.config.patch(error_on_recompile=True),
        stream_of(pipe, **call) as stream,
        stream_of(make_pipeline(QUICK), **call) as plain,
    ):
        assert relative_error(take(stream, 4), take(plain, 4)) < 1e-4
    assert len(counting.graphs) == 1


OTHER_CALLS: dict[str, dict[str, Any]] = {
    "size": {"height": 48},
    "text length": {"prompt_embeds": random_embeds(1, text_len=5)},
    "backend": {"cache": CacheOptions(backend="sdpa")},
    "window": {"recipe": QUICK.replace(num_window_frames=9)},
    "pages": {"cache": CacheOptions(page_size=8)},
}


@pytest.mark.parametrize("call", OTHER_CALLS.values(), ids=OTHER_CALLS)
def test_what_was_not_warmed_up_runs_eagerly(call: dict[str, Any]) -> None:
    pipe, counting = warm_pipeline()
    with stream_of(pipe, **call) as stream, stream_of(make_pipeline(QUICK), **call) as plain:
        assert torch.equal(take(stream, 3), take(plain, 3))
    assert len(counting.graphs) == 1


def test_a_larger_pool_runs_eagerly() -> None:
    pipe, counting = warm_pipeline()
    with stream_of(pipe, cache=pipe.create_cache(num_videos=2)) as stream, stream.fork() as child:
        assert torch.equal(take(stream, 2), take(child, 2))
    assert len(counting.graphs) == 1


def test_another_warmup_compiles_the_other_size() -> None:
    pipe, first = warm_pipeline()
    second = CountingBackend("eager")
    pipe.warmup(height=48, compile={"backend": second}, cuda_graphs=False)
    assert len(first.graphs) == len(second.graphs) == 1
    with stream_of(pipe, height=48) as stream:
        take(stream, 3)
    assert len(second.graphs) == 1


def test_cooldown_leaves_the_blocks_as_they_were() -> None:
    pipe, _ = warm_pipeline()
    assert all(block._compiled_call_impl is not None for block in pipe.transformer.blocks)
    pipe.cooldown()
    assert all(block._compiled_call_impl is None for block in pipe.transformer.blocks)


def test_blocks_that_are_compiled_already_are_left_to_their_owner() -> None:
    pipe = make_pipeline(QUICK)
    pipe.transformer.compile_repeated_blocks(backend="eager")
    with pytest.raises(ValueError, match=r"compiled already.*compile=False"):
        pipe.warmup(cuda_graphs=False)
    report = pipe.warmup(compile=False, cuda_graphs=False)
    assert report.num_compiled_shapes == 0
    pipe.cooldown()
    assert all(block._compiled_call_impl is not None for block in pipe.transformer.blocks)


def test_compiled_blocks_in_recorded_forwards() -> None:
    from diffusers_ardiff.pipelines.warmup import run_warmup

    pipe, counting = make_pipeline(QUICK), CountingBackend("eager")
    report = run_warmup(pipe, None, None, compile={"backend": counting}, recorder=FunctionRecorder())
    assert (report.num_compiled_shapes, report.num_graphs, len(counting.graphs)) == (1, 4, 1)
    with (
        torch._dynamo.config.patch(error_on_recompile=True),
        stream_of(pipe) as stream,
        stream_of(make_pipeline(QUICK)) as plain,
    ):
        assert relative_error(switch_every_way(stream), switch_every_way(plain)) < 1e-4
    assert pipe._warm.graphs.num_replays > 0
