"""Trains the built-in tiny text-to-video model in resumable pieces and exports it as a diffusers folder.

    python scripts/train_tiny.py --stage vae --minutes 5 --state runs/tiny --device cuda --seed 1
    python scripts/train_tiny.py --stage vae --minutes 1.75 --state runs/tiny --device cuda --seed 2 --clip 3 121
    python scripts/train_tiny.py --stage transformer --minutes 7.5 --state runs/tiny --device cuda --seed 1
    python scripts/train_tiny.py --export diffusers_ardiff/builtin/tiny --state runs/tiny

The shipped weights come from these pieces, 14.25 minutes on one H200; `--export` leaves `model_index.json`, the recipe,
as it is. They are not reproduced to the bit: pieces are timed, and the VAE was trained before `shapes` gave every shape
a lane, on shapes that moved faster and bounced off each other.

A piece goes on from the averaged weights in `--state` with a fresh optimiser; give every piece its own seed. `--steps`
replaces the clock, for a run that does not depend on the speed of the machine. `--debug` shrinks everything so that
three steps of any stage take seconds on a CPU.
"""

import argparse
import dataclasses
from pathlib import Path

import torch
from tiny.export import export_components
from tiny.train_transformer import TransformerSettings, train_transformer
from tiny.train_vae import VaeSettings, train_vae
from tiny.training import Budget

DEBUG_VAE = VaeSettings(num_clips=2, num_frames=9, num_scenes=64, num_test_clips=4)
DEBUG_TRANSFORMER = TransformerSettings(
    batch=2, chunks=4, num_clips=16, num_openings=16, encode_batch=1, encode_seconds=5, compile=False
)


def parse_args() -> argparse.Namespace:
    """Command line of the script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", choices=["vae", "transformer"], help="what to train")
    parser.add_argument("--state", type=Path, required=True, help="folder of the weights between pieces")
    parser.add_argument("--minutes", type=float, default=8.0, help="wall time of the piece")
    parser.add_argument("--steps", type=int, help="optimiser steps, instead of --minutes")
    parser.add_argument("--clip", type=int, nargs=2, metavar=("CLIPS", "FRAMES"), help="VAE: clips, frames of each")
    parser.add_argument("--peak-rate", type=float, help="highest learning rate")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--debug", action="store_true", help="tiny sizes, no compilation")
    parser.add_argument("--export", type=Path, metavar="DIR", help="write the trained components to DIR")
    return parser.parse_args()


def main() -> None:
    """Runs the stage and the export that the command line asks for."""
    args = parse_args()
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    overrides = {"peak_rate": args.peak_rate} if args.peak_rate else {}
    if args.clip:
        overrides |= {"num_clips": args.clip[0], "num_frames": args.clip[1]}
    budget, device = Budget(args.minutes, args.steps), torch.device(args.device)
    if args.stage == "vae":
        settings = dataclasses.replace(DEBUG_VAE if args.debug else VaeSettings(), **overrides)
        train_vae(args.state, budget, device, args.seed, settings)
    elif args.stage is not None:
        settings = dataclasses.replace(DEBUG_TRANSFORMER if args.debug else TransformerSettings(), **overrides)
        train_transformer(args.state, budget, device, args.seed, settings)
    if args.export is not None:
        export_components(args.state, args.export)


if __name__ == "__main__":
    main()
