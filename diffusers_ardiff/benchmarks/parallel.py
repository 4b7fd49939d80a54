"""Seconds a chunk with one video on several ranks, against one rank in the same run; run on all of them by accelerate.

Each case runs on the first ranks that it needs, while the others wait. The first rank also runs alone, and compares.
"""

from __future__ import annotations

import argparse
import time
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
from .clock import Clock
from .models import TOY_VAE, build_vae
from .parallel_report import Case, ExchangeTimer, ParallelResult, RankTimes
from .peak import peak_so_far, reset_peak
from .report import window_label
from .results import Results

VARIANTS = ("eager", "compiled", "graphs")
COMPARED_CHUNKS = 5


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
        self._singles: dict[Case, tuple[RankTimes, torch.Tensor]] = {}

    def measure(self, case: Case) -> ParallelResult | None:
        """The case on its ranks; None on all but the first."""
        if case.single not in self._singles and self._rank == 0:
            self._singles[case.single] = self._time(case.single)
        self._wait_for_all()
        self.pipe.enable_parallelism(
            ulysses_degree=case.ulysses_degree,
            guidance_parallel=case.guidance_parallel,
            decode_rank=case.decode_rank,
            num_ranks=case.num_ranks,
        )
        try:
            mine = self._time(case) if self._rank < case.num_ranks else None
        finally:
            self.pipe.disable_parallelism()
        times = self._gather(mine[0] if mine is not None else None)
        if self._rank != 0 or mine is None:
            return None
        single, expected = self._singles[case.single]
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
        layout = self.pipe.parallel_layout
        decodes = case.decodes and layout.writes_frames
        call: dict[str, Any] = {"recipe": self.recipe, "guided": case.guided, "text_len": TEXT_LEN, "decode": decodes}
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        reset_peak(self.device)
        plan = self.pipe.plan_memory(**call)
        if layout.is_decoder:
            latents, (seconds, exchange) = torch.empty(0), (self._receive(), None)
        else:
            latents, (seconds, exchange) = self._denoise(case, call, decodes=decodes)
        times = RankTimes(
            chunk_seconds=seconds,
            exchange_seconds=exchange,
            pool_bytes=plan.pool_bytes,
            planned_bytes=plan.peak_bytes,
            peak_bytes=peak_so_far(self.device),
        )
        return times, latents

    def _denoise(
        self, case: Case, call: dict[str, Any], *, decodes: bool
    ) -> tuple[torch.Tensor, tuple[float, float | None]]:
        if self.variant != "eager":
            self.pipe.warmup(cuda_graphs=self.variant == "graphs", **call)
        with self._open(case, "pt" if decodes else "latent") as stream:
            latents = torch.cat([next(stream).latents for _ in range(self._num_first)], dim=2)
            steady = self._steady(stream)
        self.pipe.cooldown()
        return latents, steady

    @property
    def _num_first(self) -> int:
        """Chunks before the steady state."""
        return max(COMPARED_CHUNKS, 2 + -(-kept_frames(self.recipe) // self.recipe.chunk_frames))

    def _receive(self) -> float:
        """Seconds from chunk to chunk on the rank that decodes."""
        ends = []
        for chunk in self.pipe.receive_chunks("pt"):
            ends.append(self._now())
            assert chunk.frames is not None
        steady = ends[self._num_first - 1 : self._num_first + self.num_chunks]
        return (steady[-1] - steady[0]) / (len(steady) - 1)

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

    def _open(self, case: Case, output_type: str) -> ARStream:
        guidance: dict[str, Any] = (
            {"guidance_scale": 5.0, "negative_prompt_embeds": -self._embeds} if case.guided else {}
        )
        return self.pipe.stream(
            prompt_embeds=self._embeds,
            recipe=self.recipe,
            output_type=output_type,
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
    if options.decode:
        cases += [Case(ulysses_degree=degree, decodes=True) for degree in degrees]
        more = [Case(ulysses_degree=degree, decodes=True, decode_rank=True) for degree in [1, *degrees]]
        cases += [case for case in more if case.num_ranks <= world_size]
    return cases


def run_parallel(options: argparse.Namespace, results: Results) -> None:
    """Measure every case at every window; the first rank has the results."""
    state = PartialState(cpu=options.device == "cpu")
    check_launch(state.num_processes)
    device = state.device
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    cases = choose_cases(PRESETS[options.preset]["num_attention_heads"], state.num_processes, options)
    pipe = random_pipeline(options.preset, device, dtype)
    if options.decode:
        pipe.register_modules(vae=TOY_VAE() if options.preset.startswith("toy") else build_vae(device, dtype))
    for window in options.windows:
        recipe = chunk_recipe(window, options.height, options.width)
        benchmark = ParallelBenchmark(pipe, recipe, variant=options.variant, num_chunks=options.chunks)
        for case in cases:
            result = benchmark.measure(case)
            if result is not None:
                results.add({"model": options.preset} | result.to_dict(), f"{options.preset}, {result}")


def add_parallel_command(commands: Any) -> None:
    """Add ``parallel`` to the benchmark script's commands."""
    parser = commands.add_parser("parallel", help="one video on several ranks; started by accelerate launch")
    parser.add_argument("--preset", choices=sorted(PRESETS), default="wan-1.3b", help="random weights of this shape")
    parser.add_argument("--windows", nargs="+", default=["3+9", "0+21"], help="sink+recent latent frames")
    parser.add_argument("--degrees", nargs="+", type=int, help="Ulysses degrees (default: all that divide the heads)")
    parser.add_argument("--guided", action="store_true", help="also with guidance, here and on ranks of its own")
    parser.add_argument("--decode", action="store_true", help="also with frames, from the first rank or one more")
    parser.add_argument("--variant", choices=VARIANTS, default="eager")
    parser.add_argument("--chunks", type=int, default=6, help="timed in the steady state")
    parser.add_argument("--height", type=int, default=480)
    parser.add_argument("--width", type=int, default=832)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, help=".json, written by the first rank")
    parser.set_defaults(run=run_parallel, write_only=False, plot=None)
