"""Checks of what users pass in, all of them before anything is allocated, and the preparation of given videos."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from diffusers.callbacks import MultiPipelineCallbacks, PipelineCallback

from ..cache import KVManager, KVScales
from ..recipes import RECIPE_FIELDS, Recipe
from ..validation import check_int
from .control import MAX_PENDING_EVENTS
from .frames import (
    check_history_limit,
    count_latent_frames,
    generated_chunk_sizes,
    given_chunk_sizes,
    next_chunk_size,
)
from .hook import ControlHook
from .prompts import PromptSwitch
from .settings import StepCallback
from .steps import StepNoise

OUTPUT_TYPES = ("np", "pt", "pil", "latent")
_STEPS = "the steps are the recipe's: denoising_steps=[1000, 750, 500, 250] of a call replaces them."
HOST_ARGUMENTS = {
    "num_inference_steps": _STEPS,
    "timesteps": _STEPS,
    "sigmas": _STEPS,
    "guidance_scale_2": "two-expert models are not supported.",
    "attention_kwargs": "set a LoRA's scale with pipe.set_adapters(name, scale).",
}
"""What to do instead of arguments of diffusers' Wan pipelines that have no place here."""


@dataclass(frozen=True, kw_only=True)
class CacheOptions:
    """How a call's K/V pool is made. The defaults suit everybody; tests and engineers have reasons to differ.

    Args:
        page_size: slots a page; None: 16 if the attention backend accepts it, else the smallest it does.
        kv_dtype: dtype of keys and values; None: the transformer's. torch.float8_e4m3fn takes half the bytes of bfloat16, at
            an error that is yours to accept (docs/speed.md).
        kv_scales: of the values in a float8 pool.
        backend: attention backend by name; None: chosen by capability and measured order.
        write: who normalises, rotates and writes, "fused" or "torch"; None: the measured choice. See
            ``attach_paged_attention``.
        limit_bytes: refuse to allocate more than this for the call's sessions.
        shuffle_seed: fragment the pool on purpose.
    """

    page_size: int | None = None
    kv_dtype: torch.dtype | None = None
    kv_scales: KVScales = KVScales()  # noqa: RUF009
    backend: str | None = None
    write: str | None = None
    limit_bytes: int | None = None
    shuffle_seed: int | None = None


def cache_options(cache: CacheOptions | KVManager | None) -> CacheOptions:
    """The options of a call; a given pool dictates page size, dtype, backend and write.

    Raises:
        TypeError: something else was given.
    """
    if isinstance(cache, KVManager):
        return CacheOptions(
            page_size=cache.geometry.page_size,
            kv_dtype=cache.storage.dtype,
            kv_scales=cache.storage.scales,
            backend=cache.backend,
            write=cache.write,
        )
    if cache is not None and not isinstance(cache, CacheOptions):
        raise TypeError(
            f"`cache` must be CacheOptions, such as CacheOptions(limit_bytes=...), or a pool from pipe.create_cache(), "
            f"got {cache!r}."
        )
    return cache or CacheOptions()


def check_guidance(scale: Any) -> float:
    """The guidance scale; ValueError unless it is a finite number of at least 0."""
    is_number = isinstance(scale, (int, float)) and not isinstance(scale, bool)
    if not is_number or not math.isfinite(scale) or scale < 0:
        raise ValueError(f"guidance_scale must be a finite number >= 0, got {scale!r}.")
    return scale


def check_size(height: int, width: int, multiple_height: int, multiple_width: int) -> None:
    """Raise ValueError unless the frame can be cut into latent patches."""
    for name, value, multiple in (("height", height, multiple_height), ("width", width, multiple_width)):
        check_int(name, value, minimum=multiple)
        if value % multiple:
            lower = value // multiple * multiple
            raise ValueError(
                f"{name} must be a multiple of {multiple}, got {value}; the nearest are {lower} and {lower + multiple}."
            )


def check_choices(output_type: str, callback_tensors: Sequence[str], allowed_tensors: Sequence[str]) -> None:
    """Raise ValueError for an unknown output type or callback tensor."""
    if output_type not in OUTPUT_TYPES:
        raise ValueError(f"output_type must be one of {list(OUTPUT_TYPES)}, got {output_type!r}.")
    is_word = isinstance(callback_tensors, str)
    unknown = [callback_tensors] if is_word else [name for name in callback_tensors if name not in allowed_tensors]
    if unknown:
        hint = ", which is no list." if is_word else "."
        raise ValueError(
            f"callback_on_step_end_tensor_inputs has to be in {list(allowed_tensors)}, but found {unknown}{hint}"
        )


def check_callback(callback: Any) -> None:
    """Raise TypeError for a callback that can't be called."""
    if callback is not None and not callable(callback):
        raise TypeError(f"callback_on_step_end must be a function, got {callback!r}.")


def check_generators(generator: Any, num_videos: int) -> torch.Generator | list[torch.Generator] | None:
    """The generator, or a list with one a video, which may be given as a tuple.

    Raises:
        ValueError: not one a video.
        TypeError: no generator.
    """
    if generator is None or isinstance(generator, torch.Generator):
        return generator
    if not isinstance(generator, (list, tuple)) or not all(isinstance(g, torch.Generator) for g in generator):
        raise TypeError(f"`generator` must be a torch.Generator or a list of them, got {generator!r}.")
    if len(generator) != num_videos:
        raise ValueError(f"a list of {len(generator)} generators was given for {num_videos} videos; give one each.")
    return list(generator)


def check_single_source(**sources: Any) -> None:
    """Raise ValueError if more than one of the named inputs is given."""
    given = [name for name, value in sources.items() if value is not None]
    if len(given) > 1:
        raise ValueError(f"give at most one of {list(sources)}, got {given}.")


@dataclass(frozen=True, kw_only=True)
class FramePlan:
    """How many frames a stream has, and how given ones are cut. All in latent frames but ``num_frames`` (pixels)."""

    num_frames: int | None
    total_latent_frames: int | None
    given_sizes: tuple[int, ...]
    generated_sizes: tuple[int, ...] | None


def plan_frames(recipe: Recipe, num_frames: int | None, *, num_given: int, temporal_factor: int) -> FramePlan:
    """Plan a stream of ``num_frames`` pixel frames (None: endless), ``num_given`` latent frames included.

    Raises:
        ValueError: no whole number >= 1, not longer than what is given, or beyond the recipe's full history.
    """
    total = None if num_frames is None else count_latent_frames(num_frames, temporal_factor)
    if total is not None and num_given >= total:
        raise ValueError(
            f"num_frames={num_frames} ({total} latent frames) includes the given image or video, which has {num_given} "
            "latent frames already; ask for more frames."
        )
    check_history_limit(recipe, num_given, total)
    return FramePlan(
        num_frames=num_frames,
        total_latent_frames=total,
        given_sizes=tuple(given_chunk_sizes(recipe, num_given)),
        generated_sizes=None if total is None else tuple(generated_chunk_sizes(recipe, num_given, total)),
    )


def check_noise(latents: torch.Tensor | None, shape: tuple[int, int, int, int], plan: FramePlan) -> None:
    """Raise ValueError unless given initial noise fits: (videos, channels, all generated frames, height, width)."""
    if latents is None:
        return
    videos, channels, height, width = shape
    frames: Any = "any" if plan.generated_sizes is None else sum(plan.generated_sizes)
    given = tuple(latents.shape)
    if given != (videos, channels, given[2] if frames == "any" and len(given) == 5 else frames, height, width):
        raise ValueError(
            f"`latents` must be (videos, channels, generated latent frames, height, width) = ({videos}, {channels}, "
            f"{frames}, {height}, {width}), got {given}. Whole chunks are generated, so the frames are rounded up to "
            "them."
        )


def check_step_noise(noise: Any, recipe: Recipe, shape: tuple[int, int, int, int], plan: FramePlan) -> None:
    """Check that given step noise has what every chunk of the plan (of an endless one, the first) will ask for.

    Raises:
        ValueError: a tensor of another shape, or with too few chunks or steps.
        TypeError: neither a tensor nor a function.
    """
    if noise is None or callable(noise):
        return
    if not isinstance(noise, torch.Tensor):
        raise TypeError(f"`step_noise` must be a tensor or a function, got {type(noise).__name__}.")
    sizes = plan.generated_sizes
    if sizes is None:
        sizes = (next_chunk_size(recipe, sum(plan.given_sizes), None) or recipe.chunk_frames,)
    num_steps = max(len(recipe.timesteps(index)) for index in range(len(sizes))) - 1
    if num_steps == 0:
        return
    videos, channels, height, width = shape
    wrong = [size for size in sizes if tuple(noise.shape[2:]) != (videos, channels, size, height, width)]
    if wrong or noise.shape[0] < len(sizes) or noise.shape[1] < num_steps:
        raise ValueError(
            f"`step_noise` must be (chunks, steps - 1, videos, channels, frames, height, width) with at least "
            f"({len(sizes)}, {num_steps}) chunks and steps of ({videos}, {channels}, {(wrong or sizes)[0]}, {height}, "
            f"{width}), got {tuple(noise.shape)}. Chunks of different sizes take a function."
        )


def sorted_schedule(schedule: Sequence[PromptSwitch], num_videos: int) -> list[PromptSwitch]:
    """Switches by frame; ValueError for anything that is no ``PromptSwitch`` or has too many or too few prompts."""
    if not isinstance(schedule, Sequence):
        raise ValueError(f"prompt_schedule takes a list of PromptSwitch objects, got {schedule!r}.")
    for switch in schedule:
        if not isinstance(switch, PromptSwitch):
            raise ValueError(f"prompt_schedule takes PromptSwitch objects, got {switch!r}.")
        switch.check_rows(num_videos, f"the prompt switch at latent frame {switch.latent_frame}")
    return sorted(schedule, key=lambda switch: switch.latent_frame)


@dataclass(frozen=True, kw_only=True)
class CallArguments:
    """Everything a call or a stream can be given; ``ARDiffusionPipeline.__call__`` documents each."""

    prompt: str | list[str] | None = None
    negative_prompt: str | list[str] | None = None
    prompt_embeds: torch.Tensor | None = None
    negative_prompt_embeds: torch.Tensor | None = None
    max_sequence_length: int | None = None
    image: Any = None
    video: Any = None
    context_latents: torch.Tensor | None = None
    height: int | None = None
    width: int | None = None
    num_frames: int | None = None
    num_videos_per_prompt: int = 1
    recipe: str | Mapping[str, Any] | Recipe | None = None
    recipe_fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    guidance_scale: float | None = None
    generator: torch.Generator | list[torch.Generator] | None = None
    latents: torch.Tensor | None = None
    step_noise: StepNoise | None = None
    prompt_schedule: Sequence[PromptSwitch] = ()
    output_type: str = "np"
    cache: CacheOptions | KVManager | None = None
    control_hook: ControlHook | None = None
    controls: Any = None
    max_pending_events: int = MAX_PENDING_EVENTS
    callback_on_step_end: StepCallback | PipelineCallback | MultiPipelineCallbacks | None = None
    callback_on_step_end_tensor_inputs: Sequence[str] = ("latents",)
    merge_commits: bool = False

    @property
    def callback_tensors(self) -> Sequence[str]:
        """Names of the tensors that the callback gets; diffusers' callback objects bring their own."""
        if isinstance(self.callback_on_step_end, (PipelineCallback, MultiPipelineCallbacks)):
            return self.callback_on_step_end.tensor_inputs
        return self.callback_on_step_end_tensor_inputs


def check_merge(arguments: CallArguments, recipe: Recipe, *, guided: bool) -> None:
    """Raise ValueError where a commit can't share its forward with the next chunk's first step."""
    if not isinstance(arguments.merge_commits, bool):
        raise ValueError(f"merge_commits must be True or False, got {arguments.merge_commits!r}.")
    if arguments.merge_commits and guided:
        given = arguments.guidance_scale
        scale = f"recipe {recipe.name!r} has {recipe.guidance_scale}" if given is None else f"got {given}"
        raise ValueError(
            f"merge_commits=True does not go with guidance (guidance_scale above 1; {scale}): a merged forward serves one "
            "branch. Leave merge_commits out, or give guidance_scale=1 (guided=False of a warm-up)."
        )
    if arguments.merge_commits and arguments.control_hook is not None:
        raise ValueError(
            "merge_commits=True does not go with a control_hook: the two chunks of a merged forward have one set of "
            "arguments. Leave one of them out."
        )
    if not arguments.merge_commits:
        return
    if recipe.context_mode != "commit":
        raise ValueError(
            f"merge_commits=True does not go with recipe {recipe.name!r}, whose context_mode is "
            f"{recipe.context_mode!r}: its commit and the next step are forwards over different frames. Leave "
            "merge_commits out."
        )
    if recipe.rope_policy != "absolute":
        raise ValueError(
            f"merge_commits=True does not go with recipe {recipe.name!r}, whose rope_policy is {recipe.rope_policy!r}: "
            "a chunk's commit and the next chunk see the sink at different positions. Leave merge_commits out, or take "
            "rope_policy='absolute'."
        )


def call_arguments(method: str, **arguments: Any) -> CallArguments:
    """``CallArguments`` of a method that takes them by name.

    Raises:
        TypeError: an unknown name; the message has a close one, or all that are known.
    """
    names = [field.name for field in dataclasses.fields(CallArguments) if field.name != "recipe_fields"]
    check_recipe_fields(method, [name for name in arguments if name not in names])
    fields = {name: value for name, value in arguments.items() if name not in names}
    return CallArguments(**{n: v for n, v in arguments.items() if n in names}, recipe_fields=fields)


def check_recipe_fields(method: str, given: Iterable[str]) -> None:
    """Raise TypeError for a name that is no field of a recipe; the message has a close one, or all that are known."""
    arguments = [field.name for field in dataclasses.fields(CallArguments) if field.name != "recipe_fields"]
    names = [*arguments, *RECIPE_FIELDS]
    for name in given:
        if name not in RECIPE_FIELDS:
            close = difflib.get_close_matches(name, names, n=1)
            hint = HOST_ARGUMENTS.get(name) or (
                f"did you mean {close[0]!r}?" if close else f"known: {', '.join(names)}."
            )
            raise TypeError(f"{method}() got an unexpected argument {name!r}; {hint}")
