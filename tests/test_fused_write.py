"""Who normalises, rotates and writes: what the fused kernel can stand in for, and how the choice reaches the layers.

Its numbers are tested by Triton's interpreter (interpreted_fused_write.py) and on a GPU.
"""

from typing import Any

import pytest
import torch
from rollouts import make_manager, pool_bytes, random_rows
from test_processors import host_objects, same_objects
from tiny_components import PROMPT, make_pipeline, record_pools
from tiny_wan import HEAD_DIM, HEADS, PagedRun, latents_of, text_of, tiny_transformer

from diffusers_ardiff import CacheOptions
from diffusers_ardiff.attention import QKNorm, WriteChoice, choose_write, paged_norm_rope_write_attn, writing
from diffusers_ardiff.context import PagedForwardContext
from diffusers_ardiff.processors import PagedAttachment, attach, attach_paged_attention, wan
from diffusers_ardiff.processors.wan import norm_refusals


@pytest.fixture
def transformer() -> Any:
    return tiny_transformer()


def break_norm(attn: torch.nn.Module, part: str) -> None:
    """Make a layer's norms such that one kernel cannot stand in for them."""
    size = attn.heads * HEAD_DIM
    match part:
        case "kind":
            attn.norm_q = torch.nn.LayerNorm(size)
        case "size":
            attn.norm_q = torch.nn.RMSNorm(HEAD_DIM)
        case "no weights":
            attn.norm_k = torch.nn.RMSNorm(size, eps=1e-6, elementwise_affine=False)
        case "no eps":
            attn.norm_k = torch.nn.RMSNorm(size)
        case "dtype":
            attn.norm_k = attn.norm_k.double()
        case "eps":
            attn.norm_k.eps = 1e-3
        case "hook":
            attn.norm_k.register_forward_pre_hook(lambda module, args: None)
        case "wrapped":
            plain = attn.norm_k.forward
            attn.norm_k.forward = lambda states: plain(states)


def test_norms_that_a_kernel_can_stand_in_for(transformer) -> None:
    assert norm_refusals(transformer.blocks[0].attn1, HEADS * HEAD_DIM) == []


@pytest.mark.parametrize("part", ["kind", "size", "no weights", "no eps", "dtype", "eps", "hook", "wrapped"])
def test_norms_that_a_kernel_cannot_stand_in_for(transformer, monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    """Offloaded weights come along with the call of their module, so a kernel that reads them alone finds none."""
    monkeypatch.setattr(attach, "fused_write_refusals", lambda *args: [])
    break_norm(transformer.blocks[1].attn1, part)
    with attach_paged_attention(transformer) as paged:
        (reason,) = paged.fused_write_refusals("cuda", torch.bfloat16)
        assert reason.startswith("layer 1: norm_")
        assert paged.choose_write("cuda", torch.bfloat16) == WriteChoice(eager=False, compiled=False)


def test_group_offloaded_norms_are_left_to_torch(transformer) -> None:
    transformer.enable_group_offload("cpu", "cpu", offload_type="leaf_level", use_stream=False)
    assert "hooks" in norm_refusals(transformer.blocks[0].attn1, HEADS * HEAD_DIM)[0]


@pytest.mark.parametrize(
    ("name", "refusals", "chosen"),
    [
        (None, [], WriteChoice(writing.EAGER_WRITE == "fused", writing.COMPILED_WRITE == "fused")),
        (None, ["no"], WriteChoice(eager=False, compiled=False)),
        ("torch", [], WriteChoice(eager=False, compiled=False)),
        ("torch", ["no"], WriteChoice(eager=False, compiled=False)),
        ("fused", [], WriteChoice(eager=True, compiled=True)),
    ],
)
def test_choice_of_the_write(name: str | None, refusals: list[str], chosen: WriteChoice) -> None:
    assert choose_write(name, refusals) == chosen


def test_fused_write_that_cannot_serve_is_refused_before_a_write(transformer) -> None:
    run = PagedRun(transformer, 0, 6, write="fused")
    before = pool_bytes(run.manager.storage)
    with pytest.raises(ValueError, match=r"the fused write is named, but runs on cuda, not cpu"):
        run.forward(latents_of(3), 500, text_of())
    assert torch.equal(pool_bytes(run.manager.storage), before)
    assert run.paged._processors[0][0].inputs is None


def test_fused_op_refuses_cpu_tensors() -> None:
    branches = make_manager(24, 72).open_session().branches
    context = PagedForwardContext(branches, num_tokens=24).prepare()
    angles = torch.zeros(1, 24, 1, 8)
    norm = QKNorm(torch.ones(16), torch.ones(16), 1e-6)
    with pytest.raises(ValueError, match="runs on cuda, not cpu"):
        paged_norm_rope_write_attn(context.layer_inputs(0), *random_rows(branches, 24), (angles, angles), norm)
    assert context.unwritten_layers == (0,)


def test_unknown_way_to_write_is_refused_before_the_swap(transformer) -> None:
    found = host_objects(transformer)
    with pytest.raises(ValueError, match="nonsense"):
        attach_paged_attention(transformer, write="nonsense")
    assert same_objects(host_objects(transformer), found)


@pytest.mark.parametrize("compiled", [False, True])
def test_choice_reaches_every_layer(transformer, monkeypatch: pytest.MonkeyPatch, compiled: bool) -> None:
    """Eager and compiled regions are told apart; the norms' own weights and eps arrive."""
    seen = []

    def note(inputs, query, keys, values, rotary, norm):
        seen.append(norm)
        return query.clone()

    monkeypatch.setattr(wan, "paged_norm_rope_write_attn", note)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiled)
    monkeypatch.setattr(PagedAttachment, "choose_write", lambda *args: WriteChoice(eager=True, compiled=False))
    run = PagedRun(transformer, 0, 6)
    if compiled:
        run.forward(latents_of(3), 500, text_of())
        assert not seen
        return
    with pytest.raises(RuntimeError, match="wrote no keys"):
        run.forward(latents_of(3), 500, text_of())
    pairs = zip(seen, transformer.blocks, strict=True)
    assert all(norm.key_weight is block.attn1.norm_k.weight for norm, block in pairs)
    assert {norm.eps for norm in seen} == {transformer.config.eps}


class TestPipeline:
    """The option of a call's cache."""

    def test_refused_before_anything_is_allocated(self) -> None:
        pipe = make_pipeline()
        with record_pools() as made, pytest.raises(ValueError, match="the fused write is named, but runs on cuda"):
            pipe(PROMPT, cache=CacheOptions(write="fused"))
        assert not made

    def test_unknown_name(self) -> None:
        with pytest.raises(ValueError, match="nonsense"):
            make_pipeline().create_cache(cache=CacheOptions(write="nonsense"))

    def test_given_pool_dictates_it(self) -> None:
        pipe = make_pipeline()
        manager = pipe.create_cache(cache=CacheOptions(write="torch"))
        with pipe.stream(PROMPT, cache=manager, output_type="latent") as stream:
            assert stream.rollout.runner.attachment is pipe.paged_attachment(write="torch")
            assert stream.rollout.runner.attachment.write == "torch"
