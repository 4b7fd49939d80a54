"""The attention kernel over keys in a view instead of pages: any range of a contiguous run, or a copy."""

from __future__ import annotations

import torch

from ...context import PagedLayerInputs
from ..merge import PartialResult
from .paged_attention import attend_pages
from .tiles import AttentionConfig, choose_config


def attend_keys(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    causal: bool,
    softmax_scale: float,
    config: AttentionConfig | None = None,
) -> PartialResult:
    """Attention with its log-sum-exp; a ``PartialAttention``.

    Args:
        query: (B, L, H, D).
        keys, values: (B, N, H, D), tokens contiguous, rows at any one stride; the query's dtype, or float8.
        causal: bottom-right aligned; N >= L then.
        softmax_scale: positive.
        config: tile sizes; None: chosen for the shapes and the device.

    Raises:
        ValueError: as ``attend_pages``.
    """
    num_rows, num_keys = keys.shape[:2]
    if config is None:
        config = choose_config(query.shape, query.dtype, query.device, num_keys=num_keys, contiguous=True)
    stride = keys.stride(0) // keys.stride(1) if num_rows > 1 else num_keys
    # A row begins anywhere, so pages are of one token and the table has the first token of each row.
    first_tokens = torch.arange(num_rows, dtype=torch.int32, device=keys.device) * stride
    inputs = PagedLayerInputs(
        key_pool=_as_pool(keys, stride),
        value_pool=_as_pool(values, stride),
        slot_mapping=first_tokens.new_empty((num_rows, 0)),
        block_table=first_tokens[:, None],
        seq_lens=torch.full_like(first_tokens, num_keys),
        layer_index=torch.tensor(0),
        launch=torch.tensor([1, 0]),
    )
    out, lse = attend_pages(
        query,
        inputs,
        page_size=1,
        softmax_scale=softmax_scale,
        contiguous=True,
        causal=causal,
        with_lse=True,
        config=config,
    )
    assert lse is not None
    return PartialResult(out, lse)


def _as_pool(rows: torch.Tensor, stride: int) -> torch.Tensor:
    """(tokens, H, D) from the first row's first token to the last row's last, as a view."""
    num_tokens = (rows.shape[0] - 1) * stride + rows.shape[1]
    return rows.as_strided((num_tokens, *rows.shape[2:]), rows.stride()[1:])
