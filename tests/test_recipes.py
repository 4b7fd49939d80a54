"""Recipes: the numbers of each file, every refusal, and the way through JSON and back."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from diffusers_ardiff.recipes import Recipe, list_recipes, load_recipe, window_from_peer

FOUR_STEPS = (1000.0, 750.0, 500.0, 250.0)
WINDOWED: dict[str, Any] = {
    "name": "test",
    "chunk_frames": 3,
    "num_sink_frames": 3,
    "num_window_frames": 9,
    "denoising_steps": [1000, 750, 500, 250],
}
FULL_HISTORY = {**WINDOWED, "num_sink_frames": 0, "num_window_frames": None, "max_latent_frames": 21}

# name: (chunk, sink, window, max_latent_frames, steps, first chunk's steps, shift, warp)
PUBLISHED = {
    "causal-forcing-chunkwise": (3, 0, None, 21, FOUR_STEPS, None, 5.0, True),
    "causal-forcing-framewise": (1, 0, None, 21, FOUR_STEPS, None, 5.0, True),
    "causal-forcing-framewise-1step": (1, 0, None, 21, (1000.0,), FOUR_STEPS, 5.0, True),
    "causal-forcing-framewise-2step": (1, 0, None, 21, (1000.0, 500.0), None, 5.0, True),
    "causvid": (3, 0, None, 21, (1000.0, 757.0, 522.0), None, 8.0, False),
    "krea": (3, 1, 5, None, FOUR_STEPS, None, 5.0, True),
    "longlive": (3, 3, window_from_peer(12, 3), None, FOUR_STEPS, None, 5.0, True),
    "rolling-forcing": (3, 3, 18, None, (1000.0, 800.0, 600.0, 400.0, 200.0), None, 5.0, True),
    "longlive-2": (8, 8, window_from_peer(32, 8), None, FOUR_STEPS, None, 5.0, True),
    "reward-forcing": (3, 3, window_from_peer(9, 3), None, FOUR_STEPS, None, 5.0, True),
    "self-forcing": (3, 0, window_from_peer(-1, 0), 21, FOUR_STEPS, None, 5.0, True),
}

# name: (context mode, clean last step, RoPE policy, its limit) where they are not the usual ones
HOW = {"krea": ("recompute", True, "capped", 6), "rolling-forcing": ("rolling", False, "relative", None)}


def test_listed_are_the_published_ones() -> None:
    assert list_recipes() == sorted(PUBLISHED)


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_published_numbers(name: str) -> None:
    recipe = load_recipe(name)
    numbers = (
        recipe.chunk_frames,
        recipe.num_sink_frames,
        recipe.num_window_frames,
        recipe.max_latent_frames,
        recipe.denoising_steps,
        recipe.first_chunk_denoising_steps,
        recipe.shift,
        recipe.warp_steps,
    )
    assert recipe.name == name
    assert numbers == PUBLISHED[name]
    fps = 24 if name == "longlive-2" else 16
    assert (recipe.fps, recipe.guidance_scale, recipe.commit_timestep) == (fps, 1.0, 0.0)
    how = (recipe.context_mode, recipe.clean_last_step, recipe.rope_policy, recipe.rope_limit_frames)
    assert how == HOW.get(name, ("commit", False, "absolute", None))
    assert recipe.source


@pytest.mark.parametrize(
    ("steps", "shift", "expected"),
    [
        (FOUR_STEPS, 5.0, (1000.0, 937.5, 833.3333, 625.0)),
        (FOUR_STEPS, 8.0, (1000.0, 960.0, 888.8889, 727.2727)),
        (FOUR_STEPS, 1.0, FOUR_STEPS),
        ((1000.0, 500.0), 5.0, (1000.0, 833.3333)),
        ((1000.0, 800.0, 600.0, 400.0, 200.0), 5.0, (1000.0, 952.381, 882.353, 769.231, 555.556)),
    ],
)
def test_warped_timesteps(steps: tuple[float, ...], shift: float, expected: tuple[float, ...]) -> None:
    recipe = Recipe(**{**WINDOWED, "denoising_steps": steps, "shift": shift})
    assert recipe.timesteps() == pytest.approx(expected, abs=1e-3)
    assert recipe.sigmas() == tuple(timestep / 1000 for timestep in recipe.timesteps())


def test_steps_without_warp_are_taken_as_they_are() -> None:
    assert load_recipe("causvid").timesteps() == (1000.0, 757.0, 522.0)
    assert load_recipe("causvid").sigmas() == (1.0, 0.757, 0.522)


def test_only_the_first_chunk_has_its_own_steps() -> None:
    recipe = load_recipe("causal-forcing-framewise-1step")
    assert recipe.timesteps(0) == load_recipe("self-forcing").timesteps(0)
    assert recipe.timesteps(1) == recipe.timesteps(500) == (1000.0,)
    assert load_recipe("longlive").timesteps(0) == load_recipe("longlive").timesteps(1)


@pytest.mark.parametrize("chunk_index", [-1, 0.5, None])
def test_timesteps_refuse_what_is_no_chunk_index(chunk_index: Any) -> None:
    with pytest.raises(ValueError, match="chunk_index"):
        load_recipe("longlive").timesteps(chunk_index)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("name", "", "name = ''.*non-empty string"),
        ("name", 3, "name = 3.*non-empty string"),
        ("source", None, "source = None.*string"),
        ("chunk_frames", 0, "chunk_frames.*0"),
        ("chunk_frames", 3.0, r"chunk_frames.*3\.0"),
        ("chunk_frames", True, "chunk_frames.*True"),
        ("chunk_frames", 10, "num_window_frames = 9.*at least chunk_frames = 10.*enlarge"),
        ("first_chunk_frames", 0, "first_chunk_frames.*0"),
        ("first_chunk_frames", 13, r"num_window_frames \+ num_sink_frames = 12.*first_chunk_frames = 13"),
        ("num_sink_frames", -1, "num_sink_frames.*-1"),
        ("num_sink_frames", None, "num_sink_frames.*None"),
        ("num_window_frames", 2, "num_window_frames = 2.*at least chunk_frames = 3"),
        ("num_window_frames", 9.5, r"num_window_frames.*9\.5"),
        ("num_window_frames", None, "num_window_frames = None, max_latent_frames = None.*exactly one"),
        ("max_latent_frames", 21, "num_window_frames = 9, max_latent_frames = 21.*exactly one"),
        ("max_latent_frames", -21, "max_latent_frames.*-21"),
        ("denoising_steps", [], r"denoising_steps = \[\].*at least one step"),
        ("denoising_steps", 1000, "denoising_steps = 1000.*strictly decreasing"),
        ("denoising_steps", "1000", "denoising_steps = '1000'.*strictly decreasing"),
        ("denoising_steps", [1000, 0], r"denoising_steps contains 0.*\(0, 1000\].*clean_last_step=True"),
        ("denoising_steps", [1001], r"denoising_steps contains 1001.*\(0, 1000\]"),
        ("denoising_steps", [1000, math.nan], r"denoising_steps contains nan.*\(0, 1000\]"),
        ("denoising_steps", [1000, "750"], r"denoising_steps contains '750'"),
        ("denoising_steps", [750, 1000], r"denoising_steps = \[750, 1000\].*largest first"),
        ("denoising_steps", [1000, 1000], r"denoising_steps = \[1000, 1000\].*without repeats"),
        ("first_chunk_denoising_steps", [], r"first_chunk_denoising_steps = \[\].*at least one step"),
        ("shift", 0, "shift = 0.*above 0"),
        ("shift", math.nan, "shift = nan.*finite"),
        ("shift", math.inf, "shift = inf.*finite"),
        ("shift", "5", "shift = '5'.*number"),
        ("warp_steps", 1, "warp_steps = 1.*True and False"),
        ("warp_steps", None, "warp_steps = None.*True and False"),
        ("commit_timestep", -1, "commit_timestep = -1.*from 0 to 1000"),
        ("commit_timestep", 1000.5, r"commit_timestep = 1000\.5.*from 0 to 1000"),
        ("commit_timestep", math.nan, "commit_timestep = nan"),
        ("rope_policy", "spiral", "rope_policy = 'spiral'.*'absolute'"),
        ("fps", 0, "fps.*0"),
        ("height", -5, "height.*-5"),
        ("width", None, "width.*None"),
        ("num_frames", "x", "num_frames.*x"),
        ("fps", 16.0, r"fps.*16\.0"),
        ("guidance_scale", -0.1, r"guidance_scale = -0\.1.*at least 0"),
        ("guidance_scale", math.inf, "guidance_scale = inf.*finite"),
    ],
)
def test_each_field_is_validated(field: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Recipe(**{**WINDOWED, field: value})


def test_full_history_needs_room_for_sink_and_chunk() -> None:
    assert Recipe(**{**FULL_HISTORY, "max_latent_frames": 3}).max_latent_frames == 3
    with pytest.raises(ValueError, match=r"max_latent_frames = 3.*at least the sink plus the largest chunk = 4"):
        Recipe(**{**FULL_HISTORY, "max_latent_frames": 3, "num_sink_frames": 1})
    with pytest.raises(ValueError, match=r"max_latent_frames = 3.*= 4"):
        Recipe(**{**FULL_HISTORY, "max_latent_frames": 3, "first_chunk_frames": 4})


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_json_round_trip(name: str, tmp_path: Path) -> None:
    recipe = load_recipe(name)
    values = recipe.to_dict()
    assert not any(isinstance(value, tuple) for value in values.values())
    assert Recipe.from_dict(json.loads(json.dumps(values))) == recipe
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(values))
    assert load_recipe(str(file)) == load_recipe(file) == load_recipe(values) == recipe
    assert load_recipe(recipe) is recipe


def test_recipes_are_hashable_even_when_built_from_lists() -> None:
    assert hash(Recipe(**WINDOWED)) == hash(Recipe(**{**WINDOWED, "denoising_steps": FOUR_STEPS}))


def test_from_dict_names_unknown_and_missing_fields() -> None:
    with pytest.raises(ValueError, match=r"unknown fields \['window', 'sink'\]; known are \['name', 'chunk_frames'"):
        Recipe.from_dict({**WINDOWED, "window": 9, "sink": 3})
    with pytest.raises(ValueError, match=r"\['chunk_frames', 'denoising_steps'\] are missing; required are \['name'"):
        Recipe.from_dict({"name": "test", "num_window_frames": 9})


def test_replace_is_validated_and_leaves_the_original() -> None:
    recipe = load_recipe("self-forcing")
    rolling = recipe.replace(num_window_frames=9, num_sink_frames=3, max_latent_frames=None)
    assert (rolling.num_window_frames, rolling.num_sink_frames, recipe.num_window_frames) == (9, 3, None)
    with pytest.raises(ValueError, match="exactly one"):
        recipe.replace(num_window_frames=9)
    with pytest.raises(ValueError, match=r"Recipe.replace: unknown fields \['steps'\]; known are"):
        recipe.replace(steps=[1000])


@pytest.mark.parametrize(
    ("local_attn_size", "sink_size", "window"), [(12, 3, 9), (9, 3, 6), (5, 1, 4), (21, 0, 21), (-1, 0, None)]
)
def test_window_from_peer(local_attn_size: int, sink_size: int, window: int | None) -> None:
    assert window_from_peer(local_attn_size, sink_size) == window


@pytest.mark.parametrize(("local_attn_size", "sink_size"), [(3, 3), (0, 0), (-2, 0), (9.0, 3), (True, 0), (9, -1)])
def test_window_from_peer_refuses_what_leaves_no_window(local_attn_size: Any, sink_size: Any) -> None:
    with pytest.raises(ValueError, match="sink"):
        window_from_peer(local_attn_size, sink_size)


def test_unknown_recipes_name_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"unknown recipe 'Self-Forcing': known are \['causal-forcing-chunkwise'"):
        load_recipe("Self-Forcing")
    with pytest.raises(ValueError, match=r"unknown recipe '\.\./recipes/longlive'"):
        load_recipe("../recipes/longlive")
    with pytest.raises(ValueError, match=r"absent\.json' does not exist"):
        load_recipe(tmp_path / "absent.json")
    with pytest.raises(TypeError, match="recipe of type int: allowed are a name"):
        load_recipe(3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "message"), [("{", "not valid JSON"), ("[1]", "holds a list: allowed is a JSON object")]
)
def test_files_that_are_no_recipe(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "bad.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=message):
        load_recipe(file)
