"""``ARDiffusionPipeline``: autoregressive video generation with a plain diffusers Wan checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.loaders.lora_pipeline import WanLoraLoaderMixin
from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from diffusers.pipelines.pipeline_utils import DiffusionPipeline
from diffusers.video_processor import VideoProcessor
from transformers import AutoTokenizer, UMT5EncoderModel

from ..cache import KVManager, MemoryPlan
from ..processors import PagedAttachment
from ..recipes import Recipe, load_recipe, override_recipe
from .async_stream import AsyncARStream
from .checks import check_first_frame, check_models
from .decoding import DecoderSettings
from .hook import ControlHook
from .inputs import CacheOptions, CallArguments, cache_options, call_arguments, check_recipe_fields, check_size
from .live import Inbox
from .memory import CachePlanner, count_replay_texts
from .opening import check_call, open_stream
from .output import ARDiffusionPipelineOutput
from .parallel import Parallelism
from .pretrained import PretrainedLoading
from .prompts import PromptSwitch
from .settings import CallProperties, StepCallback
from .steps import StepNoise
from .stream import ARStream
from .text import PromptEncoding, default_text_len
from .turns import turn_of
from .vae_stream import spatial_factor, temporal_factor
from .warmup import WarmUp
from .window import LatentShape

DEFAULT_RECIPE = "self-forcing"


class ARDiffusionPipeline(
    PretrainedLoading,
    DiffusionPipeline,
    PromptEncoding,
    CallProperties,
    WarmUp,
    DecoderSettings,
    Parallelism,
    WanLoraLoaderMixin,
):
    """Text, image and video to video, chunk by chunk through a paged K/V cache.

        pipe = ARDiffusionPipeline.from_pretrained("tiny")
        video = pipe("a red circle moving right", num_frames=81).frames[0]
        for chunk in pipe.stream("a red circle moving right"):      # endless
            show(chunk.frames)

    Args:
        tokenizer, text_encoder, vae, scheduler, transformer: as in ``WanPipeline``. The scheduler is kept for saving;
            the few-step rule takes its timesteps from the recipe.
        transformer_2: must be None; two-expert checkpoints are not supported.
        recipe: how the checkpoint is sampled (name, mapping or ``Recipe``); part of the saved config. None:
            "self-forcing".
    """

    model_cpu_offload_seq = "text_encoder->transformer->vae"  # type: ignore[assignment]
    _callback_tensor_inputs: ClassVar[list[str]] = ["latents", "prompt_embeds", "negative_prompt_embeds"]
    _optional_components = ["transformer", "transformer_2", "vae"]  # noqa: RUF012

    def __init__(
        self,
        tokenizer: AutoTokenizer,
        text_encoder: UMT5EncoderModel,
        vae: AutoencoderKLWan,
        scheduler: FlowMatchEulerDiscreteScheduler,
        transformer: WanTransformer3DModel | None = None,
        transformer_2: WanTransformer3DModel | None = None,
        recipe: dict[str, Any] | str | Recipe | None = None,
    ) -> None:
        super().__init__()
        if transformer_2 is not None:
            raise ValueError(
                "this checkpoint has two experts (transformer_2), which is not supported; use a single one."
            )
        self.register_modules(
            tokenizer=tokenizer,
            text_encoder=text_encoder,
            vae=vae,
            scheduler=scheduler,
            transformer=transformer,
            transformer_2=transformer_2,
        )
        self.register_to_config(recipe=load_recipe(recipe or DEFAULT_RECIPE).to_dict())
        self.vae_scale_factor_spatial = spatial_factor(vae) if vae is not None else 8
        self.vae_scale_factor_temporal = temporal_factor(vae) if vae is not None else 4
        self.video_processor = VideoProcessor(vae_scale_factor=self.vae_scale_factor_spatial)
        self.call_state = None
        self._attachment: PagedAttachment | None = None

    @property
    def recipe(self) -> Recipe:
        """How this checkpoint is sampled; saved with the pipeline. May be set, to a name, a mapping or a ``Recipe``."""
        return load_recipe(self.config["recipe"])

    @recipe.setter
    def recipe(self, recipe: str | Mapping[str, Any] | Recipe) -> None:
        self.register_to_config(recipe=load_recipe(recipe).to_dict())

    # -- memory --------------------------------------------------------------------------------------------------

    def plan_memory(
        self,
        height: int | None = None,
        width: int | None = None,
        *,
        cuda_graphs: bool = False,
        merge_commits: bool = False,
        **call: Any,
    ) -> MemoryPlan:
        """Bytes that a call would allocate, before anything is.

        Args:
            height, width: pixels; None: the recipe's.
            cuda_graphs: count what ``warmup`` with CUDA graphs keeps until ``cooldown``, its pool being the call's.
            merge_commits: whether that warm-up merges commits.
            **call: ``num_videos``, ``guided`` (whether there is a negative branch; default: as the recipe's guidance
                scale says), ``recipe``, ``text_len``, ``decode``, ``cache`` (``CacheOptions``).

        Raises:
            ValueError: bad size.
            MemoryLimitError: more than ``CacheOptions.limit_bytes``.
        """
        copies = count_replay_texts(merge_commits=merge_commits) if cuda_graphs else 0
        return self.plan_cache(height, width, **call).plan(with_work=True, num_replay_texts=copies)

    def create_cache(self, height: int | None = None, width: int | None = None, **call: Any) -> KVManager:
        """Allocate a pool for ``num_videos`` videos at a time, to share between streams (``cache=`` of a call).

        Takes the ``**call`` arguments of ``plan_memory`` and raises like it.
        """
        return self.plan_cache(height, width, **call).build()

    def plan_cache(
        self,
        height: int | None = None,
        width: int | None = None,
        *,
        recipe: Recipe | None = None,
        num_videos: int = 1,
        guided: bool | None = None,
        text_len: int | None = None,
        decode: bool = True,
        cache: CacheOptions | KVManager | None = None,
    ) -> CachePlanner:
        """The planner behind ``plan_memory`` and ``create_cache``: page size, ring geometry, bytes."""
        recipe = recipe if recipe is not None else self.recipe
        height = recipe.height if height is None else height
        width = recipe.width if width is None else width
        options = cache_options(cache)
        check_models(self)
        check_first_frame(self, recipe)
        factor = self.vae_scale_factor_spatial
        attachment = self.paged_attachment(options.backend, options.write)
        attachment.choose_write(self._execution_device.type, options.kv_dtype or self.transformer.dtype)
        geometry = attachment.geometry
        check_size(height, width, factor * geometry.patch_size[1], factor * geometry.patch_size[2])
        return CachePlanner(
            transformer=self.transformer,
            geometry=geometry,
            recipe=recipe,
            shape=LatentShape(
                num_videos=num_videos,
                channels=self.transformer.config["in_channels"],
                height=height // factor,
                width=width // factor,
            ),
            guided=recipe.guidance_scale > 1.0 if guided is None else guided,
            text_len=default_text_len(self.tokenizer) if text_len is None else text_len,
            decoding=self.decoding if decode or recipe.encode_first_frame else None,
            options=options,
            device=self._execution_device,
            layout=self.parallel_layout,
        )

    def paged_attachment(self, backend: str | None = None, write: str | None = None) -> PagedAttachment:
        """The paged processors, the same objects for compiled code's sake; new ones where a block was replaced."""
        known = self._attachment
        fits = known is not None and known.transformer is self.transformer and known.covers_all_blocks
        if known is None or not fits or (known.backend, known.write) != (backend, write):
            with turn_of(self.transformer):  # It keeps the processors it finds, which must not be ours.
                self._attachment = known = PagedAttachment(self.transformer, backend=backend, write=write)
        known.sharding = self.token_sharding
        return known

    # -- generation ----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def stream(
        self, prompt: str | list[str] | None = None, negative_prompt: str | list[str] | None = None, **arguments: Any
    ) -> ARStream:
        """Generate chunk by chunk, endless unless ``num_frames`` is given.

        Takes the arguments of a call (``return_dict`` excepted), with ``num_frames=None`` by default, and
        ``max_pending_events``, how many events may wait for the next chunk (16). Each chunk is an ``ARChunk``; the
        first is ready before the second begins. ``ARStream.update`` changes prompt and controls on the way. Close the
        stream, or leave its ``with`` block, to get all memory back.

        Raises:
            ValueError, TypeError, MemoryLimitError: a bad argument, before anything is allocated.
        """
        arguments = {"prompt": prompt, "negative_prompt": negative_prompt, **arguments}
        call = check_call(self, call_arguments("stream", **arguments))
        return open_stream(self, call)

    @torch.no_grad()
    def astream(
        self, prompt: str | list[str] | None = None, negative_prompt: str | list[str] | None = None, **arguments: Any
    ) -> AsyncARStream:
        """``stream`` for asyncio: ``async for chunk in pipe.astream(...)``; takes the same arguments.

        Raises:
            ValueError, TypeError, MemoryLimitError: a bad argument, at once.
        """
        arguments = {"prompt": prompt, "negative_prompt": negative_prompt, **arguments}
        call = check_call(self, call_arguments("astream", **arguments))
        inbox = Inbox(call.rules)
        # Gradients are switched off by thread, and this runs in a worker.
        return AsyncARStream(torch.no_grad()(lambda: open_stream(self, call, inbox=inbox)), inbox)

    @torch.no_grad()
    def __call__(
        self,
        prompt: str | list[str] | None = None,
        negative_prompt: str | list[str] | None = None,
        height: int | None = None,
        width: int | None = None,
        num_frames: int | None = None,
        guidance_scale: float | None = None,
        num_videos_per_prompt: int = 1,
        generator: torch.Generator | list[torch.Generator] | None = None,
        latents: torch.Tensor | None = None,
        prompt_embeds: torch.Tensor | None = None,
        negative_prompt_embeds: torch.Tensor | None = None,
        output_type: str = "np",
        return_dict: bool = True,
        callback_on_step_end: StepCallback | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] = ("latents",),
        max_sequence_length: int | None = None,
        *,
        image: Any = None,
        video: Any = None,
        context_latents: torch.Tensor | None = None,
        recipe: str | Mapping[str, Any] | Recipe | None = None,
        prompt_schedule: Sequence[PromptSwitch] = (),
        step_noise: StepNoise | None = None,
        cache: CacheOptions | KVManager | None = None,
        control_hook: ControlHook | None = None,
        controls: Any = None,
        merge_commits: bool = False,
        **recipe_fields: Any,
    ) -> ARDiffusionPipelineOutput | tuple[Any]:
        """Generate whole videos.

        Args:
            prompt, negative_prompt: one text or a list; or their ``*_embeds`` (prompts, text_len, text_dim).
            height, width, num_frames: pixels and pixel frames; None: the recipe's. Any number of frames: whole chunks
                are generated and exactly ``num_frames`` returned, a given image or video included.
            guidance_scale: above 1.0 a second branch runs the negative prompt; None: the recipe's.
            num_videos_per_prompt: videos a prompt.
            generator: one for all videos, or a list with one each, which gives the videos of single calls.
            latents: initial noise (videos, channels, generated latent frames, height, width).
            output_type: "np", "pt", "pil" or "latent"; see ``ARDiffusionPipelineOutput``.
            return_dict: False returns a tuple.
            callback_on_step_end: called as (pipeline, step, timestep, tensors) after each denoise step, counted over
                all chunks; ``latents`` are the current chunk's. What it returns replaces the tensors. A diffusers
                ``PipelineCallback`` names its tensors itself.
            callback_on_step_end_tensor_inputs: any of "latents", "prompt_embeds", "negative_prompt_embeds".
            max_sequence_length: rows of the prompt embeddings; None: the tokenizer's limit, at most 512.
            image: first frame; committed alone before the first chunk.
            video: frames to continue, 1 + 4 * n of them; committed chunk by chunk.
            context_latents: the same as normalised latents (videos or 1, channels, frames, height, width).
            recipe: replaces the pipeline's recipe for this call.
            prompt_schedule: prompt changes on the way.
            step_noise: noise of each step instead of drawn one, for reproducible runs; see ``StepNoise``.
            cache: ``CacheOptions``, or a pool from ``create_cache`` to share.
            control_hook: edits the transformer's arguments before every forward; see ``ControlHook``.
            controls: any object for the hook, until an event replaces it.
            merge_commits: run each chunk's commit in one forward with the next chunk's first step (docs/speed.md).
            **recipe_fields: single fields of the recipe to replace for this call, such as ``num_window_frames=9``.

        Raises:
            ValueError, TypeError, MemoryLimitError: a bad argument, before anything is allocated.
        """
        check_recipe_fields("__call__", recipe_fields)
        chosen = override_recipe(load_recipe(recipe if recipe is not None else self.recipe), recipe_fields)
        call = check_call(
            self,
            CallArguments(
                prompt=prompt,
                negative_prompt=negative_prompt,
                prompt_embeds=prompt_embeds,
                negative_prompt_embeds=negative_prompt_embeds,
                max_sequence_length=max_sequence_length,
                image=image,
                video=video,
                context_latents=context_latents,
                height=height,
                width=width,
                num_frames=chosen.num_frames if num_frames is None else num_frames,
                num_videos_per_prompt=num_videos_per_prompt,
                recipe=chosen,
                guidance_scale=guidance_scale,
                generator=generator,
                latents=latents,
                step_noise=step_noise,
                prompt_schedule=prompt_schedule,
                output_type=output_type,
                cache=cache,
                callback_on_step_end=callback_on_step_end,
                callback_on_step_end_tensor_inputs=callback_on_step_end_tensor_inputs,
                control_hook=control_hook,
                controls=controls,
                merge_commits=merge_commits,
            ),
        )
        with self.progress_bar(total=call.num_steps) as bar, open_stream(self, call, on_step=bar.update) as stream:
            # All chunks before any frames: reading them may wait, see DecodeOptions.overlap.
            frames = join_frames([chunk.frames for chunk in list(stream)], output_type)
        return ARDiffusionPipelineOutput(frames=frames) if return_dict else (frames,)


def join_frames(chunks: list[Any], output_type: str) -> Any:
    """Join the frames of consecutive chunks along time; bit by bit what the chunks held."""
    if output_type == "pil":
        return [[image for chunk in chunks for image in chunk[video]] for video in range(len(chunks[0]))]
    if output_type == "np":
        return np.concatenate(chunks, axis=1)
    return torch.cat(chunks, dim=2 if output_type == "latent" else 1)
