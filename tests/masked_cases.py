"""Forwards under piecewise masks, their oracle, and a torch kernel that returns a log-sum-exp.

Spans are half-open absolute positions. The oracle is written from the rule, cell by cell, never from the package.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from dense import Token, TokenHistory, dense_attention, visible_positions
from rollouts import Rows, forward, make_manager, random_rows

from diffusers_ardiff.attention import get_backend, paged_write_attn, registry
from diffusers_ardiff.attention.masked import attend_masked
from diffusers_ardiff.attention.merge import PartialResult
from diffusers_ardiff.cache import Branch
from diffusers_ardiff.context import PagedForwardContext

Spans = list[tuple[int, int]]

FRAME = 24
PIECES = {
    "causal": [],
    "full": [(0, 24)],
    "text then image": [(7, 24)],
    "mixed": [(2, 9), (9, 13), (17, 21)],
    "one token each": [(0, 1), (23, 24)],
}
"""Spans relative to the first token of a frame."""


def expected_masked(
    history: TokenHistory,
    rows: Sequence[torch.Tensor],
    spans: Spans,
    *,
    start: int | None = None,
    extra: Token | None = None,
) -> torch.Tensor:
    """Query, keys and values (L, H, D) of one row: a token sees what precedes the forward, all of its tokens up to
    itself, those up to the end of a span that it lies in, and every extra row."""
    query, keys, values = rows
    begin = history.committed_end if start is None else start
    new = {begin + i: (keys[i], values[i]) for i in range(len(keys))}
    positions = visible_positions(begin, len(keys), history.sink, history.window, history.origin)
    tokens = [new.get(p) or history.tokens[p] for p in positions]
    mask = torch.tensor(
        [
            [p < begin or p <= q or any(a <= q < b and p < b for a, b in spans) for p in positions]
            for q in range(begin, begin + len(query))
        ]
    )
    all_keys, all_values = (torch.stack(part) for part in zip(*tokens, strict=True))
    if extra is not None:
        all_keys, all_values = torch.cat([all_keys, extra[0]]), torch.cat([all_values, extra[1]])
        mask = torch.cat([mask, torch.ones(len(query), len(extra[0]), dtype=torch.bool)], dim=1)
    return dense_attention(query, all_keys, all_values, mask.to(query.device))


def masked_forward(
    branches: Sequence[Branch],
    rows: Rows,
    spans: object,
    *,
    start: int | None = None,
    extra: Rows | None = None,
    backend: str | None = None,
    commit: bool = True,
) -> torch.Tensor:
    """One forward through every layer of the pool with the same rows; returns the last layer's output."""
    context = PagedForwardContext(
        branches,
        num_tokens=rows.keys.shape[1],
        start=start,
        num_extra=0 if extra is None else extra.keys.shape[1],
        backend=backend,
        full_attn_spans=spans,
    )
    with context:
        for layer in range(context.storage.shape.num_layers):
            out = paged_write_attn(context.layer_inputs(layer), *rows, *(extra[1:] if extra else ()))
    if commit:
        context.mark_committed()
    return out


def row_of(rows: Rows, index: int = 0) -> list[torch.Tensor]:
    """One row's query, keys and values."""
    return [part[index] for part in rows]


def actions_of(extra: Rows | None, index: int = 0) -> Token | None:
    """One row's extra keys and values."""
    return (extra.keys[index], extra.values[index]) if extra is not None else None


def random_spans(rng: random.Random, begin: int, end: int) -> Spans:
    """Up to three spans between ``begin`` and ``end``, and sometimes one on either side of them."""
    edges = sorted(rng.sample(range(begin, end + 1), min(2 * rng.randrange(4), (end - begin + 1) // 2 * 2)))
    spans = [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True)]
    before = [(0, begin - 1)] if begin > 1 and rng.random() < 0.3 else []
    after = [(end, end + 5)] if rng.random() < 0.3 else []
    if spans and before and rng.random() < 0.5:
        # Begins in the history and ends in the forward.
        return [(begin - 1, spans[0][1]), *spans[1:], *after]
    return [*before, *spans, *after]


def torch_partial(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *, causal: bool, softmax_scale: float
) -> PartialResult:
    """A kernel as strict as they come: it reads whole tiles, so a NaN anywhere in its keys spoils the result."""
    num_queries, num_keys = query.shape[1], keys.shape[1]
    assert num_keys > 0 and not keys.float().isnan().any() and not values.float().isnan().any()
    scores = torch.einsum("blhd,bnhd->bhln", query.float(), keys.float()) * softmax_scale
    if causal:
        assert num_keys >= num_queries
        hidden = torch.ones(num_queries, num_keys).triu(num_keys - num_queries + 1).bool()
        scores = scores.masked_fill(hidden.to(scores.device), float("-inf"))
    out = torch.einsum("bhln,bnhd->blhd", scores.softmax(-1), values.float())
    return PartialResult(out.to(query.dtype), scores.logsumexp(-1))


def shifted(spans: Spans, by: int) -> Spans:
    """The same spans, ``by`` tokens later."""
    return [(start + by, end + by) for start, end in spans]


def lse_backend(kernel: Callable, name: str = "lse") -> registry.AttentionBackend:
    """A backend that reaches its kernel only through the merge."""

    def attend(query, inputs, plan, softmax_scale):
        if plan.mask is None:
            return get_backend("reference").attend(query, inputs, plan, softmax_scale)
        return attend_masked(kernel, query, inputs, plan, plan.mask, softmax_scale)

    return replace(get_backend("reference"), name=name, rank=2000, attend=attend, masks=True, lse=True)


def rows_on_device(branches: Sequence[Branch], num_tokens: int) -> Rows:
    """Queries, keys and values that fit the branches' pool, where it lies."""
    return Rows(*(part.to(branches[0].storage.device) for part in random_rows(branches, num_tokens)))


def advance(branches: Sequence[Branch], histories: Sequence[TokenHistory], chunks: int, length: int = FRAME) -> None:
    """Commit plain chunks."""
    for _ in range(chunks):
        rows = rows_on_device(branches, length)
        forward(branches, rows)
        for index, history in enumerate(histories):
            history.commit(rows.keys[index], rows.values[index])


def open_rows(num_rows: int = 1, *, frames: int = 0, **kwargs: object) -> tuple[list[Branch], list[TokenHistory]]:
    """Sessions of one branch each with as many committed frames; sink 1 frame, window 3."""
    manager = make_manager(FRAME, 3 * FRAME, max_sessions=num_rows, **kwargs)
    branches = [manager.open_session().branch() for _ in range(num_rows)]
    histories = [TokenHistory(FRAME, 3 * FRAME) for _ in branches]
    advance(branches, histories, frames)
    return branches, histories
