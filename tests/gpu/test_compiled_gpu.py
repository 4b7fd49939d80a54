"""Compiled blocks on a CUDA device: one graph, Inductor's CUDA graphs around the op, nothing of a pool's size."""

from collections.abc import Iterator

import pytest
import torch
from dense import relative_error
from test_compile import allocated_elements
from tiny_wan import PagedRun, latents_of, text_of, tiny_transformer
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code
from torch.profiler import ProfilerActivity, profile

pytestmark = pytest.mark.gpu

LAYERS = 3


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def open_run(*, write: str | None = None, window: int = 4, **kwargs: object) -> PagedRun:
    transformer = tiny_transformer(num_layers=LAYERS).to("cuda")
    return PagedRun(transformer, 1, window, write=write, device="cuda", **kwargs)


@pytest.mark.parametrize("write", ["torch", "fused"])
def test_reduce_overhead_records_graphs_for_every_fill_level(write: str) -> None:
    """Fill, first overwrite and steady state: one Inductor graph for all layers, its CUDA graphs recorded, none skipped,
    replayed in every later forward; the numbers are those of eager."""
    plain, compiled = open_run(write="torch"), open_run(write=write)
    compiled.transformer.compile_repeated_blocks(fullgraph=True, mode="reduce-overhead")
    for chunk in range(7):
        arguments = (latents_of(2, seed=chunk), 500, text_of())
        with torch._dynamo.config.patch(error_on_recompile=chunk > 0):
            for commit in (False, True):
                out = compiled.forward(*arguments, commit=commit)
                assert relative_error(out, plain.forward(*arguments, commit=commit)) < 1e-4
    assert counters["inductor"]["cudagraph_skips"] == 0
    assert counters["stats"]["unique_graphs"] == 1
    assert sum(counters["graph_break"].values()) == 0
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        compiled.forward(latents_of(2, seed=9), 500, text_of())
    launches = sum(event.count for event in trace.key_averages() if event.key == "cudaGraphLaunch")
    assert launches >= 2 * LAYERS


def test_a_skipped_cuda_graph_would_be_noticed() -> None:
    """What the pools would be to Inductor without the op's tag: inputs that a recorded graph changes."""

    @torch.compile(fullgraph=True, mode="reduce-overhead")
    def mixed(values: torch.Tensor, pool: torch.Tensor) -> torch.Tensor:
        pool.add_(values)
        return values * 2

    for _ in range(3):
        mixed(torch.ones(8, device="cuda"), torch.ones(8, device="cuda"))
    assert counters["inductor"]["cudagraph_skips"] > 0


@pytest.mark.parametrize("write", ["torch", "fused"])
def test_compiled_code_allocates_nothing_of_a_pools_size(write: str) -> None:
    """A mutated view of a graph input was once copied whole in every layer (pytorch#131192)."""
    run = open_run(write=write, window=40)
    run.transformer.compile_repeated_blocks(fullgraph=True)
    with torch._inductor.config.patch(force_disable_caches=True):
        _, codes = run_and_get_code(run.forward, latents_of(2), 0, text_of())
    name = "paged_norm_rope_write_attn" if write == "fused" else "paged_write_attn"
    assert any(f"{name}.default(" in code for code in codes)
    sizes = [size for code in codes for size in allocated_elements(code)]
    assert sizes and max(sizes) < run.manager.storage.key_pools[0].numel()
