"""Oracles for the paged cache, written from its rules and never from its code.

Letters as in the package: S sink, W window, H committed end, O origin, P start, L rows, A extra rows, all in tokens.
Tensors: queries (L, heads, head_dim), keys and values (N, heads, head_dim).
"""

from dataclasses import dataclass, field

import torch

Token = tuple[torch.Tensor, torch.Tensor]


def dense_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Float32 softmax over an explicit list of keys; ``mask`` (L, N) is true where a key is visible."""
    query, keys, values = query.float(), keys.float(), values.float()
    scores = torch.einsum("qhd,khd->hqk", query, keys) / query.shape[-1] ** 0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)


def visible_positions(start: int, length: int, sink: int, window: int, origin: int | None = None) -> list[int]:
    """What a forward of ``length`` tokens at ``start`` sees: the first S tokens and the last W after them.

    Nothing between the sink and ``origin`` is left after a flush.
    """
    end = start + length
    oldest = max(end - window, sink if origin is None else origin)
    return [p for p in range(end) if p < sink or p >= oldest]


@dataclass
class TokenHistory:
    """One branch as an explicit list of (position, key, value)."""

    sink: int
    window: int
    tokens: dict[int, Token] = field(default_factory=dict)
    committed_end: int = 0
    origin: int = -1

    def __post_init__(self) -> None:
        if self.origin < 0:
            self.origin = self.sink

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        start: int | None = None,
        extra: Token | None = None,
    ) -> torch.Tensor:
        """A forward whose rows are ``keys``, ``values`` at ``start``; remembers nothing."""
        begin = self.committed_end if start is None else start
        new = {begin + i: (keys[i], values[i]) for i in range(len(keys))}
        seen = [
            new.get(p) or self.tokens[p]
            for p in visible_positions(begin, len(keys), self.sink, self.window, self.origin)
        ]
        all_keys = torch.stack([key for key, _ in seen])
        all_values = torch.stack([value for _, value in seen])
        if extra is not None:
            all_keys, all_values = torch.cat([all_keys, extra[0]]), torch.cat([all_values, extra[1]])
        return dense_attention(query, all_keys, all_values)

    def commit(self, keys: torch.Tensor, values: torch.Tensor, *, start: int | None = None) -> None:
        """Keep these rows for good."""
        begin = self.committed_end if start is None else start
        self.tokens.update({begin + i: (keys[i].clone(), values[i].clone()) for i in range(len(keys))})
        self.committed_end = begin + len(keys)

    def flush(self, keep: int) -> None:
        """Forget all but the sink and the last ``keep`` tokens."""
        self.origin = max(self.origin, self.committed_end - min(keep, self.window))

    def reset(self) -> None:
        """Forget everything."""
        self.tokens.clear()
        self.committed_end, self.origin = 0, self.sink


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference over the largest expected value; NaN compares as infinite."""
    difference = (actual.double() - expected.double()).abs().max() / expected.double().abs().max()
    return float(difference.nan_to_num(float("inf")))
