#!/usr/bin/env python
"""Generate a video without end and change it while it runs; every line typed is the prompt from the next chunk on.

python scripts/interactive.py "a red circle moving right" --output out/live.mp4
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from diffusers_ardiff import MemoryLimitError
from diffusers_ardiff.generation import check_negative_prompt, check_warmup
from diffusers_ardiff.interactive import HELP, InteractiveRequest, run_interactive
from diffusers_ardiff.load import load_pipeline
from diffusers_ardiff.recipes import override_recipe


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Command line of this script."""
    parser = argparse.ArgumentParser(description=f"Generate a video without end. Type, while it runs: {HELP}")
    parser.add_argument("prompt", metavar="PROMPT", help="of the first chunk")
    parser.add_argument(
        "--output", type=Path, default=Path("live.mp4"), help=".mp4, .webm or .gif file, or a folder for PNG files"
    )
    parser.add_argument("--max-frames", type=int, help="pixel frames to stop after (default: at :quit)")
    parser.add_argument("--height", type=int, help="pixels (default: the recipe's)")
    parser.add_argument("--width", type=int, help="pixels (default: the recipe's)")
    parser.add_argument("--seed", type=int, default=0, help="of the noise")
    parser.add_argument("--guidance-scale", type=float, help="above 1 a negative branch runs (default: the recipe's)")
    parser.add_argument("--negative-prompt", help="of the negative branch (default: an empty one); needs guidance")
    parser.add_argument("--preview", action="store_true", help="draw each chunk's last frame in the terminal")
    parser.add_argument(
        "--warmup",
        action="store_true",
        help="first compile the transformer and capture its forwards as CUDA graphs, prompt changes included: minutes once, "
        "then faster chunks; an error without a CUDA device",
    )
    parser.add_argument(
        "--overlap",
        action="store_true",
        help="decode a chunk beside the denoising of the next one; on a CUDA device only",
    )
    parser.add_argument("--model", default="tiny", help="built-in model, diffusers folder or hub id")
    parser.add_argument("--recipe", help="name or .json file (default: the model's)")
    parser.add_argument(
        "--num-window-frames", type=int, help="latent frames seen, the sink not counted (default: the recipe's)"
    )
    parser.add_argument(
        "--num-sink-frames", type=int, help="first latent frames that are never forgotten (default: the recipe's)"
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 2 for bad input."""
    args = parse_arguments(argv)
    try:
        request = InteractiveRequest(
            prompt=args.prompt,
            output=args.output,
            max_frames=args.max_frames,
            height=args.height,
            width=args.width,
            seed=args.seed,
            guidance_scale=args.guidance_scale,
            negative_prompt=args.negative_prompt,
            preview=args.preview,
        )
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        pipeline = load_pipeline(args.model, device, recipe=args.recipe)
        fields = {"num_window_frames": args.num_window_frames, "num_sink_frames": args.num_sink_frames}
        given = {name: value for name, value in fields.items() if value is not None}
        pipeline.recipe = override_recipe(pipeline.recipe, given)
        check_negative_prompt(args.negative_prompt, args.guidance_scale, pipeline.recipe)
        if args.overlap:
            pipeline.set_decoder(overlap=True)
        if args.warmup:
            check_warmup(pipeline)
            print(pipeline.warmup(**request.warmup_arguments(pipeline)), flush=True)
        # A file of its own: the interpreter may abort where it closes sys.stdin at exit while a thread still reads it.
        lines = os.fdopen(os.dup(sys.stdin.fileno()), encoding=sys.stdin.encoding)
        run_interactive(pipeline, request, lines, lambda text: print(text, flush=True))
    except (ValueError, TypeError, OSError, MemoryLimitError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(request.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
