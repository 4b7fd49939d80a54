"""The ``rollout``, ``decode`` and ``sessions`` commands of ``scripts/benchmark.py``."""

from __future__ import annotations

import argparse
import gc
import json
import statistics
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from ..cache import FLOAT8
from ..doctor import DTYPES
from ..gelu import fuse_gelu
from ..load import load_pipeline
from ..pipelines import ARDiffusionPipeline
from ..recipes import load_recipe
from . import sessions
from .decode import VARIANTS, DecodeCase, describe_decode, measure_decode
from .dense_roll import DenseRollAttnProcessor, measure_dense_roll
from .models import WAN_SHAPES, build_light_decoder, build_pipeline, windowed
from .peak import peak_so_far, reset_peak
from .plot import plot_rollout
from .published_loop import PublishedLoopAttnProcessor
from .report import describe, window_label
from .results import Results
from .rollout import (
    RolloutSettings,
    first_steady_chunk,
    measure_rollout,
    time_decoding,
    warm_up,
)

DECODERS = ("wan", "light", "none")
BASELINES = {"dense-roll": DenseRollAttnProcessor, "published-loop": PublishedLoopAttnProcessor}
KV_DTYPES = DTYPES | {"float8": FLOAT8}


def add_rollout_command(commands: Any) -> None:
    """``rollout``: a long rollout, chunk by chunk."""
    parser = commands.add_parser("rollout", help="a long rollout, chunk by chunk: speed, latency, memory, flatness")
    parser.add_argument(
        "--model", default="tiny", help=f"{', '.join(WAN_SHAPES)} (random weights), a built-in model, folder or hub id"
    )
    parser.add_argument("--recipe", help="name or .json file (default: the model's own)")
    parser.add_argument("--sink-frames", type=int, help="latent frames kept for ever (default: the recipe's)")
    parser.add_argument("--window-frames", type=int, help="recent latent frames kept, sink not included")
    parser.add_argument("--height", type=int, help="pixels (default: the recipe's)")
    parser.add_argument("--width", type=int)
    parser.add_argument("--num-frames", type=int, help="pixel frames in all (default: what the measured chunks need)")
    parser.add_argument("--measured-chunks", type=int, default=60, help="in the steady state")
    parser.add_argument("--decoder", choices=DECODERS, default="wan", help="wan: the pipeline's VAE")
    parser.add_argument("--latents-only", action="store_const", const="none", dest="decoder", help="--decoder none")
    parser.add_argument("--compile-decoder", action="store_true")
    parser.add_argument("--channels-last", action="store_true", help="of the decoder's weights")
    parser.add_argument("--compile", action="store_true", help="the transformer's blocks, by pipe.warmup")
    parser.add_argument("--graphs", action="store_true", help="replay forwards as CUDA graphs, by pipe.warmup")
    parser.add_argument("--fuse-gelu", action="store_true", help="GELU in the product before it; not in the baseline")
    parser.add_argument("--overlap", action="store_true", help="decode beside the next chunk's denoising")
    parser.add_argument("--baseline", choices=list(BASELINES), help="time this, eager, in the same run; print ratios")
    parser.add_argument("--backend", help="attention backend (default: chosen)")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bfloat16", help="of random weights")
    parser.add_argument("--kv-dtype", choices=sorted(KV_DTYPES), help="of keys and values (default: the model's)")
    parser.add_argument("--repeats", type=int, default=1)
    _add_outputs(parser)
    parser.add_argument("--plot", type=Path, help=".png of time and memory per chunk; needs matplotlib")
    parser.set_defaults(run=run_rollout, draw=plot_rollout)


def add_decode_command(commands: Any) -> None:
    """``decode``: the decoders alone."""
    parser = commands.add_parser("decode", help="stream decode of steady chunks, random weights of Wan 2.1's VAE")
    parser.add_argument("--height", type=int, default=480)
    parser.add_argument("--width", type=int, default=832)
    parser.add_argument("--chunk-frames", type=int, default=3, help="latent frames")
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS), metavar="VARIANT")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bfloat16")
    parser.add_argument("--repeats", type=int, default=10)
    _add_outputs(parser)
    parser.set_defaults(run=run_decode, plot=None)


def add_sessions_command(commands: Any) -> None:
    """``sessions``: joint forwards and forks."""
    parser = commands.add_parser("sessions", help="several sessions in one forward, and the cost of a fork")
    parser.add_argument("--tiny", action="store_true", help="at a size for a CPU; default: Wan 1.3B, LingBot")
    parser.add_argument("--only", choices=["together", "fork"], help="default: both")
    parser.add_argument("--repeats", type=int, default=10)
    _add_outputs(parser)
    parser.set_defaults(run=run_sessions, plot=None)


def add_plot_command(commands: Any) -> None:
    """``plot``: a chart from files that ``rollout --output`` wrote, perhaps on another machine."""
    parser = commands.add_parser("plot", help="draw the .json files of the rollout command")
    parser.add_argument("files", type=Path, nargs="+", help=".json")
    parser.add_argument("--plot", type=Path, required=True, help=".png; needs matplotlib")
    parser.set_defaults(run=read_results, draw=plot_rollout, output=None)


def read_results(options: argparse.Namespace, results: Results) -> None:
    """The results in all files."""
    for path in options.files:
        results.figures += json.loads(path.read_text())["results"]


def _add_outputs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, help=".json")


def run_rollout(options: argparse.Namespace, results: Results) -> None:
    """Time one rollout after the other."""
    pipeline = prepare_pipeline(options)
    settings = _settings(options, pipeline)
    recipe = settings.recipe
    assert recipe is not None
    # First of all: its blocks are the stock ones, launched kernel by kernel.
    baseline = None if options.baseline is None else run_baseline(pipeline, settings, options.baseline)
    if options.fuse_gelu:
        fuse_gelu(pipeline.transformer)
    is_warm = options.compile or options.graphs
    if baseline is not None and is_warm:
        baseline["ours_eager"] = time_transformer(pipeline, settings)
    reset_peak(pipeline._execution_device)
    warmup = pipeline.warmup_decoder(recipe=recipe) if settings.decode else 0.0
    warm = warm_up(pipeline, settings, compile=options.compile, cuda_graphs=options.graphs) if is_warm else None
    warmup_peak = peak_so_far(pipeline._execution_device)
    # Kernels are loaded before anything is timed.
    measure_rollout(pipeline, replace(settings, measured_chunks=2, num_frames=None))
    factor = pipeline.vae_scale_factor_temporal
    for _ in range(options.repeats):
        gc.collect()
        result = measure_rollout(pipeline, settings)
        report = {
            "model": options.model,
            "window": window_label(recipe),
            "recipe": recipe.to_dict(),
            "decoder": options.decoder,
            "decoder_options": vars(pipeline.decoding.options),
            "decoder_warmup_seconds": warmup,
            "warmup_peak_bytes": warmup_peak,
            "kv_dtype": options.kv_dtype,
            "forwards": {"compiled": options.compile, "graphs": options.graphs, "fused_gelu": options.fuse_gelu},
            "warmup": None if warm is None else asdict(warm),
            "pixel_fps": recipe.chunk_frames * factor / result.mean_seconds,
        }
        lines = [f"{options.model}, {describe(recipe, result, factor, options.decoder)}"]
        if warmup_peak is not None:
            lines.append(f"  peak of the warm-up {warmup_peak / 2**30:.2f} GiB")
        if settings.decode:
            lines.append(f"  decoder warm-up {warmup:.1f} s, options {report['decoder_options']}")
        lines.append(f"  forwards {_forwards_label(options)}" + ("" if warm is None else f": {warm}"))
        results.add(report | result.to_dict(), "\n".join(lines))
        ours = result.transformer_seconds
        if settings.decode:
            alone = measure_alone(pipeline, settings)
            results.extend("alone", alone)
            ours = alone["transformer_seconds"]
        if baseline is not None:
            results.extend("baseline", compare(baseline, ours, _forwards_label(options)))


def _forwards_label(options: argparse.Namespace) -> str:
    chosen = {"compiled": options.compile, "replayed": options.graphs}
    names = " and ".join(name for name, is_chosen in chosen.items() if is_chosen) or "eager"
    return names + (", GELU fused" if options.fuse_gelu else "")


def run_baseline(pipeline: ARDiffusionPipeline, settings: RolloutSettings, name: str) -> dict[str, Any]:
    """Time the dense cache that rolls, once its kernels are loaded."""
    layer_type = BASELINES[name]
    measure_dense_roll(pipeline, replace(settings, measured_chunks=2, num_frames=None), layer_type=layer_type)
    gc.collect()
    seconds = measure_dense_roll(pipeline, settings, layer_type=layer_type)
    recipe = settings.recipe
    assert recipe is not None
    dense = statistics.median(seconds[first_steady_chunk(recipe) :])
    return {"name": name, "chunk_seconds": seconds, "steady_seconds": dense}


def time_transformer(pipeline: ARDiffusionPipeline, settings: RolloutSettings) -> float:
    """Seconds of denoising and commit of a chunk where nothing is decoded, once kernels are loaded."""
    settings = replace(settings, decode=False)
    measure_rollout(pipeline, replace(settings, measured_chunks=2, num_frames=None))
    return measure_rollout(pipeline, settings).transformer_seconds


def measure_alone(pipeline: ARDiffusionPipeline, settings: RolloutSettings) -> dict[str, float]:
    """Seconds a chunk of decoding alone, and of denoising and commit alone; prints both."""
    recipe = settings.recipe
    assert recipe is not None
    decode = time_decoding(pipeline, recipe)
    transformer = time_transformer(pipeline, settings)
    print(
        f"  alone: decoding {decode:.4f} s a chunk, denoising + commit {transformer:.4f} s; one after the other "
        f"{decode + transformer:.4f} s",
        flush=True,
    )
    return {"decode_seconds": decode, "transformer_seconds": transformer}


def compare(baseline: dict[str, Any], ours: float, label: str) -> dict[str, Any]:
    """The baseline with the ratio to ours; prints what is compared with what."""
    name, dense = baseline["name"], baseline["steady_seconds"]
    print(
        f"  denoising + commit of a chunk, nothing decoded: {name} (stock blocks, eager) {dense:.4f} s, ours "
        f"({label}) {ours:.4f} s: {dense / ours:.2f} x",
        flush=True,
    )
    eager = baseline.get("ours_eager")
    if eager is not None:
        print(f"  both eager: {name} {dense:.4f} s, ours {eager:.4f} s: {dense / eager:.2f} x", flush=True)
    ratios = {"ratio": dense / ours} | ({} if eager is None else {"ratio_eager": dense / eager})
    return baseline | {"ours": ours} | ratios


def prepare_pipeline(options: argparse.Namespace) -> ARDiffusionPipeline:
    """The pipeline with its decoder chosen."""
    device = torch.device(options.device)
    if options.model in WAN_SHAPES:
        pipeline = build_pipeline(options.model, device, DTYPES[options.dtype])
    else:
        pipeline = load_pipeline(options.model, device, recipe=options.recipe)
    if options.decoder != "none":
        pipeline.set_decoder(
            build_light_decoder(device, pipeline.vae.dtype) if options.decoder == "light" else None,
            compile=options.compile_decoder,
            channels_last=options.channels_last,
            overlap=options.overlap,
        )
    return pipeline


def _settings(options: argparse.Namespace, pipeline: ARDiffusionPipeline) -> RolloutSettings:
    recipe = load_recipe(options.recipe) if options.recipe is not None else pipeline.recipe
    size = {name: value for name in ("height", "width") if (value := getattr(options, name)) is not None}
    return RolloutSettings(
        recipe=windowed(recipe, options.sink_frames, options.window_frames).replace(**size),
        measured_chunks=options.measured_chunks,
        num_frames=options.num_frames,
        decode=options.decoder != "none",
        backend=options.backend,
        kv_dtype=None if options.kv_dtype is None else KV_DTYPES[options.kv_dtype],
    )


def run_decode(options: argparse.Namespace, results: Results) -> None:
    """Measure each variant."""
    case = DecodeCase(
        height=options.height,
        width=options.width,
        chunk_frames=options.chunk_frames,
        dtype=DTYPES[options.dtype],
        repeats=options.repeats,
    )
    for result in measure_decode(case, options.variants, torch.device(options.device)):
        results.add(result, describe_decode(case, result))


def run_sessions(options: argparse.Namespace, results: Results) -> None:
    """Measure joint forwards, each mode by itself, and forks."""
    together, fork = sessions.tiny_cases() if options.tiny else (sessions.TogetherCase(), sessions.ForkCase())
    device, repeats = torch.device(options.device), options.repeats
    if options.only in (None, "together"):
        for mode, setup in sessions.modes_of(device).items():
            result = sessions.measure_together(together, device=device, repeats=repeats, modes={mode: setup})
            results.add(result, sessions.describe(result))
    if options.only in (None, "fork"):
        result = sessions.measure_fork(fork, device=device, repeats=repeats)
        results.add(result, sessions.describe(result))
