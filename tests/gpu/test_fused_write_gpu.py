"""The fused norm, rotation and write on a CUDA device: against torch's path in a transformer, huge pools, no syncs."""

from collections.abc import Callable, Iterator

import pytest
import torch
from dense import relative_error
from paged_cases import make_inputs, make_states, with_slots
from rollouts import make_manager
from tiny_wan import PagedRun, latents_of, text_of, tiny_transformer
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from diffusers_ardiff.attention import QKNorm, WriteChoice, paged_norm_rope_write_attn, paged_write_attn
from diffusers_ardiff.cache import FLOAT8, KVScales
from diffusers_ardiff.cache.float8 import store_as
from diffusers_ardiff.context import PagedForwardContext
from diffusers_ardiff.processors import wan
from diffusers_ardiff.rope import VideoRope, apply_rotary

pytestmark = pytest.mark.gpu

LAYERS = 3
NO_FLOAT8 = not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9)
TOLERANCE = {torch.float32: 5e-5, torch.bfloat16: 3e-2}


@pytest.fixture(autouse=True)
def exact_float32() -> Iterator[None]:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    yield


@pytest.fixture
def fused_calls(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """Query shapes of every call of the fused op by a processor."""
    calls = []

    def note(inputs, query, *rest):
        calls.append(query.shape)
        return paged_norm_rope_write_attn(inputs, query, *rest)

    monkeypatch.setattr(wan, "paged_norm_rope_write_attn", note)
    return calls


def open_run(
    write: str | None, dtype: torch.dtype, *, kv_dtype: torch.dtype | None = None, **kwargs: object
) -> PagedRun:
    """A transformer of 2 heads of 64 and its sessions, sink 1 frame, window 4."""
    transformer = tiny_transformer(num_layers=LAYERS, attention_head_dim=64).to("cuda", dtype)
    return PagedRun(transformer, 1, 4, write=write, device="cuda", dtype=kv_dtype or dtype, **kwargs)


# -- numbers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("shuffle_seed", [None, 3])
@pytest.mark.parametrize("fused_projections", [False, True])
def test_transformer_equals_torch(
    fused_calls: list, dtype: torch.dtype, shuffle_seed: int | None, fused_projections: bool
) -> None:
    """Two sessions of different length as rows, through fill and wrap, in poisoned pools; random norm weights."""
    plain, fused = (open_run(write, dtype, max_sessions=2, shuffle_seed=shuffle_seed) for write in ("torch", "fused"))
    for run in (plain, fused):
        if fused_projections:
            run.transformer.fuse_qkv_projections()
        both, run.branches = run.branches, run.branches[:1]
        run.forward(latents_of(2, seed=20), 500, text_of())
        run.branches = both
    for chunk in range(5):
        arguments = (latents_of(2, rows=2, seed=chunk), 500, text_of(rows=2))
        out = fused.forward(*arguments)
        assert out.isfinite().all()
        assert relative_error(out, plain.forward(*arguments)) < TOLERANCE[dtype]
    assert len(fused_calls) == 6 * LAYERS


@pytest.mark.skipif(NO_FLOAT8, reason="needs compute capability 8.9")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_float8_pool_bit_for_bit(dtype: torch.dtype) -> None:
    """What the plain path stores: rounded to even, saturated, and NaN where the model made one."""
    from diffusers_ardiff.attention.kernels.rope_write import rope_write

    scales = KVScales(key=0.25, value=0.3)
    inputs = with_slots(make_inputs([200, 200], heads=12, head_dim=128, dtype=FLOAT8, device="cuda"), 48)
    query, keys, values = (part.clone() for part in make_states(2, 48, 12, 128, dtype=dtype, device="cuda"))
    values[0, 0], values[0, 1], values[1, 2, 3], keys[1, 2] = 6e4, float("inf"), float("nan"), -6e4
    rotary = VideoRope(head_dim=128)([list(range(8)), list(range(40, 48))], 2, 3, device="cuda")
    rotated = rope_write(inputs, query, keys, values, rotary, scales)
    assert torch.equal(rotated, apply_rotary(query, *rotary))
    expected = (store_as(apply_rotary(keys, *rotary), FLOAT8, 0.25), store_as(values, FLOAT8, 0.3))
    for pool, rows in zip(inputs[:2], expected, strict=True):
        stored = pool.view(torch.uint8)[inputs.slot_mapping]
        # Both signs of NaN are NaN.
        assert torch.equal(*(torch.where((part & 127) == 127, 127, part) for part in (stored, rows.view(torch.uint8))))


@pytest.mark.skipif(NO_FLOAT8, reason="needs compute capability 8.9")
@pytest.mark.parametrize("shuffle_seed", [None, 3])
def test_transformer_over_a_float8_pool(fused_calls: list, shuffle_seed: int | None) -> None:
    """Fused and torch write the same stored values but where the norm's sum rounds another way."""
    plain, fused, wide = (
        open_run(write, dtype, kv_dtype=kv_dtype, shuffle_seed=shuffle_seed)
        for write, dtype, kv_dtype in (
            ("torch", torch.bfloat16, FLOAT8),
            ("fused", torch.bfloat16, FLOAT8),
            ("torch", torch.bfloat16, torch.bfloat16),
        )
    )
    for chunk in range(6):
        arguments = (latents_of(2, seed=chunk), 500, text_of())
        out = fused.forward(*arguments)
        assert out.isfinite().all()
        assert relative_error(out, plain.forward(*arguments)) < 0.1
        assert 0 < relative_error(out, wide.forward(*arguments)) < 0.3
    assert len(fused_calls) == 6 * LAYERS


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_unnamed_is_the_measured_choice(fused_calls: list, dtype: torch.dtype) -> None:
    run = open_run(None, dtype)
    assert run.paged.fused_write_refusals("cuda", dtype) == []
    choice = run.paged.choose_write("cuda", dtype)
    run.forward(latents_of(2), 500, text_of())
    assert len(fused_calls) == LAYERS * choice.eager
    assert open_run("torch", dtype).paged.choose_write("cuda", dtype) == WriteChoice(eager=False, compiled=False)


def test_write_beyond_2_31_elements() -> None:
    """The last slots get what the plain path computes; the first, where 32-bit addresses would wrap to, keep theirs."""
    heads, head_dim, tokens = 12, 128, 24
    num_slots = 2**31 // (heads * head_dim) + 1000
    pools = [torch.zeros((num_slots, heads, head_dim), dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    assert (num_slots - tokens) * heads * head_dim > 2**31
    slots = torch.arange(num_slots - tokens, num_slots, device="cuda")[None]
    inputs = make_inputs([1], device="cuda")._replace(key_pool=pools[0], value_pool=pools[1], slot_mapping=slots)
    query, keys, values = make_states(1, tokens, heads, head_dim, dtype=torch.bfloat16, device="cuda")
    rotary = VideoRope(head_dim=head_dim)([[0, 1, 2, 3]], 2, 3, device="cuda")
    weight = torch.rand(heads * head_dim, dtype=torch.bfloat16, device="cuda")

    from diffusers_ardiff.attention.kernels.rope_write import norm_rope_write

    norm_rope_write(inputs, query, keys, values, rotary, QKNorm(weight, weight, 1e-6))
    normed = torch.nn.functional.rms_norm(keys.flatten(2), weight.shape, weight, 1e-6).view_as(keys)
    assert relative_error(pools[0][slots], apply_rotary(normed, *rotary)) < 2e-2
    assert torch.equal(pools[1][slots], values)
    assert not any(pool[:-tokens].any() for pool in pools)


# -- host work ------------------------------------------------------------------------------------------------------


def runtime_calls(work: Callable[[], object]) -> list[str]:
    """Names of the CUDA calls that the host makes inside ``work``."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace, record_function("measured"):
        work()
    events = [event for event in trace.events() if event.device_type == DeviceType.CPU]
    (region,) = [event.time_range for event in events if event.name == "measured"]
    inside = [event for event in events if region.start <= event.time_range.start <= region.end]
    return [event.name for event in inside if event.name.startswith("cu")]


def waits(calls: list[str]) -> list[str]:
    return [name for name in calls if "Synchronize" in name or name in ("cudaMemcpy", "cudaMemset")]


def test_a_wait_would_be_noticed() -> None:
    assert waits(runtime_calls(lambda: torch.ones(3, device="cuda").sum().item()))


@pytest.mark.parametrize("kind", ["written", "normalised, rotated, written"])
@pytest.mark.parametrize("shuffle_seed", [None, 2])
def test_the_op_never_waits_for_the_device(kind: str, shuffle_seed: int | None) -> None:
    """The profiler's view, with the backend that is chosen here."""
    manager = make_manager(
        24, 72, heads=2, head_dim=128, dtype=torch.bfloat16, device="cuda", shuffle_seed=shuffle_seed
    )
    context = PagedForwardContext(manager.open_session().branches, num_tokens=24).prepare()
    states = make_states(1, 24, 2, 128, dtype=torch.bfloat16, device="cuda")
    rotary = VideoRope(head_dim=128)([[0, 1, 2, 3]], 2, 3, device="cuda")
    weight = torch.ones(256, dtype=torch.bfloat16, device="cuda")

    def call() -> torch.Tensor:
        if kind == "written":
            return paged_write_attn(context.layer_inputs(0), *states)
        return paged_norm_rope_write_attn(context.layer_inputs(0), *states, rotary, QKNorm(weight, weight, 1e-6))

    for _ in range(2):
        call()
    torch.cuda.synchronize()
    calls = runtime_calls(call)
    assert any("Launch" in name for name in calls)
    assert waits(calls) == []
