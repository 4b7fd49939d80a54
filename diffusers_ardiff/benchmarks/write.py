"""Writing one chunk: keys and values alone, and with the norm and rotation that come before, each way beside the others."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any, NamedTuple

import torch
from torch.nn.functional import rms_norm

from ..attention import QKNorm, fused_write_refusals
from ..attention.keys import write_rows
from ..context import LaunchPlan, find_launch_plan
from ..rope import Rotary, apply_rotary
from .op import NUM_LAYERS, OpCase, OpRows, SteadyState
from .timing import Timing, Variant, time_interleaved

WRITTEN_TENSORS = 4
"""Keys and values, read and written; with norm and rotation also queries."""
PREPARED_TENSORS = 6


class WriteInputs(NamedTuple):
    """What the layer has before its norms."""

    rotary: Rotary
    norm: QKNorm

    @classmethod
    def random(cls, case: OpCase, device: torch.device) -> WriteInputs:
        """Of one chunk's shapes."""
        angles = torch.rand((1, case.num_queries, 1, case.head_dim // 2), device=device).repeat_interleave(2, dim=-1)
        size = case.num_heads * case.head_dim
        weights = [torch.rand(size, dtype=case.dtype, device=device) for _ in range(2)]
        return cls((angles.cos(), angles.sin()), QKNorm(weights[0], weights[1], 1e-6))


def norm_rope(query: torch.Tensor, keys: torch.Tensor, inputs: WriteInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalised and rotated queries and keys (R, L, H, D), as a Wan layer computes them in torch."""
    (query_weight, key_weight, eps), rotary = inputs.norm, inputs.rotary
    query = rms_norm(query.flatten(2), query_weight.shape, query_weight, eps).view_as(query)
    keys = rms_norm(keys.flatten(2), key_weight.shape, key_weight, eps).view_as(keys)
    return apply_rotary(query, *rotary), apply_rotary(keys, *rotary)


def norm_rope_scatter(
    rows: OpRows, inputs: WriteInputs, slots: torch.Tensor, key_pool: torch.Tensor, value_pool: torch.Tensor
) -> torch.Tensor:
    """The same and the write, in torch operations that Inductor may fuse: no op hides anything. Returns the queries."""
    query, keys = norm_rope(rows.query, rows.keys, inputs)
    key_pool.index_copy_(0, slots, keys[0])
    value_pool.index_copy_(0, slots, rows.values[0])
    return query


def measure_write(
    case: OpCase, *, device: torch.device, warmup: int = 10, repeats: int = 50, compiled: bool = True
) -> dict[str, Any]:
    """Time what a layer does between its projections and attention.

    Args:
        case: shapes.
        device: where.
        warmup, repeats: calls of each way.
        compiled: also Inductor's versions; they take seconds to compile.

    Returns: ``{"case", "write": {way: times and GB/s read and written}}``. Ways: ``op`` and ``scatter`` write keys and
        values alone. ``prepare_eager``, ``prepare_inductor`` (norm and rotation compiled, then the op's write: what a
        compiled transformer does), ``prepare_inductor_all`` (the write compiled too, without an op) and
        ``prepare_fused`` (one Triton kernel, where it can run) normalise and rotate first.
    """
    state = SteadyState(case, ["sdpa"], device)
    try:
        variants = _write_variants(state) | _prepare_variants(state, compiled=compiled)
        times = time_interleaved(variants, device=device, warmup=warmup, repeats=repeats)
    finally:
        state.close()
    size = state.rows[0].query.numel() * case.dtype.itemsize
    return {
        "case": case.to_dict(),
        "label": case.label,
        "write": {name: _with_rate(name, timing, size) for name, timing in times.items()},
    }


def _with_rate(name: str, timing: Timing, tensor_bytes: int) -> dict[str, Any]:
    moved = (PREPARED_TENSORS if name.startswith("prepare") else WRITTEN_TENSORS) * tensor_bytes
    return asdict(timing) | {"gb_per_s": moved / timing.median_ms / 1e6}


def _plan_of(state: SteadyState) -> LaunchPlan:
    plan = find_launch_plan(int(state.inputs("sdpa", 0).launch[1]))
    if plan is None:
        raise RuntimeError("the forward context has no launch plan.")
    return plan


def _write_variants(state: SteadyState) -> dict[str, Variant]:
    plan = _plan_of(state)
    scattered = replace(plan, rows=tuple(replace(row, base_slot=None) for row in plan.rows))

    def write(used: LaunchPlan) -> Variant:
        return lambda i: write_rows(
            state.inputs("sdpa", i), used, state.rows[i % NUM_LAYERS].keys, state.rows[i % NUM_LAYERS].values
        )

    return {"op": write(plan), "scatter": write(scattered)}


def _prepare_variants(state: SteadyState, *, compiled: bool) -> dict[str, Variant]:
    case, plan = state.case, _plan_of(state)
    device = state.rows[0].query.device
    inputs = WriteInputs.random(case, device)

    def then_write(prepare: Any) -> Variant:
        def call(index: int) -> torch.Tensor:
            rows = state.rows[index % NUM_LAYERS]
            query, keys = prepare(rows.query, rows.keys, inputs)
            write_rows(state.inputs("sdpa", index), plan, keys, rows.values)
            return query

        return call

    variants = {"prepare_eager": then_write(norm_rope)}
    if compiled:
        whole = torch.compile(norm_rope_scatter, fullgraph=True, dynamic=False)

        def inductor_all(index: int) -> torch.Tensor:
            layer = state.inputs("sdpa", index)
            slots = layer.slot_mapping.flatten()
            return whole(state.rows[index % NUM_LAYERS], inputs, slots, layer.key_pool, layer.value_pool)

        variants["prepare_inductor"] = then_write(torch.compile(norm_rope, fullgraph=True, dynamic=False))
        variants["prepare_inductor_all"] = inductor_all
    if not fused_write_refusals(device.type, case.dtype, case.head_dim):
        from ..attention.kernels.rope_write import norm_rope_write

        variants["prepare_fused"] = lambda i: norm_rope_write(
            state.inputs("sdpa", i), *state.rows[i % NUM_LAYERS], *inputs
        )
    return variants
