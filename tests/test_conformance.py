"""What diffusers' own test suites ask of a pipeline, a LoRA loader, offloading and attention processors, asked of ours.

The clauses follow its pipeline, memory, LoRA and attention mixins; components are ours.
"""

from __future__ import annotations

import copy
import inspect
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline
from diffusers.loaders.lora_pipeline import WanLoraLoaderMixin
from diffusers.utils import logging as diffusers_logging
from tiny_components import (
    PROMPT,
    QUICK,
    RECIPE,
    host_state,
    latents_of,
    make_components,
    make_pipeline,
    make_transformer,
    random_embeds,
    seed,
)

from diffusers_ardiff import ARDiffusionPipeline, attach_paged_attention

CALL: dict[str, Any] = {"num_frames": 9, "output_type": "pt"}
ONE_CHUNK = QUICK.replace(name="one-chunk", chunk_frames=3)


def video(pipe: ARDiffusionPipeline, prompt: Any = PROMPT, **call: Any) -> torch.Tensor:
    return pipe(prompt, **CALL | {"generator": seed(0)} | call).frames


def worst(a: torch.Tensor, b: torch.Tensor) -> float:
    return (a.float() - b.float()).abs().max().item()


class TestPipeline:
    def test_call_signature(self) -> None:
        parameters = inspect.signature(ARDiffusionPipeline.__call__).parameters
        required = [
            "prompt",
            "negative_prompt",
            "height",
            "width",
            "guidance_scale",
            "prompt_embeds",
            "negative_prompt_embeds",
        ]
        optional = ["num_videos_per_prompt", "generator", "latents", "output_type", "return_dict", "num_frames"]
        callbacks = ["callback_on_step_end", "callback_on_step_end_tensor_inputs", "max_sequence_length"]
        assert set(required + optional + callbacks) <= set(parameters)
        assert list(parameters)[1] == "prompt" and all(parameters[name].default is None for name in required)
        assert parameters["return_dict"].default is True and parameters["num_videos_per_prompt"].default == 1

    def test_optional_arguments_may_be_left_out(self, pipe: ARDiffusionPipeline) -> None:
        assert pipe(PROMPT, num_frames=5).frames.shape == (1, 5, 32, 48, 3)

    @pytest.mark.parametrize("rows", [1, 2, 3])
    def test_batch_sizes(self, pipe: ARDiffusionPipeline, rows: int) -> None:
        assert video(pipe, [PROMPT] * rows, generator=[seed(n) for n in range(rows)]).shape == (rows, 9, 3, 32, 48)

    def test_first_of_a_batch_is_the_single_one(self, pipe: ARDiffusionPipeline) -> None:
        batch = video(pipe, [PROMPT, "a blue square", "a circle"], generator=[seed(n) for n in range(3)])
        assert worst(batch[:1], video(pipe)) < 1e-4

    @pytest.mark.parametrize("num_videos", [1, 2])
    @pytest.mark.parametrize("prompts", [1, 2])
    def test_videos_per_prompt(self, pipe: ARDiffusionPipeline, num_videos: int, prompts: int) -> None:
        frames = video(pipe, [PROMPT] * prompts, num_videos_per_prompt=num_videos)
        assert frames.shape[0] == num_videos * prompts

    def test_tuple_is_the_dataclass(self, pipe: ARDiffusionPipeline) -> None:
        as_tuple = pipe(PROMPT, **CALL, generator=seed(0), return_dict=False)
        assert isinstance(as_tuple, tuple) and worst(as_tuple[0], video(pipe)) == 0

    def test_output_types_agree(self, pipe: ARDiffusionPipeline) -> None:
        pt = video(pipe)[0].permute(0, 2, 3, 1).numpy()
        as_numpy = video(pipe, output_type="np")[0]
        as_pil = np.stack([np.asarray(image) for image in video(pipe, output_type="pil")[0]])
        assert np.abs(pt - as_numpy).max() < 1e-6
        assert np.abs(as_pil / 255 - as_numpy).max() <= 0.5 / 255 + 1e-6

    def test_components(self, pipe: ARDiffusionPipeline) -> None:
        components = pipe.components
        assert all(hasattr(pipe, name) for name in components)
        assert set(components) == {"tokenizer", "text_encoder", "vae", "scheduler", "transformer", "transformer_2"}
        assert set(components) == set(inspect.signature(ARDiffusionPipeline.__init__).parameters) - {"self", "recipe"}

    def test_encode_prompt_in_isolation(self, pipe: ARDiffusionPipeline) -> None:
        """Text first, in a pipeline without the other models; the rest later, without text models."""
        texts = make_pipeline(QUICK, vae=None, transformer=None)
        positive, negative = texts.encode_prompt(PROMPT, "blurry", do_classifier_free_guidance=True)
        rest = make_pipeline(QUICK, text_encoder=None, tokenizer=None)
        call = {"guidance_scale": 3.0}
        frames = video(rest, None, prompt_embeds=positive, negative_prompt_embeds=negative, **call)
        assert worst(frames, video(pipe, negative_prompt="blurry", **call)) < 1e-4

    def test_guidance_off_and_on(self, pipe: ARDiffusionPipeline) -> None:
        plain, guided = video(pipe, guidance_scale=1.0), video(pipe, guidance_scale=7.0)
        assert plain.shape == guided.shape and worst(plain, guided) > 1e-3

    def test_to_dtype(self) -> None:
        pipe = make_pipeline(QUICK)
        models = [part for part in pipe.components.values() if hasattr(part, "dtype")]
        assert len(models) == 3 and all(model.dtype == torch.float32 for model in models)
        pipe.to(dtype=torch.bfloat16)
        assert all(model.dtype == torch.bfloat16 for model in models)
        assert torch.isfinite(video(pipe)).all()

    def test_to_device_leaves_the_video(self) -> None:
        pipe = make_pipeline(QUICK)
        before = video(pipe)
        assert worst(video(pipe.to("cpu")), before) == 0

    def test_unknown_component_is_not_taken(self) -> None:
        with pytest.raises(TypeError, match="unet"):
            ARDiffusionPipeline(**make_components(), unet=make_transformer())

    def test_progress_bar_can_be_switched_off(self, capsys: pytest.CaptureFixture) -> None:
        pipe = make_pipeline(QUICK)
        pipe.set_progress_bar_config(disable=True)
        pipe(PROMPT, num_frames=5)
        assert "%|" not in capsys.readouterr().err
        pipe.set_progress_bar_config(disable=False)
        pipe(PROMPT, num_frames=5)
        assert "%|" in capsys.readouterr().err

    def test_nothing_is_warned_of_in_a_plain_call(self, pipe: ARDiffusionPipeline, recwarn: Any) -> None:
        diffusers_logging.enable_propagation()
        video(pipe)
        assert [str(w.message) for w in recwarn if "diffusers_ardiff" in str(w.filename)] == []

    def test_class_is_one_pipeline(self) -> None:
        assert issubclass(ARDiffusionPipeline, (DiffusionPipeline,))
        assert issubclass(ARDiffusionPipeline, WanLoraLoaderMixin)


class TestCallbacks:
    def test_only_allowed_tensors(self, pipe: ARDiffusionPipeline) -> None:
        seen: list[str] = []

        def all_of_them(_pipe: Any, _index: int, _timestep: float, tensors: dict[str, Any]) -> dict[str, Any]:
            assert all(name in pipe._callback_tensor_inputs for name in tensors)
            seen.extend(tensors)
            return tensors

        names = pipe._callback_tensor_inputs
        video(pipe, callback_on_step_end=all_of_them, callback_on_step_end_tensor_inputs=names, guidance_scale=3.0)
        assert set(seen) == set(names)
        seen.clear()
        video(pipe, callback_on_step_end=all_of_them, callback_on_step_end_tensor_inputs=names[:1])
        assert set(seen) == {"latents"}

    def test_latents_set_to_zero_in_the_last_step(self, pipe: ARDiffusionPipeline) -> None:
        """With one chunk, the latents of the callback are those of the whole video."""

        def zero_at_the_end(pipeline: Any, index: int, _timestep: float, tensors: dict[str, Any]) -> dict[str, Any]:
            if index == pipeline.num_timesteps - 1:
                tensors["latents"] = torch.zeros_like(tensors["latents"])
            return tensors

        latents = pipe(
            PROMPT, num_frames=9, recipe=ONE_CHUNK, output_type="latent", callback_on_step_end=zero_at_the_end
        ).frames
        assert latents.shape[2] == 3 and latents.abs().sum() == 0

    def test_guidance_scale_raised_in_every_step(self, pipe: ARDiffusionPipeline) -> None:
        def raise_it(pipeline: Any, _index: int, _timestep: float, tensors: dict[str, Any]) -> dict[str, Any]:
            pipeline._guidance_scale += 1.0
            return tensors

        video(pipe, callback_on_step_end=raise_it, guidance_scale=2.0, num_frames=21)
        assert pipe.num_timesteps == 4 and pipe.guidance_scale == 2.0 + pipe.num_timesteps

    def test_interrupt_from_a_callback(self, pipe: ARDiffusionPipeline) -> None:
        steps: list[int] = []

        def stop(pipeline: Any, index: int, _timestep: float, tensors: dict[str, Any]) -> dict[str, Any]:
            steps.append(index)
            pipeline._interrupt = True
            return tensors

        pipe(PROMPT, num_frames=33, output_type="latent", callback_on_step_end=stop)
        assert steps == [0]


class TestSaving:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_local_round_trip(self, tmp_path: Path, dtype: torch.dtype) -> None:
        """Loaded, saved and loaded again: the same bits; in float32 also those of the pipeline that was saved first."""
        made = make_pipeline(QUICK)
        made.save_pretrained(tmp_path / "first")
        first = ARDiffusionPipeline.from_pretrained(tmp_path / "first", dtype=dtype)
        first.save_pretrained(tmp_path / "second")
        second = ARDiffusionPipeline.from_pretrained(tmp_path / "second", dtype=dtype)
        for pipe in (first, second):
            pipe.set_progress_bar_config(disable=True)
            assert all(part.dtype == dtype for part in pipe.components.values() if hasattr(part, "dtype"))
        assert worst(video(second), video(first)) == 0
        if dtype == torch.float32:
            assert worst(video(first), video(made)) < 1e-5

    @pytest.mark.parametrize("name", ARDiffusionPipeline._optional_components)
    def test_optional_components(self, tmp_path: Path, name: str) -> None:
        parts = make_components() | {name: None}
        ARDiffusionPipeline(**parts, recipe=QUICK).save_pretrained(tmp_path / "model")
        loaded = ARDiffusionPipeline.from_pretrained(tmp_path / "model")
        assert getattr(loaded, name) is None

    def test_index_lists_what_the_constructor_takes(self, tmp_path: Path) -> None:
        make_pipeline(QUICK).save_pretrained(tmp_path / "model")
        index = json.loads((tmp_path / "model" / "model_index.json").read_text(encoding="utf-8"))
        listed = {name for name in index if not name.startswith("_")}
        assert listed == set(inspect.signature(ARDiffusionPipeline.__init__).parameters) - {"self"}

    def test_loading_twice_shares_nothing(self, tmp_path: Path) -> None:
        make_pipeline(QUICK).save_pretrained(tmp_path / "model")
        first, second = (ARDiffusionPipeline.from_pretrained(tmp_path / "model") for _ in range(2))
        first.transformer.proj_out.weight.data.zero_()
        assert second.transformer.proj_out.weight.abs().sum() > 0


class TestMemory:
    def test_offload_twice(self) -> None:
        pipe = make_pipeline(QUICK)
        expected = video(pipe)
        pipe.enable_model_cpu_offload(device="cpu")
        assert worst(video(pipe), expected) == worst(video(pipe), expected) == 0
        hooks = [part._hf_hook for part in (pipe.text_encoder, pipe.transformer, pipe.vae)]
        assert all(hook is not None for hook in hooks)
        pipe.remove_all_hooks()
        assert worst(video(pipe), expected) == 0

    def test_hooks_survive_another_way_of_offloading(self) -> None:
        pipe = make_pipeline(QUICK)
        pipe.enable_model_cpu_offload(device="cpu")
        with pytest.raises(ValueError, match=r"[Oo]ffload"):
            pipe.transformer.enable_group_offload("cpu", "cpu", offload_type="leaf_level")

    @pytest.mark.parametrize("exclude", ["vae", "text_encoder"])
    def test_group_offload_with_an_exception(self, exclude: str) -> None:
        pipe = make_pipeline(QUICK)
        expected = video(pipe)
        pipe.enable_group_offload(
            torch.device("cpu"), torch.device("cpu"), offload_type="leaf_level", exclude_modules=exclude
        )
        assert not hasattr(getattr(pipe, exclude), "_diffusers_hook")
        assert worst(video(pipe), expected) < 1e-5

    @pytest.mark.parametrize("storage", [torch.bfloat16, torch.float8_e4m3fn])
    def test_layerwise_casting(self, storage: torch.dtype) -> None:
        pipe = make_pipeline(QUICK)
        pipe.transformer.enable_layerwise_casting(storage_dtype=storage, compute_dtype=torch.float32)
        frames = video(pipe)
        assert torch.isfinite(frames).all() and frames.shape == (1, 9, 3, 32, 48)


class TestAttention:
    """Attention mixins, while the processors are in the transformer and after."""

    def test_processors_are_found_by_their_names(self) -> None:
        transformer = make_transformer()
        names = list(transformer.attn_processors)
        with attach_paged_attention(transformer):
            assert list(transformer.attn_processors) == names
            kinds = {type(processor).__name__ for processor in transformer.attn_processors.values()}
            assert kinds == {"PagedWanSelfAttnProcessor", "PagedWanCrossAttnProcessor"}
        assert {type(p).__name__ for p in transformer.attn_processors.values()} == {"WanAttnProcessor"}

    def test_set_by_dictionary_or_one_for_all(self) -> None:
        """The host empties a dictionary that it is given, so it gets a copy."""
        transformer = make_transformer()
        stock = dict(transformer.attn_processors)
        transformer.set_attn_processor(dict(stock))
        assert transformer.attn_processors == stock
        with pytest.raises(ValueError, match="number of processors"):
            transformer.set_attn_processor(dict(list(stock.items())[:1]))

    def test_weights_and_their_names_stay(self) -> None:
        transformer = make_transformer()
        before = {name: weight.data_ptr() for name, weight in transformer.state_dict().items()}
        with attach_paged_attention(transformer):
            assert {name: weight.data_ptr() for name, weight in transformer.state_dict().items()} == before
            assert not any(isinstance(p, torch.nn.Module) for p in transformer.attn_processors.values())

    def test_transformer_can_be_copied_and_pickled_after_a_call(self) -> None:
        pipe = make_pipeline(QUICK)
        expected = latents_of(pipe)
        for twin in (copy.deepcopy(pipe.transformer), pickle.loads(pickle.dumps(pipe.transformer))):
            assert worst(latents_of(make_pipeline(QUICK, transformer=twin)), expected) < 1e-5

    def test_stock_forward_after_a_call(self) -> None:
        pipe = make_pipeline(QUICK)
        latents, embeds = torch.randn(1, 16, 2, 4, 6, generator=seed(1)), random_embeds(2)
        arguments = {"timestep": torch.tensor([500.0]), "encoder_hidden_states": embeds, "return_dict": False}
        with torch.no_grad():
            before = pipe.transformer(latents, **arguments)[0]
            state = host_state(pipe.transformer)
            video(pipe)
            assert host_state(pipe.transformer) == state
            assert torch.equal(pipe.transformer(latents, **arguments)[0], before)

    def test_fused_projections_come_and_go(self) -> None:
        pipe = make_pipeline(QUICK)
        before = video(pipe)
        pipe.transformer.fuse_qkv_projections()
        fused = video(pipe)
        pipe.transformer.unfuse_qkv_projections()
        assert worst(fused, before) < 1e-5 and worst(video(pipe), before) < 1e-5

    def test_compiled_blocks_have_one_graph(self) -> None:
        torch._dynamo.reset()
        counters = torch._dynamo.utils.counters
        counters.clear()
        pipe = make_pipeline(RECIPE, transformer=make_transformer(num_layers=4))
        expected = latents_of(pipe)
        pipe.transformer.compile_repeated_blocks(fullgraph=True, backend="eager")
        assert worst(latents_of(pipe), expected) < 1e-5
        assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


class TestLoraLoading:
    """Beyond tests/test_host_features.py::TestLora: what the LoRA mixin asks of the class."""

    def test_modules_that_take_a_lora(self) -> None:
        assert "transformer" in ARDiffusionPipeline._lora_loadable_modules

    def test_public_methods(self) -> None:
        names = "load_lora_weights unload_lora_weights fuse_lora unfuse_lora set_adapters disable_lora enable_lora"
        names += " delete_adapters get_list_adapters get_active_adapters save_lora_weights set_lora_device"
        assert [name for name in names.split() if not callable(getattr(ARDiffusionPipeline, name, None))] == []

    def test_adapter_names(self) -> None:
        from test_host_features import lora_state_dict

        pipe = make_pipeline(QUICK)
        pipe.load_lora_weights(lora_state_dict(), adapter_name="style")
        assert pipe.get_list_adapters() == {"transformer": ["style"]} and pipe.get_active_adapters() == ["style"]
        assert pipe.num_fused_loras == 0
        pipe.fuse_lora(components=["transformer"])
        assert pipe.num_fused_loras == 1

    def test_scales_by_block(self) -> None:
        from test_host_features import lora_state_dict

        pipe = make_pipeline(QUICK)
        pipe.load_lora_weights(lora_state_dict(), adapter_name="style")
        full = latents_of(pipe)
        pipe.transformer.set_adapters("style", weights={"blocks.0": 1.0, "blocks.1": 0.0})
        assert worst(latents_of(pipe), full) > 1e-4
