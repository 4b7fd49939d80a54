"""Piecewise attention over keys in one tensor, and the torch function that serves as its attention call.

Shapes: B samples, S queries, N keys, H heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from ...masks.segments import QueryRange, Segment, Span, build_segments, check_keys, check_spans


class AttnFunc(Protocol):
    """An attention call: query (B, S, H, D), keys and values (B, N, H, D) to (B, S, H, D).

    ``causal`` is bottom-right aligned: the last query sees the last key. flash-attn's functions fit.
    """

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, /, *, causal: bool, softmax_scale: float
    ) -> torch.Tensor: ...


def sdpa_attn_func(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, causal: bool, softmax_scale: float | None
) -> torch.Tensor:
    """torch's scaled dot product attention as an ``AttnFunc``; runs anywhere.

    Args:
        query: (B, S, H, D).
        key, value: (B, N, H', D); H' divides H.
        causal: bottom-right aligned, so query i sees keys 0 .. N - S + i.
        softmax_scale: None: D ** -0.5.

    Returns: (B, S, H, D).

    Raises:
        ValueError: causal with more queries than keys, where the first queries would see nothing.
    """
    num_queries, num_keys = query.shape[1], key.shape[1]
    if causal and num_queries > num_keys:
        raise ValueError(
            f"causal attention needs at least as many keys as queries, got {num_keys} keys and {num_queries} queries."
        )
    out = scaled_dot_product_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        attn_mask=causal_lower_right(num_queries, num_keys) if causal else None,
        scale=softmax_scale,
        enable_gqa=query.shape[2] != key.shape[2],
    )
    return out.transpose(1, 2)


def piecewise_attn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    full_attn_spans: Sequence[Sequence[Span]],
    softmax_scale: float,
    attn_func: AttnFunc,
    query_ranges: Sequence[QueryRange] | None = None,
) -> torch.Tensor:
    """Attend with a mask that is causal but for fully visible spans, one call of ``attn_func`` a segment.

    Args:
        query: (B, S, H, D).
        key, value: (B, N, H, D), from global position 0 on.
        full_attn_spans: the half-open spans of each sample, equal in all of them, or one list for all.
        softmax_scale: factor on the scores, handed to ``attn_func``.
        attn_func: see ``AttnFunc``; ``sdpa_attn_func`` runs anywhere.
        query_ranges: where the query's rows lie in the sequence; None: they are its last S tokens.

    Returns: (B, S, H, D), in the order of the query's rows.

    Raises:
        ValueError: spans that differ between samples or are malformed; ranges that do not cover the query in order;
            queries or spans beyond the keys. Raised before the first call of ``attn_func``.

    Example: ``piecewise_attn(q, k, v, [[(2, 7)]], q.shape[-1] ** -0.5, sdpa_attn_func)``
    """
    spans = _common_spans(full_attn_spans, query.shape[0])
    if key.shape[1] != value.shape[1]:
        raise ValueError(f"key and value must have equal lengths, got {key.shape[1]} and {value.shape[1]}.")
    ranges = _last_rows(query.shape[1], key.shape[1]) if query_ranges is None else query_ranges
    _check_cover(ranges, query.shape[1])
    outputs = []
    for rows, segment in _local_segments(spans, ranges, key.shape[1]):
        keys = slice(segment.kv_end)
        outputs.append(
            attn_func(
                query[:, rows],
                key[:, keys],
                value[:, keys],
                causal=segment.mode == "causal",
                softmax_scale=softmax_scale,
            )
        )
    if len(outputs) > 1:
        return torch.cat(outputs, dim=1)
    return outputs[0] if outputs else torch.empty_like(query)


def _common_spans(full_attn_spans: Sequence[Sequence[Span]], num_samples: int) -> tuple[Span, ...]:
    if len(full_attn_spans) not in (1, num_samples):
        raise ValueError(
            f"full_attn_spans must hold one list of spans for each of the {num_samples} samples, or one for all, got "
            f"{len(full_attn_spans)} lists."
        )
    first, *others = (check_spans(s, name=f"full_attn_spans[{i}]") for i, s in enumerate(full_attn_spans))
    for sample, spans in enumerate(others, start=1):
        if spans != first:
            raise ValueError(
                f"all samples of one call must have equal full_attn_spans, got {first} for sample 0 and {spans} for "
                f"sample {sample}. Call once a group of equal spans, or build a paged plan, which takes spans a row."
            )
    return first


def _last_rows(query_len: int, kv_len: int) -> tuple[QueryRange, ...]:
    if query_len > kv_len:
        raise ValueError(
            f"without query_ranges the queries are the last tokens of the sequence, got {query_len} queries and only "
            f"{kv_len} keys. Pass the keys of the queries themselves as well."
        )
    return (QueryRange(0, query_len, kv_len - query_len),)


def _check_cover(ranges: Sequence[QueryRange], query_len: int) -> None:
    covered = 0
    for index, part in enumerate(ranges):
        if part.local_start != covered or part.local_end < covered:
            raise ValueError(
                f"query_ranges must cover the local query in order, so range {index} must begin at row {covered} and "
                f"not end before it, got rows [{part.local_start}, {part.local_end})."
            )
        covered = part.local_end
    if covered != query_len:
        raise ValueError(f"query_ranges must cover the local query of {query_len} rows, got ranges for {covered}.")


def _local_segments(spans: Sequence[Span], ranges: Sequence[QueryRange], kv_len: int) -> list[tuple[slice, Segment]]:
    """Each segment with its rows of the local query."""
    found = []
    for part in ranges:
        segments = build_segments(spans, part.global_start, part.local_end - part.local_start)
        check_keys(segments, kv_len)
        shift = part.local_start - part.global_start
        found += [(slice(segment.q_start + shift, segment.q_end + shift), segment) for segment in segments]
    return found
