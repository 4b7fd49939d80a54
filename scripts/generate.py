#!/usr/bin/env python
"""Generate videos from prompts.

python scripts/generate.py "a red circle moving right and a blue square" --num-frames 81 --output out/video.mp4
accelerate launch --multi_gpu --num_processes 2 --num_machines 1 scripts/generate.py --prompts prompts.txt --resume
accelerate launch --multi_gpu --num_processes 2 --num_machines 1 scripts/generate.py "PROMPT" --ulysses 2
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from accelerate import PartialState

from diffusers_ardiff import MemoryLimitError, PromptSwitch
from diffusers_ardiff.generation import GenerationRequest, check_negative_prompt
from diffusers_ardiff.jobs import VideoResult, generate_videos
from diffusers_ardiff.load import load_pipeline
from diffusers_ardiff.parallel import LaunchError, check_launch
from diffusers_ardiff.pipelines.prompts import SWITCH_MODES
from diffusers_ardiff.recipes import list_recipes, override_recipe

SWITCH_MODE_HELP = (
    "what becomes of the past at a switch (default: %(default)s). recache: the window is rewritten under the new prompt; "
    "text: it stays as it was written; flush: it is forgotten but for the sink; blend: it stays, and the prompt moves "
    "over in --blend-chunks equal steps"
)
WARMUP_HELP = (
    "first compile the transformer and capture its forwards as CUDA graphs: minutes once, then faster chunks, so for many or "
    "long videos; an error without a CUDA device"
)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Command line of this script."""
    parser = argparse.ArgumentParser(description="Generate videos, chunk by chunk, streamed to disk.")
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="one video each")
    parser.add_argument("--prompts", type=Path, dest="prompts_file", metavar="FILE", help="more, one a line")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("video.mp4"),
        help=".mp4, .webm or .gif; several prompts add a number (default: %(default)s)",
    )
    parser.add_argument("--num-frames", type=int, help="pixel frames of a video (default: the recipe's)")
    parser.add_argument("--height", type=int, help="pixels (default: the recipe's)")
    parser.add_argument("--width", type=int, help="pixels (default: the recipe's)")
    parser.add_argument(
        "--seed", type=int, default=0, help="of the first video; the next ones count on (default: %(default)s)"
    )
    parser.add_argument("--image", type=Path, help="image file the video begins with")
    parser.add_argument(
        "--video",
        type=Path,
        help="video file (at the recipe's rate) or folder of pictures to continue, 1 + 4n frames",
    )
    parser.add_argument(
        "--video-frames", type=int, metavar="N", help="take the first N of its frames, 1 + 4n (default: all)"
    )
    parser.add_argument(
        "--switch",
        nargs=2,
        action="append",
        default=[],
        metavar=("LATENT_FRAME", "PROMPT"),
        help="another prompt from the first chunk at or after this latent frame on; may be repeated",
    )
    parser.add_argument("--switch-mode", choices=SWITCH_MODES, default="recache", help=SWITCH_MODE_HELP)
    parser.add_argument("--blend-chunks", type=int, default=0, help="chunks that a blend takes, at least 1 for it")
    parser.add_argument("--model", default="tiny", help="built-in model, diffusers folder or hub id (default: tiny)")
    parser.add_argument("--checkpoint", help="original-layout weights to load over the model")
    parser.add_argument("--lora", help="LoRA file that belongs to the checkpoint, merged into it")
    parser.add_argument("--recipe", help=f"a .json file or one of {', '.join(list_recipes())} (default: the model's)")
    parser.add_argument(
        "--num-window-frames", type=int, help="latent frames seen, the sink not counted (default: the recipe's)"
    )
    parser.add_argument(
        "--num-sink-frames", type=int, help="first latent frames that are never forgotten (default: the recipe's)"
    )
    parser.add_argument("--fps", type=float, help="of the file (default: the recipe's)")
    parser.add_argument(
        "--limit-bytes", type=int, help="refuse to allocate more for a video's cache and decoder (default: no limit)"
    )
    parser.add_argument("--guidance-scale", type=float, help="above 1 a negative branch runs (default: the recipe's)")
    parser.add_argument("--negative-prompt", help="of the negative branch (default: an empty one); needs guidance")
    parser.add_argument("--warmup", action="store_true", help=WARMUP_HELP)
    parser.add_argument(
        "--overlap",
        action="store_true",
        help="decode a chunk beside the denoising of the next one; on a CUDA device only",
    )
    parser.add_argument("--resume", action="store_true", help="keep videos made by the same command before")
    parser.add_argument(
        "--ulysses",
        type=int,
        default=1,
        metavar="N",
        help="processes that share the heads of one video (docs/several_gpus.md)",
    )
    parser.add_argument("--guidance-parallel", action="store_true", help="the negative branch on processes of its own")
    parser.add_argument("--decode-rank", action="store_true", help="one more process a video, which decodes")
    return parser.parse_args(argv)


def read_prompts(args: argparse.Namespace) -> list[str]:
    """All prompts of the command line: those given, then the lines of the file that hold text.

    Raises:
        OSError: no such file.
    """
    lines = [] if args.prompts_file is None else args.prompts_file.read_text(encoding="utf-8").splitlines()
    return [*args.prompts, *(line.strip() for line in lines if line.strip())]


def read_switches(args: argparse.Namespace) -> list[PromptSwitch]:
    """The prompt changes of the command line.

    Raises:
        ValueError: a bad frame number or bad options.
    """
    wrong = [frame for frame, _ in args.switch if not frame.isdecimal()]
    if wrong:
        raise ValueError(f"--switch takes a latent frame number (0, 1, 2, ...) and a prompt, got {wrong[0]!r}.")
    return [
        PromptSwitch(latent_frame=int(frame), prompt=prompt, mode=args.switch_mode, blend_chunks=args.blend_chunks)
        for frame, prompt in args.switch
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns 2 for bad input, 1 where a video failed, 130 after Ctrl-C."""
    args = parse_arguments(argv)
    state = PartialState(cpu=not torch.cuda.is_available())
    try:
        return run(args, state)
    except KeyboardInterrupt:
        print("interrupted: finished videos are kept, and --resume goes on from there.", file=sys.stderr)
        return 128 + signal.SIGINT
    finally:
        # Left to the interpreter's end, the group's threads can outlive what they need and abort the process.
        state.destroy_process_group()


def exit_on_signals() -> None:
    """Turn the signals of launchers, schedulers and closed terminals into an exit that removes half-written files."""
    for number in (signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)):
        # One that is to be ignored (nohup) stays so.
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, lambda received, _frame: sys.exit(128 + received))


def run(args: argparse.Namespace, state: PartialState) -> int:
    """Make the videos of one process; returns the exit status."""
    try:
        check_launch(state.num_processes)
        request = GenerationRequest(
            prompts=read_prompts(args),
            output=args.output,
            num_frames=args.num_frames,
            height=args.height,
            width=args.width,
            seed=args.seed,
            image=args.image,
            video=args.video,
            video_frames=args.video_frames,
            switches=read_switches(args),
            fps=args.fps,
            limit_bytes=args.limit_bytes,
            guidance_scale=args.guidance_scale,
            negative_prompt=args.negative_prompt,
            model=" ".join(filter(None, (args.model, args.checkpoint, args.lora))),
        )
        pipeline = load_pipeline(
            args.model, state.device, recipe=args.recipe, checkpoint=args.checkpoint, lora=args.lora
        )
        fields = {"num_window_frames": args.num_window_frames, "num_sink_frames": args.num_sink_frames}
        given = {name: value for name, value in fields.items() if value is not None}
        pipeline.recipe = override_recipe(pipeline.recipe, given)
        check_negative_prompt(args.negative_prompt, args.guidance_scale, pipeline.recipe)
        if args.ulysses != 1 or args.guidance_parallel or args.decode_rank:
            pipeline.enable_parallelism(
                ulysses_degree=args.ulysses, guidance_parallel=args.guidance_parallel, decode_rank=args.decode_rank
            )
        if args.overlap:
            pipeline.set_decoder(overlap=True)
        results = generate_videos(pipeline, request, resume=args.resume, warmup=args.warmup)
    except (ValueError, TypeError, OSError, LaunchError, MemoryLimitError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if state.is_main_process:
        report(request, results)
    return 1 if any(result.status == "failed" for result in results) else 0


def report(request: GenerationRequest, results: Sequence[VideoResult]) -> None:
    """Print the files that are there, and what failed."""
    for result in results:
        if result.status == "failed":
            print(f"failed: {request.path(result.index)} ({result.prompt!r}): {result.error}", file=sys.stderr)
        else:
            print(request.path(result.index))


if __name__ == "__main__":
    exit_on_signals()
    sys.exit(main())
