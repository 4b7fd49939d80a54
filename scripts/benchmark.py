#!/usr/bin/env python
"""Measure parts of the package on this machine. Each figure is printed and written as soon as it is there.

python scripts/benchmark.py op --preset anchors --output out/op.json --plot out/op.png
python scripts/benchmark.py op --heads 12 40 --queries 4680 --keys 18720 32760 --backends flash3 sdpa --fragmented
python scripts/benchmark.py op --preset order --output out/order.json
python scripts/benchmark.py op --heads 12 --queries 4680 --keys 32760 --write-only
python scripts/benchmark.py rollout --model tiny --num-frames 2000 --repeats 3
python scripts/benchmark.py chunk --preset wan-1.3b --windows 3+9 0+21 --output out/chunk.json
python scripts/benchmark.py rollout --model wan-1.3b --sink-frames 3 --window-frames 9 --baseline dense-roll
python scripts/benchmark.py decode --output out/decode.json
python scripts/benchmark.py sessions --output out/sessions.json
python scripts/benchmark.py family --families ltx cosmos --output out/families.json
accelerate launch --multi_gpu --num_processes 2 --num_machines 1 scripts/benchmark.py parallel --preset wan-14b --guided
python scripts/benchmark.py sizing
"""

from __future__ import annotations

import argparse
import itertools
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from diffusers_ardiff.benchmarks import OpCase, anchor_cases, measure_op, measure_write, order_cases, plot_op
from diffusers_ardiff.benchmarks.chunk import add_chunk_command
from diffusers_ardiff.benchmarks.commands import (
    add_decode_command,
    add_plot_command,
    add_rollout_command,
    add_sessions_command,
)
from diffusers_ardiff.benchmarks.family import add_family_command
from diffusers_ardiff.benchmarks.parallel import add_parallel_command
from diffusers_ardiff.benchmarks.results import Results
from diffusers_ardiff.benchmarks.sizing import add_sizing_command
from diffusers_ardiff.doctor import DTYPES

PRESETS = {"anchors": anchor_cases, "order": order_cases}


def parse_arguments() -> argparse.Namespace:
    """Command line of this script."""
    parser = argparse.ArgumentParser(description="Measure parts of the package on this machine.")
    commands = parser.add_subparsers(dest="command", required=True)
    op = commands.add_parser("op", help="write-and-attend in the steady state, beside dense kernels alone")
    op.add_argument(
        "--preset",
        choices=sorted(PRESETS),
        help="instead of --heads ...: anchors, the shapes of Wan models at 832x480; order, every kind of work",
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
    op.add_argument("--ragged", type=int, default=1, metavar="ROWS", help="sessions of different length as rows")
    op.add_argument("--masked", action="store_true", help="the chunk in three spans, causal among each other")
    op.add_argument("--write-only", action="store_true", help="the write alone, and norm, rotation and write")
    op.add_argument("--eager-only", action="store_true", help="with --write-only: without Inductor's versions")
    op.add_argument("--warmup", type=int, default=10)
    op.add_argument("--repeats", type=int, default=50)
    op.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    op.add_argument("--output", type=Path, help=".json")
    op.add_argument("--plot", type=Path, help=".png; needs matplotlib")
    op.set_defaults(run=run_op, draw=plot_op)
    add_chunk_command(commands)
    add_rollout_command(commands)
    add_decode_command(commands)
    add_plot_command(commands)
    add_sessions_command(commands)
    add_family_command(commands)
    add_parallel_command(commands)
    add_sizing_command(commands)
    options = parser.parse_args()
    if options.command == "op" and options.write_only and options.plot is not None:
        op.error("--plot draws attention times; leave it out with --write-only")
    return options


def choose_cases(options: argparse.Namespace) -> list[OpCase]:
    """Cases to measure."""
    dtype = DTYPES[options.dtype]
    if options.preset is not None:
        cases = PRESETS[options.preset](dtype)
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
            rows=options.ragged,
            masked=options.masked,
        )
        for heads, queries, keys in itertools.product(options.heads, options.queries, options.keys)
    ]


def run_op(options: argparse.Namespace, results: Results) -> None:
    """Measure every case."""
    device = torch.device(options.device)
    torch.manual_seed(0)
    for case in choose_cases(options):
        counts = {"device": device, "warmup": options.warmup, "repeats": options.repeats}
        if options.write_only:
            result = measure_write(case, compiled=not options.eager_only, **counts)
        else:
            result = measure_op(case, backends=options.backends, **counts)
        results.add(result, summary(result))


def summary(result: dict[str, Any]) -> str:
    """One case as text."""
    lines = [result["label"]]
    for name, entry in result.get("write", {}).items():
        lines.append(f"  write, {name:<22} {entry['median_ms']:8.3f} ms  {entry['gb_per_s']:8.0f} GB/s")
    for name, entry in result.get("dense", {}).items():
        lines.append(f"  {name + ' alone':<20} {entry['median_ms']:8.3f} ms")
    for name, entry in result.get("op", {}).items():
        ratios = ", ".join(f"{ratio:.3f} x {dense}" for dense, ratio in entry["ratio"].items())
        first = f" (first of a chunk {entry['first_ms']:.3f})" if "first_ms" in entry else ""
        lines.append(f"  {'op, ' + name:<20} {entry['median_ms']:8.3f} ms{first}  {ratios}")
    if "order" in result:
        lines.append(f"  fastest first: {', '.join(result['order'])}")
    return "\n".join(lines)


def main() -> None:
    """Measure, print and write; ends with 1 where a part of the command failed."""
    options = parse_arguments()
    results = Results(options.output)
    try:
        options.run(options, results)
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    if options.plot is not None:
        options.draw(results.figures, options.plot)
    if results.errors:
        sys.exit(1)


if __name__ == "__main__":
    main()
