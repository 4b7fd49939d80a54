"""Chunk time of each family's transformer over the paged cache, against recomputing the window for each chunk."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..cache import KVManager, RingGeometry
from ..context import PagedForwardContext
from ..processors import attach_paged_attention
from .clock import Clock
from .family_shapes import FAMILY_SHAPES, Chunk, FamilyShape
from .models import keep_float32, made_on

HOST_KERNELS = [
    SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH,
]  # fmt: skip
"""Of the stock processors, fastest first on an H200; torch's own order begins with a slower one."""


@dataclass(frozen=True, kw_only=True)
class FamilyResult:
    """Medians of one family.

    Attributes:
        window: visible latent frames, the chunk's own included, as total (sink + recent).
        paged_ms: all steps of a chunk and its commit, over the cache.
        recompute_ms: all steps of a chunk, each over the whole window with the stock processors; nothing to commit.
        kv_bytes: of the cache.
        peak_bytes: on the device; None on the CPU.
    """

    family: str
    layers: int
    heads: int
    head_dim: int
    tokens_per_frame: int
    chunk_frames: int
    window: str
    steps: int
    paged_ms: float
    recompute_ms: float
    kv_bytes: int
    peak_bytes: int | None

    def __str__(self) -> str:
        ratio = self.recompute_ms / self.paged_ms
        return (
            f"{self.family}: {self.layers} layers of {self.heads} x {self.head_dim}, {self.tokens_per_frame} tokens a "
            f"frame, chunks of {self.chunk_frames}, window {self.window}, {self.steps} steps: {self.paged_ms:.1f} ms a "
            f"chunk, recomputing the window {self.recompute_ms:.1f} ms ({ratio:.2f} x)"
        )


class FamilyBenchmark:
    """One transformer with random weights, run chunk by chunk both ways.

    Args:
        shape: of the model.
        options: the command's; ``tiny`` shrinks the model.
    """

    def __init__(self, shape: FamilyShape, options: argparse.Namespace) -> None:
        self.shape, self.options = shape, options
        self.device = torch.device(options.device)
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        torch.manual_seed(0)
        with made_on(self.device, self.dtype):
            self.transformer = shape.build(tiny=options.tiny)
        keep_float32(self.transformer)
        self.paged = attach_paged_attention(self.transformer, backend=options.backend)
        self.paged.detach()
        if options.compile:
            for block in self.paged.family.blocks(self.transformer):
                block.compile()

    def measure(self, name: str) -> FamilyResult:
        """Both ways in turn, in the steady state."""
        options, geometry = self.options, self.paged.geometry
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        kept = options.sink_frames + options.window_frames
        manager = self._open_cache()
        branch = manager.open_session().branch()
        with torch.no_grad(), host_kernels(self.device):
            for _ in range(-(-kept // options.chunk_frames) + 1):
                self._paged_chunk(branch, steps=0)
            paged = self._time(lambda: self._paged_chunk(branch, steps=options.steps))
            recompute = self._time(lambda: self._recompute(kept))
        return FamilyResult(
            family=name,
            layers=geometry.num_layers,
            heads=geometry.num_heads,
            head_dim=geometry.head_dim,
            tokens_per_frame=self._tokens,
            chunk_frames=options.chunk_frames,
            window=f"{kept} ({options.sink_frames}+{options.window_frames})",
            steps=options.steps,
            paged_ms=paged,
            recompute_ms=recompute,
            kv_bytes=sum(t.numel() * t.element_size() for pool in self._pools(manager) for t in pool),
            peak_bytes=torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else None,
        )

    @property
    def _tokens(self) -> int:
        return self.paged.geometry.tokens_per_frame(*self.shape.size(tiny=self.options.tiny))

    @property
    def _extra_rows(self) -> int:
        return self._tokens if self.shape.reference else self.shape.text_rows

    @staticmethod
    def _pools(manager: KVManager) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        return list(manager.storage.key_pools), list(manager.storage.value_pools)

    def _open_cache(self) -> KVManager:
        options = self.options
        geometry = RingGeometry(
            sink_tokens=options.sink_frames * self._tokens,
            window_tokens=options.window_frames * self._tokens,
            page_size=16,
            max_extra_tokens=self._extra_rows,
        )
        shape = self.paged.geometry.kv_shape(self.dtype)
        return KVManager(geometry, shape, dtype=self.dtype, device=self.device)

    def _paged_chunk(self, branch: Any, *, steps: int) -> None:
        frames = self.options.chunk_frames
        first = branch.committed_tokens // self._tokens
        latent_size = self.shape.size(tiny=self.options.tiny)
        _, *patch = self.paged.geometry.patch_size
        grid = (latent_size[0] // patch[0], latent_size[1] // patch[1])
        rotary = self.paged.make_rope(**self.shape.rope)([list(range(first, first + frames))], *grid, self.device)
        arguments = self._arguments(first, frames)
        for _ in range(steps + 1):
            context = PagedForwardContext([branch], num_tokens=frames * self._tokens, num_extra=self._extra_rows)
            with self.paged, context, self.paged.bind(context, rotary):
                self.transformer(**arguments, return_dict=False)
        context.mark_committed()

    def _recompute(self, frames: int) -> None:
        arguments = self._arguments(0, frames)
        for _ in range(self.options.steps):
            self.transformer(**arguments, return_dict=False)

    def _arguments(self, first: int, frames: int) -> Any:
        config = self.transformer.config
        channels = config.get("in_channels") or config["in_visual_dim"]
        generator = torch.Generator(self.device).manual_seed(1)

        def place(*size: int) -> torch.Tensor:
            return torch.randn(size, generator=generator, device=self.device, dtype=self.dtype)

        frames *= self.paged.geometry.patch_size[0]
        latents = place(1, channels, frames, *self.shape.size(tiny=self.options.tiny))
        return self.shape.inputs(self.transformer, Chunk(latents, first, self.shape.text_len, place))

    def _time(self, call: Callable[[], object]) -> float:
        clock, times = Clock(self.device), []
        for index in range(self.options.warmup + self.options.repeats):
            start = clock.mark()
            call()
            end = clock.mark()
            clock.wait(end)
            if index >= self.options.warmup:
                times.append(clock.seconds(start, end) * 1e3)
        return statistics.median(times)


@contextmanager
def host_kernels(device: torch.device) -> Iterator[None]:
    """The stock processors take the fastest of torch's kernels."""
    if device.type != "cuda":
        yield
        return
    with sdpa_kernel(HOST_KERNELS, set_priority=True):
        yield


def run_family(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure every family asked for; prints each as it is done."""
    results = []
    for name in options.families:
        benchmark = FamilyBenchmark(FAMILY_SHAPES[name], options)
        result = benchmark.measure(name)
        print(result, flush=True)
        results.append(asdict(result))
        del benchmark
        if options.device.startswith("cuda"):
            torch.cuda.empty_cache()
    return results


def add_family_command(commands: Any) -> None:
    """Add ``family`` to the benchmark script's commands."""
    family = commands.add_parser("family", help="seconds a chunk of each family, against recomputing the window")
    family.add_argument("--families", nargs="+", choices=list(FAMILY_SHAPES), default=list(FAMILY_SHAPES))
    family.add_argument("--chunk-frames", type=int, default=3)
    family.add_argument("--sink-frames", type=int, default=3)
    family.add_argument("--window-frames", type=int, default=9, help="the chunk's own included, the sink not")
    family.add_argument("--steps", type=int, default=4, help="denoise forwards of a chunk")
    family.add_argument("--backend", help="attention backend of the paged side; default: by capability and rank")
    family.add_argument("--compile", action="store_true", help="compile the blocks, on both sides")
    family.add_argument("--tiny", action="store_true", help="two layers of 32 channels, for a CPU")
    family.add_argument("--warmup", type=int, default=2)
    family.add_argument("--repeats", type=int, default=5)
    family.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    family.add_argument("--output", type=Path, help=".json")
    family.set_defaults(run=run_family, write_only=False, plot=None)
