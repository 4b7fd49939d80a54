"""Ulysses: from a share of the tokens with all heads to all tokens with a share of the heads, and back.

Only the new chunk travels, in one exchange each way: q, k and v together there, the attention's output back. What the
window holds stays where it was written. The collective is one opaque op, so compiled blocks contain it whole.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from ..merged import MergedLayerInputs

_groups: dict[str, dist.ProcessGroup] = {}
_numbers = itertools.count()


# Looks its group up by name, so what replays kernels must not record it by itself; whole forwards may be captured.
@torch.library.custom_op("diffusers_ardiff::all_to_all_rows", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def all_to_all_rows(rows: torch.Tensor, group: str) -> torch.Tensor:
    """Send ``rows[i]`` to rank i of the group, receive its rows as ``out[i]``; (ranks, ...) contiguous."""
    out = torch.empty_like(rows, memory_format=torch.contiguous_format)
    dist.all_to_all_single(out, rows.contiguous(), group=_groups[group])
    return out


@all_to_all_rows.register_fake
def _all_to_all_rows_fake(rows: torch.Tensor, group: str) -> torch.Tensor:
    return torch.empty_like(rows, memory_format=torch.contiguous_format)


class HeadExchange:
    """Deals a layer's heads out to the ranks of a group, for the length of one attention call.

    Args:
        group: ranks that share the heads.
        shard: this one's number in it.

    Attributes:
        timer: entered around each exchange, for measurements; in eager forwards only.
    """

    def __init__(self, group: dist.ProcessGroup, shard: int) -> None:
        self.degree = dist.get_world_size(group)
        self.shard = shard
        self.timer: Callable[[], AbstractContextManager[Any]] = nullcontext
        self.group = group
        self._name = f"heads-{next(_numbers)}"
        _groups[self._name] = group

    def close(self) -> None:
        """Forget the group."""
        _groups.pop(self._name, None)

    def share_of(self, num_tokens: int) -> int:
        """Tokens a rank has of a chunk; the last ranks' are padded where they don't divide."""
        return -(-num_tokens // self.degree)

    def attend(
        self, attention: Callable[..., torch.Tensor], inputs: Any, qkv: tuple[torch.Tensor, ...]
    ) -> torch.Tensor:
        """Attention over all tokens of the chunk and the history, with this rank's heads.

        Args:
            attention: called with ``inputs``, then query, key and value (rows, L, heads / degree, head_dim).
            inputs: of this layer, for L tokens, or for the two halves of a merged forward; the pools hold heads / degree
                heads.
            qkv: query, key and value of this rank's share, (rows, share, heads, head_dim) each.

        Returns: (rows, share, heads, head_dim); rows that only pad are zeros.
        """
        paged = inputs.committed if isinstance(inputs, MergedLayerInputs) else inputs
        return self.to_tokens(attention(inputs, *self.to_heads(qkv, paged.slot_mapping.shape[1])))

    def to_heads(self, qkv: tuple[torch.Tensor, ...], num_tokens: int) -> tuple[torch.Tensor, ...]:
        """Shares of tokens with all heads -> all tokens with a share of the heads, one exchange for all tensors."""
        # (ranks, rows, share, heads a rank, head_dim) of each: what goes to one rank lies together, copied once.
        parts = [part.unflatten(2, (self.degree, -1)).permute(2, 0, 1, 3, 4) for part in qkv]
        received = self._exchange(torch.stack(parts, dim=3))
        return received.transpose(0, 1).flatten(1, 2)[:, :num_tokens].unbind(2)

    def to_tokens(self, out: torch.Tensor) -> torch.Tensor:
        """All tokens with a share of the heads -> this rank's share of the tokens with all heads."""
        share = self.share_of(out.shape[1])
        missing = share * self.degree - out.shape[1]
        if missing:
            out = torch.cat([out, out.new_zeros((out.shape[0], missing, *out.shape[2:]))], dim=1)
        received = self._exchange(out.unflatten(1, (self.degree, share)).transpose(0, 1).contiguous())
        return received.permute(1, 2, 0, 3, 4).flatten(2, 3)

    def _exchange(self, rows: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return all_to_all_rows(rows, self._name)
        with self.timer():
            return all_to_all_rows(rows, self._name)
