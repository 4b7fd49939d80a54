"""Rotate queries and keys and write keys and values into their slots, in one launch; optionally normalise before.

Shapes: R rows, L tokens, H heads, D head size, A extra rows a row, which the caller writes itself. A program serves
all heads of one token. Rounding is that of the plain path: the norm in float32, rounded; the rotation in float32,
rounded.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ...cache.float8 import FLOAT8, FLOAT8_MAX, UNSCALED, KVScales
from ...context import PagedLayerInputs
from ...rope import Rotary
from ..writing import FUSED_DTYPES, QKNorm


@triton.jit
def _normalised(
    states: tl.tensor, weight: tl.tensor, offsets: tl.tensor, inside: tl.tensor, eps: tl.tensor, DIM: tl.constexpr
) -> tl.tensor:
    """RMS norm over a whole token (BLOCK_H, BLOCK_D), masked lanes being 0; rounded to the dtype of ``states``."""
    wide = states.to(tl.float32)
    mean = tl.sum(tl.sum(wide * wide, 1), 0) / DIM
    scale = tl.load(weight + offsets, mask=inside, other=0.0).to(tl.float32)
    return (wide * tl.math.rsqrt(mean + eps) * scale).to(states.dtype)


@triton.jit
def _rotated(
    states: tl.tensor, cos: tl.tensor, sin: tl.tensor, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr
) -> tl.tensor:
    """Interleaved pairs (BLOCK_H, BLOCK_D) turned by ``cos`` of their even and ``sin`` of their odd column."""
    even, odd = tl.split(tl.reshape(states.to(tl.float32), [BLOCK_H, BLOCK_D // 2, 2]))
    cos_even, _ = tl.split(tl.reshape(cos, [1, BLOCK_D // 2, 2]))
    _, sin_odd = tl.split(tl.reshape(sin, [1, BLOCK_D // 2, 2]))
    turned = tl.join(even * cos_even - odd * sin_odd, even * sin_odd + odd * cos_even)
    return tl.reshape(turned, [BLOCK_H, BLOCK_D]).to(states.dtype)


@triton.jit
def _saturated(states: tl.tensor, factor: tl.tensor, LARGEST: tl.constexpr) -> tl.tensor:
    """``states * factor`` in float32, within what float8 holds; NaN stays NaN."""
    return tl.clamp(states.to(tl.float32) * factor, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def rope_write_kernel(
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    rotated_query: tl.tensor,
    key_pool: tl.tensor,
    value_pool: tl.tensor,
    slot_mapping: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    query_weight: tl.tensor,
    key_weight: tl.tensor,
    eps: tl.tensor,
    query_row: tl.tensor,
    query_token: tl.tensor,
    key_row: tl.tensor,
    key_token: tl.tensor,
    value_row: tl.tensor,
    value_token: tl.tensor,
    slot_row: tl.tensor,
    angle_row: tl.tensor,
    key_factor: tl.tensor,
    value_factor: tl.tensor,
    LARGEST: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """Grid (L, R). ``*_row``, ``*_token`` are strides in elements; weights None: no norm. LARGEST: of a float8 pool,
    whose values are multiplied by their factor; None: any other pool.

    Args:
        query, keys, values: (R, L, H, D) with heads side by side. rotated_query: (R, L, H, D), contiguous.
        key_pool, value_pool: (slots, H, D). slot_mapping: (R, L + A) int64; a negative slot is not written.
        cos, sin: (1 or R, L, 1, D) float32.
    """
    token = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    head = tl.arange(0, BLOCK_H)[:, None]
    column = tl.arange(0, BLOCK_D)[None, :]
    inside = (head < NUM_HEADS) & (column < HEAD_DIM)
    offsets = head * HEAD_DIM + column
    DIM: tl.constexpr = NUM_HEADS * HEAD_DIM

    q = tl.load(query + row * query_row + token * query_token + offsets, mask=inside, other=0.0)
    k = tl.load(keys + row * key_row + token * key_token + offsets, mask=inside, other=0.0)
    v = tl.load(values + row * value_row + token * value_token + offsets, mask=inside, other=0.0)
    if query_weight is not None:
        q = _normalised(q, query_weight, offsets, inside, eps, DIM)
        k = _normalised(k, key_weight, offsets, inside, eps, DIM)

    angle = row * angle_row + token * HEAD_DIM + column
    cosine = tl.load(cos + angle, mask=column < HEAD_DIM, other=0.0)
    sine = tl.load(sin + angle, mask=column < HEAD_DIM, other=0.0)
    q = _rotated(q, cosine, sine, BLOCK_H, BLOCK_D)
    k = _rotated(k, cosine, sine, BLOCK_H, BLOCK_D)

    tl.store(rotated_query + (row * tl.num_programs(0) + token) * DIM + offsets, q, mask=inside)
    if LARGEST is not None:
        k, v = _saturated(k, key_factor, LARGEST), _saturated(v, value_factor, LARGEST)
    slot = tl.load(slot_mapping + row * slot_row + token)
    written = inside & (tl.zeros_like(offsets) + slot >= 0)
    tl.store(key_pool + slot * DIM + offsets, k.to(key_pool.dtype.element_ty), mask=written)
    tl.store(value_pool + slot * DIM + offsets, v.to(value_pool.dtype.element_ty), mask=written)


def rope_write(
    inputs: PagedLayerInputs,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    rotary: Rotary,
    scales: KVScales = UNSCALED,
) -> torch.Tensor:
    """Rotate ``query`` and ``keys``; write keys and values into the slots of the forward's tokens.

    Args:
        inputs: pools and slots of one layer; the pools change.
        query, keys, values: (R, L, H, D) of one dtype, queries and keys after their norms.
        rotary: cos and sin, (1 or R, L, 1, D) float32.
        scales: of float8 pools.

    Returns: rotated queries (R, L, H, D), contiguous.

    Raises:
        ValueError: the shapes do not fit each other.
    """
    check_rope_write(inputs, (query, keys, values), rotary, None)
    return launch_rope_write(inputs, (query, keys, values), rotary, None, scales)


def norm_rope_write(
    inputs: PagedLayerInputs,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    rotary: Rotary,
    norm: QKNorm,
    scales: KVScales = UNSCALED,
) -> torch.Tensor:
    """``rope_write`` of queries and keys that are normalised across heads first."""
    check_rope_write(inputs, (query, keys, values), rotary, norm)
    return launch_rope_write(inputs, (query, keys, values), rotary, norm, scales)


def launch_rope_write(
    inputs: PagedLayerInputs, states: tuple[torch.Tensor, ...], rotary: Rotary, norm: QKNorm | None, scales: KVScales
) -> torch.Tensor:
    """``rope_write``, or with a norm ``norm_rope_write``, of what ``check_rope_write`` lets through."""
    rows, num_tokens, heads, head_dim = states[0].shape
    cos, sin = (angles.contiguous() for angles in rotary)
    query, keys, values = (_with_heads_side_by_side(tensor) for tensor in states)
    rotated = torch.empty_like(query, memory_format=torch.contiguous_format)
    block_h, block_d = triton.next_power_of_2(heads), triton.next_power_of_2(head_dim)
    with torch.cuda.device_of(query):
        rope_write_kernel[(num_tokens, rows)](
            query,
            keys,
            values,
            rotated,
            inputs.key_pool,
            inputs.value_pool,
            inputs.slot_mapping,
            cos,
            sin,
            *(norm if norm is not None else (None, None, 0.0)),
            *(stride for tensor in (query, keys, values) for stride in tensor.stride()[:2]),
            inputs.slot_mapping.stride(0),
            cos.stride(0) if cos.shape[0] > 1 else 0,
            1.0 / scales.key,
            1.0 / scales.value,
            LARGEST=FLOAT8_MAX if inputs.key_pool.dtype == FLOAT8 else None,
            NUM_HEADS=heads,
            HEAD_DIM=head_dim,
            BLOCK_H=block_h,
            BLOCK_D=block_d,
            num_warps=4 if block_h * block_d <= 2048 else 8,
            # A fused multiply-add rounds once where torch rounds twice.
            enable_fp_fusion=False,
        )
    return rotated


def _with_heads_side_by_side(tensor: torch.Tensor) -> torch.Tensor:
    """Chunks of a fused projection are read in place; anything else whose heads lie apart is copied."""
    return tensor if tensor.stride()[2:] == (tensor.shape[3], 1) else tensor.contiguous()


def check_rope_write(
    inputs: PagedLayerInputs, states: tuple[torch.Tensor, ...], rotary: Rotary, norm: QKNorm | None
) -> None:
    """Raise ValueError where shapes do not fit each other; it looks at shapes, strides of the pools and dtypes only."""
    shape = states[0].shape
    if len(shape) != 4 or any(tensor.shape != shape or tensor.dtype != states[0].dtype for tensor in states):
        raise ValueError(
            "query, keys and values must be (R, L, H, D) of one shape and dtype, got "
            f"{[tuple(tensor.shape) for tensor in states]} of {[tensor.dtype for tensor in states]}."
        )
    if states[0].dtype not in FUSED_DTYPES:
        raise ValueError(f"the kernel computes in float32, so it takes no {states[0].dtype}.")
    rows, num_tokens, heads, head_dim = shape
    if inputs.slot_mapping.shape[0] != rows or inputs.slot_mapping.shape[1] < num_tokens:
        raise ValueError(
            f"{rows} rows of {num_tokens} tokens need a slot each, got {tuple(inputs.slot_mapping.shape)}."
        )
    if any(pool.shape[1:] != (heads, head_dim) or not pool.is_contiguous() for pool in inputs[:2]):
        raise ValueError(
            f"the pools must be contiguous (slots, {heads}, {head_dim}), got {tuple(inputs.key_pool.shape)}."
        )
    if any(a.shape[0] not in (1, rows) or a.shape[1:] != (num_tokens, 1, head_dim) for a in rotary) or head_dim % 2:
        raise ValueError(
            f"cos and sin must be (1 or {rows}, {num_tokens}, 1, {head_dim}) with an even head size, got "
            f"{[tuple(a.shape) for a in rotary]}."
        )
    if norm is not None and any(weight.shape != (heads * head_dim,) for weight in norm[:2]):
        raise ValueError(f"norm weights must be ({heads * head_dim},), got {[tuple(w.shape) for w in norm[:2]]}.")
