"""What one forward needs to know about the cache, built once on the host and shared by all layers.

``PagedForwardContext`` claims its branches, turns ring arithmetic into a handful of small tensors, and says at the end
whether the forward succeeded. Layers see only ``PagedLayerInputs``, a tuple of tensors: nothing in it that a compiled
region would have to guard on changes between forwards, only values do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeGuard

from .cache.branch import Branch
from .cache.layout import ForwardSpan
from .cache.storage import KVStorage
from .launch import (
    LaunchPlan,
    RowLayout,
    drop_launch_plan,
    find_launch_plan,
    register_launch_plan,
    replace_launch_plan,
)
from .layer_inputs import ForwardInputs, PagedLayerInputs, build_layer_inputs
from .masks import FullAttnSpans, PagedMask, build_paged_mask
from .validation import check_int

__all__ = [
    "ForwardInputs",
    "LaunchPlan",
    "PagedForwardContext",
    "PagedLayerContext",
    "PagedLayerInputs",
    "RowLayout",
    "find_launch_plan",
    "is_paged_context",
    "register_launch_plan",
]


class PagedForwardContext:
    """One forward over one or several branches; all layers share it.

    Args:
        branches: the rows of the batch, all of one pool, each at most once.
        num_tokens: L, new tokens a row.
        start: position of the first token; None: each branch's committed end. See ``RingState.plan_forward``.
        num_extra: A, rows a row that live for this forward only (action or state tokens).
        backend: attention backend by name; None: chosen by capability.
        full_attn_spans: None: all tokens of the forward see each other. Else they are causal among themselves, but for
            these spans of absolute positions, whose tokens see their whole span: one list for all rows, or one a row.
            History and extra rows stay visible to every token. Spans that no token lies in do nothing.
        max_past_tokens: how many tokens before the forward's own are visible beside the sink; None: all that are stored.
            Keys are then gathered where more are stored.

    Legality is checked here, before anything is written or claimed; ``prepare`` claims the branches. Use it as a
    context manager (an exception marks the forward as failed), or call ``close`` or ``mark_committed`` yourself.

    Raises:
        ValueError: no or repeated branches, different pools, an illegal forward, illegal spans (see
            ``build_paged_mask``), or spans together with ``max_past_tokens``.
        RuntimeError: a branch is closed, stale, or has another forward open.
    """

    def __init__(
        self,
        branches: Sequence[Branch],
        *,
        num_tokens: int,
        start: int | None = None,
        num_extra: int = 0,
        backend: str | None = None,
        full_attn_spans: FullAttnSpans | None = None,
        max_past_tokens: int | None = None,
    ) -> None:
        if not branches or len({id(branch) for branch in branches}) != len(branches):
            raise ValueError(f"a forward takes one or more different branches, got {[b.name for b in branches]}.")
        if len({id(branch.storage) for branch in branches}) != 1:
            raise ValueError("the branches of one forward must live in one pool; open their sessions in one manager.")
        for branch in branches:
            branch.check_idle("a forward")
        self.branches = tuple(branches)
        self.num_tokens = num_tokens
        self.num_extra = num_extra
        self.spans: tuple[ForwardSpan, ...] = tuple(
            branch.ring.plan_forward(num_tokens, num_extra, start) for branch in branches
        )
        self.mask: PagedMask | None = None
        if full_attn_spans is not None:
            geometry = self.branches[0].ring.geometry
            self.mask = build_paged_mask(full_attn_spans, self.spans, geometry, device=self.storage.device)
        self.max_past_tokens = _checked_past(max_past_tokens, self.mask)
        self._backend = backend
        self._only_writes = False
        self._plans: list[LaunchPlan] = []
        self._parts: list[list[PagedLayerInputs]] = []
        self._written_layers: list[set[int]] = [set()]
        self._prepared = False
        self._open = False

    @property
    def storage(self) -> KVStorage:
        """The pool that all branches of this forward live in."""
        return self.branches[0].storage

    @property
    def starts(self) -> tuple[int, ...]:
        """Absolute position of each row's first token."""
        return tuple(span.start for span in self.spans)

    @property
    def is_prepared(self) -> bool:
        """Whether ``prepare`` has built the layer inputs; stays true after the end of the forward."""
        return self._prepared

    @property
    def unwritten_layers(self) -> tuple[int, ...]:
        """Layers of the pool that this forward has written nothing into so far."""
        written = set.intersection(*self._written_layers)
        return tuple(layer for layer in range(self.storage.shape.num_layers) if layer not in written)

    def write_only(self) -> PagedForwardContext:
        """Say, before ``prepare``, that nobody reads the transformer's output, as after the clean forward of a chunk.

        Once the last layer has written its keys and values its attention is left out, and returns zeros, so the output
        means nothing. What is written is the same. Returns itself.

        Raises:
            RuntimeError: prepared already, or the forward merges two chunks.
        """
        if self.is_prepared:
            raise RuntimeError("write_only() comes before prepare(): call it on the context that you have just made.")
        self._only_writes = True
        return self

    def use_backend(self, name: str) -> None:
        """Compute with the attention backend of that name from now on.

        Raises:
            ValueError: this context names another one.
        """
        if self._backend not in (None, name):
            raise ValueError(
                f"the forward context names attention backend {self._backend!r}, but {name!r} was attached to the "
                "transformer. Name one of them, or the same in both places."
            )
        if self._backend == name:
            return
        self._backend = name
        self._plans = [replace(plan, backend=name) for plan in self._plans]
        for plan, inputs in zip(self._plans, self._parts, strict=True):
            replace_launch_plan(inputs[0].launch, plan)

    def prepare(self) -> PagedForwardContext:
        """Claim the branches and build the tensors, once; calling it again does nothing. Returns itself.

        Raises:
            RuntimeError: this forward is over, a branch is closed, open or stale, or has moved on since the context
                was made.
            ValueError: the forward is no longer legal.
        """
        if self._open:
            return self
        if self.is_prepared:
            raise RuntimeError("this forward is over; a context serves one forward. Make a new one.")
        self._check_up_to_date()
        for branch in self.branches:
            branch.prepare_write()
        self._claim_branches()
        self._open = True
        try:
            self._build_inputs()
        except BaseException:
            self.close(succeeded=False)
            raise
        return self

    def _check_up_to_date(self) -> None:
        for branch, span in zip(self.branches, self.spans, strict=True):
            branch.check_idle("a forward")
            start = span.start if span.is_recache else None
            if branch.ring.plan_forward(span.num_tokens, span.num_extra, start) != span:
                raise RuntimeError(
                    f"branch {branch.name!r} has moved on to position {branch.committed_tokens} since this context "
                    f"was made for position {span.start}. Make a new one."
                )

    def _claim_branches(self) -> None:
        """Claim all branches, or, where one can't be claimed, none."""
        claimed: list[Branch] = []
        try:
            for branch, span in zip(self.branches, self.spans, strict=True):
                branch.open_forward(span)
                claimed.append(branch)
        except BaseException:
            for branch in claimed:
                branch.close_forward(succeeded=False)
            raise

    def _release_branches(self, *, succeeded: bool) -> None:
        for branch in self.branches:
            branch.close_forward(succeeded=succeeded)

    def _spans_by_part(self) -> Sequence[Sequence[ForwardSpan]]:
        """Each branch's span, for each of the writes that a layer makes one after the other."""
        return [self.spans]

    def _build_inputs(self) -> None:
        for spans, written in zip(self._spans_by_part(), self._written_layers, strict=True):
            plan, inputs = build_layer_inputs(
                self.branches,
                spans,
                backend=self._backend,
                mask=self.mask,
                max_past=self.max_past_tokens,
                written_layers=written,
                only_writes=self._only_writes,
            )
            self._plans.append(plan)
            self._parts.append(inputs)
        self._prepared = True

    def mark_written(self) -> None:
        """Count every layer as written: a captured graph has just replayed all of them."""
        for written in self._written_layers:
            written.update(range(self.storage.shape.num_layers))

    def layer_inputs(self, layer: int) -> PagedLayerInputs:
        """Tensors of one layer.

        Raises:
            RuntimeError: not prepared yet, over, or its session was closed.
            IndexError: no such layer.
        """
        if not self.is_prepared:
            raise RuntimeError("layer inputs are asked for before prepare(): call prepare() on the forward context.")
        if not self._open or any(branch.closed for branch in self.branches):
            raise RuntimeError("layer inputs are asked for after the end of their forward or session. Make a new one.")
        if not 0 <= layer < len(self._parts[0]):
            raise IndexError(f"layer {layer} does not exist; the pool has {len(self._parts[0])} layers.")
        return self.join_parts([inputs[layer] for inputs in self._parts])

    @property
    def parts(self) -> tuple[list[PagedLayerInputs], ...]:
        """Inputs of every layer, for each of the writes that a layer makes one after the other; one but in a merge."""
        return tuple(self._parts)

    @staticmethod
    def join_parts(parts: Sequence[PagedLayerInputs]) -> Any:
        """One layer's inputs, one of each of ``parts``, in the form that ``layer_inputs`` returns them."""
        return parts[0]

    def layer_context(self, layer: int) -> PagedLayerContext:
        """A handle on one layer of this forward."""
        return PagedLayerContext(self, layer)

    def close(self, *, succeeded: bool = True) -> None:
        """End the forward; calling it again does nothing. Only a forward that succeeded can be committed.

        Layer inputs that somebody still holds are refused from here on.
        """
        if not self._open:
            return
        self._open = False
        for inputs in self._parts:
            drop_launch_plan(inputs[0].launch)
        self._plans, self._parts = [], []
        self._release_branches(succeeded=succeeded)

    def mark_committed(self) -> None:
        """End the forward as succeeded and advance every branch past it. No-op where it was committed already.

        Raises:
            RuntimeError: not prepared, failed, nothing was written, or a later forward has run on a branch since; no
                branch has advanced then.
        """
        if not self.is_prepared:
            raise RuntimeError("this forward never ran: call prepare(), run the transformer, then mark_committed().")
        self.close(succeeded=True)
        for branch, span in zip(self.branches, self.spans, strict=True):
            branch.check_commit(span)
        if not any(self._written_layers):
            raise RuntimeError(
                "no layer wrote keys in this forward, so there is nothing to commit. Run the transformer inside "
                "`with context, paged.bind(context, ...)`; after replaying a graph of your own, call mark_written()."
            )
        for branch, span in zip(self.branches, self.spans, strict=True):
            branch.commit(span)

    def __enter__(self) -> PagedForwardContext:
        return self.prepare()

    def __exit__(self, exc_type: type[BaseException] | None, *exc_info: object) -> None:
        self.close(succeeded=exc_type is None)


def _checked_past(max_past_tokens: int | None, mask: PagedMask | None) -> int | None:
    if max_past_tokens is None:
        return None
    if mask is not None:
        raise ValueError("full_attn_spans and max_past_tokens can't be combined; leave one of them out.")
    return check_int("max_past_tokens", max_past_tokens, minimum=0)


class PagedLayerContext(NamedTuple):
    """One layer of a forward context."""

    forward: PagedForwardContext
    layer: int

    def to_layer_inputs(self) -> PagedLayerInputs:
        """Tensors of this layer; see ``PagedForwardContext.layer_inputs``."""
        return self.forward.layer_inputs(self.layer)


def is_paged_context(value: Any) -> TypeGuard[PagedForwardContext | PagedLayerContext]:
    """Whether ``value`` is a paged forward context or one layer of it."""
    return isinstance(value, (PagedForwardContext, PagedLayerContext))
