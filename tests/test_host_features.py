"""What diffusers users do to a pipeline, done to this one: the video is that of the plain run, the pool stays put."""

from __future__ import annotations

import inspect
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import accelerate
import pytest
import torch
from diffusers import AutoencoderKLWan, DiffusionPipeline, WanPipeline, WanTransformer3DModel
from diffusers.models.attention_dispatch import _AttentionBackendRegistry
from peft import LoraConfig, get_peft_model_state_dict
from spoiled_offload import offloading_that_spoils_weights
from tiny_components import (
    PROMPT,
    QUICK,
    host_state,
    latents_of,
    make_components,
    make_pipeline,
    make_transformer,
    random_embeds,
    seed,
)
from torch._subclasses.fake_tensor import FakeTensor

from diffusers_ardiff import HUB_SHIM, ARDiffusionPipeline
from diffusers_ardiff.cache import KVManager

CPU = torch.device("cpu")
LINEARS = ["to_q", "to_k", "to_v", "to_out.0"]


@pytest.fixture(autouse=True)
def attention_backend() -> Iterator[None]:
    """`set_attention_backend` of any model changes diffusers' backend for the whole process."""
    before = _AttentionBackendRegistry._active_backend
    yield
    _AttentionBackendRegistry._active_backend = before


@pytest.fixture(scope="module")
def plain() -> torch.Tensor:
    return latents_of(make_pipeline(QUICK))


@pytest.fixture
def pipe() -> ARDiffusionPipeline:
    return make_pipeline(QUICK)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.isfinite(actual).all()
    assert (actual - expected).abs().max() <= 1e-5


@contextmanager
def pools_stay() -> Iterator[None]:
    """Every pool made in the block has its tensors where they were, and nobody asked to copy one of them."""
    made: list[tuple[KVManager, list[int]]] = []
    build, to = KVManager.__init__, torch.Tensor.to
    copies: list[int] = []

    def note(manager: KVManager, *args: Any, **kwargs: Any) -> None:
        build(manager, *args, **kwargs)
        made.append((manager, addresses(manager)))

    def watch(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        moved = to(tensor, *args, **kwargs)
        if isinstance(tensor, FakeTensor):  # of a trace, which holds no data
            return moved
        if moved.data_ptr() != tensor.data_ptr() and any(tensor.data_ptr() in pool for _, pool in made):
            copies.append(tensor.data_ptr())
        return moved

    with patch.object(KVManager, "__init__", note), patch.object(torch.Tensor, "to", watch):
        yield
    assert made and not copies
    assert all(addresses(manager) == before for manager, before in made)


def addresses(manager: KVManager) -> list[int]:
    return [pool.data_ptr() for pool in (*manager.storage.key_pools, *manager.storage.value_pools)]


def frames_of(pipe: ARDiffusionPipeline, **call: Any) -> torch.Tensor:
    return pipe(PROMPT, num_frames=21, generator=seed(0), output_type="pt", **call).frames


# -- where weights are ------------------------------------------------------------------------------------------------


class TestOffload:
    @pytest.fixture(scope="class")
    def frames(self) -> torch.Tensor:
        return frames_of(make_pipeline(QUICK))

    def test_model_offload(self, pipe: ARDiffusionPipeline, frames: torch.Tensor) -> None:
        pipe.enable_model_cpu_offload(device="cpu")
        with pools_stay():
            assert_close(frames_of(pipe), frames)
            assert_close(frames_of(pipe), frames)

    def test_sequential_offload(self, pipe: ARDiffusionPipeline, frames: torch.Tensor) -> None:
        """Weights are on the meta device between the calls of their modules, so a read past a hook fails."""
        for part in (pipe.text_encoder, pipe.transformer, pipe.vae):
            accelerate.cpu_offload(part, CPU, offload_buffers=len(part._parameters) > 0)
        assert pipe.transformer.blocks[0].attn1.to_q.weight.is_meta
        with pools_stay():
            assert_close(frames_of(pipe), frames)
        assert pipe.transformer.blocks[0].attn1.to_q.weight.is_meta

    @pytest.mark.parametrize(
        "options",
        [
            {"offload_type": "leaf_level"},
            {"offload_type": "block_level", "num_blocks_per_group": 1},
            {"offload_type": "block_level", "num_blocks_per_group": 2},
        ],
    )
    def test_group_offload(
        self, pipe: ARDiffusionPipeline, frames: torch.Tensor, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        on_device = offloading_that_spoils_weights(monkeypatch)
        pipe.enable_group_offload(CPU, CPU, **options)
        assert pipe.transformer.blocks[1].attn1.to_q.weight.isnan().all()
        with pools_stay():
            assert_close(frames_of(pipe), frames)
            assert_close(frames_of(pipe), frames)
        assert pipe.transformer.blocks[1].attn1.to_q.weight.isnan().all()
        assert not any(pipe.transformer.blocks[1] in group.modules for group in on_device)

    def test_offload_and_a_prompt_switch(self, pipe: ARDiffusionPipeline, monkeypatch: pytest.MonkeyPatch) -> None:
        def run(pipeline: ARDiffusionPipeline) -> torch.Tensor:
            with pipeline.stream(PROMPT, generator=seed(0), output_type="latent") as stream:
                chunks = [next(stream).latents]
                stream.switch_prompt("a blue square", mode="recache")
                return torch.cat([*chunks, next(stream).latents], dim=2)

        expected = run(pipe)
        offloading_that_spoils_weights(monkeypatch)
        pipe.enable_group_offload(CPU, CPU, offload_type="block_level", num_blocks_per_group=1)
        with pools_stay():
            assert_close(run(pipe), expected)

    @pytest.mark.parametrize("device_map", ["cpu", "balanced"])
    def test_device_map(self, saved: Path, device_map: str, plain: torch.Tensor) -> None:
        pipe = ARDiffusionPipeline.from_pretrained(saved, device_map=device_map)
        pipe.set_progress_bar_config(disable=True)
        with pools_stay():
            assert_close(latents_of(pipe), plain)


# -- what weights are -------------------------------------------------------------------------------------------------


class TestPrecision:
    def test_layerwise_casting(self, pipe: ARDiffusionPipeline) -> None:
        """Storage in bfloat16, computation in float32: the video of weights that were rounded to bfloat16 and back."""
        rounded = make_pipeline(QUICK)
        pipe.transformer.enable_layerwise_casting(storage_dtype=torch.bfloat16, compute_dtype=torch.float32)
        stored = pipe.transformer.state_dict()
        assert stored["blocks.0.attn1.to_q.weight"].dtype == torch.bfloat16
        rounded.transformer.load_state_dict({name: weight.float() for name, weight in stored.items()})
        with pools_stay():
            assert_close(latents_of(pipe), latents_of(rounded))
        assert pipe.transformer.state_dict()["blocks.0.attn1.to_q.weight"].dtype == torch.bfloat16

    def test_layerwise_casting_keeps_the_dtype_of_the_pool(self, pipe: ARDiffusionPipeline) -> None:
        pipe.transformer.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.bfloat16)
        assert pipe.create_cache(32, 48, decode=False).storage.dtype == torch.bfloat16

    def test_quantization_by_torchao(self, saved: Path, plain: torch.Tensor) -> None:
        quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
        from diffusers import PipelineQuantizationConfig, TorchAoConfig

        config = TorchAoConfig(quantization.Int8WeightOnlyConfig())
        pipe = ARDiffusionPipeline.from_pretrained(
            saved,
            quantization_config=PipelineQuantizationConfig(quant_mapping={"transformer": config}),
            dtype=torch.float32,  # diffusers loads torchao models in bfloat16 unless told otherwise
        )
        pipe.set_progress_bar_config(disable=True)
        linear = pipe.transformer.blocks[0].attn1.to_q
        assert type(linear.weight.data) is not torch.Tensor
        dense = make_transformer()
        weights = pipe.transformer.state_dict()
        dense.load_state_dict(
            {
                n: w.dequantize() if hasattr(w, "dequantize") and type(w) is not torch.Tensor else w
                for n, w in weights.items()
            }
        )
        with pools_stay():
            latents = latents_of(pipe)
        assert_close(latents, latents_of(make_pipeline(QUICK, transformer=dense)))
        assert 1e-4 < (latents - plain).abs().max() < 0.2

    def test_quantization_by_bitsandbytes(self) -> None:
        pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
        if not torch.cuda.is_available():
            pytest.skip("its layers need a GPU: tests/gpu/test_offload_gpu.py")

    def test_from_pipe_keeps_dtypes(self) -> None:
        """diffusers casts everything to float32 where no dtype is given, the source's own modules too."""
        wan = WanPipeline(**make_components(), transformer_2=None)
        wan.transformer.to(torch.bfloat16)
        kept = wan.transformer.scale_shift_table.data.float()
        wan.transformer.scale_shift_table.data = kept
        pipe = ARDiffusionPipeline.from_pipe(wan, recipe=QUICK)
        assert pipe.transformer is wan.transformer and pipe.recipe == QUICK
        assert wan.transformer.blocks[0].attn1.to_q.weight.dtype == torch.bfloat16
        assert wan.transformer.scale_shift_table.dtype == torch.float32
        assert (wan.vae.dtype, pipe.text_encoder.dtype) == (torch.float32, torch.float32)

    def test_from_pipe_takes_the_recipe_over(self, pipe: ARDiffusionPipeline, plain: torch.Tensor) -> None:
        other = ARDiffusionPipeline.from_pipe(pipe)
        other.set_progress_bar_config(disable=True)
        assert other.recipe == pipe.recipe == QUICK
        assert_close(latents_of(other, recipe=None), plain)
        changed = ARDiffusionPipeline.from_pipe(pipe, transformer=make_transformer(num_layers=1), recipe="longlive")
        assert (len(changed.transformer.blocks), changed.recipe.name) == (1, "longlive")

    def test_from_pipe_with_a_dtype_is_that_of_diffusers(self, pipe: ARDiffusionPipeline) -> None:
        assert ARDiffusionPipeline.from_pipe(pipe, dtype=torch.bfloat16).transformer.dtype == torch.bfloat16

    def test_from_pipe_and_back(self, pipe: ARDiffusionPipeline) -> None:
        wan = WanPipeline.from_pipe(pipe, dtype=torch.float32)
        assert wan.transformer is pipe.transformer
        with pytest.raises(TypeError, match=r"unexpected arguments \['recipes'\]; known: .*'recipe'"):
            ARDiffusionPipeline.from_pipe(wan, recipes="longlive")

    def test_dtype_by_component(self, saved: Path) -> None:
        pipe = ARDiffusionPipeline.from_pretrained(
            saved, dtype={"transformer": torch.bfloat16, "default": torch.float32}
        )
        assert (pipe.transformer.dtype, pipe.vae.dtype) == (torch.bfloat16, torch.float32)


# -- how attention runs ------------------------------------------------------------------------------------------------


class TestAttention:
    @pytest.mark.parametrize("backend", ["native", "_native_math"])
    def test_set_attention_backend(self, pipe: ARDiffusionPipeline, backend: str, plain: torch.Tensor) -> None:
        pipe.transformer.set_attention_backend(backend)
        before = host_state(pipe.transformer)
        with pools_stay():
            assert_close(latents_of(pipe), plain)
        assert host_state(pipe.transformer) == before
        assert pipe.transformer.blocks[0].attn2.processor._attention_backend is not None

    def test_fused_projections(self, pipe: ARDiffusionPipeline, plain: torch.Tensor) -> None:
        pipe.transformer.fuse_qkv_projections()
        assert pipe.transformer.blocks[0].attn1.fused_projections
        with pools_stay():
            assert_close(latents_of(pipe), plain)
        pipe.transformer.unfuse_qkv_projections()
        assert_close(latents_of(pipe), plain)

    def test_compile_repeated_blocks(self, pipe: ARDiffusionPipeline, plain: torch.Tensor) -> None:
        torch._dynamo.reset()
        pipe.transformer.compile_repeated_blocks(fullgraph=True, backend="eager")
        with pools_stay():
            assert_close(latents_of(pipe), plain)

    @pytest.mark.parametrize("kind", ["dictionary", "file"])
    def test_single_file_transformer(self, saved: Path, tmp_path: Path, kind: str, plain: torch.Tensor) -> None:
        """diffusers' own route for original-layout files; its map is ours."""
        from safetensors.torch import save_file
        from test_checkpoints import to_original

        weights = {f"model.diffusion_model.{to_original(n)}": w for n, w in make_transformer().state_dict().items()}
        source: Any = weights
        if kind == "file":
            source = str(tmp_path / "wan.safetensors")
            save_file(weights, source)
        transformer = WanTransformer3DModel.from_single_file(source, config=str(saved), subfolder="transformer")
        assert_close(latents_of(make_pipeline(QUICK, transformer=transformer.eval())), plain)

    def test_cache_of_the_host_is_refused(self, pipe: ARDiffusionPipeline) -> None:
        """First-block caching skips blocks, which would then have no keys."""
        from diffusers import FirstBlockCacheConfig

        pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=1e9))
        with pytest.raises(RuntimeError, match=r"disable_cache\(\)"):
            latents_of(pipe)
        pipe.transformer.disable_cache()
        latents_of(pipe)


# -- LoRA ---------------------------------------------------------------------------------------------------------------


def lora_state_dict(value: int = 0, prefix: str = "transformer") -> dict[str, torch.Tensor]:
    """A LoRA whose B is not zero, as ``save_lora_weights`` writes it."""
    transformer = make_transformer()
    transformer.add_adapter(LoraConfig(r=4, lora_alpha=4, target_modules=LINEARS, init_lora_weights=False))
    random = torch.Generator().manual_seed(value)
    state = get_peft_model_state_dict(transformer, adapter_name="default")
    return {f"{prefix}.{n}": 0.3 * torch.randn(w.shape, generator=random) for n, w in sorted(state.items())}


class TestLora:
    def test_load_scale_fuse_unload(self, pipe: ARDiffusionPipeline, plain: torch.Tensor) -> None:
        """A LoRA whose keys matched nothing loaded, and changed nothing."""
        pipe.load_lora_weights(lora_state_dict(), adapter_name="style")
        with pools_stay():
            full = latents_of(pipe)
        assert (full - plain).abs().max() > 1e-3
        pipe.set_adapters(["style"], adapter_weights=[0.5])
        half = latents_of(pipe)
        assert (half - full).abs().max() > 1e-3 and (half - plain).abs().max() > 1e-3
        pipe.set_adapters(["style"], adapter_weights=[0.0])
        assert_close(latents_of(pipe), plain)
        pipe.set_adapters(["style"], adapter_weights=[1.0])
        pipe.fuse_lora(components=["transformer"])
        with pools_stay():
            assert_close(latents_of(pipe), full)
        pipe.unfuse_lora(components=["transformer"])
        assert_close(latents_of(pipe), full)
        pipe.disable_lora()
        assert_close(latents_of(pipe), plain)
        pipe.enable_lora()
        assert_close(latents_of(pipe), full)
        pipe.unload_lora_weights()
        assert_close(latents_of(pipe), plain)

    def test_fused_with_half_its_scale(self, pipe: ARDiffusionPipeline) -> None:
        pipe.load_lora_weights(lora_state_dict(), adapter_name="style")
        pipe.set_adapters(["style"], adapter_weights=[0.5])
        half = latents_of(pipe)
        pipe.set_adapters(["style"], adapter_weights=[1.0])
        pipe.fuse_lora(components=["transformer"], lora_scale=0.5)
        assert_close(latents_of(pipe), half)

    def test_two_adapters(self, pipe: ARDiffusionPipeline) -> None:
        pipe.load_lora_weights(lora_state_dict(0), adapter_name="a")
        first = latents_of(pipe)
        pipe.load_lora_weights(lora_state_dict(1), adapter_name="b")
        pipe.set_adapters(["a", "b"])
        both = latents_of(pipe)
        assert (both - first).abs().max() > 1e-3
        pipe.delete_adapters("b")
        assert pipe.get_active_adapters() == ["a"]
        assert_close(latents_of(pipe), first)

    def test_text_keys_follow_the_lora(self, pipe: ARDiffusionPipeline) -> None:
        """Cross-attention keys are kept for a prompt; a LoRA that arrives later must not find the old ones."""
        state = {name: w for name, w in lora_state_dict().items() if ".attn2." in name}
        plain = latents_of(pipe)
        pipe.load_lora_weights(state)
        assert (latents_of(pipe) - plain).abs().max() > 1e-4

    def test_processors_attached_again(self, pipe: ARDiffusionPipeline) -> None:
        pipe.load_lora_weights(lora_state_dict())
        full = latents_of(pipe)
        pipe._attachment = None
        assert_close(latents_of(pipe), full)

    def test_wrong_prefix_is_told(self, pipe: ARDiffusionPipeline, caplog: pytest.LogCaptureFixture) -> None:
        import logging

        root = logging.getLogger("diffusers")
        root.addHandler(caplog.handler)
        try:
            pipe.load_lora_weights(lora_state_dict(prefix="unet"))
        except ValueError as error:
            assert "unet" in str(error) or "LoRA" in str(error)
        else:
            assert "No LoRA keys associated" in caplog.text
        finally:
            root.removeHandler(caplog.handler)

    def test_save_and_load(self, pipe: ARDiffusionPipeline, tmp_path: Path) -> None:
        state = lora_state_dict()
        pipe.load_lora_weights(state)
        full = latents_of(pipe)
        layers = {name.removeprefix("transformer."): weight for name, weight in state.items()}
        ARDiffusionPipeline.save_lora_weights(tmp_path / "lora", transformer_lora_layers=layers)
        other = make_pipeline(QUICK)
        other.load_lora_weights(tmp_path / "lora")
        assert_close(latents_of(other), full)

    def test_with_group_offload(self, pipe: ARDiffusionPipeline, monkeypatch: pytest.MonkeyPatch) -> None:
        pipe.load_lora_weights(lora_state_dict())
        full = latents_of(pipe)
        offloading_that_spoils_weights(monkeypatch)
        pipe.enable_group_offload(CPU, CPU, offload_type="block_level", num_blocks_per_group=1)
        with pools_stay():
            assert_close(latents_of(pipe), full)


# -- files --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "model"
    make_pipeline(QUICK).save_pretrained(folder)
    return folder


class TestFiles:
    @pytest.mark.parametrize(
        ("save", "load"),
        [
            ({"safe_serialization": False}, {}),
            ({"variant": "fp16"}, {"variant": "fp16"}),
            ({"max_shard_size": "20KB"}, {}),
        ],
    )
    def test_ways_to_save(
        self, tmp_path: Path, save: dict[str, Any], load: dict[str, Any], plain: torch.Tensor
    ) -> None:
        make_pipeline(QUICK).save_pretrained(tmp_path / "model", **save)
        names = {path.name for path in (tmp_path / "model" / "transformer").iterdir()}
        assert "diffusion_pytorch_model.safetensors" not in names
        pipe = ARDiffusionPipeline.from_pretrained(tmp_path / "model", **load)
        pipe.set_progress_bar_config(disable=True)
        assert_close(latents_of(pipe), plain)

    def test_unknown_variant(self, saved: Path) -> None:
        with pytest.raises((ValueError, OSError), match="variant"):
            ARDiffusionPipeline.from_pretrained(saved, variant="fp8")

    def test_base_class_through_the_shim(self, saved: Path, tmp_path: Path, plain: torch.Tensor) -> None:
        """`DiffusionPipeline` looks classes up in diffusers; the file that comes with this package names ours."""
        pipe = DiffusionPipeline.from_pretrained(saved, custom_pipeline=HUB_SHIM, trust_remote_code=True)
        assert type(pipe) is ARDiffusionPipeline and pipe.recipe == QUICK
        pipe.set_progress_bar_config(disable=True)
        assert_close(latents_of(pipe), plain)

    def test_shim_inside_a_folder(self, saved: Path, tmp_path: Path) -> None:
        """A hub repository can carry the shim, and then needs no argument but the user's trust."""
        import json

        folder = Path(shutil.copytree(saved, tmp_path / "repository"))
        shutil.copy(Path(HUB_SHIM) / "pipeline.py", folder)
        index = json.loads((folder / "model_index.json").read_text(encoding="utf-8"))
        index["_class_name"] = ["pipeline", "ARDiffusionPipeline"]
        (folder / "model_index.json").write_text(json.dumps(index), encoding="utf-8")
        assert type(DiffusionPipeline.from_pretrained(folder, trust_remote_code=True)) is ARDiffusionPipeline
        assert ARDiffusionPipeline.from_pretrained(folder, trust_remote_code=True).recipe == QUICK

    def test_base_class_without_it_names_ours(self, saved: Path) -> None:
        with pytest.raises(AttributeError, match="ARDiffusionPipeline"):
            DiffusionPipeline.from_pretrained(saved)


# -- the VAE's options --------------------------------------------------------------------------------------------------


class TestVaeOptions:
    def test_tiling_is_refused_before_anything_runs(self, pipe: ARDiffusionPipeline) -> None:
        pipe.vae.enable_tiling()
        with pytest.raises(NotImplementedError, match=r"Call vae\.disable_tiling\(\)"):
            pipe(PROMPT, num_frames=9)
        with pytest.raises(NotImplementedError, match=r"Call vae\.disable_tiling\(\)"):
            pipe.stream(PROMPT)
        latents = latents_of(pipe)
        pipe.vae.disable_tiling()
        assert frames_of(pipe).shape[1] == 21 and torch.isfinite(latents).all()

    def test_tiled_decode_of_the_whole_video_afterwards(self, pipe: ARDiffusionPipeline) -> None:
        """What the refusal offers: latents from us, frames from the tiled VAE in one call."""
        plain = frames_of(pipe)
        latents = latents_of(pipe, recipe=None)
        pipe.vae.enable_tiling(tile_sample_min_height=64, tile_sample_min_width=64)
        mean, std = (
            torch.tensor(v).view(1, -1, 1, 1, 1) for v in (pipe.vae.config.latents_mean, pipe.vae.config.latents_std)
        )
        with torch.no_grad():
            frames = pipe.vae.decode(latents * std + mean).sample.transpose(1, 2) / 2 + 0.5
        assert_close(frames[:, :21].clamp(0, 1), plain)

    def test_pipeline_has_no_switch_of_its_own(self, pipe: ARDiffusionPipeline) -> None:
        assert not hasattr(pipe, "enable_vae_tiling") and isinstance(pipe.vae, AutoencoderKLWan)


# -- arguments of a call ------------------------------------------------------------------------------------------------


def same_rows(
    pipe: ARDiffusionPipeline, first: Callable[[], torch.Tensor], second: Callable[[], torch.Tensor]
) -> None:
    assert_close(first(), second())


class TestCall:
    def test_prompt_embeds(self, pipe: ARDiffusionPipeline) -> None:
        embeds, _ = pipe.encode_prompt(PROMPT, do_classifier_free_guidance=False)
        same_rows(pipe, lambda: latents_of(pipe, None, prompt_embeds=embeds), lambda: latents_of(pipe))

    def test_negative_prompt_and_its_embeds(self, pipe: ARDiffusionPipeline) -> None:
        positive, negative = pipe.encode_prompt(PROMPT, "blurry")
        call = {"guidance_scale": 3.0}
        by_text = latents_of(pipe, negative_prompt="blurry", **call)
        assert_close(latents_of(pipe, None, prompt_embeds=positive, negative_prompt_embeds=negative, **call), by_text)
        assert (by_text - latents_of(pipe, negative_prompt="red", **call)).abs().max() > 1e-5

    def test_several_videos_a_prompt(self, pipe: ARDiffusionPipeline) -> None:
        both = latents_of(pipe, num_videos_per_prompt=2, generator=[seed(0), seed(1)])
        assert_close(both[:1], latents_of(pipe))
        assert_close(both[1:], latents_of(pipe, generator=seed(1)))

    def test_callback_tensors(self, pipe: ARDiffusionPipeline) -> None:
        names = ["latents", "prompt_embeds", "negative_prompt_embeds"]
        seen: list[set[str]] = []

        def note(_pipe: Any, _step: int, _timestep: float, tensors: dict[str, Any]) -> dict[str, Any]:
            seen.append(set(tensors))
            return tensors

        call = {"callback_on_step_end": note, "guidance_scale": 3.0}
        latents = latents_of(pipe, callback_on_step_end_tensor_inputs=names, **call)
        assert seen == [set(names)] * pipe.num_timesteps and pipe.num_timesteps == 4
        assert_close(latents, latents_of(pipe, guidance_scale=3.0))
        with pytest.raises(ValueError, match=r"has to be in .*'latents'.*found \['image'\]"):
            latents_of(pipe, callback_on_step_end_tensor_inputs=["image"], **call)

    def test_embeds_of_other_lengths(self, pipe: ARDiffusionPipeline) -> None:
        short, long = (latents_of(pipe, None, prompt_embeds=random_embeds(3, text_len=n)) for n in (5, 12))
        assert (short - long).abs().max() > 1e-5

    def test_every_argument_is_documented(self) -> None:
        documented = ARDiffusionPipeline.__call__.__doc__ or ""
        parameters = list(inspect.signature(ARDiffusionPipeline.__call__).parameters)[1:]
        assert len(parameters) > 20 and [name for name in parameters if name not in documented] == []
