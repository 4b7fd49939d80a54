"""Single fields of a recipe, changed for one call."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from .recipe import Recipe

_OF_THE_CALL = ("name", "source", "fps", "height", "width", "num_frames", "guidance_scale")
RECIPE_FIELDS = tuple(field.name for field in dataclasses.fields(Recipe) if field.name not in _OF_THE_CALL)
"""Fields that a call takes by name; the others are arguments of a call anyway, or do not change what is sampled."""


def override_recipe(recipe: Recipe, fields: Mapping[str, Any]) -> Recipe:
    """The recipe with some fields changed; a window replaces the full history, and the other way round.

    Raises:
        ValueError: an unknown field, or the result is no valid recipe.
    """
    changes = dict(fields)
    if changes.get("num_window_frames") is not None:
        changes.setdefault("max_latent_frames", None)
    elif changes.get("max_latent_frames") is not None:
        changes.setdefault("num_window_frames", None)
    return recipe.replace(**changes) if changes else recipe
