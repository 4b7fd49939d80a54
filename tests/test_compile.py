"""Compiled blocks: one graph for all layers, and none after the first chunk."""

import copy
from collections.abc import Iterator

import pytest
import torch
from counting import CountingBackend, op_calls
from dense import relative_error
from tiny_wan import PagedRun, latents_of, text_of, tiny_transformer
from torch._dynamo.utils import counters

NUM_LAYERS = 12


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


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


def test_a_guarded_number_would_be_noticed() -> None:
    """The counter above can fail: a processor that reads its layer number compiles one graph a layer."""
    run, counting = PagedRun(tiny_transformer(num_layers=3), 0, 6), CountingBackend("eager")
    for layer, block in enumerate(run.transformer.blocks):
        block.attn1.register_forward_pre_hook(lambda module, args, layer=layer: (args[0] + layer, *args[1:]))
    run.transformer.compile_repeated_blocks(fullgraph=True, backend=counting)
    run.forward(latents_of(3), 0, text_of())
    assert len(counting.graphs) > 1
