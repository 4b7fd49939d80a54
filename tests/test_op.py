"""The op: its schema, its writes, and what it reads, against an explicit list of tokens."""

import importlib
import random
import re

import pytest
import torch
from dense import TokenHistory, dense_attention, relative_error
from rollouts import Rows, forward, make_manager, pool_bytes, random_rows
from torch.testing import assert_close

from diffusers_ardiff.attention import AttentionRequest, op, paged_attention, paged_write_attn
from diffusers_ardiff.context import PagedForwardContext, PagedLayerInputs

SCHEMAS = {
    "paged_write_attn": (
        "diffusers_ardiff::paged_write_attn(Tensor query, Tensor k_curr, Tensor v_curr, Tensor? k_act, "
        "Tensor? v_act, Tensor(a5!) key_pool, Tensor(a6!) value_pool, Tensor slot_mapping, Tensor block_table, "
        "Tensor seq_lens, Tensor layer_index, Tensor launch, float softmax_scale) -> Tensor"
    ),
    "paged_norm_rope_write_attn": (
        "diffusers_ardiff::paged_norm_rope_write_attn(Tensor query, Tensor keys, Tensor values, Tensor query_weight, "
        "Tensor key_weight, Tensor cos, Tensor sin, Tensor(a7!) key_pool, Tensor(a8!) value_pool, "
        "Tensor slot_mapping, Tensor block_table, Tensor seq_lens, Tensor layer_index, Tensor launch, "
        "float norm_eps, float softmax_scale) -> Tensor"
    ),
    "paged_attn": (
        "diffusers_ardiff::paged_attn(Tensor query, Tensor key_pool, Tensor value_pool, Tensor block_table, "
        "Tensor seq_lens, Tensor layer_index, Tensor launch, float softmax_scale) -> Tensor"
    ),
}


def prepared(sink: int = 24, window: int = 72, num_tokens: int = 24, **kwargs) -> PagedForwardContext:
    num_extra = kwargs.get("extra", 0)
    branches = make_manager(sink, window, **kwargs).open_session().branches
    return PagedForwardContext(branches, num_tokens=num_tokens, num_extra=num_extra).prepare()


def packed(context: PagedForwardContext, rows: Rows, extra: Rows | None) -> tuple:
    inputs = context.layer_inputs(0)
    k_act, v_act = (extra.keys, extra.values) if extra else (None, None)
    return (*rows, k_act, v_act, *inputs, 0.5)


# -- schema ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(SCHEMAS))
def test_schema_is_pinned(name: str) -> None:
    """Compiled code cached under an op's name is stale once the schema behind it changes (pytorch#187319): a change
    here needs a new op name."""
    schema = getattr(torch.ops.diffusers_ardiff, name).default._schema
    mutated = [arg.name for arg in schema.arguments if arg.alias_info is not None and arg.alias_info.is_write]
    assert mutated == ([] if name == "paged_attn" else ["key_pool", "value_pool"])
    assert renumbered(str(schema)) == renumbered(SCHEMAS[name])


def renumbered(schema: str) -> str:
    """Alias set names are torch's business; which argument has one is ours."""
    return re.sub(r"\([a-z]\d*!\)", "(!)", schema)


@pytest.mark.parametrize("name", sorted(SCHEMAS))
def test_inductor_cuts_its_cuda_graphs_around_the_ops(name: str) -> None:
    """A recorded op would replay the lengths and slots of the forward it was recorded in."""
    op_overload = getattr(torch.ops.diffusers_ardiff, name).default
    assert torch.Tag.cudagraph_unsafe in op_overload.tags


@pytest.mark.parametrize("num_extra", [0, 3])
@pytest.mark.parametrize("shuffle_seed", [None, 1])
def test_opcheck(num_extra: int, shuffle_seed: int | None) -> None:
    context = prepared(extra=num_extra, shuffle_seed=shuffle_seed)
    rows = random_rows(context.branches, 24)
    extra = random_rows(context.branches, num_extra) if num_extra else None
    write_args = packed(context, rows, extra)
    torch.library.opcheck(torch.ops.diffusers_ardiff.paged_write_attn.default, write_args)
    torch.ops.diffusers_ardiff.paged_write_attn(*write_args)
    inputs = context.layer_inputs(0)
    read_args = (rows.query, inputs.key_pool, inputs.value_pool, *inputs[3:], 0.5)
    torch.library.opcheck(torch.ops.diffusers_ardiff.paged_attn.default, read_args)


def test_output_shares_no_storage_with_inputs() -> None:
    context = prepared()
    rows = random_rows(context.branches, 24)
    out = paged_write_attn(context.layer_inputs(0), *rows)
    pointers = {t.untyped_storage().data_ptr() for t in (*rows, *context.layer_inputs(0))}
    assert out.untyped_storage().data_ptr() not in pointers
    assert out.is_contiguous()


def test_import_again_is_safe() -> None:
    context = prepared()
    rows = random_rows(context.branches, 24)
    before = paged_write_attn(context.layer_inputs(0), *rows)
    again = importlib.reload(op)
    assert torch.equal(again.paged_write_attn(context.layer_inputs(0), *rows), before)
    assert torch.equal(paged_write_attn(context.layer_inputs(0), *rows), before)


@pytest.mark.parametrize("fullgraph", [False, True])
def test_no_backward_is_an_error(fullgraph: bool) -> None:
    """The op runs with gradients on, as in a loop without ``no_grad``; only asking for them raises."""
    context = prepared()
    query, keys, values = (tensor.requires_grad_() for tensor in random_rows(context.branches, 24))
    out = paged_write_attn(context.layer_inputs(0), query, keys, values)
    assert out.requires_grad and not context.storage.key_pools[0].requires_grad
    with pytest.raises(RuntimeError, match="have no backward"):
        out.sum().backward()
    compiled = torch.compile(paged_write_attn, backend="aot_eager", fullgraph=fullgraph)
    with pytest.raises(RuntimeError):
        compiled(context.layer_inputs(0), query, keys, values).sum().backward()


def test_the_compiler_does_not_look_into_the_op() -> None:
    """Called by a frame that the compiler had given up, the op was taken for one more function to compile."""
    context = prepared()
    rows = random_rows(context.branches, 24)

    def broken(inputs: PagedLayerInputs, *rows: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return paged_write_attn(inputs, *rows)

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with torch.no_grad():
        torch.compile(broken, backend="aot_eager")(context.layer_inputs(0), *rows)
    assert sum(torch._dynamo.utils.counters["graph_break"].values()) == 1


# -- arguments ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        lambda q, k, v, a: (q, k[:, :-1], v[:, :-1], *a),
        lambda q, k, v, a: (q, k, v[:, :-1], *a),
        lambda q, k, v, a: (q, k, v, None, None),
        lambda q, k, v, a: (q, k, v, a[0], None),
        lambda q, k, v, a: (q, k, v, a[0][:, :1], a[1][:, :1]),
        lambda q, k, v, a: (q[:, :, :1], k, v, *a),
        lambda q, k, v, a: (q[..., :4], k[..., :4], v[..., :4], a[0][..., :4], a[1][..., :4]),
        lambda q, k, v, a: (q.repeat(2, 1, 1, 1), k, v, *a),
        lambda q, k, v, a: tuple(t[:, :, :1] for t in (q, k, v, *a)),
        lambda q, k, v, a: tuple(t[..., :1] for t in (q, k, v, *a)),
    ],
)
def test_wrong_shapes_write_nothing(change) -> None:
    """Rows of one head were broadcast into a pool of two, and the error came after the write."""
    context = prepared(extra=3)
    rows, extra = random_rows(context.branches, 24), random_rows(context.branches, 3)
    before = pool_bytes(context.storage)
    with pytest.raises(ValueError, match=r"writes \(1, 27\) rows of \(2, 8\)"):
        paged_write_attn(context.layer_inputs(0), *change(*rows, (extra.keys, extra.values)))
    assert torch.equal(pool_bytes(context.storage), before)


@pytest.mark.parametrize("shape", [(24, 2), (5, 2, 8), (1, 1, 24, 2, 8)])
def test_read_refuses_other_query_shapes(shape: tuple[int, ...]) -> None:
    branches = make_manager(24, 72, branches_per_session=2).open_session(["a", "b"]).branches
    context = PagedForwardContext(branches, num_tokens=24).prepare()
    with pytest.raises(ValueError, match="2 rows"):
        paged_attention(torch.randn(shape), context.layer_inputs(0))


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
@pytest.mark.parametrize(
    ("heads", "shape"),
    [(1, (1, 3, 2, 8)), (2, (1, 3, 1, 8)), (2, (1, 3, 2, 4)), (2, (2, 3, 2, 8)), (2, (6, 1, 8))],
)
def test_read_refuses_queries_of_other_pages(heads: int, shape: tuple[int, ...], backend: str) -> None:
    """Two query heads over pages of one, and two rows over one, were broadcast and answered; the others failed inside a
    backend with an error of its own."""
    branches = make_manager(24, 72, heads=heads).open_session().branches
    rows = random_rows(branches, 24)
    forward(branches, rows, backend=backend)
    with PagedForwardContext(branches, num_tokens=24, backend=backend) as context:
        inputs = context.layer_inputs(0)
        paged_write_attn(inputs, *rows)
        message = re.escape(f"a query must be (1, tokens, {heads}, 8)")
        with pytest.raises(ValueError, match=message):
            paged_attention(torch.randn(shape), inputs)


REFUSED_TENSORS = {
    "integer queries": (lambda t: {"query": t["query"].long()}, "query must hold floating point"),
    "boolean keys": (lambda t: {"k_curr": t["k_curr"] > 0}, "k_curr must hold floating point"),
    "complex values": (lambda t: {"v_curr": t["v_curr"] + 1j}, "v_curr must hold floating point"),
    "queries elsewhere": (lambda t: {"query": t["query"].to("meta")}, "the pages are on cpu, got query on meta"),
    "keys elsewhere": (lambda t: {"k_curr": t["k_curr"].to("meta")}, "the pages are on cpu, got k_curr on meta"),
    "no scale": (lambda t: {"softmax_scale": 0.0}, "softmax_scale must be positive and finite, got 0.0"),
    "negative scale": (lambda t: {"softmax_scale": -1.0}, "softmax_scale must be positive and finite"),
    "scale NaN": (lambda t: {"softmax_scale": float("nan")}, "softmax_scale must be positive and finite"),
}


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
@pytest.mark.parametrize("kind", REFUSED_TENSORS)
def test_tensors_that_no_backend_can_serve_write_nothing(kind: str, backend: str) -> None:
    """Integer queries came back as truncated attention, complex keys lost half of their numbers, tensors elsewhere gave
    no keys and no error, and a scale that the Triton kernel refuses was refused after the write."""
    change, message = REFUSED_TENSORS[kind]
    branches = make_manager(24, 72).open_session().branches
    rows = random_rows(branches, 24)
    before = pool_bytes(branches[0].storage)
    call = {"query": rows.query, "k_curr": rows.keys, "v_curr": rows.values}
    with PagedForwardContext(branches, num_tokens=24, backend=backend) as context:
        with pytest.raises(ValueError, match=message):
            paged_write_attn(context.layer_inputs(0), **(call | change(call)))
        assert context.unwritten_layers == (0,)
    assert torch.equal(pool_bytes(branches[0].storage), before)


def test_extra_rows_elsewhere_write_nothing() -> None:
    """As above, of action rows."""
    context = prepared(extra=3)
    rows, extra = random_rows(context.branches, 24), random_rows(context.branches, 3)
    before = pool_bytes(context.storage)
    for k_act, v_act in ((extra.keys.to("meta"), extra.values), (extra.keys, extra.values.to("meta"))):
        with pytest.raises(ValueError, match=r"got [kv]_act on meta"):
            paged_write_attn(context.layer_inputs(0), *rows, k_act, v_act)
    assert torch.equal(pool_bytes(context.storage), before)


def test_read_takes_rows_or_a_flat_batch() -> None:
    branches = make_manager(24, 72, branches_per_session=2).open_session(["a", "b"]).branches
    context = PagedForwardContext(branches, num_tokens=24).prepare()
    rows = random_rows(branches, 24)
    out = paged_write_attn(context.layer_inputs(0), *rows)
    flat = paged_attention(rows.query.flatten(0, 1), context.layer_inputs(0))
    assert flat.shape == (48, 2, 8)
    assert torch.equal(flat.view_as(out), out)
    for row in range(2):
        assert_close(out[row], dense_attention(*(t[row] for t in rows)), rtol=1e-5, atol=1e-5)


def test_softmax_scale() -> None:
    context = prepared()
    rows = random_rows(context.branches, 24)
    out = paged_write_attn(context.layer_inputs(0), *rows, softmax_scale=0.7)
    expected = dense_attention(rows.query[0] * 0.7 * 8**0.5, rows.keys[0], rows.values[0])
    assert_close(out[0], expected, rtol=1e-5, atol=1e-5)


def test_pool_dtype_is_independent_of_the_model() -> None:
    """Float32 rows in a bfloat16 pool: stored in the pool's dtype, returned in the query's."""
    context = prepared(dtype=torch.bfloat16)
    rows = Rows(*(t.float() for t in random_rows(context.branches, 24)))
    out = paged_write_attn(context.layer_inputs(0), *rows)
    assert (out.dtype, context.storage.dtype) == (torch.float32, torch.bfloat16)
    assert relative_error(out[0], dense_attention(*(t[0] for t in rows))) < 2e-2


# -- choosing a backend ---------------------------------------------------------------------------------------------


@pytest.fixture
def choices(monkeypatch: pytest.MonkeyPatch) -> list[AttentionRequest]:
    """Every request for which a backend was looked for."""
    asked = []
    plain = op.select_backend
    monkeypatch.setattr(op, "select_backend", lambda request, name: asked.append(request) or plain(request, name))
    return asked


def test_a_forward_chooses_its_backend_once(choices: list[AttentionRequest]) -> None:
    """30 layers asked every backend for its refusals 30 times."""
    branches = make_manager(24, 72, layers=30).open_session().branches
    for forwards in (1, 2):
        forward(branches, random_rows(branches, 24))
        assert len(choices) == forwards


def test_another_situation_is_chosen_for_anew(choices: list[AttentionRequest]) -> None:
    """Same forward: another pool dtype, extra queries that no mask binds, a backend named late. Then another forward
    whose rows have different lengths."""
    branches = make_manager(24, 72, extra=1).open_session().branches
    spans = [(0, 24)]
    context = PagedForwardContext(branches, num_tokens=24, num_extra=1, full_attn_spans=spans).prepare()
    rows, extra = random_rows(branches, 24), random_rows(branches, 1)
    inputs = context.layer_inputs(0)
    for _ in range(2):
        paged_write_attn(inputs, *rows, extra.keys, extra.values)
    assert [(request.needs_mask, request.work) for request in choices] == [(True, "masked")]
    halves = inputs._replace(key_pool=inputs.key_pool.bfloat16(), value_pool=inputs.value_pool.bfloat16())
    paged_attention(rows.query, halves)
    assert [request.dtype for request in choices] == [torch.float32, torch.bfloat16]
    context.use_backend("reference")
    paged_attention(rows.query, inputs)
    assert len(choices) == 3


@pytest.mark.parametrize(
    ("shuffle_seed", "chunks", "work"),
    [(None, (0, 0), "dense"), (2, (0, 0), "fragmented"), (None, (0, 2), "ragged"), (2, (0, 2), "ragged")],
)
def test_kind_of_work(
    choices: list[AttentionRequest], shuffle_seed: int | None, chunks: tuple[int, ...], work: str
) -> None:
    manager = make_manager(24, 72, max_sessions=2, shuffle_seed=shuffle_seed)
    branches = [manager.open_session().branch() for _ in chunks]
    for branch, count in zip(branches, chunks, strict=True):
        for _ in range(count):
            forward([branch], random_rows([branch], 24))
    forward(branches, random_rows(branches, 24))
    assert choices[-1].work == work


# -- what is read ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_extra", [0, 3])
@pytest.mark.parametrize("history_frames", [0, 1, 3, 6])
def test_action_rows_live_for_one_forward(num_extra: int, history_frames: int) -> None:
    """A in {0, 3} beside C 24 and B 16; the next forward does not see them."""
    branches = make_manager(24, 72, extra=num_extra).open_session().branches
    history = TokenHistory(24, 72)
    for step in range(history_frames + 2):
        rows = random_rows(branches, 24)
        extra = random_rows(branches, num_extra) if num_extra and step != history_frames + 1 else None
        query, keys, values = (t[0] for t in rows)
        out = forward(branches, rows, extra=extra)
        expected = history.attend(query, keys, values, extra=(extra.keys[0], extra.values[0]) if extra else None)
        history.commit(keys, values)
        assert_close(out[0], expected, rtol=1e-5, atol=1e-5)


def test_denoise_steps_see_their_own_keys_and_the_commit_keeps_the_clean_ones() -> None:
    """Caches were filled from noisy steps (Self-Forcing#66). Keys equal their input here: 4 steps and a clean pass of
    each of 6 chunks; the pages hold the clean values only, and step n reads step n's."""
    branches = make_manager(0, 96).open_session().branches
    (branch,) = branches
    history = TokenHistory(0, 96)
    for _ in range(6):
        for _ in range(5):
            states = random_rows(branches, 24).query
            out = forward(branches, Rows(states, states, states), commit=False)
            assert_close(out[0], history.attend(states[0], states[0], states[0]), rtol=1e-5, atol=1e-5)
        branch.commit()
        history.commit(states[0], states[0])
    first_slot = branch.run.pages[0] * 16
    for position in range(48, 144):
        assert torch.equal(branch.storage.key_pools[0][first_slot + position % 96], history.tokens[position][0])


def test_sink_and_one_frame_with_ragged_pages() -> None:
    """C 24, B 16: with whole pages evicted, slots 24..31 were read though nobody wrote them (vllm-omni PR#6481). The
    pool is NaN there; the output at frame 5 is finite and dense over frames 0 and 5."""
    branches = make_manager(24, 24).open_session().branches
    history = TokenHistory(24, 24)
    for _ in range(6):
        rows = random_rows(branches, 24)
        out = forward(branches, rows)
        expected = history.attend(*(t[0] for t in rows))
        history.commit(rows.keys[0], rows.values[0])
    assert_close(out[0], expected, rtol=1e-5, atol=1e-5)


# -- everything at random -------------------------------------------------------------------------------------------


class RandomBranch:
    """Random requests to a branch of a poisoned pool, and the same on an explicit list of tokens."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        torch.manual_seed(seed)
        self.sink, self.window, self.extra = rng.choice([0, 1, 3, 5]), rng.randint(2, 9), rng.choice([0, 3])
        self.manager = make_manager(
            self.sink,
            self.window,
            page_size=rng.choice([1, 3, 4, 16]),
            extra=self.extra,
            heads=1,
            head_dim=4,
            max_sessions=2,
            shuffle_seed=rng.choice([None, seed]),
        )
        self.manager.open_session()
        self.branches = self.manager.open_session().branches
        self.branch = self.branches[0]
        self.history = TokenHistory(self.sink, self.window)
        self.backend = rng.choice(["reference", "sdpa"])
        self.refused = 0

    def full_state(self) -> tuple:
        ring = {name: value for name, value in vars(self.branch.ring).items() if name != "geometry"}
        return ring, self.branch.history, self.manager.allocator.num_used, pool_bytes(self.manager.storage).tolist()

    def forward(self, length: int, start: int | None = None) -> None:
        rows = random_rows(self.branches, length)
        extra = random_rows(self.branches, self.extra) if self.extra and self.rng.random() < 0.5 else None
        ends = self.rng.choices(["commit", "fail", "keep"], [6, 2, 1])[0]
        before = self.full_state()
        try:
            out = forward(self.branches, rows, start=start, extra=extra, backend=self.backend, commit=False)
        except ValueError:
            assert self.full_state() == before
            self.refused += 1
            return
        query, keys, values = (t[0] for t in rows)
        actions = (extra.keys[0], extra.values[0]) if extra else None
        expected = self.history.attend(query, keys, values, start=start, extra=actions)
        assert_close(out[0], expected, rtol=1e-5, atol=1e-5)
        if start is not None:
            self.history.commit(keys, values, start=start)
        elif ends == "commit":
            assert self.branch.commit() == length
            self.history.commit(keys, values)
        elif ends == "fail":
            self.fail(length)

    def fail(self, length: int) -> None:
        context = PagedForwardContext(self.branches, num_tokens=length, backend=self.backend)
        with pytest.raises(ArithmeticError), context:
            paged_write_attn(context.layer_inputs(0), *random_rows(self.branches, length))
            raise ArithmeticError

    def recache(self) -> None:
        span = self.branch.ring.recache_span()
        if span is not None:
            self.forward(span[1], start=span[0])

    def flush(self) -> None:
        keep = self.rng.choice([0, 1, 2, self.window])
        self.branch.flush(keep)
        self.history.flush(keep)

    def reset(self) -> None:
        self.branch.reset()
        self.history.reset()

    def step(self) -> None:
        match self.rng.choices(["forward", "recache", "flush", "reset"], [12, 1, 1, 0.3])[0]:
            case "forward":
                self.forward(self.rng.randint(1, 6))
            case action:
                getattr(self, action)()
        assert self.branch.committed_tokens == self.history.committed_end


def test_random_sequences_equal_dense_attention() -> None:
    """300 sequences of 25 requests on fragmented and whole pools, ragged pages, both backends; every output equals
    attention over the explicit list, and a refused request leaves ring, pages and every slot as they were."""
    refused = 0
    for seed in range(300):
        sequence = RandomBranch(seed)
        for _ in range(25):
            sequence.step()
        sequence.manager.check_integrity()
        refused += sequence.refused
    assert refused > 100
