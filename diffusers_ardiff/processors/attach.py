"""Swap paged processors into an existing video transformer, and put it back as it was found."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from ..attention import WriteChoice, check_write_name, choose_write, fused_write_refusals, get_backend
from ..cache import KVShape, TextKV
from ..context import ForwardInputs
from ..parallel import TokenSharding
from ..rope import Rotary
from .wan import HostSettings, PagedWanCrossAttnProcessor, PagedWanSelfAttnProcessor, norm_refusals, project_text

_ATTN_PARTS = ("to_q", "to_k", "to_v", "to_out", "norm_q", "norm_k", "heads", "set_processor")


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
    inputs of one forward. ``sharding`` deals tokens and heads out to several ranks; None: one rank has all.
    """

    sharding: TokenSharding | None = None

    def __init__(self, transformer: Any, *, backend: str | None = None, write: str | None = None) -> None:
        self.transformer = transformer
        self.backend = get_backend(backend).name if backend is not None else None
        self.write = check_write_name(write)
        blocks = _wan_blocks(transformer)
        self._attn = [(block.attn1, block.attn2) for block in blocks]
        self._processors = [
            (PagedWanSelfAttnProcessor(attn1.processor), PagedWanCrossAttnProcessor(attn2.processor))
            for attn1, attn2 in self._attn
        ]
        self._rope = OffsetRope(transformer.rope)
        self._attached = False
        self._stays = False
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

    def attach(self) -> PagedAttachment:
        """Put the processors and the rope module into the transformer until ``detach``; a ``with`` leaves them in.

        All or none: a failure midway puts back what was swapped.

        Raises:
            RuntimeError: attached already, or blocks were replaced after this attachment was made.
        """
        self._swap_in()
        self._stays = True
        return self

    def detach(self) -> None:
        """Put the transformer back as it was found; calling it again does nothing.

        Raises:
            RuntimeError: somebody swapped processors, blocks or the rope after us; theirs have to be removed first.
        """
        if self._attached:
            self._check_unchanged()
            self._swap_out()

    def _pairs(self) -> Iterator[tuple[Any, HostSettings]]:
        for attns, ours in zip(self._attn, self._processors, strict=True):
            yield from zip(attns, ours, strict=True)

    def _swap_in(self) -> None:
        if self._attached:
            raise RuntimeError("these processors are attached already; detach them first.")
        self._check_unchanged()
        try:
            for attn, processor in self._pairs():
                processor.host_processor = attn.processor
                attn.set_processor(processor)
            self._rope.host_rope = self.transformer.rope
            self.transformer.rope = self._rope
        except BaseException:
            self._swap_out()
            raise
        self._attached = True

    def _swap_out(self) -> None:
        for attn, processor in self._pairs():
            if attn.processor is processor:
                attn.set_processor(processor.host_processor)
        if self.transformer.rope is self._rope:
            self.transformer.rope = self._rope.host_rope
        self._attached = self._stays = False

    @property
    def covers_all_blocks(self) -> bool:
        """Whether the transformer still has exactly the attention modules these processors were made for."""
        found = [getattr(block, name, None) for block in self.transformer.blocks for name in ("attn1", "attn2")]
        known = [attn for attn, _ in self._pairs()]
        return len(found) == len(known) and all(a is b for a, b in zip(found, known, strict=True))

    @property
    def _is_compiled(self) -> bool:
        modules = (self.transformer, *self.transformer.blocks)
        return any(getattr(module, "_compiled_call_impl", None) is not None for module in modules)

    def _check_unchanged(self) -> None:
        if not self.covers_all_blocks:
            raise RuntimeError(
                "blocks of the transformer were replaced, added or removed after the paged processors were made for it, "
                "so these would not be paged; undo the later swap first, or make a new attachment."
            )
        swapped = any(attn.processor is not processor for attn, processor in self._pairs())
        if self._attached and (swapped or self.transformer.rope is not self._rope):
            raise RuntimeError(
                "the transformer's attention processors or its rope were swapped again after the paged ones were "
                "attached; undo the later swap first."
            )

    def __enter__(self) -> PagedAttachment:
        if not self._attached:
            self._swap_in()
        self._num_entered += 1
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._num_entered -= 1
        if self._num_entered == 0 and not self._stays:
            self.detach()

    @contextmanager
    def bind(self, context: ForwardInputs, rotary: Rotary, text: TextKV | None = None) -> Iterator[None]:
        """Hand one prepared forward's inputs to the processors; always taken back.

        Args:
            context: a prepared forward context; where it names no attention backend, it takes the attached one.
            rotary: (cos, sin) of all its tokens, also where ``sharding`` cuts them.
            text: text K/V of its rows; None: the host computes cross-attention from ``encoder_hidden_states``.

        Raises:
            RuntimeError: not attached, another forward is bound, processors or blocks were swapped, or, at the end, a
                layer has written no keys, so the forward must not be committed.
            ValueError: context and attachment name different backends, or the fused write is named and cannot serve.
        """
        if not self._attached:
            raise RuntimeError("attach the paged processors before binding a forward to them.")
        if self._rope.rotary is not None:
            raise RuntimeError("another forward is bound to this transformer; a transformer runs one at a time.")
        self._check_unchanged()
        if self.backend is not None:
            context.use_backend(self.backend)
        write = self.choose_write(context.storage.device.type, context.storage.dtype)
        if self._is_compiled:
            # Inductor's CUDA graphs would else take each compiled block for a step, and free what the last one returned.
            torch.compiler.cudagraph_mark_step_begin()
        sharding = self.sharding
        if sharding is not None:
            rotary = sharding.cut_rotary(self.transformer, rotary)
        try:
            self._rope.rotary = rotary
            for layer, (self_attn, cross_attn) in enumerate(self._processors):
                self_attn.inputs, self_attn.write = context.layer_inputs(layer), write
                self_attn.exchange = sharding.exchange if sharding is not None else None
                cross_attn.text = text.layers[layer] if text is not None else None
            with sharding.cut(self.transformer) if sharding is not None else nullcontext():
                yield
        finally:
            self._rope.rotary = None
            for self_attn, cross_attn in self._processors:
                self_attn.inputs = self_attn.exchange = None
                cross_attn.text = None
        self._check_all_written(context)

    def fused_write_refusals(self, device_type: str, dtype: torch.dtype) -> list[str]:
        """Why one kernel cannot normalise and rotate in this transformer and write to pools of that dtype; empty: it can.

        The device first, and if it can, the first layer whose norms refuse.
        """
        if self.sharding is not None:
            return ["keys are normalised over all heads before these are dealt out, and written after that"]
        geometry = self.geometry
        reasons = fused_write_refusals(device_type, dtype, geometry.head_dim)
        if reasons:
            return reasons
        for layer, (attn1, _) in enumerate(self._attn):
            found = norm_refusals(attn1, geometry.num_heads * geometry.head_dim)
            if found:
                return [f"layer {layer}: {reason}" for reason in found]
        return []

    def choose_write(self, device_type: str, dtype: torch.dtype) -> WriteChoice:
        """Who normalises, rotates and writes, in eager and in compiled regions; one choice for all layers.

        Raises:
            ValueError: the fused write is named and cannot serve.
        """
        refusals = [] if self.write == "torch" else self.fused_write_refusals(device_type, dtype)
        return choose_write(self.write, refusals)

    def _check_all_written(self, context: ForwardInputs) -> None:
        unwritten = [layer for layer in context.unwritten_layers if layer < len(self._attn)]
        if unwritten:
            raise RuntimeError(
                f"layers {unwritten} wrote no keys in this forward, so it counts as failed. Either a cache skips blocks "
                "(call disable_cache() on the transformer), or a processor or block was swapped after the paged ones "
                "were attached, or the transformer was not called."
            )

    @torch.no_grad()
    def compute_text_kv(self, prompt_embeds: torch.Tensor, image_embeds: torch.Tensor | None = None) -> TextKV:
        """Text K/V of all layers, from text-encoder outputs.

        Args:
            prompt_embeds: (rows, text_len, text_dim).
            image_embeds: (rows, image_len, image_dim) where the model has an image embedder.

        Returned whole or not at all, so a failure leaves whatever a session held before.

        Raises:
            NotImplementedError: diffusers moves whole blocks to the device when they are called (block-level group
                offloading), and here only parts of them are.
        """
        if any(_is_offloaded_whole(block) for block in self.transformer.blocks):
            raise NotImplementedError(
                "text K/V are computed by parts of the blocks, which block-level group offloading leaves off the device; "
                "use enable_group_offload(offload_type='leaf_level')."
            )
        hook = getattr(self.transformer, "_hf_hook", None)
        if hook is not None:
            hook.pre_forward(self.transformer)
        embedder = self.transformer.condition_embedder
        text_states = embedder.text_embedder(prompt_embeds.to(self.transformer.dtype))
        image_states = None if image_embeds is None else embedder.image_embedder(image_embeds)
        return TextKV(tuple(project_text(attn2, text_states, image_states) for _, attn2 in self._attn))


def attach_paged_attention(
    transformer: Any, *, backend: str | None = None, write: str | None = None
) -> PagedAttachment:
    """Swap paged attention into a Wan-family transformer, found by structure.

        with attach_paged_attention(transformer) as paged, PagedForwardContext([branch], num_tokens=n) as forward:
            with paged.bind(forward, rotary, text):
                transformer(...)

    Args:
        transformer: ``WanTransformer3DModel`` or a model built like it.
        backend: attention backend by name; None: chosen by capability and measured order.
        write: who normalises, rotates and writes: "fused" (one Triton kernel), "torch"; None: the measured choice, torch
            where the kernel cannot serve. Either way ``PagedAttachment.choose_write`` says which.

    Returns: the attachment, attached. Use it as a context manager, or call ``detach()``.

    Raises:
        TypeError: the model lacks a part; the message lists them.
        ValueError: unknown backend or way to write.
    """
    attachment = PagedAttachment(transformer, backend=backend, write=write)
    attachment._swap_in()
    return attachment


def _is_offloaded_whole(block: Any) -> bool:
    registry = getattr(block, "_diffusers_hook", None)
    hook = registry.get_hook("group_offloading") if registry is not None else None
    # Leaf-level offloading hooks a block too, for its own parameters only.
    return hook is not None and any(module is block for module in hook.group.modules)


def _wan_blocks(transformer: Any) -> list[Any]:
    missing = [name for name in ("blocks", "rope", "condition_embedder", "config") if not hasattr(transformer, name)]
    blocks = list(getattr(transformer, "blocks", []))
    for index, block in enumerate(blocks):
        missing += [f"blocks.{index}.{part}" for part in _missing_parts(block)]
        if missing:
            break
    if missing or not blocks:
        raise TypeError(
            f"{type(transformer).__name__} is not built like a Wan transformer; missing: {missing or ['blocks']}. "
            "Supported: WanTransformer3DModel and its clones."
        )
    return blocks


def _missing_parts(block: Any) -> list[str]:
    attns = {name: getattr(block, name, None) for name in ("attn1", "attn2")}
    return [f"{name}.{p}" for name, attn in attns.items() for p in _ATTN_PARTS if getattr(attn, p, None) is None]
