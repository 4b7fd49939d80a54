"""From a call's arguments to a running stream: check, plan, encode, allocate, in this order."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ..cache import KVManager
from ..recipes import Recipe, load_recipe, override_recipe
from ..validation import check_int
from .checked_call import CheckedCall
from .checks import check_components, check_embeds, check_given_latents
from .decode_stream import DecodeStream
from .first_frame import FirstFrame
from .forwards import ForwardRunner
from .given import preprocess_image, preprocess_video
from .inputs import (
    CallArguments,
    FramePlan,
    check_callback,
    check_choices,
    check_generators,
    check_guidance,
    check_merge,
    check_noise,
    check_single_source,
    check_step_noise,
    plan_frames,
    sorted_schedule,
)
from .live import EventRules, Inbox
from .memory import CachePlanner
from .output import FrameOutput
from .overlap import OverlappedOutput
from .prompts import check_tensor, count_prompts
from .recompute import RecomputeRollout
from .remote_decode import RemoteOutput, check_role
from .rollout import Rollout
from .same_call import check_same_call, shared_generator
from .settings import CallState, StreamSettings
from .steps import NoiseSource
from .stream import ARStream
from .turns import turn_of
from .vae_stream import VaeEncodeStream, encode_video, num_pixel_frames
from .window import LatentShape

if TYPE_CHECKING:
    from .host import PipelineHost


def check_call(pipeline: PipelineHost, arguments: CallArguments) -> CheckedCall:
    """Check all arguments of a call against each other, the model and the memory allowed.

    Raises:
        ValueError, TypeError: a bad argument; the message says what was given and what is allowed.
        MemoryLimitError: the plan is larger than ``CacheOptions.limit_bytes``.
    """
    a = arguments
    for name in ("latents", "context_latents"):
        if (given := getattr(a, name)) is not None:
            check_tensor(name, given)
    recipe = override_recipe(load_recipe(a.recipe if a.recipe is not None else pipeline.recipe), a.recipe_fields)
    scale = check_guidance(recipe.call_guidance(a.guidance_scale))
    num_videos = _count_videos(a)
    schedule = sorted_schedule(a.prompt_schedule, num_videos)
    check_components(pipeline, a, guided=scale > 1.0)
    check_embeds(a, pipeline.transformer.config["text_dim"])
    check_merge(a, recipe, guided=scale > 1.0)
    check_choices(a.output_type, a.callback_tensors, pipeline._callback_tensor_inputs)
    check_callback(a.callback_on_step_end)
    check_role(pipeline.parallel_layout, a.output_type, pipeline.decoded_elsewhere)
    check_single_source(image=a.image, video=a.video, context_latents=a.context_latents)
    generator = check_generators(a.generator, num_videos)
    planner = _plan_cache(pipeline, a, recipe, num_videos, guided=scale > 1.0)
    video = _preprocess(pipeline, a, planner)
    frames = plan_frames(
        recipe,
        a.num_frames,
        num_given=_count_given(pipeline, a, video),
        temporal_factor=pipeline.vae_scale_factor_temporal,
    )
    _check_tensors(a, recipe, planner.shape, frames)
    if isinstance(a.cache, KVManager):
        planner.check_manager(a.cache)
    else:
        planner.plan()
    return CheckedCall(
        arguments=dataclasses.replace(a, prompt_schedule=schedule, generator=generator),
        recipe=recipe,
        guidance_scale=scale,
        frames=frames,
        planner=planner,
        given_video=video,
        decoder=_checked_decoder(pipeline, a, video, planner),
        rules=_event_rules(pipeline, a, planner),
    )


def _count_videos(arguments: CallArguments) -> int:
    """Rows of every forward. Raises ValueError or TypeError for bad prompts and numbers."""
    a = arguments
    num_videos = count_prompts(a.prompt, a.prompt_embeds) * check_int(
        "num_videos_per_prompt", a.num_videos_per_prompt, minimum=1
    )
    if a.negative_prompt is not None or a.negative_prompt_embeds is not None:
        count_prompts(a.negative_prompt, a.negative_prompt_embeds, "negative_prompt")
    if a.max_sequence_length is not None:
        check_int("max_sequence_length", a.max_sequence_length, minimum=1)
    return num_videos


def _plan_cache(
    pipeline: PipelineHost, arguments: CallArguments, recipe: Recipe, num_videos: int, *, guided: bool
) -> CachePlanner:
    a = arguments
    return pipeline.plan_cache(
        a.height,
        a.width,
        recipe=recipe,
        num_videos=num_videos,
        guided=guided,
        text_len=a.max_sequence_length if a.prompt_embeds is None else a.prompt_embeds.shape[1],
        decode=a.output_type != "latent",
        cache=a.cache,
    )


def _check_tensors(arguments: CallArguments, recipe: Recipe, shape: LatentShape, frames: FramePlan) -> None:
    """Raise for given latents or noise that do not fit the frames planned."""
    size = (shape.num_videos, shape.channels, shape.height, shape.width)
    check_noise(arguments.latents, size, frames)
    check_step_noise(arguments.step_noise, recipe, size, frames)
    num_given = sum(frames.given_sizes)
    check_given_latents(
        arguments.context_latents, shape.num_videos, (shape.channels, num_given, shape.height, shape.width)
    )


def _checked_decoder(
    pipeline: PipelineHost, arguments: CallArguments, given_video: torch.Tensor | None, planner: CachePlanner
) -> DecodeStream | None:
    """The decoder that the call needs. Raises where the VAE's or the decoder's options forbid to stream it here."""
    if given_video is not None:
        VaeEncodeStream(pipeline.vae).check_options(batch=given_video.shape[0])
    if arguments.output_type == "latent" and not planner.recipe.encode_first_frame:
        return None
    pipeline.decoding.check(pipeline._execution_device, planner.shape.num_videos)
    return pipeline.decoding.open(pipeline._execution_device)


def _event_rules(pipeline: PipelineHost, arguments: CallArguments, planner: CachePlanner) -> EventRules:
    return EventRules(
        num_videos=planner.shape.num_videos,
        text_len=planner.text_len,
        text_dim=pipeline.transformer.config["text_dim"],
        encodes_text=pipeline.tokenizer is not None and pipeline.text_encoder is not None,
        takes_controls=arguments.control_hook is not None,
        is_leader=planner.layout.is_leader,
        max_pending_events=check_int("max_pending_events", arguments.max_pending_events, minimum=1),
    )


def _preprocess(pipeline: PipelineHost, arguments: CallArguments, planner: CachePlanner) -> torch.Tensor | None:
    """A given image or video as (1 or videos, 3, frames, height, width) in [-1, 1], None where none is given."""
    factor = pipeline.vae_scale_factor_spatial
    size = {"height": planner.shape.height * factor, "width": planner.shape.width * factor}
    if arguments.image is not None:
        return preprocess_image(pipeline.video_processor, arguments.image, **size)
    if arguments.video is not None:
        return preprocess_video(pipeline.video_processor, arguments.video, **size)
    return None


def _count_given(pipeline: PipelineHost, arguments: CallArguments, video: torch.Tensor | None) -> int:
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
    pipeline: PipelineHost,
    call: CheckedCall,
    *,
    on_step: Callable[[], None] | None = None,
    inbox: Inbox | None = None,
) -> ARStream:
    """Encode text and given frames, allocate the cache, and make the stream; gives all memory back on an error.

    Args:
        on_step: called after each denoise step.
        inbox: takes the stream's events already; None: a new one.
    """
    with turn_of(pipeline.transformer):
        return _open_stream(pipeline, call, on_step, inbox)


def _open_stream(
    pipeline: PipelineHost, call: CheckedCall, on_step: Callable[[], None] | None, inbox: Inbox | None
) -> ARStream:
    a, planner, groups = call.arguments, call.planner, pipeline.parallel_groups
    check_same_call(groups, call)
    generator = shared_generator(groups, a.generator)
    embeds = pipeline.encode_branches(
        a.prompt,
        _default_negative(call),
        prompt_embeds=a.prompt_embeds,
        negative_prompt_embeds=a.negative_prompt_embeds if planner.guided else None,
        num_videos=call.num_videos,
        text_len=planner.text_len,
    )
    settings = _stream_settings(call, _given_chunks(pipeline, call), on_step)
    stream = ARStream(
        pipeline,
        _open_rollout(pipeline, call),
        NoiseSource(device=planner.device, generator=generator, latents=a.latents, step_noise=a.step_noise),
        settings,
        state=CallState(guidance_scale=call.guidance_scale, num_timesteps=call.num_steps),
        output=_frame_output(pipeline, settings, call),
        inbox=inbox,
    )
    pipeline.decoded_elsewhere = stream
    try:
        stream.set_embeds(embeds)
    except BaseException as error:
        stream._fail(error)
        raise
    return stream


def _frame_output(pipeline: PipelineHost, settings: StreamSettings, call: CheckedCall) -> FrameOutput:
    groups = pipeline.parallel_groups
    if groups is not None and groups.decoder is not None:
        return RemoteOutput(pipeline.video_processor, settings, groups.decoder)
    if call.decoder is not None and pipeline.decoding.options.overlap:
        return OverlappedOutput(pipeline.video_processor, settings, call.decoder, device=call.planner.device)
    return FrameOutput(pipeline.video_processor, settings, call.decoder)


def _open_rollout(pipeline: PipelineHost, call: CheckedCall) -> Rollout:
    a, planner = call.arguments, call.planner
    attachment = pipeline.paged_attachment(planner.options.backend, planner.options.write)
    manager = a.cache if isinstance(a.cache, KVManager) else pipeline.warm_pool(planner)
    manager = manager or planner.build()
    runner = ForwardRunner(attachment)
    if pipeline._warm is not None:
        pipeline._warm.equip(runner, manager)
    make = RecomputeRollout if call.recipe.context_mode == "recompute" else Rollout
    rollout = make(
        runner,
        manager,
        call.recipe,
        planner.shape,
        guided=planner.guided,
        device=planner.device,
        groups=pipeline.parallel_groups,
    )
    if isinstance(rollout, RecomputeRollout) and call.recipe.encode_first_frame:
        rollout.first_frame = FirstFrame(pipeline.vae, call.recipe)
    rollout.control_hook, rollout.controls = a.control_hook, a.controls
    rollout.merge_commits = a.merge_commits
    return rollout


def _stream_settings(
    call: CheckedCall, given: list[torch.Tensor], on_step: Callable[[], None] | None
) -> StreamSettings:
    return StreamSettings(
        given=given,
        num_frames=call.frames.num_frames,
        total_latent_frames=call.frames.total_latent_frames,
        output_type=call.arguments.output_type,
        rules=call.rules,
        schedule=call.arguments.prompt_schedule,
        callback=call.arguments.callback_on_step_end,
        callback_tensors=call.arguments.callback_tensors,
        on_step=on_step,
    )


def _default_negative(call: CheckedCall) -> Any:
    """The negative prompt to encode: none without guidance, an empty one where guidance got none."""
    a = call.arguments
    if not call.planner.guided or a.negative_prompt_embeds is not None:
        return None
    return "" if a.negative_prompt is None else a.negative_prompt


def _given_chunks(pipeline: PipelineHost, call: CheckedCall) -> list[torch.Tensor]:
    """Clean latents of the given chunks: (videos, channels, frames, height, width) float32 each."""
    latents = call.arguments.context_latents
    if call.given_video is not None:
        latents = encode_video(pipeline.vae, call.given_video.to(call.planner.device))
    if latents is None:
        return []
    shape = call.planner.shape
    num_given = sum(call.frames.given_sizes)
    check_given_latents(latents, shape.num_videos, (shape.channels, num_given, shape.height, shape.width))
    rows = latents.to(call.planner.device, torch.float32).repeat_interleave(
        shape.num_videos // latents.shape[0], dim=0
    )
    return list(rows.split(list(call.frames.given_sizes), dim=2))
