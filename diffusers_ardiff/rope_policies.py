"""Where rotary positions put the sink: at its own frames for ever, or nearer to the window that has moved on.

Attention sees differences of positions only, and the window is always a row of frames without a gap. So a policy is one
number, the *offset* of the sink: how many frames its keys are moved towards the window. Queries and the window's keys
stay at their absolute frames, and are stored once.

    absolute                 sink 0 1 2 ............................ window 4990 .. 4998
    relative, offset 4987    ................................. 4987 4988 4989 | 4990 .. 4998
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

ROPE_POLICIES = ("absolute", "relative", "capped")


class RopePolicy(Protocol):
    """Decides the sink's offset for each forward."""

    def sink_offset(self, *, num_sink: int, oldest: int, end: int) -> int:
        """Frames to move the sink by.

        Args:
            num_sink: frames of the sink.
            oldest: first visible frame after the sink.
            end: frame after the forward's last one, extra rows included.
        """
        ...


@dataclass(frozen=True)
class AbsolutePolicy:
    """Every frame keeps the position it was made at (Self-Forcing, LongLive 1.0): the sink is ever farther away."""

    def sink_offset(self, *, num_sink: int, oldest: int, end: int) -> int:
        """0."""
        return 0


@dataclass(frozen=True)
class RelativePolicy:
    """The visible frames are numbered 0, 1, ... without a gap (LongLive "infinity", Infinity-RoPE, Rolling Forcing)."""

    def sink_offset(self, *, num_sink: int, oldest: int, end: int) -> int:
        """As many as are missing between the sink and the window."""
        return oldest - num_sink


@dataclass(frozen=True)
class CappedPolicy:
    """Positions stay below ``limit_frames``: the sink keeps 0, 1, ..., the window stops at the limit.

    With a limit above what is visible, the distance to the sink grows up to it and then stays (positions that a model
    was trained for); with a limit of S + W it is the relative policy.
    """

    limit_frames: int

    def sink_offset(self, *, num_sink: int, oldest: int, end: int) -> int:
        """As many as the newest frame is beyond the limit."""
        return max(0, end - self.limit_frames)


def make_policy(name: str, limit_frames: int | None = None) -> RopePolicy:
    """The policy of that name.

    Raises:
        ValueError: unknown name, or a limit where none belongs, or none where one does.
    """
    if name not in ROPE_POLICIES:
        raise ValueError(f"rope_policy = {name!r}: allowed is one of {ROPE_POLICIES}; choose from them.")
    if (limit_frames is not None) is not (name == "capped"):
        raise ValueError(
            f"rope_policy = {name!r}, rope_limit_frames = {limit_frames}: a limit goes with 'capped', and only with it; "
            "set both or neither."
        )
    if limit_frames is not None:
        return CappedPolicy(limit_frames)
    return RelativePolicy() if name == "relative" else AbsolutePolicy()
