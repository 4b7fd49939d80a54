"""Forward contexts: built once, shared by identity, claimed and given back, constant in size for ever."""

import statistics
import time

import pytest
import torch
from rollouts import Rows, forward, make_manager, pool_bytes, random_rows

from diffusers_ardiff.attention import paged_attention, paged_write_attn, supported_kernel_block_sizes
from diffusers_ardiff.context import (
    PagedForwardContext,
    PagedLayerContext,
    PagedLayerInputs,
    find_launch_plan,
    is_paged_context,
)


@pytest.fixture
def branch():
    with make_manager(24, 72, layers=2).open_session() as session:
        yield session.branch()


def state_of(branch) -> tuple:
    ring = {name: value for name, value in vars(branch.ring).items() if name != "geometry"}
    return ring, branch.run, branch.history, branch.text, pool_bytes(branch.storage).tolist()


# -- names ----------------------------------------------------------------------------------------------------------


def test_known_names_work_together(branch) -> None:
    context = PagedForwardContext([branch], num_tokens=24).prepare()
    layer = context.layer_context(1)
    assert isinstance(layer, PagedLayerContext)
    inputs = layer.to_layer_inputs()
    assert isinstance(inputs, PagedLayerInputs)
    assert all(isinstance(field, torch.Tensor) for field in inputs)
    rows = random_rows([branch], 24)
    written = paged_write_attn(inputs, *rows)
    assert torch.equal(written, paged_attention(rows.query, inputs))
    context.mark_committed()
    assert branch.committed_tokens == 24
    assert 16 in supported_kernel_block_sizes()


def test_is_paged_context(branch) -> None:
    context = PagedForwardContext([branch], num_tokens=24)
    answers = [is_paged_context(value) for value in (context, context.layer_context(0), None, {}, branch)]
    assert answers == [True, True, False, False, False]


# -- built once -----------------------------------------------------------------------------------------------------


def test_layers_share_their_metadata_by_identity(branch) -> None:
    context = PagedForwardContext([branch], num_tokens=24).prepare()
    first, second = context.layer_inputs(0), context.layer_inputs(1)
    for name in ("slot_mapping", "block_table", "seq_lens", "launch"):
        assert getattr(first, name) is getattr(second, name)
    for name in ("key_pool", "value_pool"):
        assert getattr(first, name).data_ptr() != getattr(second, name).data_ptr()
    assert [int(inputs.layer_index) for inputs in (first, second)] == [0, 1]


def test_building_twice_is_a_no_op(branch) -> None:
    context = PagedForwardContext([branch], num_tokens=24)
    inputs = context.prepare().layer_inputs(0)
    assert context.prepare() is context
    assert all(a is b for a, b in zip(inputs, context.layer_inputs(0), strict=True))
    context.close()
    context.close()


def test_inputs_before_prepare_are_an_error(branch) -> None:
    context = PagedForwardContext([branch], num_tokens=24)
    with pytest.raises(RuntimeError, match="before prepare"):
        context.layer_inputs(0)
    with pytest.raises(RuntimeError, match="never ran"):
        context.mark_committed()


@pytest.mark.parametrize("layer", [-1, 2])
def test_unknown_layer(branch, layer: int) -> None:
    context = PagedForwardContext([branch], num_tokens=24).prepare()
    with pytest.raises(IndexError, match=rf"layer {layer} .* 2 layers"):
        context.layer_inputs(layer)


def test_metadata_of_a_wrapped_forward() -> None:
    """C 24, B 16, S 1, W 3 frames: frame 5 writes frame 2's slots, storage 48..71, and reads 96."""
    session = make_manager(24, 72).open_session()
    for _ in range(5):
        forward(session.branches, random_rows(session.branches, 24))
    inputs = PagedForwardContext(session.branches, num_tokens=24).prepare().layer_inputs(0)
    assert inputs.slot_mapping.tolist() == [list(range(48, 72))]
    assert inputs.block_table.tolist() == [[0, 1, 2, 3, 4, 5]]
    assert inputs.seq_lens.tolist() == [96]
    dtypes = (inputs.slot_mapping.dtype, inputs.block_table.dtype, inputs.seq_lens.dtype)
    assert dtypes == (torch.int64, torch.int32, torch.int32)


def test_slots_follow_a_shuffled_table() -> None:
    """Sink and window edge inside one page, pages in random order."""
    session = make_manager(5, 7, page_size=4, extra=2, shuffle_seed=5).open_session()
    (branch,) = session.branches
    pages = branch.run.pages
    inputs = PagedForwardContext([branch], num_tokens=9, num_extra=2).prepare().layer_inputs(0)
    expected = [pages[index // 4] * 4 + index % 4 for index in range(11)]
    assert inputs.slot_mapping.tolist() == [expected]
    assert list(pages) != sorted(pages)


# -- claims ---------------------------------------------------------------------------------------------------------


def test_second_context_while_one_is_open(branch) -> None:
    late = PagedForwardContext([branch], num_tokens=24)
    first = PagedForwardContext([branch], num_tokens=24).prepare()
    with pytest.raises(RuntimeError, match="open on it"):
        PagedForwardContext([branch], num_tokens=24)
    with pytest.raises(RuntimeError, match="open on it"):
        late.prepare()
    for action in (branch.commit, branch.reset, lambda: branch.flush(0)):
        with pytest.raises(RuntimeError, match="open on it"):
            action()
    first.close()
    assert PagedForwardContext([branch], num_tokens=24).prepare().starts == (0,)


def test_commit_with_nothing_pending_is_a_no_op(branch) -> None:
    assert branch.commit() == 0
    forward([branch], random_rows([branch], 24))
    assert (branch.commit(), branch.committed_tokens) == (0, 24)


def test_unknown_branch_names_the_known_ones() -> None:
    manager = make_manager(24, 72, branches_per_session=2)
    session = manager.open_session(["positive", "negative"])
    with pytest.raises(KeyError, match=r"'uncond'.*\['negative', 'positive'\]"):
        session.branch("uncond")


def test_use_after_close() -> None:
    session = make_manager(24, 72).open_session()
    branch = session.branch()
    context = PagedForwardContext([branch], num_tokens=24).prepare()
    session.close()
    with pytest.raises(RuntimeError, match="session"):
        context.layer_inputs(0)
    context.close()
    for action in (
        lambda: PagedForwardContext([branch], num_tokens=24),
        context.mark_committed,
        branch.reset,
        session.commit,
        session.reset,
        lambda: session.flush(0),
    ):
        with pytest.raises(RuntimeError, match="closed session"):
            action()


def test_branches_must_differ_and_share_a_pool(branch) -> None:
    other = make_manager(24, 72).open_session().branch()
    for branches, message in (([], "one or more"), ([branch, branch], "different"), ([branch, other], "one pool")):
        with pytest.raises(ValueError, match=message):
            PagedForwardContext(branches, num_tokens=24)


def test_a_context_made_too_early_is_refused(branch) -> None:
    """Two contexts were made for the same position; the second one, prepared after the first was committed, wrote its
    rows over committed tokens and committed them as the same position again."""
    early = PagedForwardContext([branch], num_tokens=24)
    forward([branch], random_rows([branch], 24))
    before = state_of(branch)
    with pytest.raises(RuntimeError, match=r"moved on to position 24 .* position 0"):
        early.prepare()
    assert state_of(branch) == before
    PagedForwardContext([branch], num_tokens=24).prepare().close()


def test_a_context_serves_one_forward(branch) -> None:
    """Entering a finished context again handed out its old slots without claiming the branch: a second forward could
    overwrite tokens that had been committed meanwhile."""
    context = PagedForwardContext([branch], num_tokens=24)
    with context:
        pass
    for action in (context.prepare, context.__enter__):
        with pytest.raises(RuntimeError, match="over"):
            action()
    with pytest.raises(RuntimeError, match="after the end"):
        context.layer_inputs(0)


def test_inputs_do_not_outlive_their_context(branch) -> None:
    inputs = PagedForwardContext([branch], num_tokens=24).prepare().layer_inputs(0)
    with pytest.raises(RuntimeError, match="no longer exists"):
        paged_write_attn(inputs, *random_rows([branch], 24))


def test_inputs_end_with_their_forward() -> None:
    """Inputs that a caller kept were still served after their forward, and after their session: they wrote into pages
    that another session had been given meanwhile."""
    manager = make_manager(24, 72)
    for end in ("forward", "session"):
        session = manager.open_session()
        context = PagedForwardContext(session.branches, num_tokens=24).prepare()
        inputs, rows = context.layer_inputs(0), random_rows(session.branches, 24)
        paged_write_attn(inputs, *rows)
        if end == "forward":
            context.close()
        session.close()
        later = manager.open_session()
        before = pool_bytes(manager.storage)
        for call in (
            lambda i=inputs, r=rows: paged_write_attn(i, *r),
            lambda i=inputs, r=rows: paged_attention(r[0], i),
        ):
            with pytest.raises(RuntimeError, match="no longer exists"):
                call()
        assert torch.equal(pool_bytes(manager.storage), before)
        later.close()
        context.close()
        assert context.is_prepared


def test_a_context_knows_what_was_not_written(branch) -> None:
    """Nothing told a layer that wrote its keys from one that was skipped."""
    context = PagedForwardContext([branch], num_tokens=24)
    assert context.unwritten_layers == (0, 1)
    with context:
        paged_attention(random_rows([branch], 24).query, context.layer_inputs(0))
        paged_write_attn(context.layer_inputs(1), *random_rows([branch], 24))
        assert context.unwritten_layers == (0,)
    assert context.unwritten_layers == (0,)


@pytest.mark.parametrize("prepared", [False, True])
def test_a_backend_named_late_is_used(branch, prepared: bool) -> None:
    """A backend named after the context was made was dropped."""
    context = PagedForwardContext([branch], num_tokens=24)
    if prepared:
        context.prepare()
    context.use_backend("reference")
    context.use_backend("reference")
    plan = find_launch_plan(int(context.prepare().layer_inputs(0).launch[1]))
    assert plan is not None
    assert plan.backend == "reference"
    with pytest.raises(ValueError, match=r"'reference'.*'sdpa'"):
        context.use_backend("sdpa")


# -- success and failure --------------------------------------------------------------------------------------------


def test_denoise_forwards_change_nothing_committed(branch) -> None:
    """15 forwards of one chunk: position and table stay, committed slots keep their bytes."""
    for _ in range(6):
        forward([branch], random_rows([branch], 24))
    before = branch.storage.key_pools[0].clone()
    run, written = branch.run, slice(24 + 48, 24 + 72)
    for _ in range(15):
        forward([branch], random_rows([branch], 24), commit=False)
        assert (branch.committed_tokens, branch.run) == (144, run)
    after = branch.storage.key_pools[0].clone()
    assert not torch.equal(before[written], after[written])
    before[written] = after[written] = 0
    assert torch.equal(before, after)


def run_layers(context: PagedForwardContext, rows: Rows, fail_in_layer: int | None = None) -> list[torch.Tensor]:
    outs = []
    with context:
        for layer in range(2):
            if layer == fail_in_layer:
                raise ArithmeticError(f"layer {layer}")
            outs.append(paged_write_attn(context.layer_inputs(layer), *rows))
    return outs


@pytest.mark.parametrize("shuffle_seed", [None, 1])
def test_failed_forward_can_be_run_again(shuffle_seed: int | None) -> None:
    """It raises in layer 1 of 2, after the window has wrapped: position, pages and text stay, and the same chunk again
    gives the same bits as one that never failed."""
    outs = []
    for fails in (False, True):
        torch.manual_seed(3)
        branch = make_manager(24, 72, layers=2, shuffle_seed=shuffle_seed).open_session().branch()
        branch.text = object()
        for _ in range(6):
            forward([branch], random_rows([branch], 24))
        rows, poisoned = random_rows([branch], 24), random_rows([branch], 24)
        position, run, text = branch.committed_tokens, branch.run, branch.text
        if fails:
            with pytest.raises(ArithmeticError):
                run_layers(PagedForwardContext([branch], num_tokens=24), poisoned, fail_in_layer=1)
            assert branch.commit() == 0
        assert (branch.committed_tokens, branch.run, branch.text) == (position, run, text)
        outs.append(run_layers(PagedForwardContext([branch], num_tokens=24), rows))
    assert all(torch.equal(a, b) for a, b in zip(*outs, strict=True))


def test_failed_recache_is_healed_by_the_same_recache(branch) -> None:
    for _ in range(6):
        forward([branch], random_rows([branch], 24))
    start, length = branch.ring.recache_span()
    rows = random_rows([branch], length)
    with pytest.raises(ArithmeticError):
        run_layers(PagedForwardContext([branch], num_tokens=length, start=start), rows, fail_in_layer=1)
    before = state_of(branch)
    for action in (
        lambda: PagedForwardContext([branch], num_tokens=24),
        branch.commit,
        lambda: branch.flush(24),
    ):
        with pytest.raises(RuntimeError, match="stale"):
            action()
        assert state_of(branch) == before
    run_layers(PagedForwardContext([branch], num_tokens=length, start=start), rows)
    assert (branch.ring.stale, branch.committed_tokens) == (False, 144)
    forward([branch], random_rows([branch], 24))
    assert branch.committed_tokens == 168


def test_illegal_forward_changes_nothing(branch) -> None:
    for _ in range(6):
        forward([branch], random_rows([branch], 24))
    forward([branch], random_rows([branch], 24), commit=False)
    before = state_of(branch)
    for request in ({"num_tokens": 73}, {"num_tokens": 12, "start": 100}, {"num_tokens": 24, "num_extra": 1}):
        with pytest.raises(ValueError, match=r"\d"):
            PagedForwardContext([branch], **request)
        assert state_of(branch) == before
    assert branch.commit() == 24


def test_rows_commit_together_or_not_at_all() -> None:
    """A later forward had run on the second row: the commit of the earlier context first advanced the first row, then
    raised, and the two rows disagreed about their position."""
    branches = make_manager(24, 72, branches_per_session=2).open_session(["positive", "negative"]).branches
    context = PagedForwardContext(branches, num_tokens=24)
    with context:
        paged_write_attn(context.layer_inputs(0), *random_rows(branches, 24))
    forward(branches[1:], random_rows(branches[1:], 24), commit=False)
    with pytest.raises(RuntimeError, match="can't be committed"):
        context.mark_committed()
    assert [branch.committed_tokens for branch in branches] == [0, 0]


@pytest.mark.parametrize("undo", ["failure", "reset", "other commit"])
def test_a_row_that_lost_its_forward_refuses_the_commit(undo: str) -> None:
    """A later forward on the second row alone had failed, or the row was reset, or had committed that later forward: the
    first row advanced and the second one did not, or not over the same tokens."""
    first, second = (branches := make_manager(24, 72, branches_per_session=2).open_session(["a", "b"]).branches)
    context = PagedForwardContext(branches, num_tokens=24)
    with context:
        paged_write_attn(context.layer_inputs(0), *random_rows(branches, 24))
    if undo == "failure":
        with pytest.raises(ArithmeticError), PagedForwardContext([second], num_tokens=24):
            raise ArithmeticError
    elif undo == "reset":
        second.reset()
    else:
        forward([second], random_rows([second], 24))
    position = second.committed_tokens
    with pytest.raises(RuntimeError, match="can't be committed"):
        context.mark_committed()
    assert (first.committed_tokens, second.committed_tokens) == (0, position)


def test_what_was_committed_already_is_a_no_op(branch) -> None:
    """The check for a lost forward must not refuse a second commit, or one after the session's own."""
    context = PagedForwardContext([branch], num_tokens=24)
    with context:
        context.mark_written()
    assert branch.commit() == 24
    context.mark_committed()
    context.mark_committed()
    recache = PagedForwardContext([branch], num_tokens=24, start=0)
    with recache:
        recache.mark_written()
    recache.mark_committed()
    assert branch.committed_tokens == 24


def test_forward_without_a_write_is_not_committed(branch) -> None:
    """In a loop where the processors were not bound, the stock model ran, and slots that nobody had written became
    history, without a word."""
    with PagedForwardContext([branch], num_tokens=24) as context:
        pass
    with pytest.raises(RuntimeError, match=r"no layer wrote keys.*paged\.bind.*mark_written\(\)"):
        context.mark_committed()
    assert branch.committed_tokens == 0


def test_failed_preparation_gives_the_branches_back(branch, monkeypatch: pytest.MonkeyPatch) -> None:
    context = PagedForwardContext([branch], num_tokens=24)
    with monkeypatch.context() as patch:
        patch.setattr(branch.storage, "slots", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            context.prepare()
    branch.check_idle("a forward")
    assert PagedForwardContext([branch], num_tokens=24).prepare().starts == (0,)


def test_a_branch_that_cannot_be_claimed_leaves_none_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Putting the second row's sink back ran out of memory while the forward claimed its branches: the first stayed open
    for ever, so its session could neither run, fork, offload nor be evicted."""
    manager = make_manager(24, 72, max_sessions=2)
    branches = [manager.open_session().branch() for _ in range(2)]
    for branch in branches:
        forward([branch], random_rows([branch], 24))
    branches[1].turn_sink(1, (torch.ones(1, 1, 1, 8), torch.zeros(1, 1, 1, 8)))
    with monkeypatch.context() as patch:
        patch.setattr("diffusers_ardiff.cache.storage.turn_keys", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            PagedForwardContext(branches, num_tokens=24, start=0).prepare()
    assert [session.is_idle for session in manager.sessions] == [True, True]
    forward(branches, random_rows(branches, 24), start=0)


# -- for ever -------------------------------------------------------------------------------------------------------


def test_ten_thousand_chunks() -> None:
    """Sessions hit a length limit, and tables grew with empty entries, where storage index and position were one
    number (vllm-omni PR#7498). S 1, W 3 frames, 10,000 chunks of a frame: position right, everything else constant."""
    manager = make_manager(24, 72, layers=2)
    (branch,) = manager.open_session().branches
    sizes, tables, seconds = set(), set(), []
    for chunk in range(10_000):
        begin = time.process_time()
        context = PagedForwardContext([branch], num_tokens=24).prepare()
        inputs = context.layer_inputs(0)
        context.mark_written()
        context.mark_committed()
        seconds.append(time.process_time() - begin)
        if chunk >= 4:
            sizes.add(tuple(tuple(tensor.shape) for tensor in inputs))
            tables.add(tuple(inputs.block_table.flatten().tolist()))
            assert int(inputs.seq_lens) == 96
    assert branch.committed_tokens == 240_000
    assert len(sizes) == 1
    assert tables == {(0, 1, 2, 3, 4, 5)}
    assert manager.allocator.num_used == 6
    assert statistics.median(seconds[-1000:]) <= 2 * statistics.median(seconds[4:1004])
