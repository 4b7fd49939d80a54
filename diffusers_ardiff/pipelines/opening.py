"""From a call's arguments to a running stream: check, plan, encode, allocate, in this order."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..cache import KVManager
from ..recipes import Recipe, load_recipe
from ..validation import check_int
from .inputs import (
    CacheOptions,
    CallArguments,
    FramePlan,
    check_choices,
    check_generators,
    check_noise,
    check_single_source,
    count_prompts,
    plan_frames,
    sorted_schedule,
)
from .memory import CachePlanner
from .rollout import Rollout
from .steps import NoiseSource
from .stream import ARStream, CallState, StreamSettings
from .vae_stream import VaeDecodeStream, encode_video, num_pixel_frames

if TYPE_CHECKING:
    from .ar_pipeline import ARDiffusionPipeline


@dataclass(frozen=True, kw_only=True)
class CheckedCall:
    """Arguments that passed every check, with what follows from them. Nothing is allocated or encoded yet."""

    arguments: CallArguments
    recipe: Recipe
    guidance_scale: float
    frames: FramePlan
    planner: CachePlanner
    given_video: torch.Tensor | None
    decoder: VaeDecodeStream | None

    @property
    def num_videos(self) -> int:
        """Rows of every forward."""
        return self.planner.shape.num_videos

    @property
    def num_steps(self) -> int:
        """Denoise steps of all chunks; 0 for an endless stream."""
        chunks = range(len(self.frames.generated_sizes or ()))
        return sum(len(self.recipe.timesteps(index)) for index in chunks)


def check_call(pipeline: ARDiffusionPipeline, arguments: CallArguments) -> CheckedCall:
    """Check all arguments of a call against each other, the model and the memory allowed.

    Raises:
        ValueError, TypeError: a bad argument; the message says what was given and what is allowed.
        MemoryLimitError: the plan is larger than ``CacheOptions.limit_bytes``.
    """
    a = arguments
    recipe = load_recipe(a.recipe if a.recipe is not None else pipeline.recipe)
    scale = recipe.guidance_scale if a.guidance_scale is None else a.guidance_scale
    num_videos = count_prompts(a.prompt, a.prompt_embeds) * check_int(
        "num_videos_per_prompt", a.num_videos_per_prompt, minimum=1
    )
    if a.negative_prompt is not None or a.negative_prompt_embeds is not None:
        count_prompts(a.negative_prompt, a.negative_prompt_embeds, "negative_prompt")
    if a.max_sequence_length is not None:
        check_int("max_sequence_length", a.max_sequence_length, minimum=1)
    _check_components(pipeline, a, guided=scale > 1.0)
    check_choices(a.output_type, a.callback_tensors, pipeline._callback_tensor_inputs)
    check_single_source(image=a.image, video=a.video, context_latents=a.context_latents)
    check_generators(a.generator, num_videos)
    planner = pipeline.plan_cache(
        a.height,
        a.width,
        recipe=recipe,
        num_videos=num_videos,
        guided=scale > 1.0,
        text_len=a.max_sequence_length if a.prompt_embeds is None else a.prompt_embeds.shape[1],
        decode=a.output_type != "latent",
        cache=a.cache if isinstance(a.cache, CacheOptions) else None,
    )
    video = _preprocess(pipeline, a, planner)
    frames = plan_frames(
        recipe,
        a.num_frames,
        num_given=_count_given(pipeline, a, video),
        temporal_factor=pipeline.vae_scale_factor_temporal,
    )
    shape = planner.shape
    check_noise(a.latents, (shape.num_videos, shape.channels, shape.height, shape.width), frames)
    if isinstance(a.cache, KVManager):
        planner.check_manager(a.cache)
    else:
        planner.plan()
    return CheckedCall(
        arguments=dataclasses.replace(a, prompt_schedule=sorted_schedule(a.prompt_schedule, num_videos)),
        recipe=recipe,
        guidance_scale=scale,
        frames=frames,
        planner=planner,
        given_video=video,
        decoder=None if a.output_type == "latent" else VaeDecodeStream(pipeline.vae),
    )


def _check_components(pipeline: ARDiffusionPipeline, arguments: CallArguments, *, guided: bool) -> None:
    """Raise ValueError where the call needs a component that the pipeline was made without."""
    a = arguments
    has_text = a.prompt is not None or (guided and a.negative_prompt_embeds is None)
    needed = {
        "transformer": True,
        "tokenizer": has_text,
        "text_encoder": has_text,
        "vae": a.output_type != "latent" or a.image is not None or a.video is not None,
    }
    missing = [name for name, is_needed in needed.items() if is_needed and getattr(pipeline, name) is None]
    if missing:
        raise ValueError(
            f"this call needs {missing}, which the pipeline was made without. Without a text encoder give "
            "`prompt_embeds` (and `negative_prompt_embeds`); without a VAE take output_type='latent' and give "
            "`context_latents`."
        )


def _preprocess(pipeline: ARDiffusionPipeline, arguments: CallArguments, planner: CachePlanner) -> torch.Tensor | None:
    """A given image or video as (1 or videos, 3, frames, height, width) in [-1, 1], None where none is given."""
    factor = pipeline.vae_scale_factor_spatial
    size = {"height": planner.shape.height * factor, "width": planner.shape.width * factor}
    if arguments.image is not None:
        return pipeline.video_processor.preprocess(arguments.image, **size)[:, :, None]
    if arguments.video is not None:
        return pipeline.video_processor.preprocess_video(arguments.video, **size)
    return None


def _count_given(pipeline: ARDiffusionPipeline, arguments: CallArguments, video: torch.Tensor | None) -> int:
    """Latent frames that a given image, video or latents hold."""
    if arguments.context_latents is not None:
        if arguments.context_latents.ndim != 5:
            raise ValueError(
                "`context_latents` must be (videos or 1, channels, frames, height, width), got "
                f"{tuple(arguments.context_latents.shape)}."
            )
        return arguments.context_latents.shape[2]
    if video is None:
        return 0
    factor, num_frames = pipeline.vae_scale_factor_temporal, video.shape[2]
    num_latents = (num_frames - 1) // factor + 1
    if num_pixel_frames(num_latents, factor) != num_frames:
        lower = num_pixel_frames(num_latents, factor)
        raise ValueError(
            f"a video to continue must have 1 + {factor} * n frames, got {num_frames}; use {lower} or {lower + factor}."
        )
    return num_latents


def open_stream(
    pipeline: ARDiffusionPipeline, call: CheckedCall, on_step: Callable[[], None] | None = None
) -> ARStream:
    """Encode text and given frames, allocate the cache, and make the stream; gives all memory back on an error."""
    a, shape, device = call.arguments, call.planner.shape, call.planner.device
    embeds = pipeline.encode_branches(
        a.prompt,
        _default_negative(call),
        prompt_embeds=a.prompt_embeds,
        negative_prompt_embeds=a.negative_prompt_embeds if call.planner.guided else None,
        num_videos=shape.num_videos,
        text_len=call.planner.text_len,
    )
    given = _given_chunks(pipeline, call)
    manager = a.cache if isinstance(a.cache, KVManager) else call.planner.build()
    attachment = pipeline.paged_attachment(call.planner.options.backend)
    rollout = Rollout(attachment, manager, call.recipe, shape, guided=call.planner.guided, device=device)
    stream = ARStream(
        pipeline,
        rollout,
        NoiseSource(device=device, generator=a.generator, latents=a.latents, step_noise=a.step_noise),
        StreamSettings(
            given=given,
            num_frames=call.frames.num_frames,
            total_latent_frames=call.frames.total_latent_frames,
            output_type=a.output_type,
            text_len=call.planner.text_len,
            schedule=a.prompt_schedule,
            callback=a.callback_on_step_end,
            callback_tensors=a.callback_tensors,
            on_step=on_step,
        ),
        state=CallState(guidance_scale=call.guidance_scale, num_timesteps=call.num_steps),
        decoder=call.decoder,
    )
    try:
        stream.set_embeds(embeds)
    except BaseException:
        stream.close()
        raise
    return stream


def _default_negative(call: CheckedCall) -> Any:
    """The negative prompt to encode: none without guidance, an empty one where guidance got none."""
    a = call.arguments
    if not call.planner.guided or a.negative_prompt_embeds is not None:
        return None
    return "" if a.negative_prompt is None else a.negative_prompt


def _given_chunks(pipeline: ARDiffusionPipeline, call: CheckedCall) -> list[torch.Tensor]:
    """Clean latents of the given chunks: (videos, channels, frames, height, width) float32 each."""
    latents = call.arguments.context_latents
    if call.given_video is not None:
        latents = encode_video(pipeline.vae, call.given_video.to(call.planner.device))
    if latents is None:
        return []
    shape = call.planner.shape
    expected = (shape.channels, sum(call.frames.given_sizes), shape.height, shape.width)
    if tuple(latents.shape[1:]) != expected or shape.num_videos % latents.shape[0]:
        raise ValueError(
            f"given latents must be (1 or {shape.num_videos}, {', '.join(map(str, expected))}), got "
            f"{tuple(latents.shape)}."
        )
    rows = latents.to(call.planner.device, torch.float32).repeat_interleave(
        shape.num_videos // latents.shape[0], dim=0
    )
    return list(rows.split(list(call.frames.given_sizes), dim=2))
