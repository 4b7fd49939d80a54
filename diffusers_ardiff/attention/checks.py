"""What the ops refuse before anything is written, and by what they know rows again that they let through."""

from __future__ import annotations

import math
from collections.abc import Hashable

import torch

from ..context import LaunchPlan, PagedLayerInputs


def check_devices(pool: torch.Tensor, **tensors: torch.Tensor) -> None:
    """Raise ValueError for a tensor that is not where the pools are."""
    for name, tensor in tensors.items():
        if tensor.device != pool.device:
            raise ValueError(
                f"the pages are on {pool.device}, got {name} on {tensor.device}. Move it there, or open the session in a "
                "pool on its device."
            )


def check_tensors(pool: torch.Tensor, softmax_scale: float, **tensors: torch.Tensor) -> None:
    """Refuse what no backend can compute with.

    Raises:
        ValueError: a tensor on another device than the pools, one of integers or complex numbers, or a scale that is not
            positive and finite.
    """
    check_devices(pool, **tensors)
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise ValueError(f"{name} must hold floating point numbers, got {tensor.dtype}. Cast it first.")
    if not (math.isfinite(softmax_scale) and softmax_scale > 0):
        raise ValueError(f"softmax_scale must be positive and finite, got {softmax_scale}. None is head_dim ** -0.5.")


def check_query(query: torch.Tensor, inputs: PagedLayerInputs, plan: LaunchPlan) -> None:
    """Refuse queries that don't fit the pages.

    Raises:
        ValueError: other rows, heads or head size; under a mask, not one query a token.
    """
    num_rows, heads = inputs.seq_lens.shape[0], tuple(inputs.key_pool.shape[1:])
    if query.shape[0] != num_rows or query.shape[2:] != heads:
        raise ValueError(
            f"the forward context has {num_rows} rows and its pages have (heads, head_dim) {heads}; a query must be "
            f"({num_rows}, tokens, {heads[0]}, {heads[1]}), got {tuple(query.shape)}."
        )
    if plan.mask is None:
        return
    num_tokens, num_extra = plan.mask.num_tokens, plan.mask.num_extra
    if query.shape[1] not in (num_tokens, num_tokens + num_extra):
        raise ValueError(
            f"under full_attn_spans a forward of {num_tokens} tokens and {num_extra} extra rows takes one query a token, "
            f"then none or one an extra row, for each of {num_rows} rows; got {tuple(query.shape[:2])}."
        )


def check_rows(query: torch.Tensor, k_new: torch.Tensor, v_new: torch.Tensor, inputs: PagedLayerInputs) -> None:
    """Refuse new rows that are not those the context announced.

    Raises:
        ValueError: names the three shapes.
    """
    heads = tuple(inputs.key_pool.shape[1:])
    expected = (*inputs.slot_mapping.shape, *heads)
    query_fits = query.shape[0] == expected[0] and query.shape[2:] == heads
    if k_new.shape != expected or v_new.shape != expected or not query_fits:
        raise ValueError(
            f"the forward context writes {expected[:2]} rows of {heads}, got query {tuple(query.shape)}, keys "
            f"{tuple(k_new.shape)} and values {tuple(v_new.shape)} (extra rows included)."
        )


def signature_of(
    plan: LaunchPlan, inputs: PagedLayerInputs, softmax_scale: float, *tensors: torch.Tensor | None
) -> Hashable:
    """All that the checks of an op read beside the plan itself."""
    keys, values = inputs.key_pool, inputs.value_pool
    pools = (keys.shape, keys.stride(), keys.dtype, keys.device, values.shape, values.stride())
    rows = (inputs.slot_mapping.shape, inputs.seq_lens.shape)
    given = tuple(None if t is None else (t.shape, t.dtype, t.device) for t in tensors)
    return (plan.backend, softmax_scale, pools, rows, given)


def extra_rows(k_act: torch.Tensor | None, v_act: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """Those that are given, by the op's names for them."""
    return {name: tensor for name, tensor in (("k_act", k_act), ("v_act", v_act)) if tensor is not None}
