"""One video on several ranks: the ways to make it, and what was measured of each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

from .clock import Clock, Mark


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to make a video: ``ulysses_degree`` ranks a branch, its negative branch here or on ranks of its own; with
    frames or not, from the first rank or from one more."""

    ulysses_degree: int = 1
    guided: bool = False
    guidance_parallel: bool = False
    decodes: bool = False
    decode_rank: bool = False

    @property
    def num_ranks(self) -> int:
        """Ranks it needs."""
        return self.ulysses_degree * (2 if self.guidance_parallel else 1) + self.decode_rank

    @property
    def single(self) -> Case:
        """The same on one rank."""
        return replace(self, ulysses_degree=1, guidance_parallel=False, decode_rank=False)

    def __str__(self) -> str:
        guidance = "guidance parallel" if self.guidance_parallel else "guided" if self.guided else "unguided"
        frames = ", decoded on one more" if self.decode_rank else ", decoded" if self.decodes else ""
        return f"{self.num_ranks} rank(s): Ulysses {self.ulysses_degree}, {guidance}{frames}"


@dataclass(frozen=True, kw_only=True)
class RankTimes:
    """What one rank measured.

    Args:
        chunk_seconds: from chunk to chunk in the steady state, commit and decoding included: the mean.
        exchange_seconds: of them inside exchanges between ranks, waiting for the others included; None: not eager.
        pool_bytes: K/V pages held.
        planned_bytes: pages, text K/V, latents and working memory of the plan.
        peak_bytes: most bytes on the device, weights included; None on the CPU.
    """

    chunk_seconds: float
    exchange_seconds: float | None
    pool_bytes: int
    planned_bytes: int
    peak_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class ParallelResult:
    """One case at one window, beside one rank alone (``single``); ``relative_error`` is of the latents, from that one's."""

    window: str
    variant: str
    case: Case
    ranks: tuple[RankTimes, ...]
    single: RankTimes
    relative_error: float

    @property
    def chunk_seconds(self) -> float:
        """Of the slowest rank."""
        return max(rank.chunk_seconds for rank in self.ranks)

    @property
    def speedup(self) -> float:
        """Against one rank."""
        return self.single.chunk_seconds / self.chunk_seconds

    @property
    def communication_share(self) -> float | None:
        """Part of a chunk's time that the fastest to wait spent in exchanges; None where it was not measured."""
        shares = [r.exchange_seconds / r.chunk_seconds for r in self.ranks if r.exchange_seconds is not None]
        return min(shares) if shares else None

    @property
    def pool_share(self) -> float:
        """K/V bytes of a rank over those of one rank alone."""
        return max(rank.pool_bytes for rank in self.ranks) / self.single.pool_bytes

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        shares = {"chunk_seconds": self.chunk_seconds, "speedup": self.speedup, "pool_share": self.pool_share}
        return asdict(self) | shares | {"communication_share": self.communication_share}

    def __str__(self) -> str:
        share = "" if self.communication_share is None else f", {self.communication_share:.1%} in exchanges"
        peaks = [rank.peak_bytes for rank in self.ranks if rank.peak_bytes is not None]
        peak = f", peak {max(peaks) / 2**30:.2f} GiB ({(self.single.peak_bytes or 0) / 2**30:.2f})" if peaks else ""
        return (
            f"window {self.window:<10} {self.variant}, {self.case}: {self.chunk_seconds:.4f} s a chunk, one rank "
            f"{self.single.chunk_seconds:.4f}: {self.speedup:.2f} x{share}; K/V a rank "
            f"{self.ranks[0].pool_bytes / 2**30:.3f} GiB ({self.pool_share:.3f} x){peak}; latents "
            f"{self.relative_error:.2e} from one rank's"
        )


class ExchangeTimer:
    """Adds up the time of a rank's exchanges."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._marks: list[tuple[Mark, Mark]] = []

    @contextmanager
    def __call__(self) -> Iterator[None]:
        start = self._clock.mark()
        yield
        self._marks.append((start, self._clock.mark()))

    def take(self) -> float:
        """Seconds since the last call; all marks are reached."""
        marks, self._marks = self._marks, []
        return sum(self._clock.seconds(start, end) for start, end in marks)
