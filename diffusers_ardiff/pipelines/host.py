"""What streams and their helpers need of a pipeline, so that they depend on this list and not on the pipeline's class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Protocol

import torch

from ..cache import KVManager
from ..parallel import ParallelLayout, VideoGroups
from ..processors import PagedAttachment
from ..recipes import Recipe
from .decoding import Decoding
from .memory import CachePlanner
from .settings import CallState


class PipelineHost(Protocol):
    """The pipeline, as those below it see it; every member is documented where ``ARDiffusionPipeline`` has it."""

    transformer: Any
    vae: Any
    tokenizer: Any
    text_encoder: Any
    video_processor: Any
    vae_scale_factor_spatial: int
    vae_scale_factor_temporal: int
    call_state: CallState | None
    decoded_elsewhere: Any
    _warm: Any
    _callback_tensor_inputs: ClassVar[list[str]]

    @property
    def _execution_device(self) -> torch.device: ...
    @property
    def recipe(self) -> Recipe: ...
    @property
    def decoding(self) -> Decoding: ...
    @property
    def parallel_layout(self) -> ParallelLayout: ...
    @property
    def parallel_groups(self) -> VideoGroups | None: ...

    # Methods whose keyword arguments do not matter here.
    @property
    def stream(self) -> Callable[..., Any]: ...
    @property
    def encode_branches(self) -> Callable[..., dict[str, torch.Tensor]]: ...
    @property
    def plan_cache(self) -> Callable[..., CachePlanner]: ...
    @property
    def warmup_decoder(self) -> Callable[..., float]: ...

    def paged_attachment(self, backend: str | None = None, write: str | None = None) -> PagedAttachment: ...
    def warm_pool(self, planner: CachePlanner) -> KVManager | None: ...
    def cooldown(self) -> None: ...
    def maybe_free_model_hooks(self) -> None: ...
