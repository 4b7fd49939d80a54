"""Chunk time of each family's transformer over the paged cache, against recomputing the window for each chunk."""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from ..cache import KVManager, RingGeometry
from ..context import PagedForwardContext
from ..doctor import DTYPES
from ..processors import attach_paged_attention
from .clock import Clock
from .family_shapes import FAMILY_SHAPES, Chunk, FamilyShape
from .models import keep_float32, made_on
from .peak import peak_so_far, reset_peak
from .results import Results

HOST_KERNELS = [
    SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH,
]  # fmt: skip
"""Of the stock processors, fastest first on an H200; torch's own order begins with a slower one."""


@dataclass(frozen=True, kw_only=True)
class FamilyResult:
    """Medians of one family.

    Attributes:
        layers: of the cache that were built, of ``layers_in_all`` that the published model has.
        window: visible latent frames, the chunk's own included, as total (sink + recent).
        backend: of the paged side's attention; the other side takes torch's fastest, as ``sdpa`` does.
        paged_ms: all steps of a chunk and its commit, over the cache.
        recompute_ms: all steps of a chunk, each over the whole window with the stock processors; nothing to commit. One
            forward is timed, since they are all alike.
        kv_bytes: of the cache.
        build_seconds: making the weights.
        peak_bytes: on the device; None on the CPU.
    """

    family: str
    layers: int
    layers_in_all: int
    heads: int
    head_dim: int
    tokens_per_frame: int
    text_len: int
    chunk_frames: int
    window: str
    steps: int
    backend: str
    dtype: str
    paged_ms: float
    recompute_ms: float
    kv_bytes: int
    build_seconds: float
    peak_bytes: int | None

    def __str__(self) -> str:
        ratio = self.recompute_ms / self.paged_ms
        built = f"{self.layers}" + (f" of {self.layers_in_all}" if self.layers < self.layers_in_all else "")
        return (
            f"{self.family}: {built} layers of {self.heads} x {self.head_dim}, {self.tokens_per_frame} tokens a "
            f"frame, chunks of {self.chunk_frames}, window {self.window}, {self.steps} steps, {self.backend}: "
            f"{self.paged_ms:.1f} ms a chunk, recomputing the window {self.recompute_ms:.1f} ms ({ratio:.2f} x); built "
            f"in {self.build_seconds:.1f} s"
        )


class FamilyBenchmark:
    """One transformer with random weights, run chunk by chunk both ways.

    Args:
        shape: of the model.
        options: the command's; ``tiny`` shrinks the model, ``layers`` shortens it.
    """

    def __init__(self, shape: FamilyShape, options: argparse.Namespace) -> None:
        self.shape, self.options = shape, options
        self.device = torch.device(options.device)
        default = "bfloat16" if self.device.type == "cuda" else "float32"
        self.dtype = DTYPES[options.dtype or default]
        torch.manual_seed(0)
        start = time.perf_counter()
        with made_on(self.device, self.dtype):
            self.transformer = shape.build(tiny=options.tiny, layers=options.layers)
        keep_float32(self.transformer)
        self.build_seconds = time.perf_counter() - start
        self.paged = attach_paged_attention(self.transformer, backend=options.backend)
        self.paged.detach()
        if options.compile:
            for block in self.paged.family.blocks(self.transformer):
                block.compile()

    def measure(self, name: str) -> FamilyResult:
        """Both ways, one after the other, in the steady state."""
        options, geometry = self.options, self.paged.geometry
        reset_peak(self.device)
        kept = options.sink_frames + options.window_frames
        manager = self._open_cache()
        branch = manager.open_session().branch()
        with torch.no_grad(), host_kernels(self.device):
            # The last of them slides already, so all kernels are loaded.
            for _ in range(-(-kept // options.chunk_frames) + 1):
                self._paged_chunk(branch, steps=0)
            paged = self._time(lambda: self._paged_chunk(branch, steps=options.steps), warmup=0)
            with UnmaskedAttention():
                recompute = self._time(lambda: self._recompute(kept), warmup=options.warmup)
        return FamilyResult(
            family=name,
            layers=geometry.num_layers,
            layers_in_all=self._layers_in_all(),
            heads=geometry.num_heads,
            head_dim=geometry.head_dim,
            tokens_per_frame=self._tokens,
            text_len=self.shape.text_len,
            chunk_frames=options.chunk_frames,
            window=f"{kept} ({options.sink_frames}+{options.window_frames})",
            steps=options.steps,
            backend=options.backend,
            dtype=str(self.dtype).removeprefix("torch."),
            paged_ms=paged,
            recompute_ms=recompute * options.steps,
            kv_bytes=sum(t.numel() * t.element_size() for pool in self._pools(manager) for t in pool),
            build_seconds=self.build_seconds,
            peak_bytes=peak_so_far(self.device),
        )

    def _layers_in_all(self) -> int:
        if self.options.layers is None:
            return self.paged.geometry.num_layers
        with made_on(torch.device("meta"), self.dtype):
            whole = self.shape.build(tiny=self.options.tiny)
        return self.paged.family.geometry(whole).num_layers

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
        with self.paged:
            for _ in range(steps + 1):
                context = PagedForwardContext([branch], num_tokens=frames * self._tokens, num_extra=self._extra_rows)
                with context, self.paged.bind(context, rotary):
                    self.transformer(**arguments, return_dict=False)
        context.mark_committed()

    def _recompute(self, frames: int) -> None:
        self.transformer(**self._arguments(0, frames), return_dict=False)

    def _arguments(self, first: int, frames: int) -> Any:
        config = self.transformer.config
        channels = config.get("in_channels") or config["in_visual_dim"]
        generator = torch.Generator(self.device).manual_seed(1)

        def place(*size: int) -> torch.Tensor:
            return torch.randn(size, generator=generator, device=self.device, dtype=self.dtype)

        frames *= self.paged.geometry.patch_size[0]
        latents = place(1, channels, frames, *self.shape.size(tiny=self.options.tiny))
        return self.shape.inputs(self.transformer, Chunk(latents, first, self.shape.text_len, place))

    def _time(self, call: Callable[[], object], *, warmup: int) -> float:
        clock, times = Clock(self.device), []
        for index in range(warmup + self.options.repeats):
            start = clock.mark()
            call()
            end = clock.mark()
            clock.wait(end)
            if index >= warmup:
                times.append(clock.seconds(start, end) * 1e3)
        return statistics.median(times)


class UnmaskedAttention(TorchFunctionMode):
    """Attention under a bool mask runs without it.

    The prompts here are without padding, so such a mask of a joint family is true everywhere; it would keep the stock
    processors from the kernel that the paged side runs.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Every call of torch inside."""
        kwargs = kwargs or {}
        if func is torch.nn.functional.scaled_dot_product_attention:
            mask = kwargs.get("attn_mask")
            if mask is not None and mask.dtype == torch.bool:
                kwargs = {**kwargs, "attn_mask": None}
        return func(*args, **kwargs)


@contextmanager
def host_kernels(device: torch.device) -> Iterator[None]:
    """The stock processors take the fastest of torch's kernels."""
    if device.type != "cuda":
        yield
        return
    with sdpa_kernel(HOST_KERNELS, set_priority=True):
        yield


def run_family(options: argparse.Namespace, results: Results) -> None:
    """Measure every family asked for; one that fails or takes too long leaves the others their turn."""
    for name in options.families:
        results.attempt(name, partial(_measure_family, name, options, results), limit=options.limit)
        gc.collect()
        if options.device.startswith("cuda"):
            torch.cuda.empty_cache()


def _measure_family(name: str, options: argparse.Namespace, results: Results) -> None:
    result = FamilyBenchmark(FAMILY_SHAPES[name], options).measure(name)
    results.add(asdict(result), str(result))


def add_family_command(commands: Any) -> None:
    """Add ``family`` to the benchmark script's commands."""
    family = commands.add_parser("family", help="seconds a chunk of each family, against recomputing the window")
    family.add_argument("--families", nargs="+", choices=list(FAMILY_SHAPES), default=list(FAMILY_SHAPES))
    family.add_argument("--layers", type=int, help="build only so many blocks; default: those of the published model")
    family.add_argument("--limit", type=float, default=60, help="seconds for a family (default: %(default)s)")
    family.add_argument("--chunk-frames", type=int, default=3)
    family.add_argument("--sink-frames", type=int, default=3)
    family.add_argument("--window-frames", type=int, default=9, help="the chunk's own included, the sink not")
    family.add_argument("--steps", type=int, default=4, help="denoise forwards of a chunk")
    family.add_argument(
        "--backend", default="sdpa", help="attention of the paged side; sdpa is the other side's kernel"
    )
    family.add_argument("--dtype", choices=sorted(DTYPES), help="default: bfloat16 on a GPU, float32 on a CPU")
    family.add_argument("--compile", action="store_true", help="compile the blocks, on both sides")
    family.add_argument("--tiny", action="store_true", help="two layers of 32 channels, for a CPU")
    family.add_argument("--warmup", type=int, default=1, help="forwards over the whole window that are not timed")
    family.add_argument("--repeats", type=int, default=3, help="chunks, and forwards over the whole window")
    family.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    family.add_argument("--output", type=Path, help=".json")
    family.set_defaults(run=run_family, write_only=False, plot=None)
