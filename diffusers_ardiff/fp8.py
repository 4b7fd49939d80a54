"""Linear layers in float8: faster matrix products where the GPU has them, at an error that is yours to accept."""

from __future__ import annotations

from typing import Any

import torch

from .gelu import LinearGelu

FLOAT8 = torch.float8_e4m3fn
FLOAT8_MAX = torch.finfo(FLOAT8).max
_MULTIPLE = 16
_TEXT_PROJECTIONS = ("attn2.to_k", "attn2.to_v", "attn2.add_k_proj", "attn2.add_v_proj")
"""Run once a prompt: nothing to gain."""


class Float8Linear(torch.nn.Module):
    """y = x W^T + b with W in float8 (one scale an output row) and x quantised on the way (one scale a token).

    Args:
        linear: the layer to copy; its sizes must be multiples of 16.
    """

    weight: torch.Tensor
    weight_scale: torch.Tensor

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight, scale = quantize_rows(linear.weight.detach())
        self.register_buffer("weight", weight)
        self.register_buffer("weight_scale", scale.t().contiguous())
        self.bias = linear.bias

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """(..., in_features) bfloat16 -> (..., out_features) bfloat16."""
        rows, scale = quantize_rows(hidden_states.reshape(-1, self.in_features))
        out = torch._scaled_mm(
            rows,
            self.weight.t(),
            scale_a=scale,
            scale_b=self.weight_scale,
            bias=self.bias,
            out_dtype=hidden_states.dtype,
            use_fast_accum=True,
        )
        return out.view(*hidden_states.shape[:-1], self.out_features)


def quantize_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(N, K) -> (N, K) float8_e4m3fn and its scales (N, 1) float32, the largest value of a row at the type's largest."""
    largest = rows.abs().amax(dim=-1, keepdim=True).float()
    scale = largest.clamp(min=1e-12) / FLOAT8_MAX
    return (rows.float() / scale).clamp(-FLOAT8_MAX, FLOAT8_MAX).to(FLOAT8), scale


def quantize_linears(transformer: Any) -> int:
    """Replace the linear layers of a bfloat16 transformer's blocks by ``Float8Linear``; returns how many.

    For good: the bfloat16 weights are let go. Do it after loading LoRAs (fused) and before ``pipe.warmup()``; don't save
    the model afterwards. Embeddings, norms, the output layer and the text's K/V projections stay as they are.

    Raises:
        ValueError: another dtype, LoRA layers that are not fused, a fused GELU, or sizes that are no multiples of 16.
            Nothing has changed then.
        RuntimeError: a device without float8 products, or the layers are quantised already.
    """
    found = [
        (parent, name, child)
        for block in transformer.blocks
        for path, parent in block.named_modules()
        for name, child in parent.named_children()
        if isinstance(child, (torch.nn.Linear, Float8Linear)) and f"{path}.{name}" not in _TEXT_PROJECTIONS
    ]
    if any(isinstance(child, Float8Linear) for _, _, child in found):
        raise RuntimeError("the linear layers are float8 already.")
    linears = [(parent, name, child) for parent, name, child in found if isinstance(child, torch.nn.Linear)]
    _check_layers(transformer, [linear for _, _, linear in linears])
    for parent, name, linear in linears:
        # By name, also in lists of modules, whose items are registered under their index.
        parent.register_module(name, Float8Linear(linear))
    return len(linears)


def _check_layers(transformer: Any, linears: list[torch.nn.Linear]) -> None:
    if any(hasattr(module, "lora_A") for module in transformer.modules()):
        raise ValueError("LoRA layers can't be quantised; call fuse_lora() and unload_lora_weights() first.")
    if any(isinstance(module, LinearGelu) for module in transformer.modules()):
        raise ValueError("layers with fused GELU can't be quantised; call unfuse_gelu(transformer) first.")
    dtypes = {layer.weight.dtype for layer in linears}
    if dtypes != {torch.bfloat16}:
        raise ValueError(f"float8 linears take a bfloat16 model, its blocks hold {sorted(map(str, dtypes))}.")
    odd = sorted({(layer.in_features, layer.out_features) for layer in linears})
    odd = [size for size in odd if size[0] % _MULTIPLE or size[1] % _MULTIPLE]
    if odd:
        raise ValueError(f"float8 products take sizes that are multiples of {_MULTIPLE}, the blocks have {odd}.")
    device = linears[0].weight.device
    if device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 9):
        raise RuntimeError(
            f"{torch.cuda.get_device_name(device)} has no float8 products; they need compute capability 8.9 or later."
        )
