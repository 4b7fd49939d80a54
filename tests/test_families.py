"""Every family of transformers with paged attention, against its stock model."""

import math
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from counting import CountingBackend, op_calls
from dense import relative_error
from diffusers import (
    ChronoEditTransformer3DModel,
    CogVideoXTransformer3DModel,
    CosmosTransformer3DModel,
    HunyuanVideoFramepackTransformer3DModel,
    HunyuanVideoTransformer3DModel,
    SkyReelsV2Transformer3DModel,
    WanTransformer3DModel,
)
from diffusers.models.transformers.transformer_ltx import LTXVideoRotaryPosEmbed
from tiny_components import latents_of, make_pipeline
from tiny_families import (
    COG,
    FAMILIES,
    HEIGHT,
    HUNYUAN,
    TEXT_DIM,
    TEXT_LEN,
    WIDTH,
    Family,
    FamilyRun,
    call_hunyuan,
    call_hunyuan15,
    call_kandinsky,
    call_ltx2,
    call_vace,
    cog_rotary,
    noise,
    pack,
    window_mask,
)
from tiny_wan import TINY as TINY_WAN

from diffusers_ardiff import ARDiffusionPipeline
from diffusers_ardiff.context import PagedForwardContext
from diffusers_ardiff.processors import (
    Stack,
    TransformerFamily,
    attach_paged_attention,
    find_family,
    list_families,
    register_family,
    unregister_family,
)
from diffusers_ardiff.rope import AxialRope, apply_rotary, apply_rotary_halves

PATCH_FAMILIES = sorted(FAMILIES)


@pytest.fixture(params=PATCH_FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


def host_objects(family: Family, transformer: Any) -> list[Any]:
    return [getattr(transformer, "rope", None), *(attn.processor for attn in family.attns(transformer))]


# -- the numbers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chunk", "sink", "window", "total"),
    [(1, 0, 8, 4), (3, 0, 12, 9), (1, 1, 3, 10), (3, 3, 6, 21)],
    ids=["causal-1", "causal-3", "window-1", "window-3"],
)
def test_chunks_equal_one_masked_forward(family: Family, chunk: int, sink: int, window: int, total: int) -> None:
    """Chunk by chunk over the cache, each denoised once with other latents at another timestep before, equals the stock
    model on the whole video under the block-causal mask, banded where the window is shorter. In "window" the whole ring is
    overwritten twice."""
    transformer, latents, size = family.make(), family.latents(total, seed=7), family.patch[0]
    run, outs = FamilyRun(family, transformer, sink, window), []
    for start in range(0, total, chunk):
        run.forward(family.latents(chunk, seed=start), 900, commit=False)
        outs.append(run.forward(latents[:, :, start * size : (start + chunk) * size], 500))
    run.paged.detach()
    out = torch.cat(outs, dim=family.frame_dim)
    mask = window_mask([chunk] * (total // chunk), sink, window, family.tokens)
    assert relative_error(out, family.run(family.masked_copy(transformer, mask), latents, 500)) < 1e-5
    assert relative_error(out, family.run(transformer, latents, 500)) > 1e-3


def test_unbound_and_detached_equal_stock_bit_by_bit(family: Family) -> None:
    transformer, latents = family.make(), family.latents(3, seed=1)
    found, names, expected = host_objects(family, transformer), list(transformer.state_dict()), None
    expected = family.run(transformer, latents, 500)
    with attach_paged_attention(transformer):
        assert all(a is not b for a, b in zip(host_objects(family, transformer)[1:], found[1:], strict=True))
        assert torch.equal(family.run(transformer, latents, 500), expected)
        assert list(transformer.state_dict()) == names
    assert all(a is b for a, b in zip(host_objects(family, transformer), found, strict=True))
    assert not transformer._forward_pre_hooks
    assert torch.equal(family.run(transformer, latents, 500), expected)


def test_nothing_stays_bound_after_a_forward(family: Family) -> None:
    transformer, latents = family.make(), family.latents(3, seed=1)
    expected = family.run(transformer, latents, 500)
    run = FamilyRun(family, transformer, 0, 3)
    run.forward(latents, 500)
    assert torch.equal(family.run(transformer, latents, 500), expected)


@pytest.mark.parametrize("name", ["cogvideox", "ltx", "wan-vace"])
def test_fused_projections(name: str) -> None:
    """One projection for query, key and value, as diffusers fuses them: the same chunks, before and after."""
    family = FAMILIES[name]
    outs = []
    for fused in (False, True):
        transformer = family.make()
        if fused:
            transformer.fuse_qkv_projections()
        run = FamilyRun(family, transformer, 1, 3)
        outs.append(torch.cat([run.forward(family.latents(1, seed=n), 500) for n in range(5)], family.frame_dim))
    assert relative_error(outs[1], outs[0]) < 1e-5


class Repeated:
    """A transformer whose arguments of one row are given to two."""

    def __init__(self, transformer: Any) -> None:
        self.transformer = transformer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.transformer, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        def repeat(value: Any) -> Any:
            is_row = isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape[0] == 1
            return value.expand(2, *value.shape[1:]) if is_row else value

        return self.transformer(*map(repeat, args), **{name: repeat(value) for name, value in kwargs.items()})


def test_rows_at_different_frames_equal_each_alone(family: Family) -> None:
    """Two sessions, one of them a chunk ahead, as rows of one forward: each has angles and text rows of its own."""
    run = FamilyRun(family, family.make(), 1, 3, max_sessions=2)
    alone = [FamilyRun(family, family.make(), 1, 3) for _ in range(2)]
    branches = [run.branch, run.manager.open_session().branch()]
    for step in range(3):
        latents = family.latents(1, seed=step)
        run.forward(latents, 500)
        alone[0].forward(latents, 500)
    latents = torch.cat([family.latents(1, seed=seed) for seed in (8, 9)])
    context = PagedForwardContext(branches, num_tokens=family.tokens, num_extra=family.text)
    grid = (HEIGHT // family.patch[1], WIDTH // family.patch[2])
    with context, run.paged.bind(context, run.rope([[3], [0]], *grid, "cpu")):
        out = family.run(Repeated(run.transformer), latents, 500)
    for row, single in enumerate(alone):
        assert relative_error(out[row : row + 1], single.forward(latents[row : row + 1], 500)) < 1e-5


def compile_blocks(blocks: list[Any], backend: CountingBackend) -> None:
    for block in blocks:
        block.compile(fullgraph=True, backend=backend)


def test_one_graph_for_all_layers(family: Family, fresh_dynamo: None) -> None:
    """As many graphs as the stock model compiles to, however many layers, through fill and wrap, and eager's numbers."""
    layers = {"num_visual_blocks": 4} if "num_visual_blocks" in family.config else {"num_layers": 4}
    plain, compiled = (FamilyRun(family, family.make(**layers), 1, 3) for _ in range(2))
    counting, stock = CountingBackend("eager"), CountingBackend("eager")
    compile_blocks(compiled.paged.family.blocks(compiled.transformer), counting)
    for chunk in range(7):
        with torch._dynamo.config.patch(error_on_recompile=chunk > 0):
            latents = family.latents(1, seed=chunk)
            out = compiled.forward(latents, 500)
        assert relative_error(out, plain.forward(latents, 500)) < 1e-5
    torch._dynamo.reset()
    compile_blocks(plain.paged.family.blocks(plain.transformer), stock)
    plain.paged.detach()
    family.run(plain.transformer, family.latents(1, seed=0), 500)
    assert [op_calls(graph) for graph in counting.graphs] == [1] * family.graphs
    assert len(stock.graphs) == family.graphs


# -- angles ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["wan", "cosmos", "hunyuan-video", "hunyuan-video-1.5"])
def test_angles_are_those_of_the_rope_module(name: str) -> None:
    """Frames 2..4 of the host's own angles for a video of 5."""
    family = FAMILIES[name]
    transformer = family.make()
    options = {"fps": 16} if name == "cosmos" else {}
    expected = transformer.rope(torch.empty(1, 4, 5, HEIGHT, WIDTH), **options)
    with attach_paged_attention(transformer) as paged:
        actual = paged.make_rope(**options)([[2, 3, 4]], HEIGHT // 2, WIDTH // 2, "cpu")
    for ours, hosts in zip(actual, expected, strict=True):
        assert (ours.flatten(0, 2) - hosts.reshape(-1, hosts.shape[-1])[2 * 6 :]).abs().max() < 1e-6


def test_angles_of_cogvideox_are_those_of_its_pipeline() -> None:
    """Also where the frame is a crop of the grid that the model was trained on."""
    from diffusers.models.embeddings import get_3d_rotary_pos_embed

    transformer = FAMILIES["cogvideox"].make()
    crop, grid = ((1, 2), (5, 8)), (HEIGHT // 2, WIDTH // 2)
    with attach_paged_attention(transformer) as paged:
        plain = paged.make_rope()([range(3)], *grid, "cpu")
        cropped = paged.make_rope(extents=((1, 5), (2, 8)))([range(3)], *grid, "cpu")
    expected = get_3d_rotary_pos_embed(16, crop, grid, 3)
    for ours, hosts in [*zip(plain, cog_rotary(transformer, 3), strict=True), *zip(cropped, expected, strict=True)]:
        assert (ours[0, :, 0] - hosts).abs().max() < 1e-6


def test_angles_of_ltx_are_exact_by_default_and_the_hosts_on_request() -> None:
    """The host multiplies coordinates by up to 15708 in float32. The default is within 1e-6 of float64 at any frame;
    ``dtype=torch.float32`` is the host's bit by bit, which is 1e-4 and more away."""
    transformer = FAMILIES["ltx"].make()
    scale, grid = (8 / 24, 32.0, 32.0), (HEIGHT, WIDTH)
    host: LTXVideoRotaryPosEmbed = transformer.rope
    expected = [part[:, 2 * 24 :] for part in host(pack(torch.empty(1, 4, 5, *grid)), 5, *grid, scale)]
    with attach_paged_attention(transformer) as paged:
        hosts = paged.make_rope(scale=scale, dtype=torch.float32)([[2, 3, 4]], *grid, "cpu")
        exact = paged.make_rope(scale=scale)([[2, 3, 4]], *grid, "cpu")
        far, _ = paged.make_rope(scale=scale)([[5000]], *grid, "cpu")
    assert all(torch.equal(ours.flatten(2), theirs) for ours, theirs in zip(hosts, expected, strict=True))
    assert 1e-4 < max((a - b).abs().max() for a, b in zip(hosts, exact, strict=True)) < 5e-3
    place = 5000 * (8 / 24) / 20
    assert abs(float(far.flatten(2)[0, 0, -6]) - math.cos((2 * place - 1) * 10000 * math.pi / 2)) < 1e-6


def test_rotation_by_halves_pairs_other_channels() -> None:
    rope = {"dims": (4, 2, 2), "scales": (0.5, 1.0, 2.0)}
    states = noise(1, 12, 2, 8)
    by_halves = apply_rotary_halves(states, *AxialRope(**rope, halves=True)([[7, 8]], 2, 3))
    order = torch.arange(8).view(2, 4).T.flatten()
    by_pairs = apply_rotary(states[..., order], *AxialRope(**rope)([[7, 8]], 2, 3))
    assert torch.allclose(by_halves[..., order], by_pairs, atol=1e-6)
    assert not torch.allclose(by_halves, apply_rotary(states, *AxialRope(**rope)([[7, 8]], 2, 3)), atol=1e-2)


# -- which family ---------------------------------------------------------------------------------------------------


def test_each_model_fits_one_family() -> None:
    found = {name: find_family(family.make()).name for name, family in FAMILIES.items()}
    clones = {"skyreels-v2": "wan", "chronoedit": "wan", "wan-vace": "wan", "ltx2-split": "ltx2"}
    assert found == {name: clones.get(name, name.removesuffix("-1.5") if "cog" in name else name) for name in FAMILIES}
    others = {"wan-animate"}  # test_wan_animate.py
    assert set(found.values()) | others == {family.name for family in list_families()}


@pytest.mark.parametrize(
    "name",
    ["AnyFlow", "AnyFlowFAR", "Helios", "MotifVideo", "Kandinsky6SR", "SanaWMLTX2Refiner", "SanaVideo", "Mochi"],
)
def test_look_alikes_are_told_apart(name: str) -> None:
    """Models with the same attention modules as a family, and something else beside: they were attached."""
    with torch.device("meta"):
        transformer = getattr(diffusers, f"{name}Transformer3DModel")()
    with pytest.raises(TypeError, match="built like no transformer that paged attention knows"):
        attach_paged_attention(transformer)


def test_missing_parts_are_listed_the_closest_family_first() -> None:
    transformer = FAMILIES["cosmos"].make()
    transformer.transformer_blocks[1].attn1.norm_q = None
    with pytest.raises(
        TypeError, match=r"CosmosTransformer3DModel .* each family: cosmos: \['transformer_blocks\.1\.attn1"
    ):
        attach_paged_attention(transformer)


HUNYUAN_SINGLE = {**HUNYUAN, "num_single_layers": 1, "pooled_projection_dim": 6}
ANIMATE = {
    "num_attention_heads": 2, "attention_head_dim": 12, "latent_channels": 4, "in_channels": 12, "out_channels": 4,
    "text_dim": TEXT_DIM, "freq_dim": 16, "ffn_dim": 32, "num_layers": 2, "image_dim": 4, "added_kv_proj_dim": None,
    "motion_encoder_size": 16, "motion_style_dim": 8, "motion_dim": 4, "motion_encoder_dim": 16,
    "face_encoder_hidden_dim": 16, "face_encoder_num_heads": 2, "inject_face_latents_blocks": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    ("model", "config", "reason"),
    [
        (CosmosTransformer3DModel, {**FAMILIES["cosmos"].config, "extra_pos_embed_type": "learnable"}, "learned"),
        (CogVideoXTransformer3DModel, {**COG, "use_rotary_positional_embeddings": False}, "adds positions"),
        (CogVideoXTransformer3DModel, {**COG, "use_learned_positional_embeddings": True}, "adds positions"),
        (HunyuanVideoTransformer3DModel, {**HUNYUAN_SINGLE, "image_condition_type": "token_replace"}, "token_replace"),
        (
            HunyuanVideoFramepackTransformer3DModel,
            {**HUNYUAN_SINGLE, "image_proj_dim": 4, "has_image_proj": False, "has_clean_x_embedder": True},
            "FramePack",
        ),
    ],
)
def test_models_that_cannot_be_right_are_refused(model: type, config: dict[str, Any], reason: str) -> None:
    transformer = model(**config)
    found = [module.processor for module in transformer.modules() if hasattr(module, "processor")]
    with pytest.raises(TypeError, match=f"can't be run chunk by chunk.*{reason}"):
        attach_paged_attention(transformer)
    left = [module.processor for module in transformer.modules() if hasattr(module, "processor")]
    assert all(a is b for a, b in zip(found, left, strict=True))


class TwinFamily(TransformerFamily):
    """Fits what LTX-Video fits."""

    name = "twin"
    parts = ("caption_projection",)
    stacks = (Stack(blocks="transformer_blocks", self_attn="attn1", parts=("to_q",)),)


def test_families_are_told_apart_or_refused() -> None:
    """With two fitting adapters, the one registered first was taken in silence."""
    transformer, twin = FAMILIES["ltx"].make(), TwinFamily()
    try:
        assert register_family(twin) is register_family(twin) is twin
        with pytest.raises(ValueError, match="'twin' is registered already"):
            register_family(TwinFamily())
        with pytest.raises(TypeError, match=r"fits several families, \['ltx', 'twin'\]"):
            attach_paged_attention(transformer)
    finally:
        unregister_family("twin")
    assert find_family(transformer).name == "ltx"


# -- which calls ----------------------------------------------------------------------------------------------------


def refuse_call(name: str, call: Any, message: str, **config: Any) -> None:
    """The call raises while a forward is bound, and leaves nothing to commit; unbound it runs."""
    family = FAMILIES[name]
    run = FamilyRun(family, family.make(**config), 0, 6)
    latents = family.latents(3, seed=0)
    with torch.no_grad():
        call(run.transformer, latents, 500)
    refusing = Family(**{**vars(family), "call": call})
    run.family = refusing
    with pytest.raises(ValueError, match=message):
        run.forward(latents, 500)
    assert run.branch.commit() == 0
    run.family = family
    run.forward(latents, 500)
    assert run.branch.committed_tokens == 3 * family.tokens


def test_audio_must_be_isolated() -> None:
    """Audio in the loop: it saw one chunk of video where the stock model shows it all of it."""
    refuse_call("ltx2", lambda *args: call_ltx2(*args, isolate_modalities=False), "isolate_modalities=True")


def test_perturbed_and_sparse_attention_are_refused() -> None:
    def perturbed(*args: Any) -> torch.Tensor:
        return call_ltx2(*args, spatio_temporal_guidance_blocks=[1])

    refuse_call("ltx2-split", perturbed, "spatio_temporal_guidance_blocks")
    run = FamilyRun(FAMILIES["kandinsky5"], FAMILIES["kandinsky5"].make(), 0, 3)
    run.family = Family(
        **{**vars(run.family), "call": lambda *a: call_kandinsky(*a, sparse_params={"to_fractal": False})}
    )
    with pytest.raises(ValueError, match="sparse_params=None"):
        run.forward(run.family.latents(3, seed=0), 500)


@pytest.mark.parametrize(("name", "call"), [("hunyuan-video", call_hunyuan), ("hunyuan-video-1.5", call_hunyuan15)])
def test_text_must_be_as_long_as_announced(name: str, call: Any) -> None:
    """Padding among the text rows would take softmax mass."""
    refuse_call(name, lambda *args: call(*args, valid=4), r"must agree; rows with texts of different length")


@pytest.mark.parametrize("name", ["cogvideox", "hunyuan-video", "hunyuan-video-1.5"])
def test_joint_models_want_their_text_announced(name: str) -> None:
    family = FAMILIES[name]
    run = FamilyRun(family, family.make(), 0, 3)
    context = PagedForwardContext([run.branch], num_tokens=3 * family.tokens)
    rotary = run.rope([range(3)], HEIGHT // 2, WIDTH // 2, "cpu")
    with (
        pytest.raises(ValueError, match=r"num_extra=(<text rows|0\. They must agree)"),
        context,
        run.paged.bind(context, rotary),
    ):
        family.run(run.transformer, family.latents(3, seed=0), 500)
    assert run.branch.commit() == 0


def test_text_never_enters_the_cache() -> None:
    """Text rows live for one forward: what is committed is video, and another text changes the next chunk only as far as
    its own rows do."""
    family = FAMILIES["cogvideox"]
    run = FamilyRun(family, family.make(), 0, 6)
    for chunk in range(3):
        run.forward(family.latents(3, seed=chunk), 500)
    storage = run.manager.storage
    slots = storage.slots(torch.arange(6 * family.tokens + TEXT_LEN), run.branch.run)
    before = storage.key_pools[1][slots].clone()
    run.forward(family.latents(3, seed=5), 100, commit=False)
    changed = (storage.key_pools[1][slots] != before).flatten(1).any(1)
    # Storage 18..35 holds frames 3..5 after the wrap; the denoised frames 9..11 take their place, text the last rows.
    assert changed.tolist() == [False] * 18 + [True] * 18 + [True] * TEXT_LEN


def test_text_is_cached_where_the_family_says_so() -> None:
    """VACE blocks have cross-attention too; other families compute text K/V in the forward, and say so."""
    family = FAMILIES["wan-vace"]
    run = FamilyRun(family, family.make(), 0, 6)
    latents, embeds = family.latents(3, seed=0), noise(1, TEXT_LEN, TEXT_DIM)
    context = PagedForwardContext([run.branch], num_tokens=18)
    text = run.paged.compute_text_kv(embeds)
    assert len(text.layers) == run.paged.geometry.num_layers == 4
    with context, run.paged.bind(context, run.rope([range(3)], 2, 3, "cpu"), text), torch.no_grad():
        cached = call_vace(run.transformer, latents, 500)
    assert relative_error(cached, run.forward(latents, 500)) < 1e-6
    other = FamilyRun(FAMILIES["ltx"], FAMILIES["ltx"].make(), 0, 3)
    with pytest.raises(NotImplementedError, match="bind a forward without"):
        other.paged.compute_text_kv(embeds)
    context = PagedForwardContext([other.branch], num_tokens=24).prepare()
    with (
        pytest.raises(ValueError, match="bind without text"),
        other.paged.bind(context, other.rope([[0]], 4, 6, "cpu"), text),
    ):
        pass


# -- in the pipeline ------------------------------------------------------------------------------------------------


def make_for_pipeline(model: type, **config: Any) -> Any:
    torch.manual_seed(3)
    sizes = {"in_channels": 16, "out_channels": 16, "text_dim": 32, "ffn_dim": 32}
    return model(**{**TINY_WAN, **sizes, **config}).eval()


def test_skyreels_runs_in_the_pipeline(tmp_path: Path) -> None:
    """The same weights as a Wan transformer give the same video; saved and loaded, the same again."""
    skyreels = make_for_pipeline(SkyReelsV2Transformer3DModel)
    wan = make_for_pipeline(WanTransformer3DModel)
    wan.load_state_dict(skyreels.state_dict())
    pipes = [make_pipeline(transformer=model) for model in (skyreels, wan)]
    ours, theirs = (latents_of(pipe, num_frames=21) for pipe in pipes)
    assert relative_error(ours, theirs) < 1e-4
    pipes[0].save_pretrained(tmp_path)
    loaded = ARDiffusionPipeline.from_pretrained(tmp_path)
    assert type(loaded.transformer) is SkyReelsV2Transformer3DModel
    assert torch.equal(latents_of(loaded, num_frames=21), ours)


@pytest.mark.parametrize("name", sorted(FAMILIES.keys() - {"wan", "skyreels-v2", "chronoedit"}))
def test_pipeline_refuses_families_that_take_other_inputs(name: str) -> None:
    family = FAMILIES[name]
    with pytest.raises(ValueError, match=r"takes other inputs than the pipeline prepares.*docs/families\.md"):
        latents_of(make_pipeline(transformer=family.make()))


def test_pipeline_refuses_chronoedit_as_it_is_published() -> None:
    """It is called as Wan is, but takes the picture's latents and a mask beside the video's."""
    chronoedit = make_for_pipeline(ChronoEditTransformer3DModel, in_channels=36)
    with pytest.raises(ValueError, match=r"36 input and 16 output channels .* is not supported"):
        latents_of(make_pipeline(transformer=chronoedit))
