"""Inference recipes of the public autoregressive video models, as data.

recipe = load_recipe("longlive")
recipe = load_recipe("self-forcing").replace(num_window_frames=9, num_sink_frames=3, max_latent_frames=None)
"""

import json
import os
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from ..rope_policies import ROPE_POLICIES
from .overrides import RECIPE_FIELDS, override_recipe
from .recipe import Recipe, window_from_peer

__all__ = [
    "RECIPE_FIELDS",
    "ROPE_POLICIES",
    "Recipe",
    "list_recipes",
    "load_recipe",
    "override_recipe",
    "window_from_peer",
]


def list_recipes() -> list[str]:
    """Names of the recipes that come with the package, sorted."""
    files = resources.files(__name__).iterdir()
    return sorted(file.name.removesuffix(".json") for file in files if file.name.endswith(".json"))


def load_recipe(name_or_recipe: "str | os.PathLike[str] | Recipe | Mapping[str, Any]") -> Recipe:
    """Turn whatever names a recipe into a :class:`Recipe`.

    Args:
        name_or_recipe: a name from `list_recipes`, a path that ends in ``.json``, a mapping of field values, or a
            recipe (returned as it is).

    Raises:
        ValueError: unknown name (the known ones are listed), no such file, no JSON object in it, or invalid fields.
        TypeError: an object of another kind.
    """
    if isinstance(name_or_recipe, Recipe):
        return name_or_recipe
    if isinstance(name_or_recipe, Mapping):
        return Recipe.from_dict(name_or_recipe)
    if not isinstance(name_or_recipe, (str, os.PathLike)):
        raise TypeError(
            f"recipe of type {type(name_or_recipe).__name__}: allowed are a name, a path to a .json file, a mapping "
            f"or a Recipe; known names are {list_recipes()}."
        )
    name = os.fspath(name_or_recipe)
    if name.endswith(".json"):
        return _parse(name, _read(Path(name)))
    if name not in list_recipes():
        raise ValueError(
            f"unknown recipe {name!r}: known are {list_recipes()}; choose one of them or give a path to a .json file."
        )
    return _parse(name, (resources.files(__name__) / f"{name}.json").read_text(encoding="utf-8"))


def _read(path: Path) -> str:
    if not path.is_file():
        raise ValueError(
            f"recipe file '{path}' does not exist: give the path of a .json file or one of {list_recipes()}."
        )
    return path.read_text(encoding="utf-8")


def _parse(where: str, text: str) -> Recipe:
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"recipe {where!r} is not valid JSON ({error}): write it with json.dump(recipe.to_dict(), f)."
        ) from error
    if not isinstance(values, dict):
        raise ValueError(
            f"recipe {where!r} holds a {type(values).__name__}: allowed is a JSON object with the fields of Recipe."
        )
    return Recipe.from_dict(values)
