"""Linear layers in float8: what they compute, how far they are off, what they refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dense import relative_error
from live_streams import stream_of, take
from tiny_components import QUICK, make_pipeline, make_transformer

from diffusers_ardiff import quantize_linears
from diffusers_ardiff.fp8 import Float8Linear, quantize_rows

SIZES = {"attention_head_dim": 16, "ffn_dim": 64}


def make_linear(bias: bool = True) -> torch.nn.Linear:
    return torch.nn.Linear(64, 48, bias=bias, dtype=torch.bfloat16).requires_grad_(False)


def half_transformer(**sizes: Any) -> Any:
    return make_transformer(**SIZES | sizes).to(torch.bfloat16).requires_grad_(False)


def test_rows_use_the_whole_range() -> None:
    rows = torch.randn(5, 64) * torch.logspace(-6, 6, 5)[:, None]
    rows[2] = 0
    quantized, scale = quantize_rows(rows)
    assert quantized.float().abs().amax(dim=1).tolist() == [448, 448, 0, 448, 448]
    assert relative_error(quantized.float() * scale, rows) < 0.04


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(64,), (3, 64), (2, 5, 64)])
def test_the_product_of_the_quantised_factors(shape: tuple[int, ...], bias: bool) -> None:
    """Against the same product in float32; and against the layer itself, within what float8 allows."""
    linear, inputs = make_linear(bias), torch.randn(shape, dtype=torch.bfloat16)
    layer = Float8Linear(linear)
    weight, weight_scale = quantize_rows(linear.weight)
    rows, scale = quantize_rows(inputs.reshape(-1, 64))
    expected = (rows.float() * scale) @ (weight.float() * weight_scale).t()
    expected = (expected + linear.bias.float() if bias else expected).view(*shape[:-1], 48)
    out = layer(inputs)
    assert out.dtype == torch.bfloat16
    assert relative_error(out.float(), expected) < 5e-3
    assert 1e-3 < relative_error(out.float(), linear(inputs).float()) < 6e-2


def test_every_layer_that_runs_a_token_is_replaced() -> None:
    """q, k, v, out of self-attention, q, out of cross-attention, two of the feed-forward; text K/V stay."""
    transformer = half_transformer()
    latents, times = torch.randn(1, 16, 3, 4, 6, dtype=torch.bfloat16), torch.full((1,), 500.0)
    text = torch.randn(1, 7, 32, dtype=torch.bfloat16)
    before = transformer(latents, times, text, return_dict=False)[0]
    num_bytes = sum(p.nbytes for p in transformer.blocks.parameters())
    assert quantize_linears(transformer) == 2 * 8
    block = transformer.blocks[1]
    assert type(block.attn2.to_k) is type(block.attn2.to_v) is torch.nn.Linear
    linears = [m for m in block.modules() if isinstance(m, torch.nn.Linear)]
    assert len(linears) == 2
    assert sum(p.nbytes for p in transformer.blocks.parameters()) < 0.5 * num_bytes
    after = transformer(latents, times, text, return_dict=False)[0]
    assert 0 < relative_error(after.float(), before.float()) < 0.1


def test_a_video_in_float8_and_compiled_without_a_break() -> None:
    torch._dynamo.reset()
    pipe = make_pipeline(QUICK, transformer=half_transformer())
    with stream_of(pipe) as stream:
        expected = take(stream, 3)
    quantize_linears(pipe.transformer)
    with stream_of(pipe) as stream:
        latents = take(stream, 3)
    assert 0 < relative_error(latents, expected) < 0.2
    report = pipe.warmup(compile={"backend": "aot_eager"}, cuda_graphs=False)
    assert report.num_compiled_shapes == 1
    with stream_of(pipe) as stream:
        assert relative_error(take(stream, 3), latents) < 0.1
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("transformer", "error", "message"),
    [
        (make_transformer, ValueError, r"take a bfloat16 model, its blocks hold \['torch.float32'\]"),
        (
            lambda: half_transformer(attention_head_dim=12),
            ValueError,
            r"multiples of 16, the blocks have \[\(24, 24\)",
        ),
    ],
)
def test_refusals(transformer: Any, error: type[Exception], message: str) -> None:
    model = transformer()
    with pytest.raises(error, match=message):
        quantize_linears(model)
    assert not any(isinstance(module, Float8Linear) for module in model.modules())


def test_twice() -> None:
    transformer = half_transformer()
    quantize_linears(transformer)
    with pytest.raises(RuntimeError, match="float8 already"):
        quantize_linears(transformer)


def test_lora_layers() -> None:
    from peft import LoraConfig

    transformer = half_transformer()
    transformer.add_adapter(LoraConfig(r=2, target_modules=["to_q"]))
    with pytest.raises(ValueError, match="fuse_lora"):
        quantize_linears(transformer)
