#!/usr/bin/env python
"""Generate videos from prompts.

python scripts/generate.py "a red circle moving right and a blue square" --num-frames 81 --output out/video.mp4
accelerate launch --num_processes 2 scripts/generate.py "PROMPT" "PROMPT" --output out/video.mp4
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from accelerate import PartialState

from diffusers_ardiff import MemoryLimitError, PromptSwitch
from diffusers_ardiff.generation import GenerationRequest, generate_videos, load_pipeline
from diffusers_ardiff.pipelines.stream import SWITCH_MODES
from diffusers_ardiff.recipes import list_recipes


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Command line of this script."""
    parser = argparse.ArgumentParser(description="Generate videos, chunk by chunk, streamed to disk.")
    parser.add_argument("prompts", nargs="+", metavar="PROMPT", help="one video each")
    parser.add_argument("--output", type=Path, default=Path("video.mp4"), help=".mp4; several prompts add a number")
    parser.add_argument("--num-frames", type=int, help="pixel frames of a video (default: the recipe's)")
    parser.add_argument("--height", type=int, help="pixels (default: the recipe's)")
    parser.add_argument("--width", type=int, help="pixels (default: the recipe's)")
    parser.add_argument("--seed", type=int, default=0, help="of the first video; the next ones count on")
    parser.add_argument("--image", type=Path, help="image file the video begins with")
    parser.add_argument("--video", type=Path, help="video file to continue, 1 + 4n frames")
    parser.add_argument("--switch", nargs=2, action="append", default=[], metavar=("LATENT_FRAME", "PROMPT"))
    parser.add_argument("--switch-mode", choices=SWITCH_MODES, default="recache")
    parser.add_argument("--model", default="tiny", help="built-in model, diffusers folder or hub id")
    parser.add_argument("--checkpoint", help="original-layout weights to load over the model")
    parser.add_argument("--recipe", help=f"a .json file or one of {', '.join(list_recipes())}")
    parser.add_argument("--fps", type=float, help="of the file (default: the recipe's)")
    parser.add_argument("--limit-bytes", type=int, help="refuse to allocate more for a video's cache and decoder")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 2 for bad input."""
    args = parse_arguments(argv)
    state = PartialState(cpu=not torch.cuda.is_available())
    try:
        request = GenerationRequest(
            prompts=args.prompts,
            output=args.output,
            num_frames=args.num_frames,
            height=args.height,
            width=args.width,
            seed=args.seed,
            image=args.image,
            video=args.video,
            switches=[
                PromptSwitch(latent_frame=int(frame), prompt=prompt, mode=args.switch_mode)
                for frame, prompt in args.switch
            ],
            fps=args.fps,
            limit_bytes=args.limit_bytes,
        )
        pipeline = load_pipeline(args.model, state.device, recipe=args.recipe, checkpoint=args.checkpoint)
        written = generate_videos(pipeline, request, state)
    except (ValueError, TypeError, OSError, MemoryLimitError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for path in written:
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
