"""The baseline: a dense cache that rolls by copying, run with eager forwards of the same stock blocks.

This is the usual design, written anew for comparison: one dense tensor of keys and one of values a layer, tokens in the
order of the video. What does not fit any more is dropped by copying the kept part of the window to the front, in every
layer, at the first forward of a chunk. It is kinder than most loops of its kind (``published_loop`` is not): decisions are
made on the host once a forward, nothing is read back from the device, the text's keys and rotary angles are computed
once, and attention is the very kernel that the paged cache runs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ..cache import TextKV
from ..pipelines import ARDiffusionPipeline, CacheOptions
from ..pipelines.steps import NoiseSource, add_noise, predict_clean
from ..pipelines.window import LatentShape
from ..processors.attach import OffsetRope, PagedAttachment
from ..processors.base import HostSettings, project_out, project_qkv
from ..processors.wan import PagedWanCrossAttnProcessor
from ..recipes import Recipe
from ..rope import Rotary, VideoRope, apply_rotary
from .bare import BareKernel, bare_kernels
from .clock import Clock, Mark
from .models import random_embeds
from .rollout import RolloutSettings, count_chunks

_KERNELS = {
    ("flash3", "cuda"): "fa3",
    ("flash3_split", "cuda"): "fa3",
    ("sdpa", "cuda"): "sdpa_cudnn",
    ("sdpa", "cpu"): "sdpa",
}
"""How keys are cut into parts is ours: the baseline calls the kernel as loops do, without."""


def dense_kernel(backend: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> BareKernel:
    """The dense kernel that an attention backend of ours runs on a contiguous window.

    Raises:
        ValueError: the backend has no such kernel here.
    """
    name = _KERNELS.get((backend, device.type))
    kernels = bare_kernels(device, dtype, head_dim)
    if name not in kernels:
        raise ValueError(
            f"the dense baseline has no kernel equal to backend {backend!r} on {device.type}; choose one of "
            f"{sorted(known for known, kind in _KERNELS if kind == device.type)} with --backend."
        )
    return kernels[name]


@dataclass(kw_only=True)
class DenseWindow:
    """Which tokens a dense cache of ``sink + window`` tokens holds: the sink, then the run that begins at ``first``."""

    sink: int
    window: int
    first: int = -1

    def __post_init__(self) -> None:
        self.first = self.sink

    def place(self, start: int, num_tokens: int) -> tuple[int, int]:
        """(tokens to roll out, index of the new ones) for a forward of tokens ``start`` and after."""
        at = start - self.first + self.sink
        shift = max(0, at + num_tokens - self.sink - self.window)
        self.first += shift
        return shift, at - shift


class DenseRollAttnProcessor(HostSettings):
    """Self-attention over one layer's dense cache.

    Args:
        host_processor: the one replaced.
        cache: keys and values (2, rows, sink + window, heads, head_dim).
        sink: tokens that never roll.
        kernel: dense attention.
    """

    def __init__(self, host_processor: Any, cache: torch.Tensor, sink: int, kernel: BareKernel) -> None:
        super().__init__(host_processor)
        self.start, self.place = 0, (0, 0)
        self._cache, self._sink, self._kernel = cache, sink, kernel

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        rotary_emb: Rotary | None = None,
    ) -> torch.Tensor:
        """hidden_states (rows, tokens, dim) -> the same shape."""
        query, key, value = project_qkv(attn, hidden_states)
        query = attn.norm_q(query).unflatten(2, (attn.heads, -1))
        key = attn.norm_k(key).unflatten(2, (attn.heads, -1))
        if rotary_emb is not None:
            query, key = self._rotate(query, rotary_emb), self._rotate(key, rotary_emb)
        end = self._write(key, value.unflatten(2, (attn.heads, -1)))
        return project_out(attn, self._kernel(query, self._cache[0, :, :end], self._cache[1, :, :end]))

    def _rotate(self, hidden_states: torch.Tensor, rotary: Rotary) -> torch.Tensor:
        return apply_rotary(hidden_states, *rotary)

    def _find_place(self, num_tokens: int) -> tuple[int, int]:
        return self.place

    def _write(self, key: torch.Tensor, value: torch.Tensor) -> int:
        shift, at = self._find_place(key.shape[1])
        if shift:
            # Source and target overlap, so the kept part goes through a copy.
            self._cache[:, :, self._sink : at] = self._cache[:, :, self._sink + shift : at + shift].clone()
        end = at + key.shape[1]
        self._cache[0, :, at:end], self._cache[1, :, at:end] = key, value
        return end


class DenseRollRollout:
    """Chunk after chunk over the dense cache; the same recipe, noise and text as a rollout over the paged one.

    Args:
        attachment: gives the transformer, its geometry and the text's keys and values; it is not attached.
        recipe: chunk, window, steps.
        shape: of the latents.
        kernel: dense attention.
        device: where the transformer runs.
        layer_type: the processor of a layer.
    """

    def __init__(
        self,
        attachment: PagedAttachment,
        recipe: Recipe,
        shape: LatentShape,
        *,
        kernel: BareKernel,
        device: torch.device,
        layer_type: type[DenseRollAttnProcessor] = DenseRollAttnProcessor,
    ) -> None:
        self.recipe, self.shape, self.device = recipe, shape, device
        self._attachment, self._transformer = attachment, attachment.transformer
        geometry = attachment.geometry
        self._tokens = geometry.tokens_per_frame(shape.height, shape.width)
        sink, window = recipe.num_sink_frames * self._tokens, (recipe.num_window_frames or 0) * self._tokens
        self._window = DenseWindow(sink=sink, window=window)
        size = (2, shape.num_videos, sink + window, geometry.num_heads, geometry.head_dim)
        self._rope = VideoRope(head_dim=geometry.head_dim)
        _, *patch = geometry.patch_size
        self._grid = (shape.height // patch[0], shape.width // patch[1])
        dtype = self._transformer.dtype
        self._layers = [
            layer_type(block.attn1.processor, torch.zeros(size, dtype=dtype, device=device), sink, kernel)
            for block in self._transformer.blocks
        ]
        self._stub = torch.zeros(shape.num_videos, 1, self._transformer.config["text_dim"], dtype=dtype, device=device)
        self._text: TextKV | None = None
        self._frames = self._chunks = 0

    def set_text(self, embeds: torch.Tensor) -> None:
        """Keys and values of (videos, text_len, text_dim) embeddings, once for the rollout."""
        self._text = self._attachment.compute_text_kv(embeds)

    @torch.no_grad()
    def next_chunk(self, noise: NoiseSource) -> torch.Tensor:
        """Denoise and commit one chunk: clean latents (videos, channels, frames, height, width)."""
        recipe, size = self.recipe, self.recipe.chunk_frames
        if self._chunks == 0 and recipe.first_chunk_frames is not None:
            size = recipe.first_chunk_frames
        shape = self.shape.chunk(size)
        latents = noise.initial(shape, self._frames)
        sigmas, positions = recipe.sigmas(self._chunks), list(range(self._frames, self._frames + size))
        rotary = self._rope([positions], *self._grid, device=self.device)
        with self._attached(rotary):
            for step, (timestep, sigma) in enumerate(zip(recipe.timesteps(self._chunks), sigmas, strict=True)):
                latents = predict_clean(latents, self._forward(latents, timestep), sigma)
                if step + 1 < len(sigmas):
                    latents = add_noise(latents, noise.step(shape, self._chunks, step), sigmas[step + 1])
            self._forward(latents, recipe.commit_timestep)
        self._frames += size
        self._chunks += 1
        return latents

    def _forward(self, latents: torch.Tensor, timestep: float) -> torch.Tensor:
        start = self._frames * self._tokens
        place = self._window.place(start, latents.shape[2] * self._tokens)
        for layer in self._layers:
            layer.start, layer.place = start, place
        timesteps = torch.full((latents.shape[0],), timestep, device=self.device)
        return self._transformer(
            hidden_states=latents.to(self._stub.dtype),
            timestep=timesteps,
            encoder_hidden_states=self._stub,
            return_dict=False,
        )[0]

    @contextmanager
    def _attached(self, rotary: Rotary) -> Iterator[None]:
        if self._text is None:
            raise RuntimeError("set_text(...) comes before the first chunk.")
        transformer, host_rope = self._transformer, self._transformer.rope
        hosts = [(block.attn1.processor, block.attn2.processor) for block in transformer.blocks]
        rope = OffsetRope(host_rope)
        rope.rotary = rotary
        try:
            transformer.rope = rope
            for block, layer, text in zip(transformer.blocks, self._layers, self._text.layers, strict=True):
                cross = PagedWanCrossAttnProcessor(block.attn2.processor)
                cross.text = text
                block.attn1.set_processor(layer)
                block.attn2.set_processor(cross)
            yield
        finally:
            transformer.rope = host_rope
            for block, (attn1, attn2) in zip(transformer.blocks, hosts, strict=True):
                block.attn1.set_processor(attn1)
                block.attn2.set_processor(attn2)


def measure_dense_roll(
    pipeline: ARDiffusionPipeline,
    settings: RolloutSettings,
    on_chunk: Callable[[torch.Tensor], object] | None = None,
    layer_type: type[DenseRollAttnProcessor] = DenseRollAttnProcessor,
) -> list[float]:
    """Seconds of each chunk, denoising and commit, of the video that ``measure_rollout`` makes; nothing is decoded.

    Args:
        pipeline: on its device.
        settings: as for ``measure_rollout``.
        on_chunk: called with each chunk's latents.
        layer_type: the processor of a layer.

    Raises:
        ValueError: the attention backend has no dense kernel of its own.
    """
    recipe = settings.recipe if settings.recipe is not None else pipeline.recipe
    device, transformer = pipeline._execution_device, pipeline.transformer
    embeds = random_embeds(pipeline, device)
    planner = pipeline.plan_cache(
        recipe=recipe, text_len=embeds.shape[1], decode=False, cache=CacheOptions(backend=settings.backend)
    )
    kernel = dense_kernel(planner.backend_name(), device, transformer.dtype, planner.geometry.head_dim)
    attachment = pipeline.paged_attachment(settings.backend)
    rollout = DenseRollRollout(attachment, recipe, planner.shape, kernel=kernel, device=device, layer_type=layer_type)
    rollout.set_text(embeds)
    noise = NoiseSource(device=device, generator=torch.Generator(device).manual_seed(settings.seed))
    clock = Clock(device)
    marks: list[Mark] = []
    for index in range(count_chunks(settings, recipe, pipeline.vae_scale_factor_temporal)):
        if index >= 2:
            clock.wait(marks[-2])
        marks.append(clock.mark())
        latents = rollout.next_chunk(noise)
        if on_chunk is not None:
            on_chunk(latents)
    marks.append(clock.mark())
    clock.wait(marks[-1])
    return [clock.seconds(start, end) for start, end in itertools.pairwise(marks)]
