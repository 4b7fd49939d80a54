"""Small caches and forwards over them, shared by the tests. R rows (branches), L tokens, shapes (R, L, heads, head_dim)."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from diffusers_ardiff.attention import paged_write_attn
from diffusers_ardiff.cache import FLOAT8, Branch, KVManager, KVShape, KVStorage, RingGeometry
from diffusers_ardiff.context import PagedForwardContext


class Rows(NamedTuple):
    """New tokens of a forward."""

    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor


def poison(storage: KVStorage) -> None:
    """NaN in every slot, so that a key that nobody wrote can't go unnoticed."""
    storage.fill_(float("nan"))
    if storage.staging is not None:
        for pool in (*storage.staging.key_pools, *storage.staging.value_pools):
            pool.fill_(float("nan"))


def make_manager(
    sink: int,
    window: int,
    *,
    page_size: int = 16,
    extra: int = 0,
    layers: int = 1,
    heads: int = 2,
    head_dim: int = 8,
    dtype: torch.dtype = torch.float32,
    **kwargs: object,
) -> KVManager:
    """A manager of a poisoned pool."""
    geometry = RingGeometry(sink_tokens=sink, window_tokens=window, page_size=page_size, max_extra_tokens=extra)
    shape = KVShape(num_layers=layers, num_heads=heads, head_dim=head_dim, itemsize=dtype.itemsize)
    manager = KVManager(geometry, shape, dtype=dtype, **kwargs)
    poison(manager.storage)
    return manager


def random_rows(branches: Sequence[Branch], num_tokens: int) -> Rows:
    """Queries, keys and values that fit the branches' pool; float32 for a float8 pool."""
    storage = branches[0].storage
    size = (len(branches), num_tokens, storage.shape.num_heads, storage.shape.head_dim)
    dtype = torch.float32 if storage.dtype == FLOAT8 else storage.dtype
    return Rows(*(torch.randn(size, dtype=dtype) for _ in range(3)))


def forward(
    branches: Sequence[Branch],
    rows: Rows,
    *,
    start: int | None = None,
    extra: Rows | None = None,
    backend: str | None = None,
    commit: bool = True,
    max_past: int | None = None,
) -> torch.Tensor:
    """One forward through every layer of the pool with the same rows; returns the last layer's output."""
    context = PagedForwardContext(
        branches,
        num_tokens=rows.keys.shape[1],
        start=start,
        num_extra=0 if extra is None else extra.keys.shape[1],
        backend=backend,
        max_past_tokens=max_past,
    )
    with context:
        for layer in range(context.storage.shape.num_layers):
            out = paged_write_attn(context.layer_inputs(layer), *rows, *(extra[1:] if extra else ()))
    if commit:
        context.mark_committed()
    return out


def pool_bytes(storage: KVStorage) -> torch.Tensor:
    """A copy of every slot as raw integers, in which NaN equals itself."""
    return torch.stack([*storage.key_pools, *storage.value_pools]).view(torch.uint8).clone()
