"""The fused write inside the op and in a transformer, by Triton's interpreter. Run by test_triton.py."""

import pytest
import torch
from dense import relative_error
from interpreted_triton import scalars_index  # noqa: F401  (a fixture for every test here)
from live_streams import stream_of, take
from paged_cases import make_states
from rollouts import make_manager, pool_bytes
from test_compile import CountingBackend
from tiny_components import QUICK, make_pipeline
from tiny_wan import PagedRun, latents_of, text_of, tiny_transformer

from diffusers_ardiff import CacheOptions, KVScales
from diffusers_ardiff.attention import QKNorm, op, paged_norm_rope_write_attn
from diffusers_ardiff.cache import FLOAT8
from diffusers_ardiff.context import PagedForwardContext
from diffusers_ardiff.processors import attach
from diffusers_ardiff.rope import VideoRope


@pytest.fixture
def fused_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (op, attach):
        monkeypatch.setattr(module, "fused_write_refusals", lambda *args: [])


def fused_arguments(context: PagedForwardContext) -> tuple:
    """Projections, angles and norms that fit a context of one branch with 2 heads of 8."""
    query, keys, values = make_states(1, 24, 2, 8)
    rotary = VideoRope(head_dim=8)([[0, 1, 2, 3]], 2, 3)
    return context.layer_inputs(0), query, keys, values, rotary, QKNorm(torch.rand(16), torch.rand(16), 1e-6)


@pytest.mark.usefixtures("fused_on_cpu")
def test_fused_op_is_a_good_torch_citizen() -> None:
    context = PagedForwardContext(make_manager(24, 72).open_session().branches, num_tokens=24).prepare()
    inputs, *states, rotary, norm = fused_arguments(context)
    arguments = (*states, *norm[:2], *rotary, *inputs, norm.eps, 0.5)
    torch.library.opcheck(torch.ops.diffusers_ardiff.paged_norm_rope_write_attn.default, arguments)


@pytest.mark.usefixtures("fused_on_cpu")
def test_fused_op_knows_the_scales_of_a_float8_pool() -> None:
    """Keys of 0 weigh all values alike; values that float8 holds, so their mean is exact."""
    manager = make_manager(24, 72, dtype=FLOAT8, scales=KVScales(key=0.25, value=0.5))
    context = PagedForwardContext(manager.open_session().branches, num_tokens=24).prepare()
    inputs, query, keys, values, rotary, norm = fused_arguments(context)
    values = values.to(FLOAT8).float() * 0.5
    norm = norm._replace(key_weight=torch.zeros(16))
    out = paged_norm_rope_write_attn(inputs, query, keys, values, rotary, norm)
    torch.testing.assert_close(out, values.mean(1, keepdim=True).expand_as(out), rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("fused_on_cpu")
@pytest.mark.parametrize("change", ["values", "rotary", "norm"])
def test_fused_op_refuses_wrong_shapes_before_a_write(change: str) -> None:
    context = PagedForwardContext(make_manager(24, 72).open_session().branches, num_tokens=24).prepare()
    inputs, query, keys, values, rotary, norm = fused_arguments(context)
    if change == "values":
        values = values[:, :-1]
    elif change == "rotary":
        rotary = tuple(angles[:, :-1] for angles in rotary)
    else:
        norm = norm._replace(key_weight=norm.key_weight[:-1])
    before = pool_bytes(context.storage)
    with pytest.raises(ValueError, match=r"writes \(1, 24\)|cos and sin|norm weights"):
        paged_norm_rope_write_attn(inputs, query, keys, values, rotary, norm)
    assert torch.equal(pool_bytes(context.storage), before)
    assert context.unwritten_layers == (0,)


@pytest.mark.usefixtures("fused_on_cpu")
@pytest.mark.parametrize("fused_projections", [False, True])
@pytest.mark.parametrize("shuffle_seed", [None, 3])
def test_fused_transformer_equals_torch(fused_projections: bool, shuffle_seed: int | None) -> None:
    """Two sessions as rows at different positions, through fill and wrap; random norm weights."""
    runs = []
    for write in ("torch", "fused"):
        transformer = tiny_transformer()
        if fused_projections:
            transformer.fuse_qkv_projections()
        runs.append(PagedRun(transformer, 1, 4, write=write, max_sessions=2, shuffle_seed=shuffle_seed))
    for chunk in range(5):
        for run in runs:
            both = list(run.branches)
            if chunk == 0:
                run.branches = both[:1]
                run.forward(latents_of(2), 500, text_of())
                run.branches = both
        outputs = [run.forward(latents_of(2, rows=2, seed=chunk), 500, text_of(rows=2)) for run in runs]
        assert relative_error(outputs[1], outputs[0]) < 1e-5


@pytest.mark.usefixtures("fused_on_cpu")
def test_sinks_turn_and_extra_rows_stay_as_with_torch() -> None:
    """Sink keys that the kernel wrote are turned in place; the second chunk of a rolling window is extra rows."""
    pipe, latents = (
        make_pipeline(QUICK.replace(rope_policy="relative", context_mode="rolling", num_window_frames=6)),
        [],
    )
    for write in ("torch", "fused"):
        with stream_of(pipe, cache=CacheOptions(write=write)) as stream:
            assert stream.rollout.runner.attachment.choose_write("cpu", torch.float32).eager == (write == "fused")
            latents.append(take(stream, 3))
            assert stream.rollout.sessions[0].branch().sink.offset != 0
    assert 0 < relative_error(latents[1], latents[0]) < 1e-4


@pytest.mark.usefixtures("fused_on_cpu")
def test_fused_layers_are_one_graph() -> None:
    """Named, the fused write is used in compiled regions too; weights differ in each layer and are guarded on in none."""
    plain = PagedRun(tiny_transformer(num_layers=4), 1, 4, write="torch")
    compiled = PagedRun(tiny_transformer(num_layers=4), 1, 4, write="fused")
    counting = CountingBackend("aot_eager")
    compiled.transformer.compile_repeated_blocks(fullgraph=True, backend=counting)
    for chunk in range(4):
        with torch._dynamo.config.patch(error_on_recompile=chunk > 0):
            out = compiled.forward(latents_of(2, seed=chunk), 500, text_of())
        assert relative_error(out, plain.forward(latents_of(2, seed=chunk), 500, text_of())) < 1e-5
    (graph,) = counting.graphs
    calls = [str(node.target) for node in graph.graph.nodes if "paged_" in str(node.target)]
    assert len(calls) == 1 and "paged_norm_rope_write_attn" in calls[0]
