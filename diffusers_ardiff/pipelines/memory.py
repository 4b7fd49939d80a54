"""From a call's arguments to its K/V pool: page size, ring geometry, memory plan, manager."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from ..attention import (
    AttentionRequest,
    choose_page_size,
    get_backend,
    list_backends,
    select_backend,
    supported_kernel_block_sizes,
)
from ..cache import FLOAT8, KVManager, KVShape, MemoryPlan, RingGeometry, SideState, plan_memory
from ..parallel import ParallelLayout
from ..processors import TransformerGeometry
from ..recipes import Recipe
from .decoding import Decoding
from .first_frame import num_kept_pixels
from .inputs import CacheOptions
from .vae_stream import spatial_factor, temporal_factor
from .window import (
    LatentShape,
    frames_in_forward,
    kept_frames,
    latent_frames_in_memory,
    max_past_frames,
    ring_geometry,
)
from .work_memory import forward_bytes


def count_replay_texts(*, merge_commits: bool) -> int:
    """Copies of the text K/V that forwards captured in a warm-up read: one, and two more in one for merged forwards."""
    return 3 if merge_commits else 1


@dataclass(frozen=True, kw_only=True)
class CachePlanner:
    """Everything about a call that decides what will be allocated for it.

    Args:
        transformer: whose forwards they are; text K/V have its dtype.
        geometry: of the transformer.
        recipe: window in frames.
        shape: latent shape; its ``num_videos`` is the number of sessions.
        guided: whether there is a negative branch.
        text_len: rows of the prompt embeddings.
        decoding: decoder whose streaming state counts, None where nothing is decoded.
        options: page size, K/V dtype, backend, limit.
        device: where the pool will live.
        layout: which share of heads and branches this rank has; all bytes are this rank's.
    """

    transformer: Any
    geometry: TransformerGeometry
    recipe: Recipe
    shape: LatentShape
    guided: bool
    text_len: int
    decoding: Decoding | None
    options: CacheOptions
    device: torch.device
    layout: ParallelLayout = ParallelLayout()  # noqa: RUF009

    @property
    def num_branches(self) -> int:
        """Branches a session, on this rank."""
        names = ("positive", "negative") if self.guided else ("positive",)
        return len(self.layout.local_branches(names))

    @property
    def kv_dtype(self) -> torch.dtype:
        """Dtype of the pool."""
        return self.options.kv_dtype or self.transformer.dtype

    @property
    def kv_shape(self) -> KVShape:
        """Layers, this rank's heads, head size and bytes an element."""
        heads = self.layout.heads_per_rank(self.geometry.num_heads)
        return dataclasses.replace(self.geometry.kv_shape(self.kv_dtype), num_heads=heads)

    @property
    def tokens_per_frame(self) -> int:
        """C, tokens of one latent frame."""
        return self.geometry.tokens_per_frame(self.shape.height, self.shape.width)

    def page_size(self) -> int:
        """Slots a page: what is asked for, or what the attention backend accepts; never derived from the frame.

        Raises:
            ValueError: the backend accepts no such page size; the message names the frame and the sizes.
        """
        supported = self._supported_page_sizes()
        asked = self.options.page_size
        frame = (
            f"latent frames of {self.shape.height}x{self.shape.width} have {self.tokens_per_frame} tokens (any number "
            f"works); the attention backend accepts pages of {supported or 'no size at all'}"
        )
        if not supported or (asked is not None and asked not in supported):
            raise ValueError(f"page_size={asked} can't be used: {frame}.")
        return asked if asked is not None else choose_page_size(supported)

    def _supported_page_sizes(self) -> list[int]:
        """Page sizes of the named backend, or of the first that can do the call with pages of its own choice."""
        if self.options.backend is not None:
            return supported_kernel_block_sizes(self.options.backend)
        for backend in list_backends():
            sizes = supported_kernel_block_sizes(backend.name)
            if sizes and not backend.refusals(self._request(choose_page_size(sizes))):
                return sizes
        return supported_kernel_block_sizes()

    def _request(self, page_size: int) -> AttentionRequest:
        return AttentionRequest(
            device_type=self.device.type,
            dtype=self.kv_dtype,
            head_dim=self.geometry.head_dim,
            page_size=page_size,
            is_hip=self.device.type == "cuda" and torch.version.hip is not None,
        )

    def ring(self) -> RingGeometry:
        """Window of one branch in tokens. Raises ValueError: a page size no backend accepts."""
        if self.options.backend is not None:
            get_backend(self.options.backend)
        self.options.kv_scales.check_dtype(self.kv_dtype)
        page_size = self.page_size()
        select_backend(self._request(page_size), self.options.backend)
        return ring_geometry(self.recipe, self.tokens_per_frame, page_size)

    @property
    def _decoder(self) -> Decoding | None:
        """The decoder, where this rank has one."""
        return None if self.layout.decode_rank and not self.layout.is_decoder else self.decoding

    def side_state(self) -> SideState:
        """Bytes of one session that are not pages."""
        geometry, shape = self.geometry, self.shape
        row_bytes = geometry.num_heads * geometry.head_dim * self.transformer.dtype.itemsize
        return SideState(
            text_bytes=2 * geometry.num_layers * self.num_branches * self.text_len * row_bytes,
            vae_state_bytes=0 if self._decoder is None else self._decoder_bytes(self._decoder),
            sink_bytes=self._sink_bytes(),
            latent_bytes=latent_frames_in_memory(self.recipe) * shape.channels * shape.height * shape.width * 4,
        )

    def _decoder_bytes(self, decoder: Decoding) -> int:
        """Of one session's decoder, and of decoded frames that are kept to be encoded again."""
        height, width = self.shape.height, self.shape.width
        state = decoder.state_bytes(height, width)
        if not self.recipe.encode_first_frame:
            return state
        vae, side = decoder.vae, spatial_factor(decoder.vae)
        count = num_kept_pixels(self.recipe, temporal_factor(vae))
        return state + count * 3 * height * side * width * side * vae.dtype.itemsize

    def _sink_bytes(self) -> int:
        """Of one session's sink keys as they were written, where the policy turns them."""
        if self.recipe.rope_policy == "absolute" or self.recipe.context_mode == "recompute":
            return 0
        return self.num_branches * self.ring().sink_tokens * self.kv_shape.bytes_per_token // 2

    def plan(self, *, with_work: bool = False, num_replay_texts: int = 0) -> MemoryPlan:
        """What the call's sessions will allocate.

        Args:
            with_work: estimate the working memory of forwards and decoding too.
            num_replay_texts: copies of the text K/V that captured forwards keep; see ``count_replay_texts``.

        Raises:
            MemoryLimitError: more than ``options.limit_bytes``.
        """
        plan = plan_memory(
            self.ring(),
            self.kv_shape,
            num_sessions=self.shape.num_videos,
            num_branches=self.num_branches,
            side_state=self.side_state(),
            fragmented=self.options.shuffle_seed is not None,
        )
        plan = dataclasses.replace(plan, replay_text_bytes=num_replay_texts * plan.text_bytes)
        if self.layout.is_decoder:
            plan = dataclasses.replace(
                plan,
                pages_per_branch=0,
                pool_bytes=0,
                text_bytes=0,
                latent_bytes=0,
                staging_bytes=0,
                sink_bytes=0,
                replay_text_bytes=0,
            )
        plan.check_limit(self.options.limit_bytes)
        return self._with_work(plan) if with_work else plan

    def _with_work(self, plan: MemoryPlan) -> MemoryPlan:
        latents = self.shape.chunk(max(self.recipe.chunk_frames, self.recipe.first_chunk_frames or 0))
        return dataclasses.replace(
            plan,
            forward_bytes=self._forward_bytes(),
            decode_bytes=0 if self._decoder is None else self._decoder.work_bytes(latents),
            overlapped=self.decoding is not None and self.decoding.options.overlap,
        )

    def _forward_bytes(self) -> int:
        """Working memory of the largest forward, of this rank's share of its tokens."""
        if self.layout.is_decoder:
            return 0
        latents = self.shape.chunk(frames_in_forward(self.recipe))
        num_timesteps = latents[2] * self.tokens_per_frame if self.recipe.num_chunks_at_once > 1 else None
        share = -(-forward_bytes(self.transformer, latents, num_timesteps) // self.layout.ulysses_degree)
        return share + self._widened_bytes() + self._gathered_bytes()

    def _widened_bytes(self) -> int:
        """Copy of one layer's window, of every row, that is made of a float8 pool where no kernel converts it on the way."""
        if self.kv_dtype != FLOAT8 or self.backend_name() == "triton":
            return 0
        shape = self.kv_shape
        token = 2 * shape.num_heads * shape.head_dim * self.transformer.dtype.itemsize
        return self.shape.num_videos * self.ring().max_seq_len * token

    def _gathered_bytes(self) -> int:
        """Of one layer's keys and values, where a forward sees less than is stored and gathers them."""
        if max_past_frames(self.recipe, 0) is None or self.recipe.num_chunks_at_once == 1:
            return 0
        tokens = self.shape.num_videos * kept_frames(self.recipe) * self.tokens_per_frame
        return tokens * self.kv_shape.bytes_per_token // self.kv_shape.num_layers

    def backend_name(self) -> str:
        """The attention backend that the call's forwards will take. Raises ValueError: none can."""
        return select_backend(self._request(self.page_size()), self.options.backend).name

    def build(self) -> KVManager:
        """Allocate the pool. Raises like ``plan``."""
        return KVManager(
            self.ring(),
            self.kv_shape,
            max_sessions=self.shape.num_videos,
            branches_per_session=self.num_branches,
            dtype=self.kv_dtype,
            device=self.device,
            scales=self.options.kv_scales,
            limit_bytes=self.options.limit_bytes,
            side_state=self.side_state(),
            shuffle_seed=self.options.shuffle_seed,
            backend=self.options.backend,
            write=self.options.write,
        )

    def check_manager(self, manager: KVManager) -> None:
        """Raise ValueError unless a given pool has this call's window, shape and device; the rest is the pool's."""
        ring = self.ring()
        have = manager.geometry
        fits = ring.max_extra_tokens <= have.max_extra_tokens
        same_window = fits and (ring.sink_tokens, ring.window_tokens, ring.full_history) == (
            have.sink_tokens,
            have.window_tokens,
            have.full_history,
        )
        storage = manager.storage
        if not same_window or storage.device.type != self.device.type or storage.shape != self.kv_shape:
            raise ValueError(
                f"the given cache holds {have} of {storage.shape} on {storage.device}; this call needs {ring} of "
                f"{self.kv_shape} on {self.device}. Make it with pipe.create_cache(...) and the same size and recipe."
            )
