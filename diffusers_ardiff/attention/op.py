"""``paged_write_attn``: write the new rows' K and V into their slots, then attend. One opaque node for the compiler.

``paged_norm_rope_write_attn`` is the same with norm and rotation in the kernel that writes. The schemas mutate exactly
the two pools. What varies between forwards is a tensor's value, never a Python number.

Rows are checked, and their backend chosen, once a forward: layers of the same shapes are admitted by their signature.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import cast

import torch

from ..cache.float8 import FLOAT8
from ..context import LaunchPlan, PagedLayerInputs, find_launch_plan
from ..rope import Rotary
from .checks import check_devices, check_query, check_rows, check_tensors, extra_rows, signature_of
from .keys import layout_from_tensors, write_rows
from .library import register_op, without_backward
from .registry import AttentionBackend, AttentionRequest, Work, select_backend
from .visible import gather_visible, visible_plan
from .writing import FUSED_DTYPES, QKNorm, fused_write_refusals

__all__ = ["paged_attention", "paged_norm_rope_write_attn", "paged_write_attn"]

WRITE_ATTN_SCHEMA = (
    "(Tensor query, Tensor k_curr, Tensor v_curr, Tensor? k_act, Tensor? v_act, Tensor(a!) key_pool, "
    "Tensor(b!) value_pool, Tensor slot_mapping, Tensor block_table, Tensor seq_lens, Tensor layer_index, "
    "Tensor launch, float softmax_scale) -> Tensor"
)
NORM_ROPE_WRITE_ATTN_SCHEMA = (
    "(Tensor query, Tensor keys, Tensor values, Tensor query_weight, Tensor key_weight, Tensor cos, Tensor sin, "
    "Tensor(a!) key_pool, Tensor(b!) value_pool, Tensor slot_mapping, Tensor block_table, Tensor seq_lens, "
    "Tensor layer_index, Tensor launch, float norm_eps, float softmax_scale) -> Tensor"
)
ATTN_SCHEMA = (
    "(Tensor query, Tensor key_pool, Tensor value_pool, Tensor block_table, Tensor seq_lens, Tensor layer_index, "
    "Tensor launch, float softmax_scale) -> Tensor"
)


def _work_of(plan: LaunchPlan) -> Work:
    if plan.mask is not None:
        return "masked"
    if plan.num_keys is None:
        return "ragged"
    return "fragmented" if any(row.base_slot is None for row in plan.rows) else "dense"


def _choose(query: torch.Tensor, inputs: PagedLayerInputs, plan: LaunchPlan) -> AttentionBackend:
    request = AttentionRequest(
        device_type=query.device.type,
        dtype=inputs.key_pool.dtype,
        head_dim=inputs.key_pool.shape[-1],
        page_size=plan.page_size,
        is_hip=query.is_cuda and torch.version.hip is not None,
        work=_work_of(visible_plan(plan)),
        needs_mask=plan.mask is not None,
    )
    key = (request, plan.backend)
    if key not in plan.choices:
        plan.choices[key] = select_backend(*key)
    return plan.choices[key]


def _plan_of(inputs: PagedLayerInputs) -> LaunchPlan:
    return find_launch_plan(int(inputs.launch[1])) or layout_from_tensors(inputs.launch, inputs.seq_lens)


def _attend(
    query: torch.Tensor, inputs: PagedLayerInputs, plan: LaunchPlan, backend: AttentionBackend, softmax_scale: float
) -> torch.Tensor:
    if plan.visible is not None:
        inputs, plan = gather_visible(inputs, plan), visible_plan(plan)
    rows = query.to(_compute_dtype(query.dtype, inputs.key_pool.dtype))
    # Here, so that backends see stored values only: scores are linear in K, the output is linear in V.
    softmax_scale = softmax_scale * plan.scales.key
    if plan.mask is None or plan.mask.num_tokens >= rows.shape[1]:
        out = backend.attend(rows, inputs, plan, softmax_scale)
    else:
        num_masked = plan.mask.num_tokens
        masked = backend.attend(rows[:, :num_masked], inputs, plan, softmax_scale)
        extra = backend.attend(rows[:, num_masked:], inputs, replace(plan, mask=None), softmax_scale)
        out = torch.cat([masked, extra], dim=1)
    return (out if plan.scales.value == 1.0 else out * plan.scales.value).to(query.dtype)


def _attend_after_write(
    query: torch.Tensor, inputs: PagedLayerInputs, plan: LaunchPlan, backend: AttentionBackend, softmax_scale: float
) -> torch.Tensor:
    layer = int(inputs.layer_index)
    plan.written_layers.add(layer)
    if plan.write_pass is not None and plan.write_pass.ends_with(layer):
        # Whoever asked for a forward that only writes has all of it.
        return torch.zeros_like(query, memory_format=torch.contiguous_format)
    return _attend(query, inputs, plan, backend, softmax_scale)


def _compute_dtype(query: torch.dtype, pool: torch.dtype) -> torch.dtype:
    """The pool's; values of a float8 pool are exact in any wider dtype, so there it is the query's."""
    if pool != FLOAT8:
        return pool
    return query if query in FUSED_DTYPES else torch.float32


def _admit(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, inputs: PagedLayerInputs, plan: LaunchPlan
) -> AttentionBackend:
    """The backend for a forward's rows; ValueError, before any write, where they do not fit or none can serve them."""
    check_rows(query, keys, values, inputs)
    check_query(query, inputs, plan)
    return _choose(query, inputs, plan)


def _write_attn(
    query: torch.Tensor,
    k_curr: torch.Tensor,
    v_curr: torch.Tensor,
    k_act: torch.Tensor | None,
    v_act: torch.Tensor | None,
    *arguments: object,
) -> torch.Tensor:
    inputs, softmax_scale = PagedLayerInputs._make(arguments[:-1]), cast(float, arguments[-1])
    plan = _plan_of(inputs)
    signature = signature_of(plan, inputs, softmax_scale, query, k_curr, v_curr, k_act, v_act)
    backend = plan.choices.get(signature)
    if backend is None:
        extra = extra_rows(k_act, v_act)
        check_tensors(inputs.key_pool, softmax_scale, query=query, k_curr=k_curr, v_curr=v_curr, **extra)
    k_new = k_curr if k_act is None else torch.cat([k_curr, k_act], dim=1)
    v_new = v_curr if v_act is None else torch.cat([v_curr, v_act], dim=1)
    if backend is None:
        backend = plan.choices[signature] = _admit(query, k_new, v_new, inputs, plan)
    write_rows(inputs, plan, k_new, v_new)
    return _attend_after_write(query, inputs, plan, backend, softmax_scale)


def _write_attn_fake(
    query: torch.Tensor,
    k_curr: torch.Tensor,
    v_curr: torch.Tensor,
    k_act: torch.Tensor | None,
    v_act: torch.Tensor | None,
    key_pool: torch.Tensor,
    *arguments: object,
) -> torch.Tensor:
    # Tensors on the meta device come here and not to the op.
    check_devices(key_pool, query=query, k_curr=k_curr, v_curr=v_curr, **extra_rows(k_act, v_act))
    return torch.empty_like(query, memory_format=torch.contiguous_format)


def _check_fused(
    states: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    inputs: PagedLayerInputs,
    rotary: Rotary,
    norm: QKNorm,
    softmax_scale: float,
) -> None:
    """Raise ValueError where the fused kernel can't take these rows."""
    from .kernels.rope_write import check_rope_write

    query, keys, values = states
    refusals = [
        reason
        for dtype in {query.dtype: None, inputs.key_pool.dtype: None}
        for reason in fused_write_refusals(query.device.type, dtype, query.shape[-1])
    ]
    if refusals:
        raise ValueError("the fused write cannot serve this call: " + "; ".join(refusals) + ".")
    check_tensors(inputs.key_pool, softmax_scale, query=query, keys=keys, values=values)
    check_rows(*states, inputs)
    check_rope_write(inputs, states, rotary, norm)


def _norm_rope_write_attn(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    query_weight: torch.Tensor,
    key_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *arguments: object,
) -> torch.Tensor:
    *tensors, norm_eps, softmax_scale = cast("tuple[float, ...]", arguments)
    inputs, norm = PagedLayerInputs._make(tensors), QKNorm(query_weight, key_weight, norm_eps)
    plan, states = _plan_of(inputs), (query, keys, values)
    signature = signature_of(plan, inputs, softmax_scale, *states, cos, sin, query_weight, key_weight)
    backend = plan.choices.get(signature)
    if backend is None:
        _check_fused(states, inputs, (cos, sin), norm, softmax_scale)
        backend = plan.choices[signature] = _admit(*states, inputs, plan)
    rotated = _rope_write()(inputs, states, (cos, sin), norm, plan.scales)
    return _attend_after_write(rotated, inputs, plan, backend, softmax_scale)


@cache
def _rope_write() -> Callable[..., torch.Tensor]:
    """The fused kernel; triton is imported when it is first used."""
    from .kernels.rope_write import launch_rope_write

    return launch_rope_write


def _norm_rope_write_attn_fake(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    query_weight: torch.Tensor,
    key_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    key_pool: torch.Tensor,
    *arguments: object,
) -> torch.Tensor:
    check_devices(key_pool, query=query, keys=keys, values=values)
    return torch.empty_like(query, memory_format=torch.contiguous_format)


def _attn(
    query: torch.Tensor,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    layer_index: torch.Tensor,
    launch: torch.Tensor,
    softmax_scale: float,
) -> torch.Tensor:
    # Reads only, so there are no slots to write.
    inputs = PagedLayerInputs(key_pool, value_pool, block_table[:, :0], block_table, seq_lens, layer_index, launch)
    plan = _plan_of(inputs)
    check_tensors(key_pool, softmax_scale, query=query)
    check_query(query, inputs, plan)
    return _attend(query, inputs, plan, _choose(query, inputs, plan), softmax_scale)


def _attn_fake(query: torch.Tensor, key_pool: torch.Tensor, *arguments: object) -> torch.Tensor:
    check_devices(key_pool, query=query)
    return torch.empty_like(query, memory_format=torch.contiguous_format)


register_op("paged_write_attn", WRITE_ATTN_SCHEMA, _write_attn, _write_attn_fake)
register_op(
    "paged_norm_rope_write_attn", NORM_ROPE_WRITE_ATTN_SCHEMA, _norm_rope_write_attn, _norm_rope_write_attn_fake
)
register_op("paged_attn", ATTN_SCHEMA, _attn, _attn_fake)


def paged_write_attn(
    inputs: PagedLayerInputs,
    query: torch.Tensor,
    k_curr: torch.Tensor,
    v_curr: torch.Tensor,
    k_act: torch.Tensor | None = None,
    v_act: torch.Tensor | None = None,
    softmax_scale: float | None = None,
) -> torch.Tensor:
    """Write the new rows into the pools, then attend over everything visible to them: all keys, where the context has
    no ``full_attn_spans``.

    Args:
        inputs: this layer's tensors, from a prepared forward context.
        query: (R, Lq, H, D), any number of query rows. Under ``full_attn_spans`` one a token, L; where the context
            has extra rows, also L + A, and the last A see everything.
        k_curr, v_curr: (R, L, H, D), rotated keys and values of the forward's tokens.
        k_act, v_act: (R, A, H, D), rows that live for this forward only, if the context has extra rows.
        softmax_scale: D ** -0.5 by default.

    Returns: (R, Lq, H, D) in the query's dtype.

    Raises:
        RuntimeError: in a backward; there is none.
        ValueError: shapes differ from what the context announced, a tensor is on another device than the pools or not of
            floating point, the scale is not positive and finite, or no backend can do the call; before any write.
    """
    scale = softmax_scale if softmax_scale is not None else query.shape[-1] ** -0.5
    out = torch.ops.diffusers_ardiff.paged_write_attn.default(query, k_curr, v_curr, k_act, v_act, *inputs, scale)
    return without_backward(out, query, k_curr, v_curr)


def paged_norm_rope_write_attn(
    inputs: PagedLayerInputs,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    rotary: Rotary,
    norm: QKNorm,
    softmax_scale: float | None = None,
) -> torch.Tensor:
    """``paged_write_attn`` of projections: queries and keys are normalised and rotated by the kernel that writes.

    Args:
        inputs: this layer's tensors, from a prepared forward context.
        query, keys, values: (R, L, H, D) of one dtype, as projected, extra rows (A of the L) last; strided chunks of one
            projection are read in place.
        rotary: cos and sin, (1 or R, L, 1, D) float32, every angle twice in a row.
        norm: weights and eps.
        softmax_scale: D ** -0.5 by default.

    Returns: (R, L, H, D) in the query's dtype.

    Raises:
        ValueError: the fused kernel refuses (``fused_write_refusals``), or as ``paged_write_attn``; before any write.
    """
    scale = softmax_scale if softmax_scale is not None else query.shape[-1] ** -0.5
    out = torch.ops.diffusers_ardiff.paged_norm_rope_write_attn.default(
        query, keys, values, norm.query_weight, norm.key_weight, *rotary, *inputs, norm.eps, scale
    )
    return without_backward(out, query, keys, values)


def paged_attention(query: torch.Tensor, inputs: PagedLayerInputs, softmax_scale: float | None = None) -> torch.Tensor:
    """Attend over the pages without writing.

    Args:
        query: (R, L, H, D), or (T, H, D) with T = R * L rows, row after row; how many under ``full_attn_spans``: see
            ``paged_write_attn``.
        inputs: this layer's tensors, from a prepared forward context whose rows were written before.
        softmax_scale: D ** -0.5 by default.

    Returns: the query's shape and dtype.

    Raises:
        ValueError: the query has other rows, heads or dimensions than the pages, T is not a multiple of R, or as
            ``paged_write_attn``.
    """
    num_rows = inputs.seq_lens.shape[0]
    if query.dim() not in (3, 4) or (query.dim() == 3 and query.shape[0] % num_rows):
        raise ValueError(
            f"query must be (rows, tokens, heads, head_dim) or (rows * tokens, heads, head_dim) with {num_rows} rows, "
            f"got {tuple(query.shape)}."
        )
    rows = query if query.dim() == 4 else query.unflatten(0, (num_rows, -1))
    scale = softmax_scale if softmax_scale is not None else query.shape[-1] ** -0.5
    out = torch.ops.diffusers_ardiff.paged_attn.default(
        rows,
        inputs.key_pool,
        inputs.value_pool,
        inputs.block_table,
        inputs.seq_lens,
        inputs.layer_index,
        inputs.launch,
        scale,
    )
    return without_backward(out, query).view_as(query)
