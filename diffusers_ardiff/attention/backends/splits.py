"""In how many parts to cut the keys of one attention call, so that the last round of tiles leaves no multiprocessor idle.

A flash kernel gives each multiprocessor one tile of queries of one head at a time, and a tile takes as long as it has
keys. 4680 queries of 12 heads are 444 tiles: on 132 multiprocessors 3.4 rounds, which last as long as 4. In two parts they
are 888 tiles of half the length: 6.7 rounds, which last as long as 3.5. What is paid for it: partial results in float32
that are written and read once more.
"""

from __future__ import annotations

from functools import lru_cache

TILE_QUERIES = 128
MAX_SPLITS = 8
MIN_KEYS_A_SPLIT = 1024
MIN_GAIN = 0.03
FLOPS_A_MULTIPROCESSOR = 5.3e12
"""Of FlashAttention 3 in bfloat16 at head size 128 on a Hopper GPU, a second."""
BYTES_A_SECOND = 3e12


@lru_cache(maxsize=256)
def choose_splits(query_shape: tuple[int, ...], num_keys: int, num_multiprocessors: int) -> int:
    """Parts, 1 to 8, that a call is expected to be fastest in; 1 unless another number gains 3 % or more.

    Args:
        query_shape: (R, L, H, D).
        num_keys: of each row.
        num_multiprocessors: of the GPU.
    """
    rows, queries, heads, head_dim = query_shape
    tiles = rows * heads * -(-queries // TILE_QUERIES)
    tile_seconds = 4 * TILE_QUERIES * num_keys * head_dim / FLOPS_A_MULTIPROCESSOR

    def seconds(splits: int) -> float:
        rounds = -(-tiles * splits // num_multiprocessors)
        partial_bytes = 4 * splits * rows * queries * heads * head_dim if splits > 1 else 0
        return rounds / splits * tile_seconds + 2 * partial_bytes / BYTES_A_SECOND

    allowed = range(1, max(1, min(MAX_SPLITS, num_keys // MIN_KEYS_A_SPLIT)) + 1)
    best = min(allowed, key=seconds)
    return best if seconds(best) < (1 - MIN_GAIN) * seconds(1) else 1
