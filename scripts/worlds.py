#!/usr/bin/env python
"""Two worlds in one forward: one gets another prompt on the way, the other is forked into two futures.

python scripts/worlds.py --chunks 8 --output out/worlds
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from diffusers_ardiff import MemoryLimitError, StreamBatch
from diffusers_ardiff.load import load_pipeline
from diffusers_ardiff.validation import check_int
from diffusers_ardiff.video_io import VideoWriter


def parse_arguments() -> argparse.Namespace:
    """Command line of this script."""
    parser = argparse.ArgumentParser(description="Two worlds in one forward, a prompt change and a fork.")
    parser.add_argument("--model", default="tiny", help="built-in model, diffusers folder or hub id")
    parser.add_argument("--prompts", nargs=2, default=["a red circle moving right", "a blue square moving up"])
    parser.add_argument("--then", default="a green triangle moving left", help="the first world's prompt, later")
    parser.add_argument(
        "--chunks", type=int, default=6, help="chunks of each world; the turn comes after half of them"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("out/worlds"), help="folder for the three videos")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def main() -> int:
    """Make three videos, changed.mp4, forked.mp4 and fork.mp4; 2 for bad input."""
    options = parse_arguments()
    try:
        check_int("--chunks", options.chunks, minimum=1)
        # Before the videos are made, not after.
        options.output.mkdir(parents=True, exist_ok=True)
        make_worlds(options)
    except (ValueError, TypeError, OSError, MemoryLimitError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def make_worlds(options: argparse.Namespace) -> None:
    """Two streams of one pool in joint forwards; a third one joins as the fork of the second."""
    pipe = load_pipeline(options.model, torch.device(options.device))
    pool = pipe.create_cache(num_videos=3)
    seeds = [torch.Generator().manual_seed(options.seed + index) for index in range(3)]
    changed, forked = (
        pipe.stream(prompt, cache=pool, generator=seed) for prompt, seed in zip(options.prompts, seeds, strict=False)
    )
    batch = StreamBatch([changed, forked])
    videos = {changed: "changed", forked: "forked"}
    frames = {name: [] for name in ("changed", "forked", "fork")}
    for number in range(options.chunks):
        if number == options.chunks // 2:
            changed.update(options.then, mode="recache")
            fork = forked.fork(generator=seeds[2])
            fork.update(options.then)
            batch.add(fork)
            videos[fork] = "fork"
        for stream, chunk in zip(batch.streams, batch.step(), strict=True):
            frames[videos[stream]].append(chunk.frames[0])
    for name, chunks in frames.items():
        with VideoWriter(options.output / f"{name}.mp4", fps=pipe.recipe.fps) as writer:
            for chunk in chunks:
                writer.write(chunk)
        print(f"{options.output / name}.mp4: {sum(len(chunk) for chunk in chunks)} frames")
    pool.close()


if __name__ == "__main__":
    sys.exit(main())
