"""Rotary angles of a forward's rows, whichever frame each of them stands at; computed once a chunk."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch

from ..cache import Branch
from ..context import PagedForwardContext
from ..rope import Rotary, VideoRope
from ..rope_policies import RopePolicy
from ..transfer import upload


class FrameAngles:
    """Angles of whole latent frames, and the sink where the recipe's policy wants it.

    Args:
        rope: computes them.
        grid: height and width of a frame, in patches.
        policy: decides the sink's offset.
        device: of the result.
    """

    def __init__(self, rope: VideoRope, grid: tuple[int, int], policy: RopePolicy, device: torch.device) -> None:
        self._rope, self._grid, self._policy, self._device = rope, grid, policy, device
        self._known: dict[tuple[tuple[int, int], ...], Rotary] = {}

    @property
    def _tokens(self) -> int:
        return self._grid[0] * self._grid[1]

    def prepare(self, forward: PagedForwardContext) -> Rotary:
        """Turn the sinks of all branches of a forward that is about to begin; the angles of its tokens."""
        self.turn_sinks(forward, forward.branches)
        return self.of(forward)

    def of(self, forward: PagedForwardContext) -> Rotary:
        """(cos, sin) of the tokens of a forward, each (rows, tokens, 1, head_dim); extra rows are the frames that follow."""
        return self.at(forward.starts, forward.num_tokens + forward.num_extra)

    def at(self, starts: Sequence[int], num_tokens: int) -> Rotary:
        """As ``of``, for rows that begin at these positions. The last two are kept: a merged forward has two."""
        spans = tuple((start // self._tokens, num_tokens // self._tokens) for start in starts)
        if spans not in self._known:
            for oldest in list(self._known)[:-1]:
                del self._known[oldest]
            self._known[spans] = self._compute(spans)
        return self._known[spans]

    def _compute(self, spans: Sequence[tuple[int, int]]) -> Rotary:
        """A row each, also where all are alike: shapes must not say whether they are."""
        distinct = list(dict.fromkeys(spans))
        positions = [list(range(start, start + count)) for start, count in distinct]
        cos, sin = self._rope(positions, *self._grid, device=self._device)
        if len(distinct) == len(spans):
            return cos, sin
        rows = upload(torch.tensor([distinct.index(span) for span in spans]), self._device)
        return cos[rows], sin[rows]

    def turn_sinks(self, forward: PagedForwardContext, branches: Sequence[Branch]) -> None:
        """Turn the sinks of these branches of a forward; once a chunk at most, since its forwards agree on it."""
        for branch, span in zip(forward.branches, forward.spans, strict=True):
            if not any(branch is mine for mine in branches):
                continue
            geometry = branch.ring.geometry
            offset = self._policy.sink_offset(
                num_sink=geometry.sink_tokens // self._tokens,
                oldest=span.oldest(geometry, forward.max_past_tokens) // self._tokens,
                end=(span.end + span.num_extra) // self._tokens,
            )
            if offset != branch.sink.offset:
                branch.turn_sink(offset, self._rope.turn(offset, self._device) if offset else None)

    def copy(self) -> FrameAngles:
        """With the same angles kept, and cleared by itself."""
        copied = copy.copy(self)
        copied._known = dict(self._known)
        return copied

    def clear(self) -> None:
        """Let go of the angles kept."""
        self._known.clear()
