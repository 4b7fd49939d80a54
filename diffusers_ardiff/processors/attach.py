"""Swap paged processors into an existing video transformer, and put it back as it was found."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cached_property
from typing import Any

import torch

from ..attention import WriteChoice, check_write_name, choose_write, fused_write_refusals, get_backend
from ..cache import TextKV
from ..context import ForwardInputs
from ..parallel import TokenSharding
from ..rope import Rotary
from .base import HostSettings, PagedSelfAttnProcessor
from .family import RopeFunction, TransformerGeometry, find_family
from .offloaded import parts_onloaded


class OffsetRope(torch.nn.Module):
    """Stands in for the host's rope module; returns the bound angles, or the host's own where none are bound."""

    def __init__(self, host_rope: torch.nn.Module) -> None:
        super().__init__()
        self.host_rope = host_rope
        self.rotary: Rotary | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Rotary:
        """(cos, sin) of this forward; arguments as the host's module takes them."""
        return self.rotary if self.rotary is not None else self.host_rope(*args, **kwargs)


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
        self.family = family = find_family(transformer)
        self._layers = family.layers(transformer)
        self._processors: list[tuple[PagedSelfAttnProcessor, Any]] = [
            (
                family.make_self_processor(layer.self_attn),
                None if layer.cross_attn is None else family.make_cross_processor(layer.cross_attn),
            )
            for layer in self._layers
        ]
        self._pairs: list[tuple[Any, HostSettings]] = [
            (attn, processor)
            for attns, ours in zip(self._layers, self._processors, strict=True)
            for attn, processor in zip(attns, ours, strict=True)
            if processor is not None
        ]
        self._rope = None if family.rope_module is None else OffsetRope(getattr(transformer, family.rope_module))
        self._hooks: list[Any] = []
        self._bound: ForwardInputs | None = None
        self._attached = False
        self._stays = False
        self._num_entered = 0

    @property
    def attached(self) -> bool:
        """Whether the processors are in the transformer now."""
        return self._attached

    @cached_property
    def geometry(self) -> TransformerGeometry:
        """Layers, heads, head size and patch of the transformer."""
        return self.family.geometry(self.transformer)

    def make_rope(self, **options: Any) -> RopeFunction:
        """A function of (frame positions of each row, patch rows, patch columns, device) that gives the angles to bind.

        Args:
            options: what the family's host takes per call, such as frames a second; see docs/families.md.
        """
        return self.family.make_rope(self.transformer, **options)

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

    def _swap_in(self) -> None:
        if self._attached:
            raise RuntimeError("these processors are attached already; detach them first.")
        self._check_unchanged()
        try:
            for attn, processor in self._pairs:
                processor.host_processor = attn.processor
                attn.set_processor(processor)
            if self._rope is not None:
                self._rope.host_rope = self._host_rope
                setattr(self.transformer, self._rope_name, self._rope)
            self._hooks = self.family.register_hooks(self.transformer, lambda: self._bound)
        except BaseException:
            self._swap_out()
            raise
        self._attached = True

    def _swap_out(self) -> None:
        for attn, processor in self._pairs:
            if attn.processor is processor:
                attn.set_processor(processor.host_processor)
        if self._rope is not None and self._host_rope is self._rope:
            setattr(self.transformer, self._rope_name, self._rope.host_rope)
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._attached = self._stays = False

    @property
    def _rope_name(self) -> str:
        return self.family.rope_module or ""

    @property
    def _host_rope(self) -> Any:
        """What stands now where the host's rope module was found; None where the family leaves it alone."""
        return getattr(self.transformer, self._rope_name) if self._rope is not None else None

    @property
    def covers_all_blocks(self) -> bool:
        """Whether the transformer still has exactly the attention modules these processors were made for."""
        found, known = self.family.layers(self.transformer), self._layers
        # Modules are equal where they are the same.
        return found == known

    @property
    def _is_compiled(self) -> bool:
        modules = (self.transformer, *self.family.blocks(self.transformer))
        return any(getattr(module, "_compiled_call_impl", None) is not None for module in modules)

    def _check_unchanged(self) -> None:
        if not self.covers_all_blocks:
            raise RuntimeError(
                "blocks of the transformer were replaced, added or removed after the paged processors were made for it, "
                "so these would not be paged; undo the later swap first, or make a new attachment."
            )
        swapped = any(attn.processor is not processor for attn, processor in self._pairs)
        if self._attached and (swapped or self._host_rope is not self._rope):
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
            rotary: (cos, sin) of all its tokens, also where ``sharding`` cuts them, from the function that ``make_rope``
                returns.
            text: text K/V of its rows; None: the host computes cross-attention from ``encoder_hidden_states``.

        Raises:
            RuntimeError: not attached, another forward is bound, processors or blocks were swapped, or, at the end, a
                layer has written no keys, so the forward must not be committed.
            TypeError: ``sharding`` is set, and the family can't be cut.
            ValueError: context and attachment name different backends, or the fused write is named and cannot serve; or
                text is given to a family that does not cache it.
        """
        if not self._attached:
            raise RuntimeError("attach the paged processors before binding a forward to them.")
        if self._bound is not None:
            raise RuntimeError("another forward is bound to this transformer; a transformer runs one at a time.")
        self._check_unchanged()
        if text is not None and self._layers[0].cross_attn is None:
            raise ValueError(f"{self.family.name} transformers compute text K/V in every forward; bind without text.")
        if self.backend is not None:
            context.use_backend(self.backend)
        write = self.choose_write(context.storage.device.type, context.storage.dtype)
        if self._is_compiled:
            # Inductor's CUDA graphs would else take each compiled block for a step, and free what the last one returned.
            torch.compiler.cudagraph_mark_step_begin()
        sharding = self.sharding
        if sharding is not None:
            self.check_sharding()
            rotary = sharding.cut_rotary(self.transformer, rotary)
        try:
            self._bound = context
            self._hand_over(context, rotary, text, write)
            with sharding.cut(self.transformer) if sharding is not None else nullcontext():
                yield
        finally:
            self._bound = None
            self._take_back()
        self._check_all_written(context)

    def _hand_over(self, context: ForwardInputs, rotary: Rotary, text: TextKV | None, write: WriteChoice) -> None:
        if self._rope is not None:
            self._rope.rotary = rotary
        for layer, (self_attn, cross_attn) in enumerate(self._processors):
            self_attn.inputs, self_attn.write = context.layer_inputs(layer), write
            self_attn.exchange = self.sharding.exchange if self.sharding is not None else None
            if self._rope is None:
                self_attn.rotary = rotary
            if cross_attn is not None:
                cross_attn.text = text.layers[layer] if text is not None else None

    def _take_back(self) -> None:
        if self._rope is not None:
            self._rope.rotary = None
        for self_attn, cross_attn in self._processors:
            self_attn.inputs = self_attn.rotary = self_attn.exchange = None
            if cross_attn is not None:
                cross_attn.text = None

    def check_sharding(self) -> None:
        """Raise TypeError where tokens and heads of this transformer can't be dealt out to several ranks."""
        reasons = self.family.sharding_refusals(self.transformer)
        if reasons:
            raise TypeError(
                f"{type(self.transformer).__name__} can't be run on several ranks: {'; '.join(reasons)}. Wan, SkyReels-V2 "
                "and ChronoEdit can. Run this one on a rank alone, with ulysses_degree=1, or a video on each rank."
            )

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
        for layer, (attn, _) in enumerate(self._layers):
            found = self.family.fused_write_refusals(attn, geometry.num_heads, geometry.head_dim)
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
        unwritten = [layer for layer in context.unwritten_layers if layer < len(self._layers)]
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
            NotImplementedError: the family computes them in every forward.
        """
        hook = getattr(self.transformer, "_hf_hook", None)
        if hook is not None:
            hook.pre_forward(self.transformer)
        with parts_onloaded(self.transformer):
            return self.family.compute_text_kv(self.transformer, prompt_embeds, image_embeds)


def attach_paged_attention(
    transformer: Any, *, backend: str | None = None, write: str | None = None
) -> PagedAttachment:
    """Swap paged attention into a video transformer; its family is found by structure.

        with attach_paged_attention(transformer) as paged, PagedForwardContext([branch], num_tokens=n) as forward:
            with paged.bind(forward, rotary, text):
                transformer(...)

    Args:
        transformer: a model of a registered family (docs/families.md).
        backend: attention backend by name; None: chosen by capability and measured order.
        write: who normalises, rotates and writes: "fused" (one Triton kernel), "torch"; None: the measured choice, torch
            where the kernel cannot serve. Either way ``PagedAttachment.choose_write`` says which.

    Returns: the attachment, attached. Use it as a context manager, or call ``detach()``.

    Raises:
        TypeError: the model is of no family (the message lists what is missing for each), or can't be right chunk by
            chunk.
        ValueError: unknown backend or way to write.
    """
    attachment = PagedAttachment(transformer, backend=backend, write=write)
    attachment._swap_in()
    return attachment
