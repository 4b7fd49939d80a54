"""``python -m diffusers_ardiff.recipes``: the recipes that come with the package, or one of them as JSON."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from . import Recipe, list_recipes, load_recipe

_HEADER = ("name", "chunk", "sink + window", "timesteps", "shift", "commit", "rope", "size", "fps")


def describe(recipe: Recipe) -> tuple[str, ...]:
    """One row of the list, in the order of its header; frames are latent frames."""
    window = (
        f"all of {recipe.max_latent_frames}" if recipe.num_window_frames is None else str(recipe.num_window_frames)
    )
    steps = " ".join(f"{timestep:.4g}" for timestep in recipe.timesteps(1))
    return (
        recipe.name,
        str(recipe.chunk_frames),
        f"{recipe.num_sink_frames} + {window}",
        steps,
        f"{recipe.shift:g}",
        f"{recipe.commit_timestep:.4g}",
        recipe.rope_policy,
        f"{recipe.height}x{recipe.width}",
        str(recipe.fps),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 2 for an unknown recipe."""
    parser = argparse.ArgumentParser(prog="python -m diffusers_ardiff.recipes", description=__doc__)
    parser.add_argument("name", nargs="?", help="a recipe's name or a .json file; without one, all are listed")
    name = parser.parse_args(argv).name
    if name is None:
        rows = [_HEADER, *(describe(load_recipe(known)) for known in list_recipes())]
        widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADER))]
        for row in rows:
            print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        return 0
    try:
        print(json.dumps(load_recipe(name).to_dict(), indent=2))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
