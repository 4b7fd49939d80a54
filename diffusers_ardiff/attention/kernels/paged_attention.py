"""Flash attention over the pages, one Triton source for CUDA and ROCm.

Shapes: R rows, L queries, H heads, D head size, S splits. A program serves BLOCK_M queries of one row and head over
one split of its keys. Splits exist because a chunk's query tiles rarely fill whole waves of the processor; their
partial results are merged by log-sum-exp.

Lengths are read on the device and exact: only the tile that crosses the end is masked, in scores and values, since a
weight of 0 times NaN in an unwritten slot is NaN.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from ...cache.float8 import FLOAT8
from ...context import PagedLayerInputs
from .steps import diagonal_tiles, load_rows, page_ids, softmax_step
from .tiles import MERGE_ROWS, AttentionConfig, choose_config

LOG2_E = 1.4426950408889634
WIDE_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})


class AttentionResult(NamedTuple):
    """``out`` (R, L, H, D) in the query's dtype; ``lse`` (R, H, L) float32, natural log, where it was asked for."""

    out: torch.Tensor
    lse: torch.Tensor | None


@triton.jit(do_not_specialize=["table_width", "num_queries"])
def attend_kernel(
    query: tl.tensor,
    key_pool: tl.tensor,
    value_pool: tl.tensor,
    key_tiles: tl.tensor,
    value_tiles: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    block_table: tl.tensor,
    seq_lens: tl.tensor,
    table_width: tl.tensor,
    num_queries: tl.tensor,
    scale_log2: tl.tensor,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    CONTIGUOUS: tl.constexpr,
    CAUSAL: tl.constexpr,
    PARTIAL: tl.constexpr,
    WITH_LSE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    """Grid (query tiles, splits, R * H).

    Args:
        query: (R, L, H, D). key_pool, value_pool: (slots, H, D), all contiguous; float8 becomes the query's dtype.
        key_tiles, value_tiles: tensor descriptors of the pools as (slots, H * D), or None: plain loads.
        out: (R, L, H, D), or PARTIAL: (S, R, L, H, D) float32.
        lse: (R, H, L) float32, or PARTIAL: (S, R, L, H) in base 2, or None.
        block_table: (R, table_width). seq_lens: (R,).
        CAUSAL: bottom-right aligned, the last query sees the last key; needs CONTIGUOUS and a key for each query.
    """
    row = tl.program_id(2) // NUM_HEADS
    head = tl.program_id(2) % NUM_HEADS
    split = tl.program_id(1)
    SLOT_STRIDE: tl.constexpr = NUM_HEADS * HEAD_DIM
    length = tl.load(seq_lens + row)
    table = block_table + row * table_width
    base = 0
    keys = key_pool + head * HEAD_DIM
    values = value_pool + head * HEAD_DIM
    if CONTIGUOUS:
        base = tl.load(table) * PAGE_SIZE
        keys += base.to(tl.int64) * SLOT_STRIDE
        values += base.to(tl.int64) * SLOT_STRIDE

    token = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_D)
    inside = (token < num_queries)[:, None] & (column < HEAD_DIM)[None, :]
    offsets = ((row.to(tl.int64) * num_queries + token) * NUM_HEADS + head)[:, None] * HEAD_DIM + column[None, :]
    q = tl.load(query + offsets, mask=inside, other=0.0)

    visible_ends = length - num_queries + token + 1
    if CAUSAL:
        seen_by_all = length - num_queries + tl.program_id(0) * BLOCK_M + 1
        length = tl.minimum(length, seen_by_all + BLOCK_M - 1)
    split_len = tl.cdiv(tl.cdiv(length, BLOCK_N), tl.num_programs(1)) * BLOCK_N
    first = split * split_len
    last = tl.minimum(first + split_len, length)
    unmasked = last
    if CAUSAL:
        unmasked = tl.minimum(last, seen_by_all)
    whole = first + tl.maximum(unmasked - first, 0) // BLOCK_N * BLOCK_N

    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    # Finite, since a causal tile may hide all of its keys from a query, and -inf less -inf is NaN.
    top = tl.full([BLOCK_M], -1e38, dtype=tl.float32)
    ahead = tl.arange(0, BLOCK_N)
    if not CONTIGUOUS:
        # Loaded one tile ahead, so that the copies of K and V never wait for it.
        pages = page_ids(table, first, length, PAGE_SIZE, BLOCK_N)
    for start in tl.range(first, whole, BLOCK_N):
        if key_tiles is None:
            slots = (start + ahead).to(tl.int64)
            if not CONTIGUOUS:
                slots = pages.to(tl.int64) * PAGE_SIZE + (start + ahead) % PAGE_SIZE
                pages = page_ids(table, start + BLOCK_N, length, PAGE_SIZE, BLOCK_N)
            k = load_rows(keys, slots, slots, SLOT_STRIDE, HEAD_DIM, BLOCK_D, False)
            v = load_rows(values, slots, slots, SLOT_STRIDE, HEAD_DIM, BLOCK_D, False)
            k, v = k.to(q.dtype), v.to(q.dtype)
        else:
            k = key_tiles.load([base + start, head * HEAD_DIM])
            v = value_tiles.load([base + start, head * HEAD_DIM])
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        acc, total, top = softmax_step(scores, v, acc, total, top, scale_log2)
    if CAUSAL:
        acc, total, top = diagonal_tiles(
            q, keys, values, acc, total, top, scale_log2, whole, last, visible_ends, SLOT_STRIDE, HEAD_DIM, BLOCK_D, BLOCK_N
        )  # fmt: skip
    elif whole < last:
        slots = (whole + ahead).to(tl.int64)
        if not CONTIGUOUS:
            slots = pages.to(tl.int64) * PAGE_SIZE + (whole + ahead) % PAGE_SIZE
        valid = whole + ahead < last
        k = load_rows(keys, slots, valid, SLOT_STRIDE, HEAD_DIM, BLOCK_D, True)
        v = load_rows(values, slots, valid, SLOT_STRIDE, HEAD_DIM, BLOCK_D, True)
        k, v = k.to(q.dtype), v.to(q.dtype)
        scores = tl.where(valid[None, :], tl.dot(q, tl.trans(k), input_precision="ieee"), float("-inf"))
        acc, total, top = softmax_step(scores, v, acc, total, top, scale_log2)

    result = acc / tl.where(total > 0, total, 1.0)[:, None]
    rows_before = split * (tl.num_programs(2) // NUM_HEADS) + row
    if PARTIAL:
        part = (rows_before.to(tl.int64) * num_queries + token) * NUM_HEADS + head
        tl.store(out + part[:, None] * HEAD_DIM + column[None, :], result, mask=inside)
        tl.store(lse + part, top + tl.math.log2(total), mask=token < num_queries)
    else:
        tl.store(out + offsets, result.to(out.dtype.element_ty), mask=inside)
        if WITH_LSE:
            natural = (top + tl.math.log2(total)) * 0.6931471805599453
            tl.store(lse + tl.program_id(2) * num_queries + token, natural, mask=token < num_queries)


@triton.jit(do_not_specialize=["num_rows", "num_queries", "num_splits"])
def merge_kernel(
    partial: tl.tensor,
    partial_lse: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    num_rows: tl.tensor,
    num_queries: tl.tensor,
    num_splits: tl.tensor,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WITH_LSE: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """Weigh the splits' results by their sums. Here a row is one (r, l, h); grid (ceil(num_rows / ROWS),).

    Args:
        partial: (S, num_rows, D) float32. partial_lse: (S, num_rows) in base 2, -inf where a split had no key.
        out: (num_rows, D). lse: (R, H, L) or None.
    """
    index = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK_D)
    in_rows = index < num_rows
    inside = in_rows[:, None] & (column < HEAD_DIM)[None, :]
    offsets = index[:, None] * HEAD_DIM + column[None, :]

    acc = tl.zeros([ROWS, BLOCK_D], dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    top = tl.full([ROWS], -1e38, dtype=tl.float32)
    for _ in range(num_splits):
        part_lse = tl.load(partial_lse + index, mask=in_rows, other=0.0)
        part = tl.load(partial + offsets, mask=inside, other=0.0)
        new_top = tl.maximum(top, part_lse)
        weight, shrink = tl.math.exp2(part_lse - new_top), tl.math.exp2(top - new_top)
        acc = acc * shrink[:, None] + part * weight[:, None]
        total = total * shrink + weight
        top = new_top
        partial_lse += num_rows
        partial += num_rows.to(tl.int64) * HEAD_DIM

    result = acc / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out + offsets, result.to(out.dtype.element_ty), mask=inside)
    if WITH_LSE:
        head, token, row = index % NUM_HEADS, index // NUM_HEADS % num_queries, index // NUM_HEADS // num_queries
        natural = (top + tl.math.log2(total)) * 0.6931471805599453
        tl.store(lse + (row * NUM_HEADS + head) * num_queries + token, natural, mask=in_rows)


def attend_pages(
    query: torch.Tensor,
    inputs: PagedLayerInputs,
    *,
    page_size: int,
    softmax_scale: float,
    contiguous: bool = False,
    causal: bool = False,
    with_lse: bool = False,
    config: AttentionConfig | None = None,
) -> AttentionResult:
    """Attend over each row's first ``seq_lens`` storage indices; reads no device tensor on the host.

    Args:
        query: (R, L, H, D) in the pools' dtype; float32, bfloat16 or float16 over float8 pools.
        inputs: pools, block table and lengths of one layer. A row of length 0 gives zeros and a log-sum-exp of -inf.
        page_size: slots a page.
        softmax_scale: positive.
        contiguous: every row's pages follow each other in the pool, so a row's first page id says it all.
        causal: bottom-right aligned, so query i sees the keys before ``length - L + i + 1``; every row needs at least
            L keys, and must be contiguous.
        with_lse: also return the log-sum-exp.
        config: tile sizes; None: chosen for the shapes and the device.

    Raises:
        ValueError: shapes or dtypes do not fit, the scale is not positive, or causal rows are not contiguous.
    """
    _check(query, inputs, softmax_scale)
    if causal and not contiguous:
        raise ValueError("causal attention reads contiguous rows only: pass contiguous=True, or a copy of the keys.")
    rows, num_queries, heads, head_dim = query.shape
    if config is None:
        num_keys = inputs.block_table.shape[1] * page_size
        config = choose_config(query.shape, query.dtype, query.device, num_keys=num_keys, contiguous=contiguous)
    if inputs.key_pool.dtype == FLOAT8:
        # Tiles that the copy engine brings go to the product as they are.
        config = replace(config, descriptors=False)
    query = query.contiguous()
    out = torch.empty_like(query)
    lse = query.new_empty((rows, heads, num_queries), dtype=torch.float32) if with_lse else None
    shared = {
        "NUM_HEADS": heads,
        "HEAD_DIM": head_dim,
        "BLOCK_D": max(16, triton.next_power_of_2(head_dim)),
        "WITH_LSE": with_lse,
    }
    splits = config.num_splits
    target, target_lse = out, lse
    if splits > 1:
        target = query.new_empty((splits, *query.shape), dtype=torch.float32)
        target_lse = target.new_empty(target.shape[:-1])
    grid = (triton.cdiv(num_queries, config.block_m), splits, rows * heads)
    with torch.cuda.device_of(query):
        attend_kernel[grid](
            query,
            inputs.key_pool,
            inputs.value_pool,
            *_descriptors(inputs, config),
            target,
            target_lse,
            inputs.block_table,
            inputs.seq_lens,
            inputs.block_table.stride(0),
            num_queries,
            softmax_scale * LOG2_E,
            PAGE_SIZE=page_size,
            CONTIGUOUS=contiguous,
            CAUSAL=causal,
            PARTIAL=splits > 1,
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            **shared,
        )
        if splits > 1:
            num_rows = rows * num_queries * heads
            merge_kernel[(triton.cdiv(num_rows, MERGE_ROWS),)](
                target, target_lse, out, lse, num_rows, num_queries, splits, ROWS=MERGE_ROWS, **shared
            )
    return AttentionResult(out, lse)


def _check(query: torch.Tensor, inputs: PagedLayerInputs, softmax_scale: float) -> None:
    pools = (inputs.key_pool, inputs.value_pool)
    dtypes = {query.dtype, FLOAT8} if query.dtype in WIDE_DTYPES else {query.dtype} - {FLOAT8}
    has_fit = pools[0].dtype == pools[1].dtype and pools[0].dtype in dtypes
    if query.dim() != 4 or not has_fit or any(pool.shape[1:] != query.shape[2:] for pool in pools):
        raise ValueError(
            f"query {tuple(query.shape)} {query.dtype} does not fit pools of {tuple(pools[0].shape)} and "
            f"{tuple(pools[1].shape)} {pools[0].dtype}: (R, L, H, D) and (slots, H, D) of one dtype are needed, or float8 pools."
        )
    if not all(pool.is_contiguous() for pool in pools):
        raise ValueError("the key and value pools must be contiguous.")
    if inputs.block_table.shape[0] != query.shape[0] or inputs.seq_lens.shape != query.shape[:1]:
        raise ValueError(
            f"{query.shape[0]} query rows need as many block table rows and lengths, got "
            f"{tuple(inputs.block_table.shape)} and {tuple(inputs.seq_lens.shape)}."
        )
    if softmax_scale <= 0:
        raise ValueError(f"softmax_scale must be positive, got {softmax_scale}.")


def _descriptors(
    inputs: PagedLayerInputs, config: AttentionConfig
) -> tuple[TensorDescriptor, TensorDescriptor] | tuple[None, None]:
    """Both pools as (slots, H * D) in tiles of one head, for the copy engine."""
    if not config.descriptors:
        return None, None
    block = [config.block_n, inputs.key_pool.shape[-1]]
    keys, values = (
        TensorDescriptor.from_tensor(pool.flatten(1), block) for pool in (inputs.key_pool, inputs.value_pool)
    )
    return keys, values
