"""Scores a tiny text-to-video model by pixels alone: share of frames with exactly the asked colours, and motion.

    python scripts/score_tiny.py --output runs/score.json --grid runs/score.png
    python scripts/score_tiny.py --quick
    python scripts/score_tiny.py --truth-only

Half of the prompts ask for a colour and kind that training never showed together. Long rollouts are streamed; only
their last frames count. The truth score is that of rendered scenes, the best a model can reach.
"""

import argparse
import json
from pathlib import Path

import torch
from tiny.evaluate import frame_grid, make_prompts, score_clips, score_rollout, truth_score

from diffusers_ardiff import ARDiffusionPipeline


def parse_args() -> argparse.Namespace:
    """Command line of the script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", help="built-in model or diffusers folder")
    parser.add_argument("--prompts", type=int, default=100, help="prompts of short clips, 0 for none")
    parser.add_argument("--num-frames", type=int, default=81)
    parser.add_argument("--batch", type=int, default=20, help="prompts generated together")
    parser.add_argument("--long-prompts", type=int, default=24, help="prompts of the long rollout, 0 for none")
    parser.add_argument("--long-frames", type=int, default=2000)
    parser.add_argument("--last-frames", type=int, default=200, help="frames of the long rollout that count")
    parser.add_argument("--steps", type=float, nargs="+", help="denoising steps instead of the recipe's")
    parser.add_argument("--shift", type=float, help="shift instead of the recipe's")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, help="JSON file of the figures")
    parser.add_argument("--grid", type=Path, help="PNG of frames: rows are prompts, columns are time")
    parser.add_argument("--quick", action="store_true", help="24 prompts, and 6 rollouts of 300 frames")
    parser.add_argument("--truth-only", action="store_true", help="score rendered scenes only; loads no model")
    args = parser.parse_args()
    if args.quick:
        args.prompts, args.batch = 24, 12
        args.long_prompts, args.long_frames, args.last_frames = 6, 300, 60
    return args


def load_pipeline(args: argparse.Namespace) -> ARDiffusionPipeline:
    """The pipeline in float32 with the asked recipe."""
    pipe = ARDiffusionPipeline.from_pretrained(args.model, torch_dtype=torch.float32).to(args.device)
    pipe.set_progress_bar_config(disable=True)
    changes = {"denoising_steps": args.steps, "shift": args.shift}
    recipe = pipe.recipe.replace(**{name: value for name, value in changes.items() if value is not None})
    pipe.register_to_config(recipe=recipe.to_dict())
    return pipe


def main() -> None:
    """Prints and writes the figures that the command line asks for."""
    args = parse_args()
    report: dict[str, object] = {"truth": truth_score(100, args.num_frames, args.seed)}
    if not args.truth_only:
        pipe = load_pipeline(args)
        report["recipe"] = {"denoising_steps": pipe.recipe.denoising_steps, "shift": pipe.recipe.shift}
        if args.prompts:
            prompts = make_prompts(args.prompts, args.seed)
            report["clips"], clips = score_clips(pipe, prompts, args.num_frames, args.batch, args.seed)
            if args.grid is not None:
                frame_grid(clips[:6], columns=9, scale=1.5).save(args.grid, optimize=True)
        if args.long_prompts:
            prompts = make_prompts(args.long_prompts, args.seed + 1)
            report["rollout"] = score_rollout(pipe, prompts, args.long_frames, args.last_frames, args.seed)
    print(json.dumps(report, indent=1))
    if args.output is not None:
        args.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
