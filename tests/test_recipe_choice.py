"""Recipes at hand: listed by a command, given by the user, changed by single arguments of a call."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_components import PROMPT, QUICK, latents_of, make_pipeline, seed

from diffusers_ardiff import ARDiffusionPipeline
from diffusers_ardiff.recipes import RECIPE_FIELDS, Recipe, list_recipes, load_recipe, override_recipe
from diffusers_ardiff.recipes.__main__ import main


class TestCommand:
    def test_list(self, capsys: pytest.CaptureFixture) -> None:
        assert main([]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [line.split()[0] for line in lines[1:]] == list_recipes()
        longlive = next(line for line in lines if line.startswith("longlive "))
        assert " ".join(longlive.split()) == "longlive 3 3 + 9 1000 937.5 833.3 625 5 0 absolute 480x832 16"
        assert "0 + all of 21" in next(line for line in lines if line.startswith("self-forcing"))

    def test_one(self, capsys: pytest.CaptureFixture) -> None:
        assert main(["longlive"]) == 0
        assert Recipe.from_dict(json.loads(capsys.readouterr().out)) == load_recipe("longlive")

    def test_unknown(self, capsys: pytest.CaptureFixture) -> None:
        assert main(["sora"]) == 2
        assert "unknown recipe 'sora': known are" in capsys.readouterr().err


def documented_row(recipe: Recipe) -> str:
    """What docs/recipes.md says of a recipe."""
    window = recipe.num_window_frames or f"all of {recipe.max_latent_frames}"
    steps = " ".join(f"{step:g}" for step in recipe.denoising_steps) + (" 0" if recipe.clean_last_step else "")
    first = recipe.first_chunk_denoising_steps
    steps += f"; first chunk {' '.join(f'{step:g}' for step in first)}" if first else ""
    limit = f", below {recipe.rope_limit_frames}" if recipe.rope_limit_frames else ""
    past = f"`{recipe.context_mode}`" + (", first frame encoded again" if recipe.encode_first_frame else "")
    cells = [
        f"`{recipe.name}`",
        recipe.chunk_frames,
        f"{recipe.num_sink_frames} + {window}",
        steps,
        f"{recipe.shift:g}" if recipe.warp_steps else "not warped",
        f"{recipe.commit_timestep:g}",
        past,
        recipe.rope_policy + limit,
        f"{recipe.width}x{recipe.height}, {recipe.fps}",
        "Wan 2.2" if recipe.name == "longlive-2" else "Wan 2.1",
    ]
    return f"| {' | '.join(map(str, cells))} |"


def test_table_in_the_docs() -> None:
    """It lacked two recipes, and shift, commit, rate and VAE of all."""
    page = (Path(__file__).parents[1] / "docs" / "recipes.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert rows == [documented_row(load_recipe(name)) for name in list_recipes()]


class TestOverrides:
    """Arguments of a call that replace single fields of the recipe."""

    @pytest.mark.parametrize(
        "fields",
        [
            {"denoising_steps": [1000, 400]},
            {"chunk_frames": 2},
            {"num_window_frames": 3, "num_sink_frames": 0},
            {"shift": 3.0},
            {"commit_timestep": 100.0},
            {"first_chunk_frames": 1},
        ],
    )
    def test_equal_to_a_changed_recipe(self, pipe: ARDiffusionPipeline, fields: dict[str, Any]) -> None:
        call: dict[str, Any] = {"num_frames": 33, "generator": None}
        plain = latents_of(pipe, **call | {"generator": seed(0)})
        expected = latents_of(pipe, **call | {"generator": seed(0), "recipe": QUICK.replace(**fields)})
        changed = latents_of(pipe, **call | {"generator": seed(0)}, **fields)
        assert torch.equal(changed, expected) and not torch.equal(changed, plain)
        with pipe.stream(PROMPT, num_frames=33, generator=seed(0), output_type="latent", **fields) as stream:
            assert torch.equal(torch.cat([chunk.frames for chunk in stream], dim=2), expected)

    def test_the_recipe_of_the_pipeline_stays(self, pipe: ARDiffusionPipeline) -> None:
        latents_of(pipe, shift=2.0, recipe=None)
        assert pipe.recipe == QUICK

    def test_a_window_replaces_the_full_history_and_back(self) -> None:
        longlive, self_forcing = load_recipe("longlive"), load_recipe("self-forcing")
        windowed = override_recipe(self_forcing, {"num_window_frames": 9})
        assert (windowed.num_window_frames, windowed.max_latent_frames) == (9, None)
        full = override_recipe(longlive, {"max_latent_frames": 30})
        assert (full.num_window_frames, full.max_latent_frames) == (None, 30)
        assert override_recipe(longlive, {}) is longlive

    def test_every_field_that_samples_can_be_named(self) -> None:
        assert {"chunk_frames", "num_window_frames", "denoising_steps", "rope_policy", "warp_steps"} <= set(
            RECIPE_FIELDS
        )
        assert not {"name", "height", "num_frames", "guidance_scale"} & set(RECIPE_FIELDS)

    @pytest.mark.parametrize("window", [1, 2])
    def test_window_smaller_than_a_chunk(self, pipe: ARDiffusionPipeline, window: int) -> None:
        message = (
            rf"num_window_frames = {window}: allowed is at least chunk_frames = 3, since a chunk attends to itself"
        )
        with pytest.raises(ValueError, match=message):
            pipe(PROMPT, num_window_frames=window)
        with pytest.raises(ValueError, match=message):
            pipe.stream(PROMPT, num_window_frames=window)

    def test_unknown_names(self, pipe: ARDiffusionPipeline) -> None:
        for call in (pipe, pipe.stream):
            with pytest.raises(
                TypeError, match=r"unexpected argument 'num_windw_frames'; did you mean 'num_window_frames'"
            ):
                call(PROMPT, num_windw_frames=3)
        with pytest.raises(TypeError, match=r"__call__\(\) got an unexpected argument 'num_inference_steps'"):
            pipe(PROMPT, num_inference_steps=3)


def test_recipe_from_a_file(pipe: ARDiffusionPipeline, tmp_path: Path) -> None:
    mine = QUICK.replace(name="mine", denoising_steps=(1000, 300))
    (tmp_path / "mine.json").write_text(json.dumps(mine.to_dict()), encoding="utf-8")
    assert torch.equal(latents_of(pipe, recipe=str(tmp_path / "mine.json")), latents_of(pipe, recipe=mine))
    assert torch.equal(latents_of(pipe, recipe=mine.to_dict()), latents_of(pipe, recipe=mine))


@pytest.mark.parametrize("form", ["object", "mapping"])
def test_recipe_may_be_set(tmp_path: Path, form: str) -> None:
    """``pipe.recipe = ...`` was refused as a property without a setter, and nothing said how else to keep a recipe."""
    pipe, mine = make_pipeline(QUICK), QUICK.replace(name="mine", num_window_frames=3)
    expected = latents_of(pipe, recipe=mine)
    pipe.recipe = mine if form == "object" else mine.to_dict()
    assert pipe.recipe == mine
    assert torch.equal(latents_of(pipe, recipe=None), expected)
    pipe.save_pretrained(tmp_path)
    assert ARDiffusionPipeline.from_pretrained(tmp_path).recipe == mine
    with pytest.raises(ValueError, match="unknown recipe 'sora'"):
        pipe.recipe = "sora"
    assert pipe.recipe == mine
