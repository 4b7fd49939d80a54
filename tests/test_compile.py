"""Compiled blocks: one graph for all layers, and none after the first chunk."""

import copy
import math
import re
from typing import Any

import pytest
import torch
from counting import CountingBackend, op_calls
from dense import relative_error
from tiny_wan import PagedRun, latents_of, text_of, tiny_transformer
from torch._dynamo.utils import counters
from torch._inductor import scheduler
from torch._inductor.utils import run_and_get_code

from diffusers_ardiff.processors.wan import PagedWanSelfAttnProcessor

NUM_LAYERS = 12


pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("shuffle_seed", [None, 3])
def test_twelve_layers_are_one_graph_through_fill_and_wrap(backend: str, shuffle_seed: int | None) -> None:
    """One graph a layer, then the recompile limit, where a Python int was read in each layer (diffusers#10932); again at
    every chunk, where a cache length was guarded on (torchtune PR#1663). 3 frames a chunk, S 3, W 6: fill in 3 chunks,
    first overwrite, steady; a denoise forward and a commit each, text bound; eager gives the same numbers."""
    plain = PagedRun(tiny_transformer(num_layers=NUM_LAYERS), 3, 6, shuffle_seed=shuffle_seed)
    compiled = PagedRun(copy.deepcopy(tiny_transformer(num_layers=NUM_LAYERS)), 3, 6, shuffle_seed=shuffle_seed)
    counting = CountingBackend(backend)
    compiled.transformer.compile_repeated_blocks(fullgraph=True, backend=counting)
    for chunk in range(2 * 3 + 2):
        with torch._dynamo.config.patch(error_on_recompile=chunk > 0):
            for step, time in enumerate((1000, 0)):
                latents, commit = latents_of(3, seed=10 * chunk + step), step == 1
                out = compiled.forward(latents, time, text_of(), commit=commit)
                assert relative_error(out, plain.forward(latents, time, text_of(), commit=commit)) < 1e-4
        assert len(counting.graphs) == 1
    assert counters["stats"]["unique_graphs"] == 1
    assert sum(counters["graph_break"].values()) == 0
    assert op_calls(counting.graphs[0]) == 1


def test_guidance_branches_share_the_graph() -> None:
    """Switching between two branches, and a prompt switch of equal length, recompile nothing."""
    run = PagedRun(tiny_transformer(), 3, 6, max_sessions=2)
    branches, counting = run.branches, CountingBackend("eager")
    run.transformer.compile_repeated_blocks(fullgraph=True, backend=counting)
    for chunk in range(5):
        for index, branch in enumerate(branches):
            run.branches = [branch]
            with torch._dynamo.config.patch(error_on_recompile=chunk + index > 0):
                run.forward(latents_of(3, seed=chunk), 0, text_of(seed=index + chunk))
    assert len(counting.graphs) == 1


def test_attaching_again_keeps_the_graph() -> None:
    """A pipeline swaps its processors in for each forward and out again; the same objects stay valid for guards."""
    run, counting = PagedRun(tiny_transformer(), 0, 6), CountingBackend("eager")
    run.transformer.compile_repeated_blocks(fullgraph=True, backend=counting)
    for chunk in range(4):
        with torch._dynamo.config.patch(error_on_recompile=chunk > 0):
            run.forward(latents_of(3, seed=chunk), 0, text_of())
        run.paged.detach()
        run.paged.attach()
    assert len(counting.graphs) == 1


def allocated_elements(code: str) -> list[int]:
    """Sizes of the buffers that Inductor's code allocates."""
    shapes = re.findall(r"= empty_strided_\w+\(\(([\d, ]*)\)", code)
    return [math.prod(int(size) for size in shape.split(",") if size.strip()) for shape in shapes]


def inductor_code(run: PagedRun) -> str:
    """What Inductor generates for the blocks of a run, never from a cache of an older op."""
    with torch._inductor.config.patch(force_disable_caches=True):
        _, (code,) = run_and_get_code(run.forward, latents_of(3), 0, text_of())
    return code


def test_compiled_code_allocates_no_pool_and_hands_over_the_whole_ones() -> None:
    """A mutated view of a graph input was once copied whole in every layer (pytorch#131192)."""
    run = PagedRun(tiny_transformer(), 3, 21)
    run.transformer.compile_repeated_blocks(fullgraph=True)
    code = inductor_code(run)
    sizes = allocated_elements(code)
    assert sizes and max(sizes) < run.manager.storage.key_pools[0].numel()
    call = re.search(r"paged_write_attn\.default\((.*)\)", code)
    assert call is not None and re.search(r"None, None, arg\d+_1, arg\d+_1, ", call.group(1))


def test_inductor_records_all_but_the_op(monkeypatch: pytest.MonkeyPatch) -> None:
    """Told that every kernel runs on a GPU, Inductor cuts its CUDA graphs around the op: what it would record takes no
    pool, no lengths and no CPU tensor, each a reason for it to record nothing."""
    monkeypatch.setattr(scheduler.BaseSchedulerNode, "is_gpu", lambda self: True)
    run = PagedRun(tiny_transformer(), 3, 21)
    run.transformer.compile_repeated_blocks(fullgraph=True, mode="reduce-overhead")
    recorded, run_each_time = inductor_code(run).split("def call(self, args):")
    assert "def partition_1(args):" in recorded and "paged_write_attn" not in recorded.split("def partition_0")[1]
    call = re.search(r"paged_write_attn\.default\(.*?None, None, (.*), [\d.]+\)", run_each_time)
    assert call is not None
    own_inputs = set(call.group(1).split(", "))
    parts = re.findall(r"partition\d+_args = \[(.*)\]", run_each_time)
    assert len(own_inputs) == 7 and len(parts) == 2
    assert not own_inputs & set(", ".join(parts).split(", "))


@pytest.mark.parametrize("compiled", [False, True])
def test_a_forward_of_compiled_blocks_is_one_step(monkeypatch: pytest.MonkeyPatch, compiled: bool) -> None:
    """Each compiled block began a step of Inductor's CUDA graphs, in which the last block's output is freed."""
    steps = []
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: steps.append(1))
    run = PagedRun(tiny_transformer(), 0, 6)
    if compiled:
        run.transformer.compile_repeated_blocks(fullgraph=True, backend="eager")
    run.forward(latents_of(3), 0, text_of())
    assert len(steps) == compiled


def test_a_guarded_number_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The counter above can fail: a processor that reads its layer number compiles one graph a layer.

    Hooks that read it would not do: torch 2.11 compiles the first layer's hook for all layers.
    """
    plain = PagedWanSelfAttnProcessor.__call__

    def numbered(self: Any, attn: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return plain(self, attn, hidden_states + attn.layer_number, *args, **kwargs)

    monkeypatch.setattr(PagedWanSelfAttnProcessor, "__call__", numbered)
    run, counting = PagedRun(tiny_transformer(num_layers=3), 0, 6), CountingBackend("eager")
    for layer, block in enumerate(run.transformer.blocks):
        block.attn1.layer_number = layer
    run.transformer.compile_repeated_blocks(fullgraph=True, backend=counting)
    run.forward(latents_of(3), 0, text_of())
    assert len(counting.graphs) > 1
