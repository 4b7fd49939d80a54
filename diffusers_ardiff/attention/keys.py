"""How rows are written into the pool and found again: a view where they are contiguous, else staged or gathered copies.

Shapes: R rows, L queries, N keys, H heads, D head size.
"""

from __future__ import annotations

import torch

from ..cache.float8 import as_bytes, store_as, take_rows
from ..context import LaunchPlan, PagedLayerInputs, RowLayout
from ..launch import StridedRows


def gather_slots(block_table: torch.Tensor, page_size: int, num_keys: int) -> torch.Tensor:
    """Pool rows of storage indices 0 .. num_keys-1 of every row: (R, num_keys) int64 on the table's device."""
    indices = torch.arange(num_keys, device=block_table.device)
    pages = block_table[:, indices // page_size].to(torch.int64)
    return pages * page_size + indices % page_size


def write_rows(inputs: PagedLayerInputs, plan: LaunchPlan, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Write new rows (R, L + A, H, D) into their slots: plain copies into one contiguous run, else one scatter.

    A captured CUDA graph must find the slots in a tensor, since they differ at its next replay.
    """
    dtype = inputs.key_pool.dtype
    keys, values = store_as(keys, dtype, plan.scales.key), store_as(values, dtype, plan.scales.value)
    row = plan.rows[0]
    is_captured = keys.is_cuda and torch.cuda.is_current_stream_capturing()
    if len(plan.rows) == 1 and row.base_slot is not None and row.written_ranges and not is_captured:
        done, keys, values = 0, keys[0], values[0]
        for part in row.written_ranges:
            count, first = len(part), row.base_slot + part.start
            inputs.key_pool.narrow(0, first, count).copy_(keys.narrow(0, done, count))
            inputs.value_pool.narrow(0, first, count).copy_(values.narrow(0, done, count))
            done += count
        return
    slots = inputs.slot_mapping.flatten()
    as_bytes(inputs.key_pool).index_copy_(0, slots, as_bytes(keys).flatten(0, 1))
    as_bytes(inputs.value_pool).index_copy_(0, slots, as_bytes(values).flatten(0, 1))


def dense_view(inputs: PagedLayerInputs, plan: LaunchPlan) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Keys and values (R, N, H, D) as views, where all rows have N keys at one stride; None where they have not.

    Rows are views of the pool itself, or of the staging pools once a fragmented window was staged there.
    """
    rows, staging = plan.rows, plan.staging
    if plan.strided_rows is not None:
        return _strided(inputs.key_pool, inputs.value_pool, plan.strided_rows)
    if staging is None or any(row.staging_row is None for row in rows) or plan.num_keys is None:
        return None
    layer = int(inputs.layer_index)
    place = StridedRows.at([(row.staging_row or 0) * staging.row_len for row in rows], plan.num_keys)
    return None if place is None else _strided(staging.key_pools[layer], staging.value_pools[layer], place)


def _strided(keys: torch.Tensor, values: torch.Tensor, place: StridedRows) -> tuple[torch.Tensor, torch.Tensor]:
    strides = keys.stride()
    size, stride = (place.num_rows, place.num_keys, *keys.shape[1:]), (place.stride * strides[0], *strides)
    offset = place.base * strides[0]
    return (
        keys.as_strided(size, stride, keys.storage_offset() + offset),
        values.as_strided(size, stride, values.storage_offset() + offset),
    )


def stage_rows(inputs: PagedLayerInputs, plan: LaunchPlan) -> None:
    """Bring the staged windows of fragmented rows up to date.

    A window is gathered whole when its history is new to the staging row, else only the current rows are copied.
    """
    staging = plan.staging
    if staging is None or not plan.is_staged:
        return
    layer = int(inputs.layer_index)
    held = staging.held[layer]
    for index, row in enumerate(plan.rows):
        if row.staging_row is None:
            continue
        whole = held[row.staging_row] != row.staging_key
        ranges = (range(row.seq_len),) if whole else row.written_ranges
        held[row.staging_row] = None
        slots = gather_slots(inputs.block_table[index : index + 1], plan.page_size, row.seq_len)[0]
        for part in ranges:
            target = slice(
                row.staging_row * staging.row_len + part.start, row.staging_row * staging.row_len + part.stop
            )
            source = slots[part.start : part.stop]
            for pool, staged in (
                (inputs.key_pool, staging.key_pools[layer]),
                (inputs.value_pool, staging.value_pools[layer]),
            ):
                torch.index_select(as_bytes(pool), 0, source, out=as_bytes(staged)[target])
        held[row.staging_row] = row.staging_key


def staged_view(inputs: PagedLayerInputs, plan: LaunchPlan) -> tuple[torch.Tensor, torch.Tensor] | None:
    """``dense_view`` (R, N, H, D), after staging fragmented rows where that yields one; None where nothing does."""
    if plan.strided_rows is not None and not plan.is_staged:
        return dense_view(inputs, plan)
    if plan.num_keys is None or len({row.staging_row is None for row in plan.rows}) != 1:
        return None
    stage_rows(inputs, plan)
    return dense_view(inputs, plan)


def padded_gather(
    inputs: PagedLayerInputs, plan: LaunchPlan
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Copies of all rows' keys and values (R, max N, H, D), and a bool mask (R, 1, 1, max N), None if none is padded.

    Padding repeats a row's storage index 0, which is always written: a masked NaN would still spoil the result.
    """
    lengths = [row.seq_len for row in plan.rows]
    slots = gather_slots(inputs.block_table, plan.page_size, max(lengths))
    mask = None
    if len(set(lengths)) > 1:
        valid = torch.arange(slots.shape[1], device=slots.device)[None] < inputs.seq_lens[:, None]
        slots = torch.where(valid, slots, slots[:, :1])
        mask = valid[:, None, None]
    shape = (*slots.shape, *inputs.key_pool.shape[1:])
    flat = slots.flatten()
    keys, values = (take_rows(pool, flat).view(shape) for pool in inputs[:2])
    return keys, values, mask


def layout_from_tensors(launch: torch.Tensor, seq_lens: torch.Tensor) -> LaunchPlan:
    """A plan for layer inputs without one (handle 0): exact, but reads the lengths back from the device."""
    rows = tuple(RowLayout(seq_len=int(length), base_slot=None) for length in seq_lens.tolist())
    return LaunchPlan(page_size=int(launch[0]), rows=rows)
