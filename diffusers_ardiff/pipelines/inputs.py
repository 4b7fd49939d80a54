"""Checks of what users pass in, all of them before anything is allocated, and the preparation of given videos."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from diffusers.callbacks import MultiPipelineCallbacks, PipelineCallback

from ..cache import KVManager
from ..recipes import Recipe
from ..validation import check_int
from .frames import check_history_limit, count_latent_frames, generated_chunk_sizes, given_chunk_sizes
from .steps import StepNoise
from .stream import PromptSwitch, StepCallback

OUTPUT_TYPES = ("np", "pt", "pil", "latent")


@dataclass(frozen=True, kw_only=True)
class CacheOptions:
    """How a call's K/V pool is made. The defaults suit everybody; tests and engineers have reasons to differ.

    Args:
        page_size: slots a page; None: 16 if the attention backend accepts it, else the smallest it does.
        kv_dtype: dtype of keys and values; None: the transformer's.
        backend: attention backend by name; None: chosen by capability and measured order.
        limit_bytes: refuse to allocate more than this for the call's sessions.
        shuffle_seed: fragment the pool on purpose.
    """

    page_size: int | None = None
    kv_dtype: torch.dtype | None = None
    backend: str | None = None
    limit_bytes: int | None = None
    shuffle_seed: int | None = None


def check_size(height: int, width: int, multiple_height: int, multiple_width: int) -> None:
    """Raise ValueError unless the frame can be cut into latent patches."""
    for name, value, multiple in (("height", height, multiple_height), ("width", width, multiple_width)):
        check_int(name, value, minimum=multiple)
        if value % multiple:
            lower = value // multiple * multiple
            raise ValueError(
                f"{name} must be a multiple of {multiple}, got {value}; the nearest are {lower} and {lower + multiple}."
            )


def count_prompts(prompt: str | list[str] | None, prompt_embeds: torch.Tensor | None, name: str = "prompt") -> int:
    """How many prompts there are.

    Raises:
        ValueError: both or none given, an empty list, or embeddings of another rank.
        TypeError: a prompt is no string.
    """
    if (prompt is None) == (prompt_embeds is None):
        raise ValueError(f"give either `{name}` or `{name}_embeds`, exactly one of them.")
    if prompt_embeds is not None:
        if prompt_embeds.ndim != 3 or prompt_embeds.shape[0] == 0:
            raise ValueError(
                f"`{name}_embeds` must be (prompts, text_len, text_dim), got {tuple(prompt_embeds.shape)}."
            )
        return prompt_embeds.shape[0]
    prompts = [prompt] if isinstance(prompt, str) else prompt
    if not isinstance(prompts, list) or not all(isinstance(text, str) for text in prompts):
        raise TypeError(f"`{name}` must be a string or a list of strings, got {prompt!r}.")
    if not prompts:
        raise ValueError(f"`{name}` is an empty list; give at least one prompt.")
    return len(prompts)


def check_choices(output_type: str, callback_tensors: Sequence[str], allowed_tensors: Sequence[str]) -> None:
    """Raise ValueError for an unknown output type or callback tensor."""
    if output_type not in OUTPUT_TYPES:
        raise ValueError(f"output_type must be one of {list(OUTPUT_TYPES)}, got {output_type!r}.")
    unknown = [name for name in callback_tensors if name not in allowed_tensors]
    if unknown:
        raise ValueError(
            f"callback_on_step_end_tensor_inputs has to be in {list(allowed_tensors)}, but found {unknown}."
        )


def check_generators(generator: Any, num_videos: int) -> None:
    """Raise ValueError where a list of generators does not have one a video."""
    if isinstance(generator, list) and len(generator) != num_videos:
        raise ValueError(f"a list of {len(generator)} generators was given for {num_videos} videos; give one each.")


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
    frames = sum(plan.generated_sizes) if plan.generated_sizes is not None else latents.shape[2]
    expected = (videos, channels, frames, height, width)
    if tuple(latents.shape) != expected:
        raise ValueError(
            f"`latents` must be (videos, channels, generated latent frames, height, width) = {expected}, got "
            f"{tuple(latents.shape)}. Whole chunks are generated, so the frames are rounded up to them."
        )


def sorted_schedule(schedule: Sequence[PromptSwitch], num_videos: int) -> list[PromptSwitch]:
    """Switches by frame; ValueError for anything that is no ``PromptSwitch`` or has too many or too few prompts."""
    for switch in schedule:
        if not isinstance(switch, PromptSwitch):
            raise ValueError(f"prompt_schedule takes PromptSwitch objects, got {switch!r}.")
        num_prompts = count_prompts(switch.prompt, switch.prompt_embeds)
        if num_videos % num_prompts:
            raise ValueError(
                f"the prompt switch at latent frame {switch.latent_frame} has {num_prompts} prompts for {num_videos} "
                "videos; give 1, or one each."
            )
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
    guidance_scale: float | None = None
    generator: torch.Generator | list[torch.Generator] | None = None
    latents: torch.Tensor | None = None
    step_noise: StepNoise | None = None
    prompt_schedule: Sequence[PromptSwitch] = ()
    output_type: str = "np"
    cache: CacheOptions | KVManager | None = None
    callback_on_step_end: StepCallback | PipelineCallback | MultiPipelineCallbacks | None = None
    callback_on_step_end_tensor_inputs: Sequence[str] = ("latents",)

    @property
    def callback_tensors(self) -> Sequence[str]:
        """Names of the tensors that the callback gets; diffusers' callback objects bring their own."""
        if isinstance(self.callback_on_step_end, (PipelineCallback, MultiPipelineCallbacks)):
            return self.callback_on_step_end.tensor_inputs
        return self.callback_on_step_end_tensor_inputs
