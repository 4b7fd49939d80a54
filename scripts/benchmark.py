#!/usr/bin/env python
"""Measure parts of the package on this machine.

python scripts/benchmark.py op --preset anchors --output out/op.json --plot out/op.png
python scripts/benchmark.py op --heads 12 40 --queries 4680 --keys 18720 32760 --backends flash3 sdpa --fragmented
python scripts/benchmark.py op --heads 12 --queries 4680 --keys 32760 --write-only
python scripts/benchmark.py rollout --model tiny --num-frames 2000 --repeats 3
python scripts/benchmark.py sessions --output out/sessions.json
"""

from __future__ import annotations

import argparse
import itertools
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from diffusers_ardiff.benchmarks import OpCase, anchor_cases, measure_op, measure_write, plot_op, sessions
from diffusers_ardiff.benchmarks.rollout import describe, measure_rollout
from diffusers_ardiff.doctor import DTYPES, examine
from diffusers_ardiff.generation import load_pipeline


def parse_arguments() -> argparse.Namespace:
    """Command line of this script."""
    parser = argparse.ArgumentParser(description="Measure parts of the package on this machine.")
    commands = parser.add_subparsers(dest="command", required=True)
    op = commands.add_parser("op", help="write-and-attend in the steady state, beside dense kernels alone")
    op.add_argument(
        "--preset", choices=["anchors"], help="the shapes of Wan models at 832x480, instead of --heads ..."
    )
    op.add_argument("--heads", type=int, nargs="+", default=[12], help="every combination is measured")
    op.add_argument("--head-dim", type=int, default=128)
    op.add_argument("--queries", type=int, nargs="+", default=[4680], help="tokens of a chunk")
    op.add_argument("--keys", type=int, nargs="+", default=[32760], help="tokens of the window, chunk included")
    op.add_argument("--sink", type=int, default=0, help="tokens of the window that never leave it")
    op.add_argument("--page-size", type=int, default=16)
    op.add_argument("--dtype", choices=sorted(DTYPES), default="bfloat16")
    op.add_argument("--backends", nargs="+", help="default: all that can serve the case here")
    op.add_argument("--fragmented", action="store_true", help="pages in random order")
    op.add_argument("--write-only", action="store_true", help="the write alone")
    op.add_argument("--warmup", type=int, default=10)
    op.add_argument("--repeats", type=int, default=50)
    op.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    op.add_argument("--output", type=Path, help=".json")
    op.add_argument("--plot", type=Path, help=".png; needs matplotlib")
    op.set_defaults(run=run_op)
    rollout = commands.add_parser("rollout", help="a long rollout, chunk by chunk: speed, and whether it stays flat")
    rollout.add_argument("--model", default="tiny", help="built-in model, diffusers folder or hub id")
    rollout.add_argument("--recipe", help="name or .json file (default: the model's own)")
    rollout.add_argument("--num-frames", type=int, default=2000, help="pixel frames")
    rollout.add_argument("--latents-only", action="store_true", help="without decoding")
    rollout.add_argument("--repeats", type=int, default=1)
    rollout.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    rollout.add_argument("--output", type=Path, help=".json")
    rollout.set_defaults(run=run_rollout, write_only=False, plot=None)
    batch = commands.add_parser("sessions", help="several sessions in one forward, and the cost of a fork")
    batch.add_argument("--tiny", action="store_true", help="at a size for a CPU; default: Wan 1.3B, LingBot")
    batch.add_argument("--only", choices=["together", "fork"], help="default: both")
    batch.add_argument("--repeats", type=int, default=10)
    batch.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    batch.add_argument("--output", type=Path, help=".json")
    batch.set_defaults(run=run_sessions, write_only=False, plot=None)
    options = parser.parse_args()
    if options.write_only and options.plot is not None:
        op.error("--plot draws attention times; leave it out with --write-only")
    return options


def choose_cases(options: argparse.Namespace) -> list[OpCase]:
    """Cases to measure."""
    dtype = DTYPES[options.dtype]
    if options.preset == "anchors":
        cases = anchor_cases(dtype)
        return [replace(case, fragmented=True) for case in cases] if options.fragmented else cases
    return [
        OpCase(
            num_heads=heads,
            head_dim=options.head_dim,
            num_queries=queries,
            num_keys=keys,
            sink_tokens=options.sink,
            page_size=options.page_size,
            dtype=dtype,
            fragmented=options.fragmented,
        )
        for heads, queries, keys in itertools.product(options.heads, options.queries, options.keys)
    ]


def run_op(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure every case; prints each as it is done."""
    device = torch.device(options.device)
    torch.manual_seed(0)
    results = []
    for case in choose_cases(options):
        counts = {"device": device, "warmup": options.warmup, "repeats": options.repeats}
        if options.write_only:
            result = measure_write(case, **counts)
        else:
            result = measure_op(case, backends=options.backends, **counts)
        results.append(result)
        print(summary(result), flush=True)
    return results


def run_rollout(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Time one rollout after the other; prints each as it is done."""
    pipeline = load_pipeline(options.model, torch.device(options.device), recipe=options.recipe)
    results = []
    for _ in range(options.repeats):
        result = measure_rollout(pipeline, num_frames=options.num_frames, decode=not options.latents_only)
        print(describe(pipeline.recipe, result, pipeline.vae_scale_factor_temporal), flush=True)
        results.append(result.to_dict())
    return results


def run_sessions(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure joint forwards and forks; prints each as it is done."""
    together, fork = sessions.tiny_cases() if options.tiny else (sessions.TogetherCase(), sessions.ForkCase())
    counts: dict[str, Any] = {"device": torch.device(options.device), "repeats": options.repeats}
    results = []
    for name, measure, case in (
        ("together", sessions.measure_together, together),
        ("fork", sessions.measure_fork, fork),
    ):
        if options.only in (None, name):
            results.append(measure(case, **counts))
            print(sessions.describe(results[-1]), flush=True)
    return results


def summary(result: dict[str, Any]) -> str:
    """One case as text."""
    lines = [result["label"]]
    for name, entry in result.get("write", {}).items():
        lines.append(f"  write, {name:<12} {entry['median_ms']:8.3f} ms  {entry['gb_per_s']:8.0f} GB/s")
    for name, entry in result.get("dense", {}).items():
        lines.append(f"  {name + ' alone':<20} {entry['median_ms']:8.3f} ms")
    for name, entry in result.get("op", {}).items():
        ratios = ", ".join(f"{ratio:.3f} x {dense}" for dense, ratio in entry["ratio"].items())
        first = f" (first of a chunk {entry['first_ms']:.3f})" if "first_ms" in entry else ""
        lines.append(f"  {'op, ' + name:<20} {entry['median_ms']:8.3f} ms{first}  {ratios}")
    return "\n".join(lines)


def main() -> None:
    """Measure, print, and write what was asked for."""
    options = parse_arguments()
    results = options.run(options)
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        report = {"machine": asdict(examine()), "results": results}
        options.output.write_text(json.dumps(report, indent=2) + "\n")
    if options.plot is not None:
        plot_op(results, options.plot)


if __name__ == "__main__":
    main()
