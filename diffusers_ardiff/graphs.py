"""Whole forwards captured once and replayed: which ones, when they may be replayed, and what is copied for a replay.

A captured forward fixes addresses and lengths: the runs its rows lie in, how many keys they read, shapes. Those are its
``GraphKey``. What differs from one replay to the next (latents, timestep, angles, the slots to write, text K/V) is
copied into tensors of its own first. How a forward is captured is the recorder's business.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from .cache import KVStorage, TextKV
from .context import LaunchPlan, PagedForwardContext, PagedLayerInputs, find_launch_plan, register_launch_plan
from .gelu import LinearGelu
from .launch import WritePass
from .recording import Recorder
from .rope import Rotary

REPLAYABLE_ARGUMENTS = frozenset({"hidden_states", "timestep", "encoder_hidden_states"})


@dataclass(frozen=True, kw_only=True, eq=False)
class ForwardCall:
    """All that one transformer forward takes.

    Args:
        context: of its tokens.
        arguments: of the transformer. The text among them is a stub: its K/V are bound.
        rotary: (cos, sin) of its tokens.
        text: text K/V of its rows.
        cache_name: name of the host's ``cache_context``.
    """

    context: Any
    arguments: dict[str, Any]
    rotary: Rotary
    text: TextKV
    cache_name: str

    @property
    def text_shape(self) -> tuple[Any, ...]:
        """Shapes of one layer's text K/V."""
        return tuple(None if tensor is None else tuple(tensor.shape) for tensor in self.text.layers[0])

    @property
    def shape(self) -> tuple[Any, ...]:
        """What compiled blocks depend on: shapes of latents, timestep, angles, text K/V, pool, page table. Once prepared."""
        latents, timestep = self.arguments["hidden_states"], self.arguments["timestep"]
        paged = self.context.parts[0][0]
        return (
            (tuple(latents.shape), latents.dtype, tuple(timestep.shape), self.text_shape, frozenset(self.arguments)),
            tuple(self.rotary[0].shape),
            (tuple(paged.key_pool.shape), paged.key_pool.dtype, tuple(paged.block_table.shape)),
        )


class CompiledShapes:
    """Shapes of forwards that the blocks are compiled for.

    Attributes:
        recording: whether a new shape may be compiled now.
    """

    def __init__(self) -> None:
        self.recording = False
        self._known: set[tuple[Any, ...]] = set()

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, call: ForwardCall) -> bool:
        return call.shape in self._known

    def allows(self, call: ForwardCall) -> bool:
        """Whether this forward may run compiled; remembers it while recording."""
        if self.recording:
            self._known.add(call.shape)
        return call in self


@dataclass(frozen=True, kw_only=True)
class GraphKey:
    """What a captured forward fixes: where its rows lie, how many keys they read, every shape, and whether it attends to
    the end."""

    base_slots: tuple[int, ...]
    seq_lens: tuple[int, ...]
    num_tokens: int
    backend: str | None
    shape: tuple[Any, ...]
    only_writes: bool = False


def graph_key(call: ForwardCall) -> GraphKey | None:
    """The key of a prepared forward; None where it can't be captured or replayed.

    That is a forward under a mask, one with extra rows or over fragmented pages, and one whose control hook brings
    arguments beyond latents and timestep.
    """
    context: PagedForwardContext = call.context
    plans = [plan_of(part) for part in context.parts]
    rows = [row for plan in plans for row in plan.rows]
    bases = tuple(row.base_slot for row in rows if row.base_slot is not None)
    is_plain = (
        len(bases) == len(rows) and not any(plan.mask or plan.visible for plan in plans) and context.num_extra == 0
    )
    if not is_plain or set(call.arguments) != REPLAYABLE_ARGUMENTS:
        return None
    return GraphKey(
        base_slots=bases,
        seq_lens=tuple(row.seq_len for row in rows),
        num_tokens=context.num_tokens,
        backend=plans[0].backend,
        shape=call.shape,
        only_writes=plans[0].write_pass is not None,
    )


def plan_of(inputs: Sequence[PagedLayerInputs]) -> LaunchPlan:
    """The launch plan behind prepared layer inputs."""
    plan = find_launch_plan(int(inputs[0].launch[1]))
    if plan is None:
        raise RuntimeError("layer inputs without a launch plan can't be captured; take them from a forward context.")
    return plan


class FixedForward:
    """The tensors of a captured forward, in place of a context; the slots to write are in a tensor only."""

    def __init__(self, context: PagedForwardContext) -> None:
        self.storage = context.storage
        self._context_type = type(context)
        self._plans: list[LaunchPlan] = []
        self._parts: list[list[PagedLayerInputs]] = []
        for part in context.parts:
            plan = plan_of(part)
            # No written ranges: those of the captured forward are not those of a replay.
            rows = tuple(replace(row, written_ranges=(), staging_row=None, staging_key=None) for row in plan.rows)
            write_pass = None if plan.write_pass is None else WritePass(plan.write_pass.num_layers)
            fixed = replace(plan, rows=rows, staging=None, branches=(), written_layers=set(), write_pass=write_pass)
            launch, first = register_launch_plan(fixed), part[0]
            shared = {
                "slot_mapping": first.slot_mapping.clone(),
                "block_table": first.block_table.clone(),
                "seq_lens": first.seq_lens.clone(),
                "launch": launch,
            }
            self._plans.append(fixed)
            self._parts.append([inputs._replace(**shared) for inputs in part])

    def load(self, context: PagedForwardContext) -> None:
        """Take over where a prepared forward writes; all else is in the key."""
        for mine, theirs in zip(self._parts, context.parts, strict=True):
            mine[0].slot_mapping.copy_(theirs[0].slot_mapping)

    @property
    def parts(self) -> tuple[list[PagedLayerInputs], ...]:
        """As those of the context."""
        return tuple(self._parts)

    @property
    def unwritten_layers(self) -> tuple[int, ...]:
        """Layers that the captured function did not write."""
        return tuple(i for i in range(len(self._parts[0])) if any(i not in p.written_layers for p in self._plans))

    def use_backend(self, name: str) -> None:
        """Check that the attached backend is the captured one."""
        if any(plan.backend != name for plan in self._plans):
            raise RuntimeError(f"this forward was captured with {self._plans[0].backend!r}, not {name!r}.")

    def layer_inputs(self, layer: int) -> Any:
        """Tensors of one layer, in the form that the captured context hands out."""
        return self._context_type.join_parts([part[layer] for part in self._parts])


class FixedText:
    """Text K/V at fixed addresses, shared by the captured forwards of the same rows."""

    def __init__(self, text: TextKV) -> None:
        self.text = text.apply(torch.clone)
        self._source = weakref.ref(text)

    def load(self, text: TextKV) -> None:
        """Copy another text in; nothing where it is the one copied last."""
        if self._source() is text:
            return
        for mine, theirs in zip(self.text.layers, text.layers, strict=True):
            for target, source in zip(mine, theirs, strict=True):
                if target is not None and source is not None:
                    target.copy_(source)
        self._source = weakref.ref(text)


class CapturedForward:
    """One captured forward and the tensors it reads."""

    def __init__(
        self, call: ForwardCall, text: FixedText, run: Callable[[ForwardCall], torch.Tensor], record: Recorder
    ) -> None:
        self._text = text
        self._forward = FixedForward(call.context)
        self._call = ForwardCall(
            context=self._forward,
            arguments={name: tensor.clone() for name, tensor in call.arguments.items()},
            rotary=(call.rotary[0].clone(), call.rotary[1].clone()),
            text=text.text,
            cache_name=call.cache_name,
        )
        text.load(call.text)
        self._recording = record(lambda: run(self._call))

    def replay(self, call: ForwardCall) -> torch.Tensor:
        """Run it for another forward of the same key; the output is a copy."""
        self._forward.load(call.context)
        self._text.load(call.text)
        for name, tensor in self._call.arguments.items():
            tensor.copy_(call.arguments[name])
        for mine, theirs in zip(self._call.rotary, call.rotary, strict=True):
            mine.copy_(theirs)
        # A copy, since graphs share their memory.
        return self._recording.replay().clone()


class GraphSet:
    """Captured forwards of one transformer over one pool.

    Args:
        storage: the pool; graphs hold its addresses.
        transformer: the model; graphs hold the addresses of its weights and the scales of its LoRAs.
        record: captures a function.

    Attributes:
        recording: whether unknown forwards are to be captured.
        num_replays: forwards replayed since the warm-up.
        capture_seconds: spent on capturing.
    """

    def __init__(self, storage: KVStorage, transformer: torch.nn.Module, record: Recorder) -> None:
        self.storage = storage
        self.recording = False
        self.num_replays = 0
        self.capture_seconds = 0.0
        self._transformer = transformer
        self._record = record
        self._pool_addresses = _pool_addresses(storage)
        self._weights = _weights_of(transformer)
        self._captured: dict[GraphKey, CapturedForward] = {}
        self._texts: dict[tuple[Any, ...], FixedText] = {}

    def __len__(self) -> int:
        return len(self._captured)

    @property
    def keys(self) -> tuple[GraphKey, ...]:
        """Of all captured forwards."""
        return tuple(self._captured)

    @property
    def text_bytes(self) -> int:
        """Bytes of the text K/V that captured forwards read."""
        return sum(fixed.text.num_bytes for fixed in self._texts.values())

    def check_pools(self) -> None:
        """Raise RuntimeError where the K/V pools are no longer where they were captured."""
        if _pool_addresses(self.storage) != self._pool_addresses:
            raise RuntimeError(
                "the K/V pools have moved since their forwards were captured, so these graphs would read and write "
                "freed memory. Call pipe.warmup() again, or pipe.cooldown() to go on without graphs."
            )

    def check_weights(self) -> None:
        """Raise RuntimeError where weights were moved, replaced or added since the forwards were captured."""
        if _weights_of(self._transformer) != self._weights:
            raise RuntimeError(
                "the transformer's weights were moved, replaced or added since its forwards were captured (.to(), a "
                "LoRA or its scale, quantisation, fuse_gelu). Call pipe.warmup() again, or pipe.cooldown() to go on without graphs."
            )

    def replay(self, key: GraphKey, call: ForwardCall) -> torch.Tensor | None:
        """The output of a forward whose key was captured; None where it was not."""
        captured = self._captured.get(key)
        if captured is None and not self.recording:
            # One that attends to the end writes the same.
            captured = self._captured.get(replace(key, only_writes=False))
        if captured is None:
            return None
        self.num_replays += 1
        return captured.replay(call)

    def capture(self, key: GraphKey, call: ForwardCall, run: Callable[[ForwardCall], torch.Tensor]) -> None:
        """Capture a forward that has just run, its context still open: it writes the same values once more."""
        start = time.perf_counter()
        place = (key.base_slots, call.text_shape)
        if place not in self._texts:
            self._texts[place] = FixedText(call.text)
        self._captured[key] = CapturedForward(call, self._texts[place], run, self._record)
        self.capture_seconds += time.perf_counter() - start


def _pool_addresses(storage: KVStorage) -> tuple[int, ...]:
    return tuple(pool.data_ptr() for pool in (*storage.key_pools, *storage.value_pools))


def _weights_of(transformer: torch.nn.Module) -> tuple[Any, ...]:
    """What a captured forward holds of the model: addresses of weights, numbers that LoRAs multiply by, fused layers."""
    named = (*transformer.named_parameters(), *transformer.named_buffers())
    addresses = tuple((name, tensor.data_ptr()) for name, tensor in named if not name.startswith("rope."))
    adapters = tuple(
        (name, tuple(module.scaling.items()), tuple(module.active_adapters), module.disable_adapters)
        for name, module in transformer.named_modules()
        if hasattr(module, "lora_A")
    )
    # Replaced by other code over the same weights.
    fused = tuple(name for name, module in transformer.named_modules() if isinstance(module, LinearGelu))
    return (addresses, adapters, fused)
