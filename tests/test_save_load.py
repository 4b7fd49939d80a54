"""Where pipelines come from and go to: plain Wan folders, saved ones, incomplete ones, original checkpoints."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline, WanPipeline
from safetensors.torch import load_file, save_file
from tiny_components import PROMPT, RECIPE, latents_of, make_components, make_pipeline, make_transformer

import diffusers_ardiff
from diffusers_ardiff import ARDiffusionPipeline, Recipe
from diffusers_ardiff.recipes import load_recipe

PACKAGE_ROOT = Path(diffusers_ardiff.__file__).parents[1]

LOAD_AND_RUN = """
import sys
from safetensors.torch import save_file
from tiny_components import latents_of
from diffusers_ardiff import ARDiffusionPipeline

pipe = ARDiffusionPipeline.from_pretrained(sys.argv[1])
pipe.set_progress_bar_config(disable=True)
save_file({"latents": latents_of(pipe, recipe=None).contiguous()}, sys.argv[2])
"""


@pytest.fixture(scope="module")
def wan_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ``WanPipeline`` itself writes."""
    folder = tmp_path_factory.mktemp("models") / "wan"
    WanPipeline(**make_components()).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def saved_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "saved"
    make_pipeline(RECIPE).save_pretrained(folder)
    return folder


@pytest.fixture
def copy(wan_folder: Path, tmp_path: Path) -> Path:
    """A copy of the folder to break."""
    return Path(shutil.copytree(wan_folder, tmp_path / "copy"))


def load(folder: Any, **kwargs: Any) -> ARDiffusionPipeline:
    pipe = ARDiffusionPipeline.from_pretrained(folder, **kwargs)
    pipe.set_progress_bar_config(disable=True)
    return pipe


class TestPlainWanFolder:
    def test_runs_like_its_components(self, wan_folder: Path) -> None:
        pipe = load(wan_folder, recipe=RECIPE)
        assert torch.equal(latents_of(pipe), latents_of(make_pipeline()))

    def test_default_recipe(self, wan_folder: Path) -> None:
        assert load(wan_folder).recipe == load_recipe("self-forcing")

    @pytest.mark.parametrize("recipe", ["longlive", load_recipe("longlive"), load_recipe("longlive").to_dict()])
    def test_recipe_by_name_mapping_or_object(self, wan_folder: Path, recipe: Any) -> None:
        assert load(wan_folder, recipe=recipe).recipe == load_recipe("longlive")

    def test_unknown_recipe(self, wan_folder: Path) -> None:
        with pytest.raises(ValueError, match=r"unknown recipe 'sora': known are .*'longlive'"):
            load(wan_folder, recipe="sora")

    def test_dtype(self, wan_folder: Path) -> None:
        assert load(wan_folder, dtype=torch.bfloat16).transformer.dtype == torch.bfloat16

    def test_own_component(self, wan_folder: Path) -> None:
        transformer = make_transformer(num_layers=1)
        assert load(wan_folder, transformer=transformer).transformer is transformer


class TestSaved:
    def test_same_output_in_a_new_process(self, saved_folder: Path, tmp_path: Path) -> None:
        """A saved third-party pipeline could not be loaded back, or forgot its sampling parameters."""
        path = os.pathsep.join([str(PACKAGE_ROOT), str(Path(__file__).parent)])
        command = [sys.executable, "-c", LOAD_AND_RUN, str(saved_folder), str(tmp_path / "out.safetensors")]
        done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        loaded = load_file(tmp_path / "out.safetensors")["latents"]
        assert torch.equal(loaded, latents_of(make_pipeline(), recipe=RECIPE))

    def test_recipe_is_in_the_config(self, saved_folder: Path) -> None:
        index = json.loads((saved_folder / "model_index.json").read_text(encoding="utf-8"))
        assert index["_class_name"] == "ARDiffusionPipeline"
        assert Recipe.from_dict(index["recipe"]) == RECIPE == load(saved_folder).recipe

    def test_recipe_given_replaces_the_saved_one(self, saved_folder: Path) -> None:
        assert load(saved_folder, recipe="longlive").recipe.name == "longlive"

    def test_components_are_those_of_diffusers_and_transformers(self, saved_folder: Path) -> None:
        """Components of a third-party library were recorded under the name of a folder, which cannot be imported."""
        index = json.loads((saved_folder / "model_index.json").read_text(encoding="utf-8"))
        libraries = {name: entry[0] for name, entry in index.items() if isinstance(entry, list)}
        assert set(libraries) == {"scheduler", "text_encoder", "tokenizer", "transformer", "transformer_2", "vae"}
        assert set(libraries.values()) <= {"diffusers", "transformers", None}
        assert not list(saved_folder.glob("**/*.py"))

    def test_second_generation(self, saved_folder: Path, tmp_path: Path) -> None:
        load(saved_folder).save_pretrained(tmp_path / "again")
        assert torch.equal(
            latents_of(load(tmp_path / "again"), recipe=None), latents_of(make_pipeline(), recipe=RECIPE)
        )

    def test_wan_pipeline_reads_it(self, saved_folder: Path) -> None:
        """Checkpoints stay plain diffusers folders."""
        pipe = WanPipeline.from_pretrained(saved_folder)
        for name, weight in make_transformer().state_dict().items():
            assert torch.equal(pipe.transformer.state_dict()[name], weight)

    def test_base_class_names_ours(self, saved_folder: Path) -> None:
        with pytest.raises(AttributeError, match="ARDiffusionPipeline"):
            DiffusionPipeline.from_pretrained(saved_folder)

    def test_without_optional_components(self, tmp_path: Path) -> None:
        make_pipeline(RECIPE, vae=None).save_pretrained(tmp_path / "no_vae")
        pipe = load(tmp_path / "no_vae")
        assert pipe.vae is None
        assert torch.equal(latents_of(pipe), latents_of(make_pipeline()))

    def test_components(self) -> None:
        pipe = make_pipeline()
        other = ARDiffusionPipeline(**pipe.components, recipe=pipe.recipe)
        other.set_progress_bar_config(disable=True)
        assert torch.equal(latents_of(other), latents_of(pipe))


class TestIncompleteFolders:
    @pytest.mark.parametrize("part", ["tokenizer", "text_encoder", "vae", "scheduler", "transformer"])
    def test_missing_files(self, copy: Path, part: str) -> None:
        shutil.rmtree(copy / part)
        with pytest.raises(OSError, match=rf"is incomplete: no files in {part}/\."):
            load(copy)

    def test_files_of_a_given_component_may_be_missing(self, copy: Path) -> None:
        shutil.rmtree(copy / "transformer")
        pipe = load(copy, transformer=make_transformer(), recipe=RECIPE)
        assert torch.equal(latents_of(pipe), latents_of(make_pipeline()))

    def test_missing_in_the_index(self, copy: Path) -> None:
        index = json.loads((copy / "model_index.json").read_text(encoding="utf-8"))
        del index["vae"], index["scheduler"]
        (copy / "model_index.json").write_text(json.dumps(index), encoding="utf-8")
        with pytest.raises(OSError, match=r"is incomplete: model_index.json does not list vae, scheduler\."):
            load(copy)

    def test_no_index(self, tmp_path: Path) -> None:
        with pytest.raises(OSError, match=r"model_index.json is missing\. A Wan folder has .*transformer/"):
            load(tmp_path)

    def test_index_that_is_no_json(self, copy: Path) -> None:
        (copy / "model_index.json").write_text("{", encoding="utf-8")
        with pytest.raises(OSError, match=r"model_index.json is no JSON object"):
            load(copy)

    def test_file(self, copy: Path) -> None:
        with pytest.raises(OSError, match=r"is not a folder.*original checkpoint file goes into ar_checkpoint="):
            load(copy / "model_index.json")

    @pytest.mark.parametrize("name", ["/no/such/folder", "./missing"])
    def test_no_such_folder(self, name: str) -> None:
        with pytest.raises(OSError, match=r"is not a folder"):
            load(name)

    def test_two_experts(self, wan_folder: Path, tmp_path: Path) -> None:
        components = make_components() | {"transformer_2": make_transformer(), "boundary_ratio": 0.9}
        WanPipeline(**components).save_pretrained(tmp_path / "two")
        with pytest.raises(ValueError, match="two experts"):
            load(tmp_path / "two")


class TestOriginalCheckpoint:
    """Weights of an autoregressive checkpoint on top of a base folder."""

    @pytest.fixture
    def checkpoint(self, tmp_path: Path) -> Path:
        weights = {name: -weight for name, weight in make_transformer().state_dict().items()}
        save_file(
            {f"model.{name}": weight.contiguous() for name, weight in weights.items()}, tmp_path / "ar.safetensors"
        )
        return tmp_path / "ar.safetensors"

    def test_replaces_the_weights(self, wan_folder: Path, checkpoint: Path) -> None:
        pipe = load(wan_folder, ar_checkpoint=checkpoint, recipe=RECIPE)
        for name, weight in make_transformer().state_dict().items():
            assert torch.equal(pipe.transformer.state_dict()[name], -weight)
        assert not torch.equal(latents_of(pipe), latents_of(make_pipeline()))

    def test_survives_saving(self, wan_folder: Path, checkpoint: Path, tmp_path: Path) -> None:
        pipe = load(wan_folder, ar_checkpoint=str(checkpoint), recipe=RECIPE)
        pipe.save_pretrained(tmp_path / "saved")
        assert torch.equal(latents_of(load(tmp_path / "saved")), latents_of(pipe))

    def test_of_another_size(self, wan_folder: Path, tmp_path: Path) -> None:
        save_file(make_transformer(num_layers=3).state_dict(), tmp_path / "big.safetensors")
        with pytest.raises(ValueError, match=r"big\.safetensors' was not loaded"):
            load(wan_folder, ar_checkpoint=tmp_path / "big.safetensors")

    def test_no_such_file(self, wan_folder: Path, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError, match=r"none\.pt"):
            load(wan_folder, ar_checkpoint=tmp_path / "none.pt")


def test_prompt_is_read_by_the_saved_tokenizer(saved_folder: Path) -> None:
    loaded, made = load(saved_folder), make_pipeline()
    assert torch.equal(loaded.encode_prompt(PROMPT)[0], made.encode_prompt(PROMPT)[0])
    assert loaded.tokenizer.model_max_length == made.tokenizer.model_max_length
