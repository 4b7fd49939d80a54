#!/usr/bin/env python
"""Write a plain diffusers folder, recipe included, from a published autoregressive checkpoint.

python scripts/convert_checkpoint.py self_forcing_dmd.pt --base Wan-AI/Wan2.1-T2V-1.3B-Diffusers \
    --recipe self-forcing --output models/self-forcing
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from diffusers_ardiff.checkpoints.families import FAMILIES
from diffusers_ardiff.conversion import DEFAULT_SHARD_BYTES, ConvertOptions, convert_checkpoint
from diffusers_ardiff.pipelines.loading import fetch_base
from diffusers_ardiff.recipes import list_recipes

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Command line of this script."""
    parser = argparse.ArgumentParser(description="Convert a published checkpoint to a diffusers folder.")
    parser.add_argument("checkpoint", nargs="?", type=Path, help="file, or folder of safetensors")
    parser.add_argument("--base", help="diffusers folder or hub id of the Wan model it was trained from")
    parser.add_argument("--recipe", help=f"a .json file or one of {', '.join(list_recipes())}")
    parser.add_argument("--output", type=Path, help="folder to make")
    parser.add_argument("--lora", type=Path, help="LoRA file to merge into the weights")
    parser.add_argument("--dtype", choices=DTYPES, help="of the weights written (default: as in the file)")
    parser.add_argument(
        "--max-shard-bytes", type=int, default=DEFAULT_SHARD_BYTES, help="largest shard (default: %(default)s)"
    )
    parser.add_argument(
        "--raw", action="store_true", help="take `generator`, not `generator_ema`, where both are there"
    )
    parser.add_argument("--list-families", action="store_true", help="print the published checkpoints, and stop")
    args = parser.parse_args(argv)
    missing = [f"--{name}" for name in ("base", "recipe", "output") if getattr(args, name) is None]
    if not args.list_families and (args.checkpoint is None or missing):
        parser.error(f"needed are a checkpoint, --base, --recipe and --output; missing: {missing or ['checkpoint']}.")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 2 for bad input."""
    args = parse_arguments(argv)
    if args.list_families:
        for family in FAMILIES:
            state = f"refused: {family.refused}" if family.refused else f"recipe {family.recipe or 'none'}"
            print(f"{family.name}: {'; '.join(family.files)}\n    {state}{'; ' if family.note else ''}{family.note}")
        return 0
    try:
        options = ConvertOptions(
            use_ema=not args.raw,
            lora=args.lora,
            dtype=DTYPES[args.dtype] if args.dtype else None,
            max_shard_bytes=args.max_shard_bytes,
        )
        base = fetch_base(args.base)
        report = convert_checkpoint(args.checkpoint, args.output, base=base, recipe=args.recipe, options=options)
    except (ValueError, TypeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{args.output}: {report.num_tensors} weights of {report.wrapper_key or 'the file'} ({report.layout} names)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
