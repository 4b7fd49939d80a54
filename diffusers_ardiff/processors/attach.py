"""Swap paged processors into an existing video transformer, and put it back as it was found."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ..attention import AttentionRequest, get_backend, select_backend
from ..cache import KVShape, TextKV
from ..context import PagedForwardContext
from ..rope import Rotary
from .wan import PagedWanCrossAttnProcessor, PagedWanSelfAttnProcessor, project_text

_SELF_ATTN_PARTS = ("to_q", "to_k", "to_v", "to_out", "norm_q", "norm_k", "heads", "set_processor")


class OffsetRope(torch.nn.Module):
    """Stands in for the host's rope module; returns the bound angles, or the host's own where none are bound."""

    def __init__(self, host_rope: torch.nn.Module) -> None:
        super().__init__()
        self.host_rope = host_rope
        self.rotary: Rotary | None = None

    def forward(self, hidden_states: torch.Tensor) -> Rotary:
        """(cos, sin) for the latents (rows, channels, frames, height, width) of this forward."""
        return self.rotary if self.rotary is not None else self.host_rope(hidden_states)


@dataclass(frozen=True, kw_only=True)
class TransformerGeometry:
    """What the cache needs to know of a transformer, read from its modules and config, never assumed."""

    num_layers: int
    num_heads: int
    head_dim: int
    patch_size: tuple[int, int, int]

    def tokens_per_frame(self, latent_height: int, latent_width: int) -> int:
        """C, tokens of one latent frame.

        Raises:
            ValueError: the latent size is no multiple of the patch.
        """
        _, patch_height, patch_width = self.patch_size
        if latent_height % patch_height or latent_width % patch_width:
            raise ValueError(
                f"latent frames of {latent_height}x{latent_width} can't be cut into patches of "
                f"{patch_height}x{patch_width}; use multiples of the patch."
            )
        return (latent_height // patch_height) * (latent_width // patch_width)

    def kv_shape(self, dtype: torch.dtype) -> KVShape:
        """Shape of keys and values stored in ``dtype``."""
        return KVShape(
            num_layers=self.num_layers, num_heads=self.num_heads, head_dim=self.head_dim, itemsize=dtype.itemsize
        )


class PagedAttachment:
    """Paged processors for one transformer; made by ``attach_paged_attention``.

    The same processor objects are used each time it attaches, so compiled code stays valid. ``bind`` hands them the
    inputs of one forward.
    """

    def __init__(self, transformer: Any, *, backend: str | None = None) -> None:
        self.transformer = transformer
        self.backend = get_backend(backend).name if backend is not None else None
        blocks = _wan_blocks(transformer)
        self._attn = [(block.attn1, block.attn2) for block in blocks]
        self._processors = [
            (PagedWanSelfAttnProcessor(attn1.processor), PagedWanCrossAttnProcessor(attn2.processor))
            for attn1, attn2 in self._attn
        ]
        self._rope = OffsetRope(transformer.rope)
        self._attached = False
        self._num_entered = 0

    @property
    def attached(self) -> bool:
        """Whether the processors are in the transformer now."""
        return self._attached

    @property
    def geometry(self) -> TransformerGeometry:
        """Layers, heads, head size and patch of the transformer."""
        attn1 = self._attn[0][0]
        patch = self.transformer.config.patch_size
        return TransformerGeometry(
            num_layers=len(self._attn),
            num_heads=attn1.heads,
            head_dim=attn1.norm_k.weight.shape[0] // attn1.heads,
            patch_size=(patch[0], patch[1], patch[2]),
        )

    def check_backend(self, request: AttentionRequest) -> str:
        """Name of the backend that will serve such calls; ValueError says why where none can."""
        return select_backend(request, self.backend).name

    def attach(self) -> PagedAttachment:
        """Put the processors and the rope module into the transformer.

        Raises:
            RuntimeError: attached already.
        """
        if self._attached:
            raise RuntimeError("these processors are attached already; detach them first.")
        for pair, ours in zip(self._attn, self._processors, strict=True):
            for attn, processor in zip(pair, ours, strict=True):
                processor.host_processor = attn.processor
                attn.set_processor(processor)
        self._rope.host_rope = self.transformer.rope
        self.transformer.rope = self._rope
        self._attached = True
        return self

    def detach(self) -> None:
        """Put the transformer back as it was found; calling it again does nothing.

        Raises:
            RuntimeError: somebody swapped processors or the rope after us; theirs have to be removed first.
        """
        if not self._attached:
            return
        for pair, ours in zip(self._attn, self._processors, strict=True):
            swapped = any(attn.processor is not processor for attn, processor in zip(pair, ours, strict=True))
            if swapped or self.transformer.rope is not self._rope:
                raise RuntimeError(
                    "the transformer's attention processors or its rope were swapped again after "
                    "attach_paged_attention; undo the later swap first, then detach."
                )
        for pair, ours in zip(self._attn, self._processors, strict=True):
            for attn, processor in zip(pair, ours, strict=True):
                attn.set_processor(processor.host_processor)
        self.transformer.rope = self._rope.host_rope
        self._attached = False

    def __enter__(self) -> PagedAttachment:
        if not self._attached:
            self.attach()
        self._num_entered += 1
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._num_entered -= 1
        if self._num_entered == 0:
            self.detach()

    @contextmanager
    def bind(self, context: PagedForwardContext, rotary: Rotary, text: TextKV | None = None) -> Iterator[None]:
        """Hand one prepared forward's inputs to the processors; always taken back.

        Args:
            context: a prepared forward context.
            rotary: (cos, sin) of its tokens.
            text: text K/V of its rows; None: the host computes cross-attention from ``encoder_hidden_states``.

        Raises:
            RuntimeError: not attached, or another forward is bound.
        """
        if not self._attached:
            raise RuntimeError("attach the paged processors before binding a forward to them.")
        if self._rope.rotary is not None:
            raise RuntimeError("another forward is bound to this transformer; a transformer runs one at a time.")
        try:
            self._rope.rotary = rotary
            for layer, (self_attn, cross_attn) in enumerate(self._processors):
                self_attn.inputs = context.layer_inputs(layer)
                cross_attn.text = text.layers[layer] if text is not None else None
            yield
        finally:
            self._rope.rotary = None
            for self_attn, cross_attn in self._processors:
                self_attn.inputs = None
                cross_attn.text = None

    @torch.no_grad()
    def compute_text_kv(self, prompt_embeds: torch.Tensor, image_embeds: torch.Tensor | None = None) -> TextKV:
        """Text K/V of all layers, from text-encoder outputs.

        Args:
            prompt_embeds: (rows, text_len, text_dim).
            image_embeds: (rows, image_len, image_dim) where the model has an image embedder.

        Returned whole or not at all, so a failure leaves whatever a session held before.
        """
        hook = getattr(self.transformer, "_hf_hook", None)
        if hook is not None:
            hook.pre_forward(self.transformer)
        embedder = self.transformer.condition_embedder
        text_states = embedder.text_embedder(prompt_embeds.to(self.transformer.dtype))
        image_states = None if image_embeds is None else embedder.image_embedder(image_embeds)
        return TextKV(tuple(project_text(attn2, text_states, image_states) for _, attn2 in self._attn))


def attach_paged_attention(transformer: Any, *, backend: str | None = None) -> PagedAttachment:
    """Swap paged attention into a Wan-family transformer, found by structure.

        with attach_paged_attention(transformer) as paged, PagedForwardContext([branch], num_tokens=n) as forward:
            with paged.bind(forward, rotary, text):
                transformer(...)

    Args:
        transformer: ``WanTransformer3DModel`` or a model built like it.
        backend: attention backend by name; None: chosen by capability and measured order.

    Returns: the attachment, attached. Use it as a context manager, or call ``detach()``.

    Raises:
        TypeError: the model lacks a part; the message lists them.
        ValueError: unknown backend.
    """
    return PagedAttachment(transformer, backend=backend).attach()


def _wan_blocks(transformer: Any) -> list[Any]:
    missing = [name for name in ("blocks", "rope", "condition_embedder", "config") if not hasattr(transformer, name)]
    blocks = list(getattr(transformer, "blocks", []))
    for index, block in enumerate(blocks[:1]):
        for attn_name in ("attn1", "attn2"):
            attn = getattr(block, attn_name, None)
            parts = [part for part in _SELF_ATTN_PARTS if getattr(attn, part, None) is None]
            missing += [f"blocks.{index}.{attn_name}.{part}" for part in parts]
    if missing or not blocks:
        raise TypeError(
            f"{type(transformer).__name__} is not built like a Wan transformer; missing: {missing or ['blocks']}. "
            "Supported: WanTransformer3DModel and its clones."
        )
    return blocks
