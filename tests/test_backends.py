"""Every attention backend against dense attention; what each refuses; how often keys are copied."""

from dataclasses import replace

import pytest
import torch
from dense import TokenHistory, dense_attention, relative_error
from rollouts import Rows, forward, make_manager, pool_bytes, random_rows
from torch.testing import assert_close

from diffusers_ardiff.attention import (
    AttentionRequest,
    backends,
    choose_page_size,
    get_backend,
    list_backends,
    paged_attention,
    paged_write_attn,
    register_backend,
    registry,
    select_backend,
    supported_kernel_block_sizes,
)
from diffusers_ardiff.context import PagedForwardContext

CPU_BACKENDS = [backend.name for backend in list_backends() if "cpu" in backend.device_types]
PAGE = 16
LENGTHS = [1, PAGE - 1, PAGE, PAGE + 1, 257, 320]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def test_reference_is_the_last_resort() -> None:
    """Whatever else is registered, the CPU is served by torch's own attention, and by the reference if need be."""
    assert CPU_BACKENDS[0] == "sdpa"
    assert CPU_BACKENDS[-1] == list_backends()[-1].name == "reference"


# -- against dense --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("shuffle_seed", [None, 2])
@pytest.mark.parametrize("length", LENGTHS)
def test_every_fill_level(backend: str, dtype: torch.dtype, shuffle_seed: int | None, length: int) -> None:
    """A masked weight of 0 times NaN in an unwritten V slot is NaN (flash-attention#1745): lengths are exact, so a pool
    full of NaN changes nothing. Window of 320 tokens in pages of 16."""
    branches = make_manager(64, 256, dtype=dtype, shuffle_seed=shuffle_seed).open_session().branches
    history = TokenHistory(64, 256)
    while length > 0:
        rows = random_rows(branches, min(length, 100))
        out = forward(branches, rows, backend=backend)
        expected = history.attend(*(t[0] for t in rows))
        history.commit(rows.keys[0], rows.values[0])
        assert relative_error(out[0], expected) < TOLERANCE[dtype]
        length -= 100


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("shuffle_seed", [None, 2])
@pytest.mark.parametrize("num_extra", [0, 3])
def test_through_three_overwrites(backend: str, shuffle_seed: int | None, num_extra: int) -> None:
    """C 24, B 16, sink 1, window 3 frames: two forwards a chunk, until the window was overwritten three times."""
    branches = make_manager(24, 72, extra=num_extra, shuffle_seed=shuffle_seed).open_session().branches
    history = TokenHistory(24, 72)
    for _ in range(13):
        for _ in range(2):
            rows = random_rows(branches, 24)
            extra = random_rows(branches, num_extra) if num_extra else None
            out = forward(branches, rows, extra=extra, backend=backend, commit=False)
            actions = (extra.keys[0], extra.values[0]) if extra else None
            expected = history.attend(*(t[0] for t in rows), extra=actions)
            assert_close(out[0], expected, rtol=1e-5, atol=1e-5)
        branches[0].commit()
        history.commit(rows.keys[0], rows.values[0])


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_five_tokens_in_a_page_of_sixteen(backend: str) -> None:
    branches = make_manager(0, 16).open_session().branches
    rows = random_rows(branches, 5)
    out = forward(branches, rows, backend=backend)
    assert_close(out[0], dense_attention(*(t[0] for t in rows)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("length", LENGTHS)
def test_zero_query_gives_the_mean_value(backend: str, length: int) -> None:
    """Padding lanes took softmax mass on the non-causal path (flashinfer#3716): with query 0 each key weighs 1/N."""
    branches = make_manager(64, 256).open_session().branches
    _, keys, values = random_rows(branches, length)
    query = torch.zeros_like(keys)
    context = PagedForwardContext(branches, num_tokens=length, backend=backend).prepare()
    out = paged_write_attn(context.layer_inputs(0), query, keys, values)
    assert_close(out, values.mean(1, keepdim=True).expand_as(out), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_many_queries_over_a_long_window(backend: str) -> None:
    """The first 128 of 300 query rows once came out wrong over 4096 keys (flashinfer#4972)."""
    branches = make_manager(96, 4000).open_session().branches
    history = TokenHistory(96, 4000)
    for num_tokens in (3796, 300):
        rows = random_rows(branches, num_tokens)
        out = forward(branches, rows, backend=backend)
        expected = history.attend(*(t[0] for t in rows))
        history.commit(rows.keys[0], rows.values[0])
    for part in (slice(0, 128), slice(128, 300)):
        assert relative_error(out[0, part], expected[part]) < 1e-5


# -- rows -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("shuffle_seed", [None, 2])
@pytest.mark.parametrize("reverse", [False, True])
def test_rows_of_different_length_equal_rows_alone(backend: str, shuffle_seed: int | None, reverse: bool) -> None:
    """Three sessions with 0, 2 and 7 frames behind them in one call, in either order."""
    manager = make_manager(24, 72, max_sessions=3, shuffle_seed=shuffle_seed)
    branches, histories = [], []
    for frames in (0, 2, 7):
        (branch,) = manager.open_session().branches
        history = TokenHistory(24, 72)
        for _ in range(frames):
            rows = random_rows([branch], 24)
            forward([branch], rows)
            history.commit(rows.keys[0], rows.values[0])
        branches.append(branch)
        histories.append(history)
    order = range(2, -1, -1) if reverse else range(3)
    for _ in range(2):
        rows = random_rows(branches, 24)
        out = forward([branches[i] for i in order], rows, backend=backend)
        for row, index in enumerate(order):
            query, keys, values = (t[row] for t in rows)
            assert_close(out[row], histories[index].attend(query, keys, values), rtol=1e-5, atol=1e-5)
            histories[index].commit(keys, values)


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("shuffle_seed", [None, 2])
@pytest.mark.parametrize("order", [(0, 1, 3), (0, 2, 3), (3, 2, 1), (1, 3)], ids=str)
def test_rows_at_any_stride(backend: str, shuffle_seed: int | None, order: tuple[int, ...]) -> None:
    """Equal lengths, but rows of four sessions picked and ordered freely: their distances in the pool differ."""
    manager = make_manager(24, 72, max_sessions=4, shuffle_seed=shuffle_seed)
    branches = [manager.open_session().branch() for _ in range(4)]
    chosen, histories = [branches[i] for i in order], [TokenHistory(24, 72) for _ in order]
    for _ in range(6):
        rows = random_rows(chosen, 24)
        out = forward(chosen, rows, backend=backend)
        for row, history in enumerate(histories):
            query, keys, values = (t[row] for t in rows)
            assert_close(out[row], history.attend(query, keys, values), rtol=1e-5, atol=1e-5)
            history.commit(keys, values)


@pytest.fixture
def sdpa_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Key shapes of each call of torch's attention."""
    calls = []
    original = backends.sdpa.scaled_dot_product_attention

    def counted(query, key, value, **kwargs):
        calls.append(tuple(key.shape))
        return original(query, key, value, **kwargs)

    monkeypatch.setattr(backends.sdpa, "scaled_dot_product_attention", counted)
    return calls


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("shuffle_seed", [None, 2])
def test_one_launch_for_all_rows(sdpa_calls: list, ragged: bool, shuffle_seed: int | None) -> None:
    manager = make_manager(24, 72, max_sessions=3, shuffle_seed=shuffle_seed)
    branches = [manager.open_session().branch() for _ in range(3)]
    if ragged:
        forward(branches[:1], random_rows(branches[:1], 24))
        sdpa_calls.clear()
    forward(branches, random_rows(branches, 24), backend="sdpa")
    assert sdpa_calls == [(3, 2, 48 if ragged else 24, 8)]


def test_equal_rows_are_read_in_place(sdpa_calls: list, monkeypatch: pytest.MonkeyPatch) -> None:
    """Branches of one session lie at equal strides: their keys are a view of the pool, nothing is gathered."""

    def no_copy(*args):
        raise AssertionError("keys were copied")

    monkeypatch.setattr(backends.sdpa, "padded_gather", no_copy)
    manager = make_manager(24, 72, branches_per_session=2)
    branches = manager.open_session(["positive", "negative"]).branches
    for _ in range(6):
        forward(branches, random_rows(branches, 24), backend="sdpa")
    assert sdpa_calls[-1] == (2, 2, 96, 8)


# -- staging --------------------------------------------------------------------------------------------------------


@pytest.fixture
def copied_keys(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Key rows of each copy out of the pool."""
    copies = []
    original = torch.index_select

    def counted(source, dim, index, *, out=None):
        copies.append(len(index))
        return original(source, dim, index, out=out) if out is not None else original(source, dim, index)

    monkeypatch.setattr(torch, "index_select", counted)
    return copies


def fragmented(frames: int = 6, **kwargs) -> tuple:
    manager = make_manager(24, 72, shuffle_seed=2, **kwargs)
    branches = [manager.open_session().branch() for _ in range(kwargs.get("max_sessions", 1))]
    for branch in branches:
        for _ in range(frames):
            forward([branch], random_rows([branch], 24))
    return (manager, *branches)


def test_window_is_gathered_once_a_chunk(copied_keys: list[int]) -> None:
    """K and V of 96 tokens at the first denoise forward, of the 24 current ones at the next three; a commit, a failure
    and a flush each make the next forward gather again."""
    _, branch = fragmented()
    copied_keys.clear()
    for _ in range(4):
        forward([branch], random_rows([branch], 24), commit=False)
    assert copied_keys == [96, 96] + [24, 24] * 3
    copied_keys.clear()
    branch.commit()
    forward([branch], random_rows([branch], 24), commit=False)
    with pytest.raises(ArithmeticError), PagedForwardContext([branch], num_tokens=24):
        raise ArithmeticError
    forward([branch], random_rows([branch], 24), commit=False)
    branch.flush(24)
    forward([branch], random_rows([branch], 24), commit=False)
    assert copied_keys == [96] * 4 + [72] * 2


def test_guidance_rows_are_staged_side_by_side(copied_keys: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Staging rows were handed out from the end, so two branches of a session lay at a negative stride: every forward
    gathered both windows again, beside staging them."""

    def no_copy(*args):
        raise AssertionError("the windows were gathered beside the staged ones")

    monkeypatch.setattr(backends.sdpa, "padded_gather", no_copy)
    manager = make_manager(24, 72, branches_per_session=2, shuffle_seed=2)
    branches = manager.open_session(["positive", "negative"]).branches
    for _ in range(6):
        forward(branches, random_rows(branches, 24))
    copied_keys.clear()
    for _ in range(2):
        forward(branches, random_rows(branches, 24), commit=False)
    assert copied_keys == [96] * 4 + [24] * 4


@pytest.mark.parametrize("frames", [1, 6])
def test_sessions_never_share_a_staged_window(frames: int) -> None:
    """Denoise forwards of sessions A, B, A: the third is bit-equal to the same forward over freshly gathered keys."""
    manager, first, second = fragmented(frames, max_sessions=2)
    rows = [random_rows([first], 24) for _ in range(3)]
    for branch, new in zip((first, second, first), rows, strict=True):
        out = forward([branch], new, commit=False)
    manager.storage.staging.held = [[None] * 2]
    fresh = forward([first], rows[2], commit=False)
    assert torch.equal(out, fresh)
    assert first.staging_row != second.staging_row


def test_reused_staging_row_is_gathered_again(copied_keys: list[int]) -> None:
    """A closed session's staging row goes to the next one, which has the same branch name and history counter."""
    manager, first = fragmented(0)
    rows = random_rows([first], 24)
    forward([first], rows, commit=False)
    first_row = first.staging_row
    manager.sessions[0].close()
    second = manager.open_session().branch()
    assert (second.staging_row, second.history) == (first_row, 0)
    copied_keys.clear()
    forward([second], rows, commit=False)
    assert copied_keys == [24, 24]
    assert manager.storage.staging.held == [[(1, "positive", 0)]]


def test_interrupted_staging_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy that raises half-way leaves a staged window of two histories: it must be gathered whole again."""
    manager, branch = fragmented()
    rows = random_rows([branch], 24)
    expected = forward([branch], rows, commit=False, backend="reference")
    forward([branch], random_rows([branch], 24), commit=False)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "index_select", lambda *args, **kwargs: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            forward([branch], rows, commit=False)
    assert manager.storage.staging.held == [[None]]
    assert_close(forward([branch], rows, commit=False), expected, rtol=1e-5, atol=1e-5)


def test_longer_retry_without_a_commit_restages_its_own_rows() -> None:
    """While the window fills, a second forward of the chunk may be longer: the rows beyond the first one's are new."""
    _, branch = fragmented(1)
    forward([branch], random_rows([branch], 12), commit=False)
    rows = random_rows([branch], 40)
    staged = forward([branch], rows, commit=False, backend="sdpa")
    assert_close(staged, forward([branch], rows, commit=False, backend="reference"), rtol=1e-5, atol=1e-5)


def test_inputs_without_a_launch_plan_are_exact() -> None:
    """Handle 0: page size and lengths are read from the tensors."""
    _, branch = fragmented()
    context = PagedForwardContext([branch], num_tokens=24).prepare()
    rows = random_rows([branch], 24)
    inputs = context.layer_inputs(0)
    out = paged_write_attn(inputs, *rows)
    bare = inputs._replace(launch=torch.tensor([16, 0]))
    assert torch.equal(paged_attention(rows.query, bare), out)


# -- refusals -------------------------------------------------------------------------------------------------------

PICKY = replace(
    get_backend("reference"),
    name="picky",
    rank=1,
    on_hip=False,
    device_types=frozenset({"cuda"}),
    dtypes=frozenset({torch.bfloat16}),
    head_dims=frozenset({64, 128}),
    page_multiple=16,
    masks=False,
)
FITS = AttentionRequest(device_type="cuda", dtype=torch.bfloat16, head_dim=128, page_size=16)


@pytest.fixture
def picky(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_backends", {**registry._backends, "picky": PICKY})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"device_type": "cpu"}, "runs on ['cuda']"),
        ({"is_hip": True}, "does not run on ROCm"),
        ({"dtype": torch.float32}, "takes ['torch.bfloat16'], not torch.float32"),
        ({"page_size": 24}, "wants pages of a multiple of 16"),
        ({"head_dim": 12}, "takes head sizes [64, 128], not 12"),
        ({"needs_mask": True}, "honours no piecewise mask"),
        ({"needs_lse": True}, "returns no log-sum-exp"),
    ],
)
@pytest.mark.usefixtures("picky")
def test_refusals(change: dict, reason: str) -> None:
    """Kernels once ran with a mask dropped in silence (diffusers#12605), or on ROCm with pages that fault the GPU
    (flash-attention#1579)."""
    request = replace(FITS, **change)
    assert PICKY.refusals(FITS) == []
    assert PICKY.refusals(request) == [reason]
    assert select_backend(FITS).name == "picky"
    with pytest.raises(ValueError) as error:
        select_backend(request, "picky")
    assert f"picky: {reason}" in str(error.value)


@pytest.mark.usefixtures("picky")
def test_unnamed_choice_goes_on_to_the_next_that_can() -> None:
    """By measured order: on ROCm a paged kernel at page 16 is never reached."""
    assert select_backend(replace(FITS, is_hip=True)).name == "sdpa"
    assert select_backend(replace(FITS, device_type="cpu")).name == "sdpa"
    with pytest.raises(ValueError) as error:
        select_backend(replace(FITS, device_type="mps"))
    message = str(error.value)
    assert "head size 128, torch.bfloat16, pages of 16 on mps" in message
    assert all(name in message for name in ("picky:", "sdpa:", "reference:"))


def test_unknown_backend_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'flash9'; known: .*'sdpa'.*'reference'"):
        get_backend("flash9")


def test_a_name_belongs_to_one_backend() -> None:
    with pytest.raises(ValueError, match="'sdpa' exists already"):
        register_backend(replace(get_backend("reference"), name="sdpa"))
    assert register_backend(get_backend("sdpa")) is get_backend("sdpa")


@pytest.mark.parametrize(("backend", "message"), [("picky", "picky: runs on"), ("flash9", "unknown")])
@pytest.mark.usefixtures("picky")
def test_refused_call_writes_nothing(backend: str, message: str) -> None:
    """Not a bit of the pool changes, and the forward can be run again with a backend that can."""
    branches = make_manager(24, 72).open_session().branches
    rows = random_rows(branches, 24)
    forward(branches, rows)
    before = pool_bytes(branches[0].storage)
    with pytest.raises(ValueError, match=message):
        forward(branches, rows, backend=backend)
    assert torch.equal(pool_bytes(branches[0].storage), before)
    assert branches[0].committed_tokens == 24
    forward(branches, rows, backend="sdpa")


# -- page sizes -----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("picky")
def test_page_sizes_are_asked_of_the_backend() -> None:
    assert supported_kernel_block_sizes("picky") == list(range(16, 257, 16))
    assert supported_kernel_block_sizes() == list(range(16, 257, 16))
    assert supported_kernel_block_sizes("reference", largest=4) == [1, 2, 3, 4]
    with pytest.raises(ValueError, match="unknown attention backend"):
        supported_kernel_block_sizes("flash9")


@pytest.mark.parametrize(
    ("supported", "chosen"), [(range(16, 257, 16), 16), ([64], 64), ([128, 64], 64), (range(1, 257), 16)]
)
def test_page_size_comes_from_the_kernel(supported, chosen: int) -> None:
    """The page was once tied to the frame: 832x480 has 1560 tokens a frame, no multiple of 16, and could not run
    (vllm-omni#6475)."""
    assert choose_page_size(supported) == chosen


def test_no_page_size_is_an_error() -> None:
    with pytest.raises(ValueError, match="no page size"):
        choose_page_size([])


def test_frame_of_1560_tokens_runs_on_pages_of_16() -> None:
    branches = make_manager(0, 1560, heads=1, head_dim=4).open_session().branches
    assert len(branches[0].run.pages) == 98
    rows = random_rows(branches, 1560)
    out = forward(branches, Rows(rows.query[:, :8], rows.keys, rows.values))
    expected = dense_attention(rows.query[0, :8], rows.keys[0], rows.values[0])
    assert_close(out[0], expected, rtol=1e-5, atol=1e-5)
