"""GELU inside the matrix product before it: one kernel in place of two, in the feed-forwards of a transformer."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import gelu, linear

from .processors.base import is_hooked

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@torch.library.custom_op("diffusers_ardiff::linear_gelu", mutates_args=())
def linear_gelu(hidden_states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """GELU (tanh approximation) of ``hidden_states @ weight.T + bias``; opaque to compilers. It has no gradient.

    On CUDA the activation is computed in the epilogue of the product, from sums that were not rounded yet; elsewhere by
    torch's own functions one after the other.

    Args:
        hidden_states: (..., in_features) in bfloat16, float16 or float32.
        weight: (out_features, in_features) of the same dtype, on the same device.
        bias: (out_features,), the same.

    Returns: (..., out_features), contiguous, in the same dtype.

    Raises:
        ValueError: dtypes, devices or shapes do not fit.
    """
    _check(hidden_states, weight, bias)
    if not hidden_states.is_cuda or torch.version.hip is not None:
        return gelu(linear(hidden_states, weight, bias), approximate="tanh").contiguous()
    rows = hidden_states.reshape(-1, weight.shape[1])
    out = torch._addmm_activation(bias, rows, weight.t(), use_gelu=True)
    return out.view(*hidden_states.shape[:-1], weight.shape[0])


@linear_gelu.register_fake
def _linear_gelu_fake(hidden_states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    _check(hidden_states, weight, bias)
    return hidden_states.new_empty((*hidden_states.shape[:-1], weight.shape[0]))


def _check(hidden_states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> None:
    tensors = (hidden_states, weight, bias)
    if len({(tensor.dtype, tensor.device) for tensor in tensors}) > 1 or hidden_states.dtype not in DTYPES:
        given = ", ".join(f"{tensor.dtype} on {tensor.device}" for tensor in tensors)
        raise ValueError(
            f"a linear layer with fused GELU takes states, weight and bias of one dtype ({', '.join(map(str, DTYPES))}) on "
            f"one device, got {given}. Call unfuse_gelu(transformer) for a model that is offloaded part by part."
        )
    if weight.dim() != 2 or bias.shape != weight.shape[:1] or hidden_states.shape[-1:] != weight.shape[1:]:
        shapes = [tuple(tensor.shape) for tensor in tensors]
        raise ValueError(f"states, weight and bias must be (..., K), (N, K) and (N,), got {shapes}.")


class LinearGelu(torch.nn.Module):
    """Stands in for a linear layer with GELU (tanh); holds that layer itself, so names and weights stay.

    Args:
        host: the module replaced, with ``proj``.
    """

    def __init__(self, host: torch.nn.Module) -> None:
        super().__init__()
        self.proj = host.proj
        # Not as a submodule: its weights are this one's.
        self.__dict__["_host"] = host

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """(..., in_features) -> (..., out_features).

        Raises:
            RuntimeError: ``proj`` has been replaced, by a LoRA or a quantised layer, which a product with its weights
                would pass by.
        """
        if type(self.proj) is not torch.nn.Linear:
            raise RuntimeError(
                f"the linear layer before a fused GELU has become a {type(self.proj).__name__}. Call "
                "unfuse_gelu(transformer) before LoRAs are loaded or layers quantised; fuse_gelu after LoRAs are fused."
            )
        return torch.ops.diffusers_ardiff.linear_gelu(hidden_states, self.proj.weight, self.proj.bias)

    def unwrap(self) -> torch.nn.Module:
        """The module replaced, with the linear layer as it is now."""
        host: Any = self.__dict__["_host"]
        host.proj = self.proj
        replaced: torch.nn.Module = host
        return replaced


def fuse_gelu(transformer: Any) -> int:
    """Compute the GELU of a transformer's feed-forwards in the epilogue of the product before it; returns how many.

    For modules built like diffusers' ``GELU`` with ``approximate="tanh"`` (Wan's and LTX's feed-forwards); activations of
    other kinds stay as they are. Results differ from separate kernels by rounding: on CUDA the activation sees the sum
    before it is rounded to the model's dtype. Weights, their names and saved files do not change, and nothing of it is
    saved; ``unfuse_gelu`` undoes it. Inference only. Do it after LoRAs are fused and before ``pipe.warmup()``.

    Raises:
        ValueError: no such activation, or one whose linear layer can't be fused: a LoRA that is not merged, quantised
            weights, no bias, hooks (offloading of parts). Nothing has changed then.
        RuntimeError: fused already, or compiled already.
    """
    _check_eager(transformer, "fuse_gelu")
    if any(isinstance(module, LinearGelu) for module in transformer.modules()):
        raise RuntimeError("GELU is fused already.")
    found = [(name, module) for name, module in transformer.named_modules() if _is_tanh_gelu(module)]
    if not found:
        raise ValueError(
            f"{type(transformer).__name__} has no linear layer with a GELU of the tanh approximation to fuse."
        )
    refused = [f"{name}.proj {reason}" for name, module in found if (reason := _refusal(module))]
    if refused:
        raise ValueError(f"GELU can't be fused: {refused[0]} ({len(refused)} of {len(found)} layers).")
    for name, module in found:
        _put(transformer, name, LinearGelu(module))
    return len(found)


def unfuse_gelu(transformer: Any) -> int:
    """Put back what ``fuse_gelu`` replaced; returns how many, 0 where nothing was fused.

    Raises:
        RuntimeError: the blocks are compiled.
    """
    found = [(name, module) for name, module in transformer.named_modules() if isinstance(module, LinearGelu)]
    if found:
        _check_eager(transformer, "unfuse_gelu")
    for name, module in found:
        _put(transformer, name, module.unwrap())
    return len(found)


def _is_tanh_gelu(module: torch.nn.Module) -> bool:
    return hasattr(module, "proj") and hasattr(module, "gelu") and getattr(module, "approximate", None) == "tanh"


def _refusal(module: Any) -> str | None:
    """Why a module's linear layer can't be fused, None where it can."""
    proj = module.proj
    if type(proj) is not torch.nn.Linear:
        return f"is a {type(proj).__name__}; fuse and unload LoRAs first, and leave quantised layers as they are"
    if type(proj.weight.data) is not torch.Tensor or proj.weight.dtype not in DTYPES:
        return f"holds {proj.weight.dtype} weights of type {type(proj.weight.data).__name__}"
    if proj.bias is None:
        return "has no bias"
    if is_hooked(proj) or is_hooked(module):
        return "has hooks (offloading, layerwise casting), which a product with its weights would pass by"
    return None


def _check_eager(transformer: Any, name: str) -> None:
    if any(getattr(module, "_compiled_call_impl", None) is not None for module in transformer.modules()):
        raise RuntimeError(
            f"the transformer is compiled; call pipe.cooldown() first, and {name} before pipe.warmup()."
        )


def _put(transformer: Any, name: str, module: torch.nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    # By name, also in lists of modules, whose items are registered under their index.
    transformer.get_submodule(parent).register_module(child, module)
