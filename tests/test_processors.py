"""Paged processors in a tiny real Wan transformer, against the stock model."""

import copy
from types import SimpleNamespace

import pytest
import torch
from dense import relative_error
from diffusers import (
    FirstBlockCacheConfig,
    FluxTransformer2DModel,
    SkyReelsV2Transformer3DModel,
    WanTransformer3DModel,
)
from diffusers.models.attention_dispatch import attention_backend
from diffusers.models.transformers.transformer_wan import WanAttnProcessor
from spoiled_offload import offloading_that_spoils_weights
from tiny_wan import (
    CHANNELS,
    HEADS,
    TEXT_DIM,
    TOKENS,
    DenseRun,
    PagedRun,
    latents_of,
    masked_copy,
    masked_forward,
    rotate,
    run_host,
    text_of,
    tiny_transformer,
    window_mask,
)
from torch.testing import assert_close

from diffusers_ardiff.attention import op
from diffusers_ardiff.cache import TextKV
from diffusers_ardiff.context import PagedForwardContext
from diffusers_ardiff.processors import (
    PagedAttachment,
    PagedWanCrossAttnProcessor,
    PagedWanSelfAttnProcessor,
    attach_paged_attention,
)

CLONES = [WanTransformer3DModel, SkyReelsV2Transformer3DModel]


@pytest.fixture
def transformer() -> WanTransformer3DModel:
    return tiny_transformer()


def host_objects(transformer) -> list[object]:
    attns = [attn for block in transformer.blocks for attn in (block.attn1, block.attn2)]
    return [transformer.rope, *(attn.processor for attn in attns)]


def same_objects(first: list[object], second: list[object]) -> bool:
    return all(a is b for a, b in zip(first, second, strict=True))


# -- put back as found ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_class", CLONES)
def test_unbound_and_detached_equal_stock_bit_by_bit(model_class: type) -> None:
    transformer = tiny_transformer(model_class)
    found, names = host_objects(transformer), list(transformer.state_dict())
    expected = run_host(transformer, latents_of(3), 500, text_of())
    with attach_paged_attention(transformer) as paged:
        assert paged.attached
        assert not same_objects(host_objects(transformer), found)
        assert torch.equal(run_host(transformer, latents_of(3), 500, text_of()), expected)
        assert list(transformer.state_dict()) == names
    assert same_objects(host_objects(transformer), found)
    assert torch.equal(run_host(transformer, latents_of(3), 500, text_of()), expected)


@pytest.mark.parametrize("bound", [False, True])
def test_restored_after_an_exception(transformer, bound: bool) -> None:
    found = host_objects(transformer)
    run = PagedRun(transformer, 0, 3)
    hook = transformer.blocks[1].attn1.to_q.register_forward_pre_hook(lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError), run.paged:
        if bound:
            run.forward(latents_of(3), 500, text_of())
        else:
            run_host(transformer, latents_of(3), 500, text_of())
    hook.remove()
    assert same_objects(host_objects(transformer), found)
    assert not run.paged.attached


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_stays_bound_after_a_forward(transformer, fails: bool) -> None:
    """While attached, a forward leaves neither pages nor angles nor text behind for the next plain call."""
    expected = run_host(transformer, latents_of(3), 500, text_of(seed=8))
    run = PagedRun(transformer, 0, 3)
    if fails:
        hook = transformer.blocks[1].attn1.to_q.register_forward_pre_hook(lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run.forward(latents_of(3), 500, text_of())
        hook.remove()
    else:
        run.forward(latents_of(3), 500, text_of())
    assert torch.equal(run_host(transformer, latents_of(3), 500, text_of(seed=8)), expected)


def test_settings_are_carried_over_both_ways(transformer) -> None:
    """Backend and context-parallel settings live on the processor; after a swap both were None
    (diffusers PR#13794)."""
    attns = [attn for block in transformer.blocks for attn in (block.attn1, block.attn2)]
    before, after = object(), object()
    for attn in attns:
        attn.processor._attention_backend, attn.processor._parallel_config = "native", before
    with attach_paged_attention(transformer):
        for attn in attns:
            assert isinstance(attn.processor, (PagedWanSelfAttnProcessor, PagedWanCrossAttnProcessor))
            assert (attn.processor._attention_backend, attn.processor._parallel_config) == ("native", before)
            attn.processor._attention_backend, attn.processor._parallel_config = None, after
    for attn in attns:
        assert type(attn.processor) is WanAttnProcessor
        assert (attn.processor._attention_backend, attn.processor._parallel_config) == (None, after)


def test_host_call_for_the_attention_backend_reaches_the_stock_processors(transformer) -> None:
    # The call also sets the backend of the whole process; this context manager puts that back.
    with attention_backend("native"), attach_paged_attention(transformer):
        transformer.set_attention_backend("_native_math")
        ours = {processor._attention_backend for processor in host_objects(transformer)[1:]}
    assert {processor._attention_backend for processor in host_objects(transformer)[1:]} == ours
    assert [backend.value for backend in ours] == ["_native_math"]


def test_processors_attach_again_as_the_same_objects(transformer) -> None:
    """Compiled code guards on them."""
    paged = attach_paged_attention(transformer)
    ours = host_objects(transformer)
    paged.detach()
    paged.detach()
    with paged:
        assert same_objects(host_objects(transformer), ours)
    with pytest.raises(RuntimeError, match="attached already"), paged:
        paged.attach()


def test_what_was_found_last_is_put_back(transformer) -> None:
    """The user swaps processors and rope between two uses: the second exit restores theirs, not those of the first."""
    paged = attach_paged_attention(transformer)
    paged.detach()
    transformer.set_attn_processor(WanAttnProcessor())
    transformer.rope = copy.deepcopy(transformer.rope)
    found = host_objects(transformer)
    with paged:
        pass
    assert same_objects(host_objects(transformer), found)


def test_nested_use_detaches_at_the_outermost_exit(transformer) -> None:
    """The inner ``with`` took the processors out while the outer one still needed them."""
    found = host_objects(transformer)
    with attach_paged_attention(transformer) as paged:
        with paged:
            pass
        assert paged.attached
        assert not same_objects(host_objects(transformer), found)
    assert same_objects(host_objects(transformer), found)


def test_with_leaves_in_what_was_attached_before_it(transformer) -> None:
    """``with`` around one forward took out the processors that ``attach()`` had put in for good; only a ``with`` that
    put them in, or that takes over from ``attach_paged_attention``, may."""
    paged = PagedAttachment(transformer).attach()
    ours = host_objects(transformer)
    with paged, paged:
        pass
    assert paged.attached
    assert same_objects(host_objects(transformer), ours)
    paged.detach()
    with paged:
        assert paged.attached
    assert not paged.attached


def test_failed_attach_is_undone(transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second layer refused its processor: the first one kept ours, on a transformer that counted as detached."""
    found, paged = host_objects(transformer), PagedAttachment(transformer)
    for failing in (transformer.blocks[1].attn1, None):
        with monkeypatch.context() as patch:
            if failing is not None:
                patch.setattr(failing, "set_processor", lambda processor: 1 / 0)
            else:
                patch.setattr(type(transformer), "__setattr__", lambda self, name, value: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                paged.attach()
        assert same_objects(host_objects(transformer), found)
        assert not paged.attached
    with paged.attach():
        assert not same_objects(host_objects(transformer), found)


@pytest.mark.parametrize("part", ["processor", "rope", "block"])
def test_a_later_swap_is_not_undone_in_silence(transformer, part: str) -> None:
    """A rope module that somebody put in later was thrown away on detach."""
    paged = attach_paged_attention(transformer)
    block, attn = transformer.blocks[0], transformer.blocks[0].attn1
    ours, rope = attn.processor, transformer.rope
    if part == "rope":
        transformer.rope = torch.nn.Identity()
    elif part == "block":
        transformer.blocks[0] = tiny_transformer().blocks[0]
    else:
        attn.set_processor(WanAttnProcessor())
    theirs = host_objects(transformer)
    with pytest.raises(RuntimeError, match="undo the later swap"):
        paged.detach()
    assert same_objects(host_objects(transformer), theirs)
    attn.set_processor(ours)
    transformer.rope, transformer.blocks[0] = rope, block
    paged.detach()
    assert not paged.attached


# -- what is refused ------------------------------------------------------------------------------------------------


def test_other_models_are_refused_with_what_is_missing() -> None:
    flux = FluxTransformer2DModel(
        num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=1, in_channels=4,
        joint_attention_dim=8, pooled_projection_dim=8, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    with pytest.raises(TypeError, match=r"FluxTransformer2DModel.*'blocks', 'rope', 'condition_embedder'"):
        attach_paged_attention(flux)


def test_missing_part_of_a_block_is_named(transformer) -> None:
    """Only the first block was looked at."""
    transformer.blocks[0].attn1.norm_k = None
    with pytest.raises(TypeError, match=r"\['blocks\.0\.attn1\.norm_k'\]"):
        attach_paged_attention(transformer)
    later = tiny_transformer()
    later.blocks[1].attn2.to_k = None
    with pytest.raises(TypeError, match=r"\['blocks\.1\.attn2\.to_k'\]"):
        attach_paged_attention(later)
    empty = SimpleNamespace(blocks=[], rope=None, condition_embedder=None, config=None)
    with pytest.raises(TypeError, match=r"\['blocks'\]"):
        attach_paged_attention(empty)


def test_unknown_backend_is_refused_before_the_swap(transformer) -> None:
    found = host_objects(transformer)
    with pytest.raises(ValueError, match="unknown attention backend"):
        attach_paged_attention(transformer, backend="flash9")
    assert same_objects(host_objects(transformer), found)


def test_binding_needs_an_attached_transformer_and_one_forward(transformer) -> None:
    run = PagedRun(transformer, 0, 6)
    rotary = run.rope([range(3)], 2, 3)
    context = PagedForwardContext(run.branches, num_tokens=3 * TOKENS)
    with pytest.raises(RuntimeError, match="before prepare"), run.paged.bind(context, rotary):
        pass
    with context, run.paged.bind(context, rotary):
        with pytest.raises(RuntimeError, match="another forward is bound"), run.paged.bind(context, rotary):
            pass
        assert transformer.rope.rotary is rotary
        run_host(transformer, latents_of(3), 500, text_of())
    run.paged.detach()
    with pytest.raises(RuntimeError, match="attach the paged processors"), run.paged.bind(context, rotary):
        pass


def test_skipped_blocks_are_not_committed(transformer) -> None:
    """A cache of the host skips blocks whose input has hardly changed: their keys stayed unwritten, no layer raised, and
    the commit advanced over them."""
    transformer.enable_cache(FirstBlockCacheConfig(threshold=0.5))
    run = PagedRun(transformer, 0, 6)
    with transformer.cache_context("cond"):
        run.forward(latents_of(3), 500, text_of(), commit=False)
        with pytest.raises(RuntimeError, match=r"layers \[1\] wrote no keys.*disable_cache"):
            run.forward(latents_of(3), 499, text_of())
    assert run.branches[0].commit() == 0
    transformer.disable_cache()
    run.forward(latents_of(3), 499, text_of())
    assert run.branches[0].committed_tokens == 3 * TOKENS


@pytest.mark.parametrize("part", ["processors", "block"])
@pytest.mark.parametrize("bound", [False, True])
def test_swapped_parts_are_not_committed(transformer, part: str, bound: bool) -> None:
    """The user swapped processors or a block after attaching: the forward ran on stock attention, wrote nothing, and was
    committed."""
    run = PagedRun(transformer, 0, 6)
    context = PagedForwardContext(run.branches, num_tokens=3 * TOKENS)

    def swap() -> None:
        if part == "block":
            transformer.blocks[1] = tiny_transformer().blocks[1]
        else:
            transformer.set_attn_processor(WanAttnProcessor())

    def swap_and_run() -> None:
        with context, run.paged.bind(context, run.rope([range(3)], 2, 3)):
            swap()
            run_host(transformer, latents_of(3), 500, text_of())

    if not bound:
        swap()
    with pytest.raises(RuntimeError, match="wrote no keys" if bound else "undo the later swap"):
        swap_and_run()
    assert run.branches[0].commit() == 0


def test_replaced_block_is_noticed_when_attaching_again(transformer) -> None:
    """An attachment keeps the modules that it found; a block put in later was left on stock attention in silence."""
    paged = attach_paged_attention(transformer)
    paged.detach()
    block, transformer.blocks[1] = transformer.blocks[1], tiny_transformer().blocks[1]
    found = host_objects(transformer)
    for enter in (paged.attach, paged.__enter__):
        with pytest.raises(RuntimeError, match="make a new attachment"):
            enter()
    assert same_objects(host_objects(transformer), found)
    transformer.blocks[1] = block
    with paged:
        pass


def test_bind_hands_over_its_backend(transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend named at the attachment was dropped where the forward named none: the default one ran."""
    used = []
    plain = op.select_backend
    monkeypatch.setattr(op, "select_backend", lambda request, name: used.append(name) or plain(request, name))
    PagedRun(transformer, 0, 6, backend="reference").forward(latents_of(3), 500, text_of())
    assert used == ["reference"]


def test_two_named_backends_are_refused(transformer) -> None:
    """The forward's backend won over the attachment's in silence."""
    run = PagedRun(transformer, 0, 6, backend="reference")
    rotary = run.rope([range(3)], 2, 3)
    context = PagedForwardContext(run.branches, num_tokens=3 * TOKENS, backend="sdpa")
    with pytest.raises(ValueError, match=r"'sdpa'.*'reference'"), context, run.paged.bind(context, rotary):
        pass
    same = PagedForwardContext(run.branches, num_tokens=3 * TOKENS, backend="reference")
    with same, run.paged.bind(same, rotary):
        run_host(transformer, latents_of(3), 500, text_of())


def test_dense_mask_is_refused_not_dropped() -> None:
    """Attention masks were once dropped in silence (diffusers#12605). This clone brings its own for 3-frame blocks."""
    run = PagedRun(tiny_transformer(SkyReelsV2Transformer3DModel, num_frame_per_block=3), 0, 6)
    with pytest.raises(ValueError, match="dense attention_mask"):
        run.forward(latents_of(6), 500, text_of())
    assert run.branches[0].commit() == 0


# -- geometry and text ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [12, 24, 40])
def test_geometry_comes_from_the_model(heads: int) -> None:
    """12 heads, 128 and 512 were written as literals (FastVideo PR#766)."""
    with torch.device("meta"):
        transformer = WanTransformer3DModel(num_attention_heads=heads, num_layers=1)
        geometry = PagedAttachment(transformer).geometry
    assert (geometry.num_layers, geometry.num_heads, geometry.head_dim) == (1, heads, 128)
    assert geometry.patch_size == (1, 2, 2)
    frames = [(60, 104), (58, 104), (44, 80)]
    assert [geometry.tokens_per_frame(*size) for size in frames] == [1560, 1508, 880]
    assert geometry.kv_shape(torch.bfloat16).bytes_per_token == 2 * heads * 128 * 2
    with pytest.raises(ValueError, match=r"59x104.*2x2"):
        geometry.tokens_per_frame(59, 104)


@pytest.mark.parametrize("length", [300, 512, 654])
@pytest.mark.parametrize("rows", [1, 2])
def test_text_cache_has_the_length_of_the_text(transformer, length: int, rows: int) -> None:
    text = attach_paged_attention(transformer).compute_text_kv(text_of(length, rows))
    assert [layer.key.shape for layer in text.layers] == [(rows, length, HEADS, 12)] * 2
    assert text.layers[0].image_key is None


def test_text_is_projected_once_a_prompt(transformer) -> None:
    run = PagedRun(transformer, 0, 6)
    calls = []
    for block in transformer.blocks:
        for projection in (block.attn2.to_k, block.attn2.to_v):
            projection.register_forward_hook(lambda *args: calls.append(1))
    text = run.paged.compute_text_kv(text_of())
    assert len(calls) == 4
    for _ in range(3):
        context = PagedForwardContext(run.branches, num_tokens=3 * TOKENS)
        with context, run.paged.bind(context, run.rope([range(3)], 2, 3), text):
            run_host(transformer, latents_of(3), 500, torch.zeros(1, 1, TEXT_DIM))
    assert len(calls) == 4


@pytest.mark.parametrize(
    "options", [{"offload_type": "leaf_level"}, {"num_blocks_per_group": 1}, {"num_blocks_per_group": 2}]
)
def test_text_under_group_offloading(transformer, options: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text K/V call parts of a block, and block-level offloading brings the block in only when it is called itself:
    weights were met on the wrong device, here as NaN. Leaf-level hooks sit on those parts."""
    expected = attach_paged_attention(tiny_transformer()).compute_text_kv(text_of())
    on_device = offloading_that_spoils_weights(monkeypatch)
    transformer.enable_group_offload("cpu", "cpu", **{"offload_type": "block_level", **options})
    assert transformer.blocks[1].attn2.to_k.weight.isnan().all()
    text = attach_paged_attention(transformer).compute_text_kv(text_of())
    for layer, plain in zip(text.layers, expected.layers, strict=True):
        assert torch.equal(layer.key, plain.key) and torch.equal(layer.value, plain.value)
    assert transformer.blocks[1].attn2.to_k.weight.isnan().all() and not on_device
    if "num_blocks_per_group" in options:
        with pytest.raises(RuntimeError):
            attach_paged_attention(transformer).compute_text_kv(torch.zeros(1, 1, 3))
        assert not on_device


def test_failed_text_leaves_the_old_one(transformer) -> None:
    """Layer 1 of 2 raises: the session still serves the whole old prompt."""
    run = PagedRun(transformer, 0, 6)
    (branch,) = run.branches
    branch.text = old = run.paged.compute_text_kv(text_of())
    copies = [tensor.clone() for layer in old.layers for tensor in layer[:2]]
    hook = transformer.blocks[1].attn2.to_v.register_forward_pre_hook(lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        branch.text = run.paged.compute_text_kv(text_of(seed=9))
    hook.remove()
    assert branch.text is old
    assert all(torch.equal(a, b) for a, b in zip(copies, (t for la in old.layers for t in la[:2]), strict=True))
    assert isinstance(old, TextKV)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("bind_text", [False, True])
def test_image_conditioned_model_equals_stock(fused: bool, bind_text: bool) -> None:
    """Added image projections; the host splits off its last 512 rows as text."""
    transformer = tiny_transformer(image_dim=10, added_kv_proj_dim=24)
    text, image = text_of(512), torch.randn(1, 5, 10)
    times = torch.full((1,), 500.0)
    with torch.no_grad():
        expected = transformer(latents_of(3), times, text, encoder_hidden_states_image=image, return_dict=False)[0]
    if fused:
        transformer.fuse_qkv_projections()
    run = PagedRun(transformer, 0, 3)
    context = PagedForwardContext(run.branches, num_tokens=3 * TOKENS)
    text_kv = run.paged.compute_text_kv(text, image) if bind_text else None
    states = {} if bind_text else {"encoder_hidden_states_image": image}
    with torch.no_grad(), context, run.paged.bind(context, run.rope([range(3)], 2, 3), text_kv):
        out = transformer(latents_of(3), times, text[:, :1] if bind_text else text, return_dict=False, **states)[0]
    assert relative_error(out, expected) < 1e-5


# -- the same numbers as stock --------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_class", CLONES)
@pytest.mark.parametrize("bind_text", [False, True])
def test_one_chunk_equals_a_plain_forward(model_class: type, bind_text: bool) -> None:
    transformer = tiny_transformer(model_class)
    expected = run_host(transformer, latents_of(3), 500, text_of())
    out = PagedRun(transformer, 0, 3).forward(latents_of(3), 500, text_of(), bind_text=bind_text)
    assert relative_error(out, expected) < 1e-5


def test_fused_projections_equal_unfused(transformer) -> None:
    fused = copy.deepcopy(transformer)
    fused.fuse_qkv_projections()
    assert fused.blocks[0].attn1.fused_projections
    runs = [PagedRun(model, 1, 6) for model in (transformer, fused)]
    for chunk in range(5):
        plain, joined = (run.forward(latents_of(3, seed=chunk), 500, text_of()) for run in runs)
        assert relative_error(joined, plain) < 1e-5


CHUNKS = [1, 3, 3, 2]
TIMES = [0.0, 250.0, 900.0, 40.0]


def split(latents: torch.Tensor, chunks: list[int]) -> list[torch.Tensor]:
    return list(latents.split(chunks, dim=2))


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
@pytest.mark.parametrize("shuffle_seed", [None, 3])
def test_full_history_equals_one_block_causal_forward(transformer, backend: str, shuffle_seed: int | None) -> None:
    """Clean forwards chunk by chunk, each at its own timestep, against all frames in one masked stock forward."""
    latents, text = latents_of(sum(CHUNKS)), text_of()
    frame_times = [time for time, length in zip(TIMES, CHUNKS, strict=True) for _ in range(length)]
    mask = window_mask(CHUNKS, 0, sum(CHUNKS))
    expected = split(masked_forward(transformer, latents, frame_times, text, mask), CHUNKS)
    run = PagedRun(transformer, 0, sum(CHUNKS), backend=backend, shuffle_seed=shuffle_seed)
    for chunk, time, whole in zip(split(latents, CHUNKS), TIMES, expected, strict=True):
        assert relative_error(run.forward(chunk, time, text), whole) < 1e-5


def test_clone_equals_its_own_block_causal_forward() -> None:
    """SkyReels-V2 makes the 3-frame block mask itself from its config."""
    text, latents = text_of(), latents_of(9)
    masked = tiny_transformer(SkyReelsV2Transformer3DModel, num_frame_per_block=3)
    expected = run_host(masked, latents, 250, text)
    run = PagedRun(tiny_transformer(SkyReelsV2Transformer3DModel), 0, 9)
    for chunk, whole in zip(split(latents, [3] * 3), split(expected, [3] * 3), strict=True):
        assert relative_error(run.forward(chunk, 250, text), whole) < 1e-5


@pytest.mark.parametrize(("sink", "window"), [(1, 3), (3, 6), (0, 4), (2, 3)])
@pytest.mark.parametrize("shuffle_seed", [None, 3])
def test_sink_and_window_equal_no_cache_at_all(transformer, sink: int, window: int, shuffle_seed: int | None) -> None:
    """Paged chunks were right at first and noise later, with normal statistics (vllm-omni PR#6392): every chunk is
    compared. All frames in one stock forward under a banded mask see the same through both layers as committed keys
    do; two noisy denoise forwards before each commit change nothing. The window is overwritten three times."""
    chunks = [3] * (3 + window)
    latents, text = latents_of(sum(chunks)), text_of()
    whole = masked_forward(transformer, latents, [0.0] * sum(chunks), text, window_mask(chunks, sink, window))
    other = masked_forward(transformer, latents, [0.0] * sum(chunks), text, window_mask(chunks, sink, window + 1))
    assert relative_error(whole, other) > 1e-3
    run = PagedRun(transformer, sink, window, shuffle_seed=shuffle_seed)
    for index, (chunk, expected) in enumerate(zip(split(latents, chunks), split(whole, chunks), strict=True)):
        for time in (900, 500):
            run.forward(latents_of(3, seed=100 + index), time, text, commit=False)
        assert relative_error(run.forward(chunk, 0, text), expected) < 1e-5


@pytest.mark.parametrize(("sink", "window"), [(1, 3), (3, 6)])
@pytest.mark.parametrize("backend", ["reference", "sdpa"])
def test_sink_and_window_equal_a_dense_cache(transformer, sink: int, window: int, backend: str) -> None:
    """Denoise forwards and commits of 10 chunks, with a dense list of tokens in each layer of the stock model."""
    run, dense = PagedRun(transformer, sink, window, backend=backend), DenseRun(transformer, sink, window)
    for chunk in range(10):
        for step, time in enumerate((1000, 500, 0)):
            latents, commit = latents_of(3, seed=10 * chunk + step), step == 2
            expected = dense.forward(latents, time, text_of(), commit=commit)
            assert relative_error(run.forward(latents, time, text_of(), commit=commit), expected) < 1e-4


@pytest.mark.parametrize("layer", [0, 1])
def test_committed_keys_equal_a_block_causal_forward(transformer, layer: int) -> None:
    """History was free of text from layer 2 on, as the clean pass skipped cross-attention, and the parity test had it
    off on both sides (FastVideo PR#1307). Non-zero text, keys of both layers; another text gives other keys."""
    chunks, latents = [3, 3, 3], latents_of(9)
    run = PagedRun(transformer, 0, 9)
    for chunk in split(latents, chunks):
        run.forward(chunk, 0, text_of())
    slots = run.manager.storage.slots(torch.arange(9 * TOKENS), run.branches[0].run)
    stored = run.manager.storage.key_pools[layer][slots]
    run.paged.detach()
    twin = masked_copy(transformer, window_mask(chunks, 0, 9))
    normed = []
    twin.blocks[layer].attn1.norm_k.register_forward_hook(lambda module, args, out: normed.append(out))
    for text in (text_of(), text_of(seed=77)):
        run_host(twin, latents, 0, text)
    cos, sin = transformer.rope(latents)
    same, other = (rotate(keys.unflatten(2, (HEADS, -1)), cos, sin)[0] for keys in normed)
    assert relative_error(stored, same) < 1e-5
    assert (relative_error(stored, other) > 1e-3) == (layer == 1)


def test_keys_sit_at_absolute_positions(transformer) -> None:
    """RoPE offsets were taken from the retained length, so every window looked like an opening shot (ComfyUI#15982).
    S 1, W 3: at frame 10 the pages hold frames 0, 10, 8, 9, each rotated by its own absolute frame."""
    run, dense = PagedRun(transformer, 1, 3), DenseRun(transformer, 1, 3)
    for frame in range(11):
        latents = latents_of(1, seed=frame)
        for side in (run, dense):
            side.forward(latents, 0, text_of())
    storage = run.manager.storage
    slots = storage.slots(torch.arange(4 * TOKENS), run.branches[0].run)
    for layer, twin in enumerate(dense.layers):
        for cell, frame in enumerate((0, 10, 8, 9)):
            tokens = [twin.history.tokens[TOKENS * frame + i] for i in range(TOKENS)]
            rows = slots[TOKENS * cell : TOKENS * (cell + 1)]
            assert_close(storage.key_pools[layer][rows], torch.stack([k for k, _ in tokens]), rtol=1e-4, atol=1e-4)
            assert_close(storage.value_pools[layer][rows], torch.stack([v for _, v in tokens]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("frame", [1022, 5000])
def test_frames_beyond_the_host_table(transformer, frame: int) -> None:
    """The host's table ends at 1024 frames (Causal-Forcing#2). Two chunks from that frame on equal a dense cache with a
    longer table of the host's own; the keys too, so the angle is the absolute one."""
    run, dense = PagedRun(transformer, 0, 6), DenseRun(transformer, 0, 6, table_frames=5010)
    (branch,) = run.branches
    for length in [6] * (frame // 6) + [frame % 6]:
        with PagedForwardContext([branch], num_tokens=length * TOKENS) as context:
            context.mark_written()
        context.mark_committed()
    branch.flush(0)
    assert branch.committed_tokens == frame * TOKENS
    dense.skip_to(frame)
    for chunk in range(2):
        latents = latents_of(3, seed=chunk)
        out = run.forward(latents, 0, text_of())
        assert out.shape == latents.shape == (1, CHANNELS, 3, 4, 6)
        assert relative_error(out, dense.forward(latents, 0, text_of())) < 1e-5
    storage = run.manager.storage
    stored = storage.key_pools[1][storage.slots(torch.arange(6 * TOKENS), branch.run)]
    tokens = [dense.layers[1].history.tokens[TOKENS * frame + i][0] for i in range(6 * TOKENS)]
    assert relative_error(stored, torch.stack(tokens)) < 1e-5


def test_sessions_as_rows_of_one_forward(transformer) -> None:
    """Two sessions, one of them 3 frames ahead, equal each alone; each row has its own frames and text."""
    run = PagedRun(transformer, 1, 6, max_sessions=2)
    alone = [PagedRun(copy.deepcopy(tiny_transformer()), 1, 6) for _ in range(2)]
    both = run.branches
    run.branches = both[:1]
    ahead = latents_of(3, seed=50)
    run.forward(ahead, 0, text_of())
    alone[0].forward(ahead, 0, text_of())
    run.branches = both
    text = torch.cat([text_of(), text_of(seed=3)])
    for chunk in range(4):
        latents = latents_of(3, rows=2, seed=chunk)
        out = run.forward(latents, 0, text)
        for row, single in enumerate(alone):
            expected = single.forward(latents[row : row + 1], 0, text[row : row + 1])
            assert relative_error(out[row : row + 1], expected) < 1e-5


def test_failed_chunk_gives_the_same_bits_again(transformer) -> None:
    """It raises in layer 1 of 2 in the steady state: position, pages and text stay."""
    outs = []
    for fails in (False, True):
        run = PagedRun(copy.deepcopy(transformer), 1, 6)
        (branch,) = run.branches
        for chunk in range(4):
            run.forward(latents_of(3, seed=chunk), 0, text_of())
        branch.text = text = run.paged.compute_text_kv(text_of())
        pages = branch.run
        if fails:
            hook = run.transformer.blocks[1].attn1.to_q.register_forward_pre_hook(lambda *args: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                run.forward(latents_of(3, seed=60), 500, text_of())
            hook.remove()
            assert branch.commit() == 0
        assert (branch.committed_tokens, branch.run, branch.text) == (12 * TOKENS, pages, text)
        outs.append(run.forward(latents_of(3, seed=70), 0, text_of()))
    assert torch.equal(*outs)


def test_angles_stay_float32_when_the_model_is_cast(transformer) -> None:
    """``.to(bfloat16)`` casts the host's own table as well, and positions above 256 alias (UNI-D2 PR#6)."""
    run = PagedRun(transformer, 0, 3, dtype=torch.bfloat16)
    transformer.to(torch.bfloat16)
    seen = []
    hook = transformer.rope.register_forward_hook(lambda module, args, out: seen.extend(out))
    run.forward(latents_of(3).bfloat16(), 500, text_of().bfloat16())
    hook.remove()
    assert [tensor.dtype for tensor in seen] == [torch.float32] * 2
    run.paged.detach()
    assert transformer.rope.freqs_cos.dtype == torch.bfloat16
