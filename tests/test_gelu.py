"""GELU in the epilogue of the product before it: the stock numbers, everything else unchanged, clear refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from counting import CountingBackend
from dense import relative_error
from diffusers import WanTransformer3DModel
from diffusers.models.activations import GELU
from live_streams import stream_of, take
from recorders import FunctionRecorder
from tiny_components import QUICK, make_pipeline, make_transformer

from diffusers_ardiff import fuse_gelu, quantize_linears, unfuse_gelu
from diffusers_ardiff.fp8 import Float8Linear
from diffusers_ardiff.gelu import LinearGelu, linear_gelu
from diffusers_ardiff.pipelines.warmup import run_warmup


def activation(bias: bool = True, approximate: str = "tanh") -> GELU:
    torch.manual_seed(0)
    return GELU(24, 40, approximate=approximate, bias=bias).requires_grad_(False)


def call(transformer: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    latents, text = (torch.randn(size, generator=generator) for size in ((1, 16, 3, 4, 6), (1, 7, 32)))
    with torch.no_grad():
        return transformer(latents, torch.full((1,), 500.0), text, return_dict=False)[0]


@pytest.mark.parametrize("shape", [(5, 24), (2, 5, 24), (2, 3, 5, 24)])
def test_the_stock_module_to_rounding(shape: tuple[int, ...]) -> None:
    """The epilogue's GELU is the tanh approximation on CUDA, but torch's CPU version of the same function is the exact
    one, off by 5e-4: there it must not be taken."""
    host, hidden = activation(), 3 * torch.randn(shape)
    out = LinearGelu(host)(hidden)
    assert out.shape == (*shape[:-1], 40)
    assert relative_error(out, host(hidden)) < 1e-6
    rows = hidden.reshape(-1, 24)
    theirs = torch._addmm_activation(host.proj.bias, rows, host.proj.weight.t(), use_gelu=True)
    assert relative_error(theirs.view_as(out), host(hidden)) > 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_op_keeps_its_contract(dtype: torch.dtype) -> None:
    arguments = (torch.randn(2, 5, 24), torch.randn(40, 24), torch.randn(40))
    torch.library.opcheck(linear_gelu, tuple(tensor.to(dtype) for tensor in arguments))
    strided = torch.randn(5, 2, 24).transpose(0, 1)
    assert linear_gelu(strided, *arguments[1:]).is_contiguous()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.ones(3, 4), torch.ones(2, 4).bfloat16(), torch.ones(2)), "of one dtype"),
        ((torch.ones(3, 4).double(), torch.ones(2, 4).double(), torch.ones(2).double()), "got torch.float64"),
        ((torch.ones(3, 4), torch.ones(2, 4, device="meta"), torch.ones(2)), "on one device"),
        ((torch.ones(3, 5), torch.ones(2, 4), torch.ones(2)), r"got \[\(3, 5\), \(2, 4\), \(2,\)\]"),
    ],
)
def test_what_does_not_fit(arguments: tuple[torch.Tensor, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        linear_gelu(*arguments)


def test_a_transformer_and_back() -> None:
    transformer = make_transformer()
    expected, names = call(transformer), list(transformer.state_dict())
    hosts = [block.ffn.net[0] for block in transformer.blocks]
    assert fuse_gelu(transformer) == len(hosts) == 2
    assert relative_error(call(transformer), expected) < 1e-6
    assert list(transformer.state_dict()) == names
    with pytest.raises(RuntimeError, match="fused already"):
        fuse_gelu(transformer)
    assert unfuse_gelu(transformer) == 2 and unfuse_gelu(transformer) == 0
    assert all(block.ffn.net[0] is host for block, host in zip(transformer.blocks, hosts, strict=True))
    assert torch.equal(call(transformer), expected)


def test_weights_that_were_replaced_meanwhile_come_back() -> None:
    transformer = make_transformer()
    fuse_gelu(transformer)
    other = make_transformer()
    with torch.no_grad():
        other.blocks[0].ffn.net[0].proj.weight.mul_(2)
    transformer.load_state_dict(other.state_dict(), assign=True)
    expected = call(other)
    assert relative_error(call(transformer), expected) < 1e-6
    unfuse_gelu(transformer)
    assert torch.equal(call(transformer), expected)


def test_saved_as_the_plain_model(tmp_path: Path) -> None:
    transformer = make_transformer()
    expected = call(transformer)
    fuse_gelu(transformer)
    transformer.save_pretrained(tmp_path)
    loaded = WanTransformer3DModel.from_pretrained(tmp_path)
    assert type(loaded.blocks[0].ffn.net[0]) is GELU
    assert torch.equal(call(loaded), expected)


def test_a_video_compiled_without_a_break() -> None:
    torch._dynamo.reset()
    with stream_of(make_pipeline(QUICK)) as stream:
        expected = take(stream, 3)
    pipe = make_pipeline(QUICK)
    fuse_gelu(pipe.transformer)
    report = pipe.warmup(compile={"backend": "aot_eager"}, cuda_graphs=False)
    assert report.num_compiled_shapes == 1
    for change in (fuse_gelu, unfuse_gelu):
        with pytest.raises(RuntimeError, match=r"cooldown\(\) first"):
            change(pipe.transformer)
    with stream_of(pipe) as stream, torch._dynamo.config.patch(error_on_recompile=True):
        assert relative_error(take(stream, 3), expected) < 1e-5
    torch._dynamo.reset()


def test_twelve_layers_are_one_graph() -> None:
    """A layer that looks at its own parts while it is traced may compile once a layer, and past the limit fail."""
    torch._dynamo.reset()
    pipe, counting = make_pipeline(QUICK, transformer=make_transformer(num_layers=12)), CountingBackend("eager")
    assert fuse_gelu(pipe.transformer) == 12
    pipe.warmup(compile={"backend": counting}, cuda_graphs=False)
    with stream_of(pipe) as stream, torch._dynamo.config.patch(error_on_recompile=True):
        take(stream, 4)
    assert len(counting.graphs) == 1
    torch._dynamo.reset()


def test_captured_forwards_are_not_replayed_past_it() -> None:
    """The weights' addresses stay, so a capture would go on with the kernels of before."""
    pipe = make_pipeline(QUICK)
    run_warmup(pipe, None, None, compile=False, recorder=FunctionRecorder())
    fuse_gelu(pipe.transformer)
    with pytest.raises(RuntimeError, match=r"fuse_gelu.*warmup\(\)"):
        stream_of(pipe)


def replaced(proj: torch.nn.Module) -> WanTransformer3DModel:
    transformer = make_transformer()
    transformer.blocks[1].ffn.net[0].proj = proj
    return transformer


def hooked() -> WanTransformer3DModel:
    transformer = make_transformer()
    transformer.blocks[1].ffn.net[0].proj.register_forward_pre_hook(lambda module, args: None)
    return transformer


def adapted() -> WanTransformer3DModel:
    from peft import LoraConfig

    transformer = make_transformer()
    transformer.add_adapter(LoraConfig(r=2, target_modules=["net.0.proj"]))
    return transformer


def exact() -> WanTransformer3DModel:
    transformer = make_transformer()
    for block in transformer.blocks:
        block.ffn.net[0].approximate = "none"
    return transformer


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: replaced(torch.nn.Linear(24, 48, bias=False)), r"blocks.1.ffn.net.0.proj has no bias \(1 of 2"),
        (lambda: replaced(Float8Linear(torch.nn.Linear(32, 48).bfloat16())), "is a Float8Linear"),
        (lambda: replaced(torch.nn.Linear(24, 48).double()), "holds torch.float64 weights"),
        (hooked, "has hooks"),
        (adapted, "proj is a Linear; fuse and unload LoRAs first"),
        (exact, "no linear layer with a GELU of the tanh approximation"),
    ],
)
def test_refusals_change_nothing(make: Any, message: str) -> None:
    transformer = make()
    with pytest.raises(ValueError, match=message):
        fuse_gelu(transformer)
    assert not any(isinstance(module, LinearGelu) for module in transformer.modules())


def test_a_lora_that_comes_later_is_not_dropped() -> None:
    """The product takes the base weight alone, so a LoRA around it would have no effect."""
    from peft import LoraConfig

    transformer = make_transformer()
    fuse_gelu(transformer)
    transformer.add_adapter(LoraConfig(r=2, target_modules=["net.0.proj"]))
    with pytest.raises(RuntimeError, match="unfuse_gelu"):
        call(transformer)
    unfuse_gelu(transformer)
    call(transformer)


def test_quantisation_of_fused_layers_is_refused() -> None:
    transformer = make_transformer(attention_head_dim=16, ffn_dim=64).to(torch.bfloat16).requires_grad_(False)
    fuse_gelu(transformer)
    with pytest.raises(ValueError, match="unfuse_gelu"):
        quantize_linears(transformer)
    unfuse_gelu(transformer)
    assert quantize_linears(transformer) == 16
