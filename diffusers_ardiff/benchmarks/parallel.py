"""Seconds a chunk with one video on several ranks, against one rank in the same run; run on all of them by accelerate.

Each case runs on the first ranks that it needs, while the others wait. The first rank also runs alone, and compares.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState

from ..parallel import HeadExchange, all_processes, check_launch, legal_degrees
from ..pipelines import ARDiffusionPipeline, ARStream
from ..pipelines.window import kept_frames
from ..recipes import Recipe
from .chunk import PRESETS, TEXT_LEN, chunk_recipe, random_pipeline
from .clock import Clock, Mark
from .report import window_label

VARIANTS = ("eager", "compiled", "graphs")
COMPARED_CHUNKS = 5


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to make a video: ``ulysses_degree`` ranks a branch, its negative branch here or on ranks of its own."""

    ulysses_degree: int = 1
    guided: bool = False
    guidance_parallel: bool = False

    @property
    def num_ranks(self) -> int:
        """Ranks it needs."""
        return self.ulysses_degree * (2 if self.guidance_parallel else 1)

    def __str__(self) -> str:
        guidance = "guidance parallel" if self.guidance_parallel else "guided" if self.guided else "unguided"
        return f"{self.num_ranks} rank(s): Ulysses {self.ulysses_degree}, {guidance}"


@dataclass(frozen=True, kw_only=True)
class RankTimes:
    """What one rank measured.

    Args:
        chunk_seconds: denoising and commit in the steady state, the mean of chunks that follow each other.
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


class ParallelBenchmark:
    """Measures cases of one pipeline at one window. All ranks of the job make the same calls.

    Args:
        pipe: random weights, the same on all ranks.
        recipe: with a window.
        variant: of ``VARIANTS``.
        num_chunks: timed in the steady state.
    """

    def __init__(self, pipe: ARDiffusionPipeline, recipe: Recipe, *, variant: str, num_chunks: int) -> None:
        self.pipe, self.recipe, self.variant, self.num_chunks = pipe, recipe, variant, num_chunks
        self.device = pipe._execution_device
        self._everyone = all_processes()
        self._rank = dist.get_rank() if self._everyone is not None else 0
        size = (1, TEXT_LEN, pipe.transformer.config["text_dim"])
        embeds = torch.randn(size, generator=torch.Generator().manual_seed(1))
        self._embeds = embeds.to(self.device, pipe.transformer.dtype)
        self._singles: dict[bool, tuple[RankTimes, torch.Tensor]] = {}

    def measure(self, case: Case) -> ParallelResult | None:
        """The case on its ranks; None on all but the first."""
        if case.guided not in self._singles and self._rank == 0:
            self._singles[case.guided] = self._time(replace(case, ulysses_degree=1, guidance_parallel=False))
        self._wait_for_all()
        self.pipe.enable_parallelism(
            ulysses_degree=case.ulysses_degree, guidance_parallel=case.guidance_parallel, num_ranks=case.num_ranks
        )
        try:
            mine = self._time(case) if self._rank < case.num_ranks else None
        finally:
            self.pipe.disable_parallelism()
        times = self._gather(mine[0] if mine is not None else None)
        if self._rank != 0 or mine is None:
            return None
        single, expected = self._singles[case.guided]
        return ParallelResult(
            window=window_label(self.recipe),
            variant=self.variant,
            case=case,
            ranks=tuple(found for found in times if found is not None),
            single=single,
            relative_error=float((mine[1] - expected).norm() / expected.norm()),
        )

    def _time(self, case: Case) -> tuple[RankTimes, torch.Tensor]:
        """This rank's times, and the latents of the first chunks."""
        call: dict[str, Any] = {"recipe": self.recipe, "guided": case.guided, "text_len": TEXT_LEN, "decode": False}
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)
        plan = self.pipe.plan_memory(**call)
        if self.variant != "eager":
            self.pipe.warmup(cuda_graphs=self.variant == "graphs", **call)
        with self._open(case) as stream:
            num_first = max(COMPARED_CHUNKS, 2 + -(-kept_frames(self.recipe) // self.recipe.chunk_frames))
            latents = torch.cat([next(stream).latents for _ in range(num_first)], dim=2)
            seconds, exchange = self._steady(stream)
        self.pipe.cooldown()
        times = RankTimes(
            chunk_seconds=seconds,
            exchange_seconds=exchange,
            pool_bytes=plan.pool_bytes,
            planned_bytes=plan.peak_bytes,
            peak_bytes=torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else None,
        )
        return times, latents

    def _steady(self, stream: ARStream) -> tuple[float, float | None]:
        """Seconds a chunk, and of a further chunk the part in exchanges, scaled to it."""
        start = self._now()
        for _ in range(self.num_chunks):
            next(stream)
        seconds = (self._now() - start) / self.num_chunks
        sharding = self.pipe.token_sharding
        if self.variant != "eager" or sharding is None:
            return seconds, None
        return seconds, seconds * self._exchange_share(stream, sharding.exchange)

    def _exchange_share(self, stream: ARStream, exchange: HeadExchange) -> float:
        plain, timer = exchange.timer, ExchangeTimer(Clock(self.device))
        exchange.timer = timer
        try:
            start = self._now()
            next(stream)
            return timer.take() / (self._now() - start)
        finally:
            exchange.timer = plain

    def _open(self, case: Case) -> ARStream:
        guidance: dict[str, Any] = (
            {"guidance_scale": 5.0, "negative_prompt_embeds": -self._embeds} if case.guided else {}
        )
        return self.pipe.stream(
            prompt_embeds=self._embeds,
            recipe=self.recipe,
            output_type="latent",
            generator=torch.Generator().manual_seed(0),
            **guidance,
        )

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def _wait_for_all(self) -> None:
        if self._everyone is not None:
            dist.barrier(group=self._everyone)

    def _gather(self, mine: RankTimes | None) -> list[RankTimes | None]:
        if self._everyone is None:
            return [mine]
        found: list[RankTimes | None] = [None] * dist.get_world_size()
        dist.all_gather_object(found, mine, group=self._everyone)
        return found


def choose_cases(num_heads: int, world_size: int, options: argparse.Namespace) -> list[Case]:
    """All cases that the ranks allow, or those of the degrees asked for.

    Raises:
        ValueError: a degree that does not divide the heads, or needs more ranks than run.
    """
    legal = [degree for degree in legal_degrees(num_heads) if degree <= world_size]
    wrong = [degree for degree in options.degrees or () if degree not in legal]
    if wrong:
        raise ValueError(
            f"degrees {wrong} can't be measured with {num_heads} heads on {world_size} ranks; can: {legal}."
        )
    degrees = options.degrees or [degree for degree in legal if degree > 1]
    cases = [Case(ulysses_degree=degree) for degree in degrees]
    if options.guided:
        cases += [Case(ulysses_degree=degree, guided=True) for degree in degrees]
        apart = [Case(ulysses_degree=degree, guided=True, guidance_parallel=True) for degree in [1, *degrees]]
        cases += [case for case in apart if case.num_ranks <= world_size]
    return cases


def run_parallel(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure every case at every window; the first rank prints each as it is done and returns them."""
    state = PartialState(cpu=options.device == "cpu")
    check_launch(state.num_processes)
    device = state.device
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    cases = choose_cases(PRESETS[options.preset]["num_attention_heads"], state.num_processes, options)
    pipe = random_pipeline(options.preset, device, dtype)
    results = []
    for window in options.windows:
        recipe = chunk_recipe(window, options.height, options.width)
        benchmark = ParallelBenchmark(pipe, recipe, variant=options.variant, num_chunks=options.chunks)
        for case in cases:
            result = benchmark.measure(case)
            if result is not None:
                print(f"{options.preset}, {result}", flush=True)
                results.append({"model": options.preset} | result.to_dict())
    return results


def add_parallel_command(commands: Any) -> None:
    """Add ``parallel`` to the benchmark script's commands."""
    parser = commands.add_parser("parallel", help="one video on several ranks; started by accelerate launch")
    parser.add_argument("--preset", choices=sorted(PRESETS), default="wan-1.3b", help="random weights of this shape")
    parser.add_argument("--windows", nargs="+", default=["3+9", "0+21"], help="sink+recent latent frames")
    parser.add_argument("--degrees", nargs="+", type=int, help="Ulysses degrees (default: all that divide the heads)")
    parser.add_argument("--guided", action="store_true", help="also with guidance, here and on ranks of its own")
    parser.add_argument("--variant", choices=VARIANTS, default="eager")
    parser.add_argument("--chunks", type=int, default=6, help="timed in the steady state")
    parser.add_argument("--height", type=int, default=480)
    parser.add_argument("--width", type=int, default=832)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, help=".json, written by the first rank")
    parser.set_defaults(run=run_parallel, write_only=False, plot=None)
