"""Tile sizes of the attention kernel: a small table, since tuning at run time would stall the first chunks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch

MERGE_ROWS = 16

_MAX_SPLITS = 8
_MIN_KEYS_A_SPLIT = 1024
# Writing and merging one split's partial results takes as long as attending over about this many more keys.
_MERGE_KEYS = 400


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """How the attention kernel is launched.

    Args:
        block_m, block_n: queries and keys of a tile.
        num_warps, num_stages: Triton's launch options.
        programs_per_unit: programs that fit on one multiprocessor at a time.
        descriptors: read whole tiles of contiguous runs by the copy engine; needs compute capability 9.0 and a head
            size that is a power of two.
        num_splits: parts that a row's keys are split into.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    programs_per_unit: int = 1
    descriptors: bool = False
    num_splits: int = 1


_Table = dict[int, AttentionConfig]
"""Largest head size -> tiles."""

# Measured on one H200 with tests/gpu/time_triton.py, head size 128; the others are by analogy.
_HOPPER: _Table = {
    64: AttentionConfig(block_m=128, block_n=128, num_warps=8, num_stages=3),
    128: AttentionConfig(block_m=128, block_n=128, num_warps=8, num_stages=3),
    256: AttentionConfig(block_m=128, block_n=64, num_warps=8, num_stages=2),
}
_HOPPER_TABLE: _Table = {**_HOPPER, 128: AttentionConfig(block_m=128, block_n=64, num_warps=8, num_stages=3)}
_SMALL_SHARED_MEMORY: _Table = {
    64: AttentionConfig(block_m=128, block_n=64, num_warps=4, num_stages=2, programs_per_unit=2),
    128: AttentionConfig(block_m=128, block_n=64, num_warps=8, num_stages=2),
    256: AttentionConfig(block_m=64, block_n=32, num_warps=8, num_stages=2),
}
_HIP: _Table = {
    128: AttentionConfig(block_m=128, block_n=64, num_warps=4, num_stages=1, programs_per_unit=2),
    256: AttentionConfig(block_m=64, block_n=32, num_warps=4, num_stages=1),
}
# Exact float32 products keep whole operands in registers; larger tiles spill.
_FLOAT32: _Table = {
    64: AttentionConfig(block_m=32, block_n=32, num_warps=8, num_stages=1),
    128: AttentionConfig(block_m=32, block_n=16, num_warps=8, num_stages=1),
    256: AttentionConfig(block_m=16, block_n=16, num_warps=8, num_stages=1),
}


@lru_cache(maxsize=256)
def choose_config(
    query_shape: torch.Size, dtype: torch.dtype, device: torch.device, *, num_keys: int, contiguous: bool
) -> AttentionConfig:
    """Tiles for queries (R, L, H, D) over at most ``num_keys`` keys a row, by dtype, head size and device.

    Depends on shapes alone, so that a captured launch serves any lengths.

    Raises:
        ValueError: the head size is above 256.
    """
    rows, num_queries, heads, head_dim = query_shape
    capability = _capability(device)
    table = _table(dtype, capability)
    if table is _HOPPER and not contiguous:
        table = _HOPPER_TABLE
    sizes = [size for size in table if size >= head_dim]
    if not sizes:
        raise ValueError(f"the Triton kernel takes head sizes up to {max(table)}, got {head_dim}.")
    config = table[min(sizes)]
    num_units = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    tiles = -(-num_queries // config.block_m) * rows * heads
    return replace(
        config,
        descriptors=contiguous and table is _HOPPER and head_dim in (64, 128, 256),
        num_splits=choose_num_splits(tiles, num_units * config.programs_per_unit, num_keys),
    )


def choose_num_splits(num_tiles: int, num_programs: int, num_keys: int) -> int:
    """Parts to split the keys into, so that the last wave of programs is nearly full.

    Example: 444 tiles on 132 multiprocessors take 4 waves of whole rows, or 7 of half rows.
    """

    def cost(splits: int) -> float:
        waves = -(-num_tiles * splits // num_programs)
        merge = _MERGE_KEYS * splits * num_tiles / num_programs if splits > 1 else 0
        return waves * num_keys / splits + merge

    return min(range(1, max(1, min(_MAX_SPLITS, num_keys // _MIN_KEYS_A_SPLIT)) + 1), key=cost)


def _capability(device: torch.device) -> int:
    """CUDA compute capability times ten; 0 on ROCm and on the CPU."""
    if device.type != "cuda" or torch.version.hip is not None:
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def _table(dtype: torch.dtype, capability: int) -> _Table:
    if dtype == torch.float32:
        return _FLOAT32
    if capability == 0:
        return _HIP
    return _HOPPER if capability in (90, 100, 103) else _SMALL_SHARED_MEMORY
