"""Seconds a chunk at the shapes of a real model (random weights): eager, compiled, replayed, merged, float8."""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, WanTransformer3DModel

from ..fp8 import quantize_linears
from ..gelu import fuse_gelu, unfuse_gelu
from ..pipelines import ARDiffusionPipeline, ARStream, CacheOptions
from ..pipelines.window import kept_frames
from ..recipes import Recipe, load_recipe
from .peak import peak_so_far, reset_peak
from .results import Results

WAN = {"in_channels": 16, "out_channels": 16, "text_dim": 4096, "freq_dim": 256, "attention_head_dim": 128}
PRESETS: dict[str, dict[str, int]] = {
    "wan-1.3b": {**WAN, "num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30},
    "wan-14b": {**WAN, "num_attention_heads": 40, "ffn_dim": 13824, "num_layers": 40},
    "toy-12": {
        **WAN,
        "text_dim": 32,
        "attention_head_dim": 16,
        "num_attention_heads": 12,
        "ffn_dim": 64,
        "num_layers": 2,
    },
    "toy": {**WAN, "text_dim": 32, "attention_head_dim": 16, "num_attention_heads": 2, "ffn_dim": 64, "num_layers": 2},
}
TEXT_LEN = 512
VARIANTS = ("eager", "compiled", "graphs", "merged", "fp8")
"""Each but the first after a warm-up: blocks compiled; and forwards replayed; and commits merged; and float8 linears."""


@dataclass(frozen=True, kw_only=True)
class ChunkResult:
    """One variant at one window.

    Args:
        window: S + W in latent frames, "12 (3+9)".
        chunk_seconds: steps and commit in the steady state, chunks following each other without a pause; the mean.
        latency_seconds: from the call for a chunk to its latents, its predecessor's commit done before; the median.
        first_chunk_seconds: from opening a stream to its first chunk's latents, text K/V included.
        second_chunk_seconds: of the next one, the first one's commit included.
        warmup: what the warm-up reported; None without one.
        peak_bytes: largest allocation on the device.
        relative_error: of the latents of the first chunks, from those of the eager variant; None for that itself.
    """

    variant: str
    window: str
    chunk_seconds: float
    latency_seconds: float
    first_chunk_seconds: float
    second_chunk_seconds: float
    warmup: dict[str, Any] | None
    peak_bytes: int | None
    relative_error: float | None

    def __str__(self) -> str:
        error = "" if self.relative_error is None else f", latents {self.relative_error:.2e} from eager"
        warm = "" if self.warmup is None else f", warm-up {self.warmup['total_seconds']:.1f} s"
        peak = "" if self.peak_bytes is None else f", peak {self.peak_bytes / 2**30:.2f} GiB"
        return (
            f"window {self.window:<10} {self.variant:<9} {self.chunk_seconds:.4f} s a chunk, latency "
            f"{self.latency_seconds:.4f} ({self.latency_seconds / self.chunk_seconds:.2f} x), first "
            f"{self.first_chunk_seconds:.4f}, second {self.second_chunk_seconds:.4f}{warm}{peak}{error}"
        )


def random_pipeline(preset: str, device: torch.device, dtype: torch.dtype) -> ARDiffusionPipeline:
    """A transformer with random weights of a real shape, without text encoder and VAE.

    As after ``from_pretrained``, the layers that the model wants in float32 are.
    """
    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            transformer: Any = WanTransformer3DModel(**PRESETS[preset])
    finally:
        torch.set_default_dtype(default)
    transformer.eval().requires_grad_(False)
    kept = tuple(transformer._keep_in_fp32_modules or ())
    for name, parameter in transformer.named_parameters():
        if any(part in name.split(".") for part in kept):
            parameter.data = parameter.data.float()
    components: dict[str, Any] = {"tokenizer": None, "text_encoder": None, "vae": None}
    pipe = ARDiffusionPipeline(**components, scheduler=FlowMatchEulerDiscreteScheduler(), transformer=transformer)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def chunk_recipe(window: str, height: int, width: int) -> Recipe:
    """Self-Forcing's steps with a window written as sink+recent latent frames, such as "3+9"."""
    sink, recent = (int(part) for part in window.split("+"))
    return load_recipe("self-forcing").replace(
        num_sink_frames=sink, num_window_frames=recent, max_latent_frames=None, height=height, width=width
    )


class ChunkBenchmark:
    """Times variants of one pipeline at one window, one after the other; with an attention backend by name, if any."""

    def __init__(
        self, pipe: ARDiffusionPipeline, recipe: Recipe, *, num_chunks: int, backend: str | None = None
    ) -> None:
        self._cache = CacheOptions(backend=backend)
        self.pipe, self.recipe, self.num_chunks = pipe, recipe, num_chunks
        self.device = pipe._execution_device
        text_dim = pipe.transformer.config["text_dim"]
        embeds = torch.randn(1, TEXT_LEN, text_dim, generator=torch.Generator().manual_seed(1))
        self._embeds = embeds.to(self.device, pipe.transformer.dtype)
        self._eager: torch.Tensor | None = None

    def measure(self, variant: str, *, show_kernels: bool = False) -> ChunkResult:
        """Warm up as the variant says, then time a stream; ``show_kernels`` prints where the device's time goes."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        reset_peak(self.device)
        merge = variant == "merged"
        report = None
        if variant != "eager":
            report = self.pipe.warmup(
                recipe=self.recipe,
                text_len=TEXT_LEN,
                decode=False,
                cache=self._cache,
                cuda_graphs=variant != "compiled" and self.device.type == "cuda",
                merge_commits=merge,
            )
        times = self._time_stream(merge)
        if show_kernels:
            self._show_kernels(merge)
        self.pipe.cooldown()
        return ChunkResult(
            variant=variant,
            window=f"{kept_frames(self.recipe)} ({self.recipe.num_sink_frames}+{self.recipe.num_window_frames})",
            warmup=None if report is None else asdict(report),
            peak_bytes=peak_so_far(self.device),
            **times,
        )

    def _time_stream(self, merge: bool) -> dict[str, Any]:
        self._wait()
        start = time.perf_counter()
        with self._open(merge) as stream:
            latents = [next(stream).latents]
            self._wait()
            first = time.perf_counter() - start
            second, chunk = self._timed(stream)
            latents.append(chunk)
            num_fill = -(-kept_frames(self.recipe) // self.recipe.chunk_frames)
            latents += [next(stream).latents for _ in range(num_fill)]
            self._wait()
            start = time.perf_counter()
            for _ in range(self.num_chunks):
                next(stream)
            self._wait()
            chunk_seconds = (time.perf_counter() - start) / self.num_chunks
            latency = statistics.median(self._latency(stream, merge) for _ in range(self.num_chunks))
        made = torch.cat(latents, dim=2)
        error = None if self._eager is None else float((made - self._eager).norm() / self._eager.norm())
        self._eager = made if self._eager is None else self._eager
        return {
            "chunk_seconds": chunk_seconds,
            "latency_seconds": latency,
            "first_chunk_seconds": first,
            "second_chunk_seconds": second,
            "relative_error": error,
        }

    def _show_kernels(self, merge: bool) -> None:
        """Print the kernels of one steady chunk by device time."""
        with self._open(merge) as stream, torch.no_grad():
            for _ in range(1 + -(-kept_frames(self.recipe) // self.recipe.chunk_frames)):
                next(stream)
            self._wait()
            with torch.profiler.profile() as profiler:
                next(stream)
                self._wait()
        print(profiler.key_averages().table(sort_by="self_device_time_total", row_limit=20, max_name_column_width=90))

    def _open(self, merge: bool) -> ARStream:
        return self.pipe.stream(
            prompt_embeds=self._embeds,
            recipe=self.recipe,
            cache=self._cache,
            output_type="latent",
            merge_commits=merge,
            generator=torch.Generator().manual_seed(0),
        )

    def _timed(self, stream: ARStream) -> tuple[float, torch.Tensor]:
        start = time.perf_counter()
        latents = next(stream).latents
        self._wait()
        return time.perf_counter() - start, latents

    def _latency(self, stream: ARStream, merge: bool) -> float:
        if not merge:
            with torch.no_grad():
                stream.rollout.commit_held()
        self._wait()
        return self._timed(stream)[0]

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def run_chunk(options: argparse.Namespace, results: Results) -> None:
    """Measure every variant at every window. Float8 comes last: it replaces the weights."""
    device = torch.device(options.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    variants = [variant for variant in VARIANTS if variant in options.variants]
    for window in options.windows:
        pipe = random_pipeline(options.preset, device, dtype)
        if options.fuse_qkv:
            pipe.transformer.fuse_qkv_projections()
        if options.fuse_gelu:
            fuse_gelu(pipe.transformer)
        if options.text_attention is not None:
            pipe.transformer.set_attention_backend(options.text_attention)
        recipe = chunk_recipe(window, options.height, options.width).replace(chunk_frames=options.chunk_frames)
        benchmark = ChunkBenchmark(pipe, recipe, num_chunks=options.chunks, backend=options.backend)
        for variant in variants:
            if variant == "fp8":
                unfuse_gelu(pipe.transformer)
                quantize_linears(pipe.transformer)
            result = benchmark.measure(variant, show_kernels=options.kernels)
            results.add(asdict(result), str(result))
        del pipe, benchmark


def add_chunk_command(commands: Any) -> None:
    """Add ``chunk`` to the benchmark script's commands."""
    chunk = commands.add_parser("chunk", help="seconds a chunk at real shapes: eager, compiled, replayed, merged, fp8")
    chunk.add_argument("--preset", choices=sorted(PRESETS), default="wan-1.3b", help="random weights of this shape")
    chunk.add_argument("--windows", nargs="+", default=["3+9", "0+21"], help="sink+recent latent frames")
    chunk.add_argument("--chunk-frames", type=int, default=3, help="latent frames; with 1, merged commits save most")
    chunk.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    chunk.add_argument("--chunks", type=int, default=8, help="timed in the steady state")
    chunk.add_argument("--kernels", action="store_true", help="also print the kernels of a chunk by device time")
    chunk.add_argument("--fuse-qkv", action="store_true", help="one projection for query, key and value")
    chunk.add_argument("--fuse-gelu", action="store_true", help="GELU in the product before it, but for fp8")
    chunk.add_argument("--backend", help="attention backend, such as flash3_split (default: chosen)")
    chunk.add_argument("--text-attention", metavar="BACKEND", help="diffusers' name, such as _native_cudnn")
    chunk.add_argument("--height", type=int, default=480)
    chunk.add_argument("--width", type=int, default=832)
    chunk.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    chunk.add_argument("--output", type=Path, help=".json")
    chunk.set_defaults(run=run_chunk, write_only=False, plot=None)
