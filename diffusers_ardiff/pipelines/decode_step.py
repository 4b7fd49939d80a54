"""One call of the Wan decoder as a function of tensors, so that it can be compiled: state in, state out, nothing mutated."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import unpatchify

from .light_decoder import LightDecoder
from .traceable import traceable

CacheEntry = torch.Tensor | str | None
"""State of one causal convolution: None before the first frame, then a marker of the host's or a tensor."""

DecodeStep = Callable[[Any, torch.Tensor, tuple[CacheEntry, ...], int], tuple[torch.Tensor, tuple[CacheEntry, ...]]]
"""(decoder, hidden (B, C, n, h, w), state, patch size) -> (pixels (B, 3, frames, H, W) float32 in [-1, 1], state)."""

MAX_COMPILED_LAYOUTS = 64
"""Pixel sizes, batches and chunk lengths times three; torch's own limit of 8 counts every one of them."""


def decode_step(
    decoder: Any, hidden: torch.Tensor, state: tuple[CacheEntry, ...], patch_size: int
) -> tuple[torch.Tensor, tuple[CacheEntry, ...]]:
    """Decode ``hidden`` after the past in ``state``; a state of None begins a video, then with one latent frame."""
    cache = list(state)
    is_first = all(entry is None for entry in state)
    pixels = decoder(hidden, feat_cache=cache, feat_idx=[0], first_chunk=is_first)
    return unpatchify(pixels, patch_size=patch_size).float().clamp_(-1.0, 1.0), tuple(cache)


def _step_with_own_state(
    decoder: Any,
    hidden: torch.Tensor,
    state: tuple[CacheEntry, ...],
    patch_size: int,
    layout: tuple[str, bool],
) -> tuple[torch.Tensor, tuple[CacheEntry, ...]]:
    """``decode_step`` whose state is copied out of the activations, into the layout that the next call takes.

    Args:
        layout: ``weight_layout`` of the decoder, and whether the state is channels-last.
    """
    channels_last = _state_layout(layout)
    pixels, state = decode_step(decoder, hidden, state, patch_size)
    return pixels, tuple(_apart(entry, channels_last) if isinstance(entry, torch.Tensor) else entry for entry in state)


def _light_step_with_own_state(
    decoder: LightDecoder, latents: torch.Tensor, state: tuple[torch.Tensor, ...], layout: tuple[str, bool]
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """As ``_step_with_own_state``, for a light decoder."""
    channels_last = _state_layout(layout)
    pixels, state = decoder(latents, state)
    return pixels, tuple(_apart(entry, channels_last) for entry in state)


def _state_layout(layout: tuple[str, bool]) -> bool:
    weights, channels_last = layout
    # Read, so that the traced code is guarded by it: torch 2.11 looks at no strides of parameters.
    if not weights:
        raise ValueError("the layout of a decoder's weights is missing.")
    return channels_last


def _apart(entry: torch.Tensor, channels_last: bool) -> torch.Tensor:
    """A copy in the layout of ``canonical``.

    Inductor drops copies that change no stride, and so the host's own ``clone()`` of an activation's last two frames: the
    state is then a view that keeps the whole chunk's activation alive. Dense strides differ from those of a part.
    """
    last = torch.channels_last if entry.dim() == 4 else torch.channels_last_3d
    memory_format = last if channels_last else torch.contiguous_format
    return torch.empty_like(entry, memory_format=memory_format).copy_(entry)


class CompiledStep:
    """``decode_step`` compiled for the exact shapes and weight layouts it meets: three graphs a layout.

    The three are a video's first latent frame, the part after it, and all later chunks of one length. So nothing is
    compiled after the second chunk, or after the third where the first chunk is a single latent frame.

    Args:
        channels_last: layout of the state between calls.
        compiler: backend of ``torch.compile``.
    """

    def __init__(self, *, channels_last: bool = False, compiler: Any = "inductor") -> None:
        self._channels_last = channels_last
        # A graph break or a shape made symbolic would cost what compiling is meant to save, so neither is allowed.
        self._compiled = torch.compile(_step_with_own_state, fullgraph=True, dynamic=False, backend=compiler)

    def __call__(
        self, decoder: Any, hidden: torch.Tensor, state: tuple[CacheEntry, ...], patch_size: int
    ) -> tuple[torch.Tensor, tuple[CacheEntry, ...]]:
        """As ``decode_step``."""
        layout = (weight_layout(decoder), self._channels_last)
        with traceable(decoder), torch._dynamo.config.patch(recompile_limit=MAX_COMPILED_LAYOUTS):
            pixels, state = self._compiled(decoder, canonical(hidden), state, patch_size, layout)
        settled = (_settled(x, self._channels_last) if isinstance(x, torch.Tensor) else x for x in state)
        return pixels, tuple(settled)


class CompiledLightStep:
    """A light decoder compiled for the exact shapes and weight layouts it meets: one graph a chunk length.

    Args:
        decoder: the network.
        channels_last: layout of the state between calls.
        compiler: backend of ``torch.compile``.
    """

    def __init__(self, decoder: LightDecoder, *, channels_last: bool = False, compiler: Any = "inductor") -> None:
        self._decoder = decoder
        self._channels_last = channels_last
        self._compiled = torch.compile(_light_step_with_own_state, fullgraph=True, dynamic=False, backend=compiler)

    def __call__(
        self, latents: torch.Tensor, state: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """As ``LightDecoder.forward``."""
        layout = (weight_layout(self._decoder), self._channels_last)
        # The past of a video that begins was not made here.
        state = tuple(canonical(entry, channels_last=self._channels_last) for entry in state)
        with torch._dynamo.config.patch(recompile_limit=MAX_COMPILED_LAYOUTS):
            pixels, state = self._compiled(self._decoder, canonical(latents), state, layout)
        return pixels, tuple(_settled(entry, self._channels_last) for entry in state)


def _settled(entry: torch.Tensor, channels_last: bool) -> torch.Tensor:
    """State as the next call takes it. Graphs give it so: this copies nothing, unless a compiler chose otherwise."""
    return canonical(_own(entry), channels_last=channels_last)


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, copied where it would keep a larger one's memory alive."""
    is_part = tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size()
    return tensor.clone() if is_part else tensor


def canonical(tensor: torch.Tensor, *, channels_last: bool = False) -> torch.Tensor:
    """The same values (rows, channels, ...) in one layout, strides of single-element dimensions included.

    Those strides mean nothing but guards compare them: without this, the second chunk's state compiles a graph that
    the third one's does not fit.
    """
    if channels_last:
        return canonical(tensor.movedim(1, -1)).movedim(-1, 1)
    strides = tuple(math.prod(tensor.shape[dim + 1 :]) for dim in range(tensor.dim()))
    return tensor if tensor.stride() == strides else tensor.contiguous().as_strided(tensor.shape, strides)


def set_conv_layout(module: torch.nn.Module, *, channels_last: bool) -> None:
    """Store a module's convolution weights channels-last, or contiguous again; values stay bit by bit."""
    formats = {
        torch.nn.Conv2d: torch.channels_last if channels_last else torch.contiguous_format,
        torch.nn.Conv3d: torch.channels_last_3d if channels_last else torch.contiguous_format,
    }
    for part in module.modules():
        for kind, memory_format in formats.items():
            if isinstance(part, kind):
                part.weight.data = part.weight.data.contiguous(memory_format=memory_format)


def weight_layout(module: torch.nn.Module) -> str:
    """The strides of all parameters, in words that compare fast."""
    return str([weight.stride() for weight in module.parameters()])
