"""Parts of the attention kernel: page ids, rows of one head, one step of the running softmax, the causal diagonal."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def page_ids(
    table: tl.tensor, start: tl.tensor, length: tl.tensor, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr
) -> tl.tensor:
    """Page of each storage index ``start ..``, (BLOCK_N,); 0 from ``length`` on. ``table``: this row's page ids."""
    index = start + tl.arange(0, BLOCK_N)
    return tl.load(table + index // PAGE_SIZE, mask=index < length, other=0)


@triton.jit
def load_rows(
    pool: tl.tensor,
    slots: tl.tensor,
    valid: tl.tensor,
    SLOT_STRIDE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MASKED: tl.constexpr,
) -> tl.tensor:
    """Rows (BLOCK_N, BLOCK_D) of one head; zeros beyond the head size, and where ``valid`` is false if MASKED."""
    column = tl.arange(0, BLOCK_D)
    pointers = pool + slots[:, None] * SLOT_STRIDE + column[None, :]
    if MASKED:
        tile = tl.load(pointers, mask=valid[:, None] & (column < HEAD_DIM)[None, :], other=0.0)
    elif HEAD_DIM == BLOCK_D:
        tile = tl.load(pointers)
    else:
        tile = tl.load(pointers, mask=(column < HEAD_DIM)[None, :], other=0.0)
    return tile


@triton.jit
def softmax_step(
    scores: tl.tensor, values: tl.tensor, acc: tl.tensor, total: tl.tensor, top: tl.tensor, scale_log2: tl.tensor
) -> tuple:
    """Fold one tile into the running output, sum and maximum; scores are raw, the exponent's base is 2."""
    new_top = tl.maximum(top, tl.max(scores, 1) * scale_log2)
    weights = tl.math.exp2(scores * scale_log2 - new_top[:, None])
    shrink = tl.math.exp2(top - new_top)
    total = total * shrink + tl.sum(weights, 1)
    acc = tl.dot(weights.to(values.dtype), values, acc * shrink[:, None], input_precision="ieee")
    return acc, total, new_top


@triton.jit
def diagonal_tiles(
    q: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    acc: tl.tensor,
    total: tl.tensor,
    top: tl.tensor,
    scale_log2: tl.tensor,
    first: tl.tensor,
    last: tl.tensor,
    visible_ends: tl.tensor,
    SLOT_STRIDE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> tuple:
    """Fold the keys ``first .. last`` of a contiguous run; query i of the tile sees those before visible_ends[i].

    That lies within the run for all but the padding of the last tile, whose result is not stored.
    """
    for start in tl.range(first, last, BLOCK_N):
        index = start + tl.arange(0, BLOCK_N)
        slots, valid = index.to(tl.int64), index < last
        k = load_rows(keys, slots, valid, SLOT_STRIDE, HEAD_DIM, BLOCK_D, True)
        v = load_rows(values, slots, valid, SLOT_STRIDE, HEAD_DIM, BLOCK_D, True)
        k, v = k.to(q.dtype), v.to(q.dtype)
        visible = index[None, :] < visible_ends[:, None]
        scores = tl.where(visible, tl.dot(q, tl.trans(k), input_precision="ieee"), float("-inf"))
        acc, total, top = softmax_step(scores, v, acc, total, top, scale_log2)
    return acc, total, top
