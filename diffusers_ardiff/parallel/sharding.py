"""A chunk's tokens dealt out to the ranks of a group: cut after the patch embedding, joined after the output projection.

Between the two, everything but self-attention works on tokens one by one, cross-attention to text included, so it runs
on this rank's share alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from ..rope import Rotary
from .exchange import HeadExchange

_PARTS = ("patch_embedding", "condition_embedder", "proj_out")


class TokenSharding:
    """Cuts and joins the tokens of one transformer's forwards.

    Args:
        exchange: of the heads among the same ranks.
        host_cuts: the transformer cuts and joins by itself (diffusers' context parallel hooks); the tokens of a chunk
            must then divide.
    """

    def __init__(self, exchange: HeadExchange, *, host_cuts: bool = False) -> None:
        self.exchange = exchange
        self.host_cuts = host_cuts
        self._num_tokens = 0

    def shard(self, tokens: torch.Tensor) -> torch.Tensor:
        """This rank's share of dimension 1, padded with zeros where the tokens don't divide."""
        share = self.exchange.share_of(tokens.shape[1])
        part = tokens[:, self.exchange.shard * share : (self.exchange.shard + 1) * share]
        missing = share - part.shape[1]
        if missing:
            part = torch.cat([part, part.new_zeros((part.shape[0], missing, *part.shape[2:]))], dim=1)
        return part

    def cut_rotary(self, transformer: Any, rotary: Rotary) -> Rotary:
        """The angles of this rank's share; refuses, before any write, a forward that can't be cut.

        Args:
            transformer: the host model.
            rotary: (cos, sin) of all tokens of the chunk.

        Raises:
            TypeError: it lacks a part that the cut needs.
            ValueError: diffusers' own hooks cut the tokens, and these don't divide.
        """
        missing = [name for name in _PARTS if not hasattr(transformer, name)]
        if missing:
            raise TypeError(f"{type(transformer).__name__} has no {missing}, where tokens are cut and joined.")
        num_tokens = rotary[0].shape[1]
        if self.host_cuts and num_tokens % self.exchange.degree:
            raise ValueError(
                f"diffusers' context parallel hooks cut a chunk into equal shares, but {num_tokens} tokens don't divide "
                f"by {self.exchange.degree}. Use pipe.enable_parallelism(ulysses_degree={self.exchange.degree}), which "
                "pads, in place of transformer.enable_parallelism()."
            )
        return self.shard(rotary[0]), self.shard(rotary[1])

    @contextmanager
    def cut(self, transformer: Any) -> Iterator[None]:
        """Let a forward in this block run on this rank's share; the host model is left as found."""
        if self.host_cuts:
            yield
            return
        handles = [
            transformer.patch_embedding.register_forward_hook(self._cut_tokens),
            transformer.condition_embedder.register_forward_hook(self._cut_timesteps),
            transformer.proj_out.register_forward_hook(self._join_tokens),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _cut_tokens(self, _module: Any, _args: Any, out: torch.Tensor) -> torch.Tensor:
        """(rows, dim, frames, height, width) -> (rows, dim, 1, 1, share): hosts flatten the last three anyway."""
        tokens = out.flatten(2).transpose(1, 2)
        self._num_tokens = tokens.shape[1]
        return self.shard(tokens).transpose(1, 2)[:, :, None, None]

    def _cut_timesteps(self, _module: Any, _args: Any, out: Any) -> Any:
        """Embeddings of the timestep of each token, (rows, tokens, dim), to this rank's; (rows, dim) of all stay."""
        timestep, modulation, *text = out
        if timestep.ndim < 3:
            return out
        return (self.shard(timestep), self.shard(modulation), *text)

    def _join_tokens(self, _module: Any, _args: Any, out: torch.Tensor) -> torch.Tensor:
        """(rows, share, channels) of every rank -> (rows, tokens, channels) on each."""
        parts = out.new_empty((self.exchange.degree, *out.shape))
        with self.exchange.timer():
            dist.all_gather(list(parts), out.contiguous(), group=self.exchange.group)
        return parts.transpose(0, 1).flatten(1, 2)[:, : self._num_tokens]
