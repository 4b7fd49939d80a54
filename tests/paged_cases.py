"""Pools, tables and new rows for the Triton kernels, and their oracle; needs neither sessions nor diffusers."""

from collections.abc import Sequence

import torch

from diffusers_ardiff.context import PagedLayerInputs


def make_inputs(
    lengths: Sequence[int],
    *,
    heads: int = 2,
    head_dim: int = 16,
    page_size: int = 16,
    capacity: int | None = None,
    shuffled: bool = True,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> PagedLayerInputs:
    """One layer of a pool that is NaN but for the first ``length`` storage indices of each row.

    Every row has pages for ``capacity`` tokens (the longest length by default). ``shuffled``: pages in random order,
    those beyond the length all being one page of NaN; else each row's pages follow each other.
    """
    wide = torch.float32 if dtype.itemsize == 1 else dtype
    width = -(-(capacity or max(lengths)) // page_size)
    num_pages = len(lengths) * width + 1
    order = torch.randperm(num_pages - 1) if shuffled else torch.arange(num_pages - 1)
    table = order.view(len(lengths), width).clone()
    pools = torch.full((2, num_pages * page_size, heads, head_dim), float("nan"), dtype=wide, device=device)
    for row, length in enumerate(lengths):
        slots = row_slots(table[row], page_size, length).to(device)
        pools[:, slots] = torch.randn((2, length, heads, head_dim), device=device).to(wide)
        if shuffled:
            table[row, -(-length // page_size) :] = num_pages - 1
    return PagedLayerInputs(
        key_pool=pools[0].clone().to(dtype),
        value_pool=pools[1].clone().to(dtype),
        slot_mapping=torch.empty((len(lengths), 0), dtype=torch.int64, device=device),
        block_table=table.to(device, torch.int32),
        seq_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
        layer_index=torch.tensor(0),
        launch=torch.tensor([page_size, 0]),
    )


def row_slots(table: torch.Tensor, page_size: int, length: int) -> torch.Tensor:
    """Pool rows of a row's first ``length`` storage indices."""
    index = torch.arange(length, device=table.device)
    return table[index // page_size].long() * page_size + index % page_size


def expected_attention(
    query: torch.Tensor, inputs: PagedLayerInputs, page_size: int, softmax_scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Float32 output (R, L, H, D) and log-sum-exp (R, H, L) over each row's explicit keys, in float64 inside.

    A head and 512 queries at a time, so that a full window fits.
    """
    out = torch.empty(query.shape, dtype=torch.float32, device=query.device)
    pools = [pool.float() if pool.element_size() == 1 else pool for pool in inputs[:2]]
    lse = query.new_empty((query.shape[0], query.shape[2], query.shape[1]), dtype=torch.float32)
    for row, length in enumerate(inputs.seq_lens.tolist()):
        slots = row_slots(inputs.block_table[row], page_size, length)
        for head in range(query.shape[2]):
            keys, values = (pool[slots, head].double() for pool in pools)
            for part in torch.arange(query.shape[1]).split(512):
                scores = query[row, part, head].double() @ keys.T * softmax_scale
                lse[row, head, part] = scores.logsumexp(-1).float()
                out[row, part, head] = (scores.softmax(-1) @ values).float()
    return out, lse


def make_states(
    rows: int, tokens: int, heads: int, head_dim: int, *, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query, keys and values (R, L, H, D) as chunks of one fused projection: their tokens lie three tokens apart."""
    fused = torch.randn((rows, tokens, 3 * heads * head_dim), device=device).to(dtype)
    query, keys, values = (part.unflatten(-1, (heads, head_dim)) for part in fused.chunk(3, dim=-1))
    return query, keys, values


def with_slots(inputs: PagedLayerInputs, num_tokens: int, num_extra: int = 0) -> PagedLayerInputs:
    """The same pools, now to be written at random slots, a different one for each new row."""
    rows = inputs.block_table.shape[0]
    slots = torch.randperm(len(inputs.key_pool))[: rows * (num_tokens + num_extra)]
    return inputs._replace(slot_mapping=slots.view(rows, -1).to(inputs.key_pool.device))


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference over the largest expected value; NaN compares as infinite."""
    difference = (actual.double() - expected.double()).abs().max() / expected.double().abs().max()
    return float(difference.nan_to_num(float("inf")))
