"""Estimates of working memory: the same code runs on the meta device, and the bytes alive at once are counted.

Nothing is allocated and nothing computed. What kernels take for themselves is not seen; convolutions are given their
input and output once more, which is what layout conversions inside the library cost.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..processors.base import HostSettings, project_out, project_qkv
from ..rope import Rotary, apply_rotary
from .light_decoder import LightDecoder
from .light_stream import LightDecodeStream
from .vae_stream import VaeDecodeStream


class PeakCounter(TorchDispatchMode):
    """Counts the bytes of all storages that operations make while it is entered; ``peak`` is the most at once."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._alive = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Weights and inputs were there before; a view of them is nothing new.
        self._note_all((args, kwargs), counted=False)
        out = func(*args, **(kwargs or {}))
        self._note_all(out, counted=True)
        extra = _bytes_of(args[0], out) if func is torch.ops.aten.convolution.default else 0
        self.peak = max(self.peak, self._alive + extra)
        return out

    def _note_all(self, tensors: Any, *, counted: bool) -> None:
        for tensor in tree_leaves(tensors):
            if not isinstance(tensor, torch.Tensor):
                continue
            storage = tensor.untyped_storage()
            key, size = id(storage), storage.nbytes() if counted else 0
            if key not in self._known:
                self._known.add(key)
                self._alive += size
                # A storage is kept as one Python object for as long as any tensor has it.
                weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self._alive -= size


def _bytes_of(*tensors: torch.Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def peak_bytes(work: Callable[[], object]) -> int:
    """Most bytes alive at once of what ``work`` makes; it has to run on meta tensors."""
    with PeakCounter() as counter, torch.no_grad():
        result = work()
    del result
    return counter.peak


def vae_decode_bytes(vae: Any, latents: tuple[int, ...], dtype: torch.dtype) -> int:
    """Working memory of a steady chunk of ``latents`` (B, C, n, h, w) through the VAE's decoder; state not included."""
    config = json.dumps({key: value for key, value in vae.config.items() if not key.startswith("_")})
    vae_class: Any = type(vae)
    return _vae_decode_bytes(vae_class, config, latents, dtype)


@lru_cache(maxsize=64)
def _vae_decode_bytes(vae_class: Any, config: str, latents: tuple[int, ...], dtype: torch.dtype) -> int:
    with torch.device("meta"):
        vae = vae_class.from_config(json.loads(config))
        torch.nn.Module.to(vae, dtype)
        stream = VaeDecodeStream(vae)
        stream.decode(torch.empty(latents))
        return peak_bytes(lambda: stream.decode(torch.empty(latents)))


@lru_cache(maxsize=64)
def light_decode_bytes(
    shape: tuple[int, tuple[int, ...], tuple[int, ...], int], latents: tuple[int, ...], dtype: torch.dtype
) -> int:
    """As ``vae_decode_bytes``, for a light decoder of these arguments."""
    with torch.device("meta"):
        stream = LightDecodeStream(LightDecoder(*shape).to(dtype))
        stream.decode(torch.empty(latents))
        return peak_bytes(lambda: stream.decode(torch.empty(latents)))


def forward_bytes(transformer: Any, latents: tuple[int, ...], num_timesteps: int | None = None) -> int:
    """Working memory of one eager forward over ``latents`` (B, C, n, h, w): that of its largest block and its ends.

    Compiled blocks take less. ``num_timesteps`` a row, one a token; None: one for all.
    """
    config = json.dumps({key: value for key, value in transformer.config.items() if not key.startswith("_")})
    # torch.compile(transformer) is a wrapper without a config to build from.
    model_class: Any = type(getattr(transformer, "_orig_mod", transformer))
    return _forward_bytes(model_class, config, (latents, num_timesteps), transformer.dtype)


class _ShapeOnlyAttn(HostSettings):
    """What the paged processors allocate, but for keys and values that are held anyway."""

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        rotary_emb: Rotary | None = None,
    ) -> torch.Tensor:
        if encoder_hidden_states is not None:
            query = attn.norm_q(attn.to_q(hidden_states)).unflatten(2, (attn.heads, -1))
            return project_out(attn, torch.empty_like(query))
        query, key, value = project_qkv(attn, hidden_states)
        query = attn.norm_q(query).unflatten(2, (attn.heads, -1))
        key = attn.norm_k(key).unflatten(2, (attn.heads, -1))
        value = value.unflatten(2, (attn.heads, -1))
        if rotary_emb is not None:
            query, key = apply_rotary(query, *rotary_emb), apply_rotary(key, *rotary_emb)
        return project_out(attn, torch.empty_like(query))


@lru_cache(maxsize=64)
def _forward_bytes(
    model_class: Any, config: str, shapes: tuple[tuple[int, ...], int | None], dtype: torch.dtype
) -> int:
    latents, num_timesteps = shapes
    # Two blocks: the second one runs while the first one's output is alive.
    values = json.loads(config) | {"num_layers": 2}
    rest = () if num_timesteps is None else (num_timesteps,)
    with torch.device("meta"):
        model = model_class.from_config(values)
        torch.nn.Module.to(model, dtype)
        for block in model.blocks:
            for attn in (block.attn1, block.attn2):
                attn.set_processor(_ShapeOnlyAttn(attn.processor))
        stub = torch.empty(latents[0], 1, values["text_dim"], dtype=dtype)
        hidden, timestep = torch.empty(latents, dtype=dtype), torch.empty(latents[:1] + rest)
        return peak_bytes(
            lambda: model(hidden_states=hidden, timestep=timestep, encoder_hidden_states=stub, return_dict=False)
        )
