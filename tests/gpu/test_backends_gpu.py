"""Every usable backend on a CUDA device: against explicit attention, in poisoned pools, without syncs, in graphs."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from dense import TokenHistory, relative_error
from rollouts import Rows, forward, make_manager

from diffusers_ardiff.attention import AttentionRequest, list_backends, paged_write_attn
from diffusers_ardiff.attention.backends.splits import choose_splits
from diffusers_ardiff.cache import Branch, KVManager
from diffusers_ardiff.context import PagedForwardContext, PagedLayerInputs, find_launch_plan, register_launch_plan

pytestmark = pytest.mark.gpu

PAGE = 16
HEADS, HEAD_DIM = 2, 128
LENGTHS = [1, PAGE - 1, PAGE, PAGE + 1, 257, 320]
TOLERANCE = 2e-2
BF16_HALF_STEP = 2**-8


def usable_backends() -> list[str]:
    """Backends that serve bfloat16, head size 128 and pages of 16 here."""
    if not torch.cuda.is_available():
        return []
    request = AttentionRequest(
        device_type="cuda",
        dtype=torch.bfloat16,
        head_dim=HEAD_DIM,
        page_size=PAGE,
        is_hip=torch.version.hip is not None,
    )
    return [backend.name for backend in list_backends() if not backend.refusals(request)]


BACKENDS = usable_backends()
KERNELS = [name for name in BACKENDS if name != "reference"]
FILLING = [backend.name for backend in list_backends() if backend.name in BACKENDS and backend.device_lengths]


@pytest.fixture(autouse=True)
def cuda_device() -> Iterator[None]:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    torch.cuda.manual_seed(0)
    yield
    torch.cuda.set_sync_debug_mode("default")


def open_manager(sink: int, window: int, **kwargs: object) -> KVManager:
    """A poisoned bfloat16 pool on the GPU."""
    settings = {"heads": HEADS, "head_dim": HEAD_DIM, "dtype": torch.bfloat16, "device": "cuda"} | kwargs
    return make_manager(sink, window, page_size=PAGE, **settings)


def gpu_rows(branches: Sequence[Branch], num_tokens: int) -> Rows:
    storage = branches[0].storage
    size = (len(branches), num_tokens, storage.shape.num_heads, storage.shape.head_dim)
    return Rows(*(torch.randn(size, dtype=storage.dtype, device="cuda") for _ in range(3)))


def step(branches: Sequence[Branch], histories: Sequence[TokenHistory], num_tokens: int, backend: str) -> float:
    """One committed forward; the largest error of its rows against their explicit histories."""
    rows = gpu_rows(branches, num_tokens)
    out = forward(branches, rows, backend=backend)
    errors = []
    for index, history in enumerate(histories):
        query, keys, values = (tensor[index] for tensor in rows)
        errors.append(relative_error(out[index], history.attend(query, keys, values)))
        history.commit(keys, values)
    return max(errors)


# -- numbers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shuffle_seed", [None, 2])
@pytest.mark.parametrize("length", LENGTHS)
def test_every_fill_level(backend: str, shuffle_seed: int | None, length: int) -> None:
    branches = open_manager(64, 256, shuffle_seed=shuffle_seed).open_session().branches
    history = TokenHistory(64, 256)
    while length > 0:
        assert step(branches, [history], min(length, 100), backend) < TOLERANCE
        length -= 100


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shuffle_seed", [None, 2])
def test_through_two_overwrites(backend: str, shuffle_seed: int | None) -> None:
    branches = open_manager(24, 72, shuffle_seed=shuffle_seed).open_session().branches
    history = TokenHistory(24, 72)
    for _ in range(9):
        assert step(branches, [history], 24, backend) < TOLERANCE


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shuffle_seed", [None, 2])
def test_rows_of_different_length(backend: str, shuffle_seed: int | None) -> None:
    """Three sessions with 0, 2 and 7 chunks behind them in one call, until all windows are full."""
    manager = open_manager(24, 72, max_sessions=3, shuffle_seed=shuffle_seed)
    branches = [manager.open_session().branch() for _ in range(3)]
    histories = [TokenHistory(24, 72) for _ in branches]
    for branch, history, chunks in zip(branches, histories, (0, 2, 7), strict=True):
        for _ in range(chunks):
            step([branch], [history], 24, backend)
    for _ in range(5):
        assert step(branches, histories, 24, backend) < TOLERANCE


@pytest.mark.skipif("flash3_split" not in BACKENDS, reason="needs FlashAttention 3 with splits")
@pytest.mark.parametrize(("queries", "heads", "keys"), [(4680, 12, 18720), (1560, 12, 9360), (700, 2, 6000)])
def test_keys_in_parts(queries: int, heads: int, keys: int) -> None:
    """As exact as in one part, at sizes where there are several.

    Both are rounded to bfloat16, so they may be one step of the largest value apart, which a limit of 0.005 forbade.
    """
    torch.manual_seed(0)
    shape = (1, queries, heads, HEAD_DIM)
    count = torch.cuda.get_device_properties(0).multi_processor_count
    assert choose_splits(shape, keys, count) > 1 or count != 132
    branches = open_manager(0, keys, heads=heads).open_session().branches
    for _ in range(-(-keys // queries) - 1):
        forward(branches, gpu_rows(branches, queries), backend="flash3")
    rows = gpu_rows(branches, queries)
    whole = forward(branches, rows, backend="flash3", commit=False)
    parts = forward(branches, rows, backend="flash3_split", commit=False)
    assert relative_error(parts, whole) <= 2**-7


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("length", LENGTHS)
def test_zero_query_gives_the_mean_value(backend: str, length: int) -> None:
    """Padding lanes took softmax mass on the non-causal path (flashinfer#3716)."""
    branches = open_manager(64, 256).open_session().branches
    _, keys, values = gpu_rows(branches, length)
    context = PagedForwardContext(branches, num_tokens=length, backend=backend).prepare()
    out = paged_write_attn(context.layer_inputs(0), torch.zeros_like(keys), keys, values)
    expected = values.float().mean(1, keepdim=True).expand_as(out)
    torch.testing.assert_close(out.float(), expected, rtol=TOLERANCE, atol=BF16_HALF_STEP)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("frames", [1, 2, 3, 4])
def test_number_of_keys_with_weight(backend: str, frames: int) -> None:
    """Inclusive, two-sided bounds once let one more token in, or twice the window (transformers#39408)."""
    length = frames * 24
    branches = open_manager(0, 96).open_session().branches
    _, keys, values = gpu_rows(branches, length)
    values = torch.zeros_like(values)
    values[:, -1] = 1
    context = PagedForwardContext(branches, num_tokens=length, backend=backend).prepare()
    out = paged_write_attn(context.layer_inputs(0), torch.zeros_like(keys), keys, values)
    torch.testing.assert_close(1 / out.float(), torch.full_like(out, length).float(), rtol=5e-3, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_many_queries_over_a_long_window(backend: str) -> None:
    """The first 128 of 300 query rows once came out wrong over 4096 keys (flashinfer#4972)."""
    branches = open_manager(96, 4000).open_session().branches
    history = TokenHistory(96, 4000)
    step(branches, [history], 3796, backend)
    rows = gpu_rows(branches, 300)
    out = forward(branches, rows, backend=backend)
    expected = history.attend(*(tensor[0] for tensor in rows))
    for part in (slice(0, 128), slice(128, 300)):
        assert relative_error(out[0, part], expected[part]) < TOLERANCE


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_sessions_of_one_token(backend: str) -> None:
    """The second of two short sequences once came out zero (flashinfer#725)."""
    manager = open_manager(0, 96, max_sessions=2)
    branches = [manager.open_session().branch() for _ in range(2)]
    rows = Rows(*(tensor.repeat(2, 1, 1, 1) for tensor in gpu_rows(branches[:1], 1)))
    out = forward(branches, rows, backend=backend)
    assert torch.equal(out[0], out[1])
    assert relative_error(out[0], rows.values[0]) < BF16_HALF_STEP


@pytest.mark.parametrize("pages_in_front", [10, 20])
def test_beyond_two_to_the_31_elements(pages_in_front: int) -> None:
    """The same tokens in the last pages and in the first: the same bits. With 10 free pages on each side of the used
    ones, the run is in two parts."""
    small = open_manager(64, 256, heads=12)
    large = open_manager(64, 256, heads=12, max_sessions=4400)
    last_pages = large.plan.num_pages - 20
    assert (last_pages * PAGE) * 12 * HEAD_DIM > 2**31
    front = large.allocator.allocate(1, pages_in_front)[0]
    large.allocator.allocate(1, last_pages if pages_in_front == 10 else last_pages - 20)
    if pages_in_front == 10:
        large.allocator.release(front)
    pair = [manager.open_session().branches for manager in (small, large)]
    assert pair[1][0].run.pages[-1] == large.plan.num_pages - 1
    assert pair[1][0].run.is_contiguous is (pages_in_front == 20)
    for _ in range(5):
        rows = gpu_rows(pair[0], 96)
        for backend in BACKENDS:
            outputs = [forward(branches, rows, backend=backend, commit=False) for branches in pair]
            limit = 0.0 if pages_in_front == 20 else TOLERANCE
            assert relative_error(outputs[1], outputs[0]) <= limit, backend
        for branches in pair:
            branches[0].commit()


# -- host work ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize(("shuffle_seed", "ragged"), list(itertools.product([None, 2], [False, True])))
def test_no_stream_sync(backend: str, shuffle_seed: int | None, ragged: bool) -> None:
    """Preparing a forward and running the op never waits for the device."""
    manager = open_manager(24, 72, max_sessions=2, shuffle_seed=shuffle_seed)
    branches = [manager.open_session().branch() for _ in range(2)]
    rows = gpu_rows(branches, 24)
    for _ in range(2):
        forward(branches[:1] if ragged else branches, Rows(*(t[: 1 if ragged else 2] for t in rows)), backend=backend)
    forward(branches, rows, backend=backend, commit=False)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    forward(branches, rows, backend=backend, commit=False)
    torch.cuda.set_sync_debug_mode("default")


def test_compiled_code_clones_no_pool() -> None:
    """A mutated view of a graph input was once copied whole in every layer (pytorch#131192)."""
    branches = open_manager(0, 65536, layers=2).open_session().branches
    rows = gpu_rows(branches, 128)
    storage = branches[0].storage

    @torch.compile(fullgraph=True)
    def layers(inputs: Sequence[PagedLayerInputs], query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor):
        for layer in inputs:
            query = query + paged_write_attn(layer, query * 2, keys + 1, values * 3)
        return query

    for measured in (False, False, True):
        context = PagedForwardContext(branches, num_tokens=128)
        with context, torch.no_grad():
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            layers([context.layer_inputs(index) for index in range(2)], *rows)
            torch.cuda.synchronize()
        if measured:
            pool = storage.key_pools[0]
            assert torch.cuda.max_memory_allocated() - before < pool.numel() * pool.element_size()
        context.mark_committed()


class StaticInputs:
    """Layer inputs whose tensors stay where they are; each forward's values are copied into them.

    The plan names no written ranges, so rows are written through the slot tensor, not into slices fixed at capture.
    """

    def __init__(self, context: PagedForwardContext) -> None:
        plan = find_launch_plan(int(context.layer_inputs(0).launch[1]))
        assert plan is not None
        self.plan = replace(plan, rows=tuple(replace(row, written_ranges=()) for row in plan.rows))
        launch = register_launch_plan(self.plan)
        first = context.layer_inputs(0)
        self.shared = {name: getattr(first, name).clone() for name in ("slot_mapping", "block_table", "seq_lens")}
        layers = range(context.storage.shape.num_layers)
        self.layers = [context.layer_inputs(index)._replace(launch=launch, **self.shared) for index in layers]

    def copy_from(self, context: PagedForwardContext) -> None:
        for name, tensor in self.shared.items():
            tensor.copy_(getattr(context.layer_inputs(0), name))


@pytest.mark.parametrize(
    ("backend", "sink", "num_tokens", "heads"),
    [(name, 24, 24, HEADS) for name in KERNELS] + [("flash3_split", 0, 4680, 12)] * ("flash3_split" in BACKENDS),
)
def test_graph_replays_equal_eager(backend: str, sink: int, num_tokens: int, heads: int) -> None:
    """Captured once in the steady state, replayed over three chunks with new slots and rows: equal to eager forwards
    over the same history. Once at a size whose keys are cut into parts, which are merged by a second kernel."""
    window = (3 if sink else 4) * num_tokens
    managers = [open_manager(sink, window, layers=2, heads=heads) for _ in range(2)]
    replayed, eager = (manager.open_session().branches for manager in managers)
    rows = gpu_rows(eager, num_tokens)
    for _ in range(5):
        new = gpu_rows(eager, num_tokens)
        for branches in (replayed, eager):
            forward(branches, new, backend=backend)

    def layers(inputs: Sequence[PagedLayerInputs]) -> torch.Tensor:
        out = rows.query
        for layer in inputs:
            out = paged_write_attn(layer, out, rows.keys, rows.values)
        return out

    context = PagedForwardContext(replayed, num_tokens=num_tokens, backend=backend).prepare()
    static = StaticInputs(context)
    layers(static.layers)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layers(static.layers)
    context.close()
    for _ in range(3):
        for tensor, new in zip(rows, gpu_rows(eager, num_tokens), strict=True):
            tensor.copy_(new)
        with PagedForwardContext(replayed, num_tokens=num_tokens, backend=backend) as context:
            static.copy_from(context)
            graph.replay()
            context.mark_written()
        context.mark_committed()
        with PagedForwardContext(eager, num_tokens=num_tokens, backend=backend) as context:
            expected = layers([context.layer_inputs(index) for index in range(2)])
        context.mark_committed()
        assert torch.equal(captured, expected)


@pytest.mark.parametrize("backend", FILLING)
@pytest.mark.parametrize("shuffle_seed", [None, 2])
def test_one_graph_serves_every_fill_level(backend: str, shuffle_seed: int | None) -> None:
    """Captured in the first chunk and replayed through fill, first overwrite and steady state: lengths and slots come
    from tensors; each output equals explicit attention."""
    branches = open_manager(24, 72, shuffle_seed=shuffle_seed).open_session().branches
    history, rows = TokenHistory(24, 72), gpu_rows(branches, 24)
    context = PagedForwardContext(branches, num_tokens=24, backend=backend).prepare()
    static = StaticInputs(context)
    paged_write_attn(static.layers[0], *rows)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = paged_write_attn(static.layers[0], *rows)
    context.close()
    lengths = set()
    for _ in range(8):
        for tensor, new in zip(rows, gpu_rows(branches, 24), strict=True):
            tensor.copy_(new)
        with PagedForwardContext(branches, num_tokens=24, backend=backend) as context:
            lengths.add(context.spans[0].kv_len)
            static.copy_from(context)
            graph.replay()
            context.mark_written()
        context.mark_committed()
        query, keys, values = (tensor[0] for tensor in rows)
        assert relative_error(captured[0], history.attend(query, keys, values)) < TOLERANCE
        history.commit(keys, values)
    assert lengths == {24, 48, 72, 96}


def test_some_backend_reads_lengths_on_the_device() -> None:
    """Without one the test above would be a test of nothing."""
    assert "triton" in FILLING
