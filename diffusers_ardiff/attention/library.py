"""How the ops are registered: straight with torch's dispatcher, whose only Python call is the op itself.

``torch.library.custom_op`` puts four Python functions around it (autograd, in-place versions, a backend's wrapper, checks
of aliases), which cost a launch-bound forward 15 to 50 microseconds a layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch._compile import _disable_dynamo

NAMESPACE = "diffusers_ardiff"
TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe)
"""The ops look up host-side facts of their forward by a handle, so nothing that replays kernels may record them: the second
tag makes Inductor (``mode="reduce-overhead"``) cut its CUDA graphs around them instead of giving them up."""

OpFunction = Callable[..., torch.Tensor]


class _Functions(NamedTuple):
    compute: OpFunction
    fake: OpFunction


_library = torch.library.Library(NAMESPACE, "FRAGMENT")
_functions: dict[str, _Functions] = {}


def register_op(name: str, schema: str, compute: OpFunction, fake: OpFunction) -> None:
    """Define an op for every device; a module that is loaded again brings new functions for the op that is there.

    Args:
        name: without namespace.
        schema: arguments and result, as torch writes them.
        compute: the op on tensors of one device; it has no backward.
        fake: the shape of its result.
    """
    is_defined = name in _functions
    _functions[name] = _Functions(compute, fake)
    if is_defined:
        return

    # Compiled code that calls the op leaves the compiler switched on, which would go on to compile what is in here.
    @_disable_dynamo
    def kernel(*arguments: Any) -> torch.Tensor:
        if not torch.is_grad_enabled():
            return _functions[name].compute(*arguments)
        # Whatever is computed in here is not to be differentiated.
        with torch.no_grad():
            return _functions[name].compute(*arguments)

    _library.define(name + schema, tags=TAGS)
    _library.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(
        f"{NAMESPACE}::{name}", lambda *arguments: _functions[name].fake(*arguments), lib=_library
    )


class _NoBackward(torch.autograd.Function):
    """Its output is ``out``; a backward is an error."""

    @staticmethod
    def forward(ctx: Any, out: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise RuntimeError(
            "the paged attention ops have no backward: they are for inference. Call the transformer under "
            "torch.no_grad(), or train it without the cache."
        )


def without_backward(out: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
    """An op's output, whose backward to ``inputs`` raises RuntimeError instead of leaving them without gradients."""
    if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in inputs):
        return out
    return _NoBackward.apply(out.detach(), *inputs)
