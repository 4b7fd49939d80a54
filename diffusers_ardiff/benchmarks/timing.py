"""Times of calls on one device, taken in turns so that clocks and heat weigh on all alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

Variant = Callable[[int], object]
"""One call; its argument counts the repeats and picks the inputs."""

BACKLOG_SIZE = 8192
BACKLOG_CALLS = 16


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Milliseconds a call: median, 10th and 90th percentile."""

    median_ms: float
    p10_ms: float
    p90_ms: float

    @classmethod
    def of(cls, samples: list[float]) -> Timing:
        """From single times in milliseconds."""
        if len(samples) == 1:
            return cls(median_ms=samples[0], p10_ms=samples[0], p90_ms=samples[0])
        deciles = statistics.quantiles(samples, n=10, method="inclusive")
        return cls(median_ms=statistics.median(samples), p10_ms=deciles[0], p90_ms=deciles[-1])


def time_interleaved(
    variants: Mapping[str, Variant], *, device: torch.device, warmup: int, repeats: int
) -> dict[str, Timing]:
    """Run every variant ``warmup`` + ``repeats`` times, one after the other in each round.

    On CUDA these are device times between events, with enough work queued ahead that no launch is waited for.
    """
    for index in range(warmup):
        for call in variants.values():
            call(index)
    samples = _time_on_cuda if device.type == "cuda" else _time_on_host
    return {name: Timing.of(times) for name, times in samples(variants, device, repeats).items()}


def _time_on_host(variants: Mapping[str, Variant], device: torch.device, repeats: int) -> dict[str, list[float]]:
    samples: dict[str, list[float]] = {name: [] for name in variants}
    for index in range(repeats):
        for name, call in variants.items():
            start = time.perf_counter()
            call(index)
            samples[name].append((time.perf_counter() - start) * 1e3)
    return samples


def _time_on_cuda(variants: Mapping[str, Variant], device: torch.device, repeats: int) -> dict[str, list[float]]:
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in variants}
    backlog = torch.zeros(BACKLOG_SIZE, BACKLOG_SIZE, dtype=torch.bfloat16, device=device)
    scratch = torch.empty_like(backlog)
    torch.cuda.synchronize(device)
    for _ in range(BACKLOG_CALLS):
        torch.mm(backlog, backlog, out=scratch)
    for index in range(repeats):
        for name, call in variants.items():
            pair = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            pair[0].record()
            call(index)
            pair[1].record()
            events[name].append(pair)
    torch.cuda.synchronize(device)
    return {name: [start.elapsed_time(end) for start, end in pairs] for name, pairs in events.items()}
