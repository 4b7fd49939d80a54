"""Attention backends: what each can do, and which one serves a call.

A backend is chosen by capability and measured order. Naming one that cannot do the call is an error that says why;
nothing falls back in silence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch

from ..context import LaunchPlan, PagedLayerInputs

AttendFn = Callable[[torch.Tensor, PagedLayerInputs, LaunchPlan, float], torch.Tensor]
"""(query (R, L, H, D), inputs, plan, softmax_scale) -> (R, L, H, D). The query has the pool's dtype, or, over a float8 pool,
float32, bfloat16 or float16; values are those stored there, any scale is the caller's business."""

DEFAULT_PAGE_SIZE = 16

Work = Literal["dense", "fragmented", "ragged", "masked"]
"""What the measured order depends on: rows of one length that are one view of the pool; rows of one length of which some
are fragmented; rows of different lengths; a piecewise mask, however rows lie."""


@dataclass(frozen=True, kw_only=True)
class AttentionRequest:
    """What a call needs.

    Args:
        is_hip: the device is ROCm (its tensors say ``is_cuda``).
        work: how its rows lie; only the order of choice depends on it.
        needs_device_lengths: the launches will be replayed at other lengths, so they must read them on the device.
    """

    device_type: str
    dtype: torch.dtype
    head_dim: int
    page_size: int
    is_hip: bool = False
    work: Work = "dense"
    needs_mask: bool = False
    needs_lse: bool = False
    needs_device_lengths: bool = False


@dataclass(frozen=True, kw_only=True)
class AttentionBackend:
    """One way to attend over the pages, and its limits.

    Args:
        name: how users ask for it.
        attend: the function; reads only.
        rank: measured order, the lowest that can do a call is chosen.
        rank_for: another rank for some kinds of work.
        device_types: torch device types it runs on.
        on_hip: whether it runs on ROCm.
        dtypes: K/V dtypes.
        page_multiple: page sizes it accepts are multiples of this.
        head_dims: allowed head sizes; None: any.
        masks: honours the plan's ``mask``, piecewise causal / full.
        lse: can return the log-sum-exp.
        device_lengths: its launches read lengths on the device, so a captured graph serves a window that fills.
        refuses: says why it cannot do a call that all of the above allows, None where it can.
        unavailable: says why this machine cannot run it now (a missing library, another device), None where it can.
    """

    name: str
    attend: AttendFn
    rank: int
    device_types: frozenset[str]
    dtypes: frozenset[torch.dtype]
    on_hip: bool = False
    page_multiple: int = 1
    head_dims: frozenset[int] | None = None
    masks: bool = False
    lse: bool = False
    device_lengths: bool = False
    rank_for: Mapping[Work, int] = field(default_factory=dict, hash=False)
    refuses: Callable[[AttentionRequest], str | None] | None = None
    unavailable: Callable[[], str | None] | None = None

    def refusals(self, request: AttentionRequest) -> list[str]:
        """Why this backend cannot do a call, a phrase each; empty: it can."""
        checks = [
            (request.device_type in self.device_types, f"runs on {sorted(self.device_types)}"),
            (not request.is_hip or self.on_hip, "does not run on ROCm"),
            (request.dtype in self.dtypes, f"takes {sorted(str(d) for d in self.dtypes)}, not {request.dtype}"),
            (request.page_size % self.page_multiple == 0, f"wants pages of a multiple of {self.page_multiple}"),
            (
                self.head_dims is None or request.head_dim in self.head_dims,
                f"takes head sizes {sorted(self.head_dims or ())}, not {request.head_dim}",
            ),
            (not request.needs_mask or self.masks, "honours no piecewise mask"),
            (not request.needs_lse or self.lse, "returns no log-sum-exp"),
            (not request.needs_device_lengths or self.device_lengths, "takes lengths from the host"),
        ]
        reasons = [reason for ok, reason in checks if not ok]
        refused = self.refuses(request) if self.refuses is not None else None
        reasons += [] if refused is None else [refused]
        missing = self.unavailable() if self.unavailable is not None else None
        return reasons if missing is None or missing in reasons else [*reasons, missing]


_backends: dict[str, AttentionBackend] = {}


def register_backend(backend: AttentionBackend) -> AttentionBackend:
    """Add a backend.

    Raises:
        ValueError: the name is taken by another backend.
    """
    if _backends.setdefault(backend.name, backend) is not backend:
        raise ValueError(f"an attention backend named {backend.name!r} exists already; choose another name.")
    return backend


def list_backends(work: Work = "dense") -> list[AttentionBackend]:
    """All backends in their measured order for a kind of work."""
    return sorted(_backends.values(), key=lambda backend: backend.rank_for.get(work, backend.rank))


def get_backend(name: str) -> AttentionBackend:
    """The backend of that name.

    Raises:
        ValueError: unknown; the message has the known names.
    """
    if name not in _backends:
        raise ValueError(f"unknown attention backend {name!r}; known: {[b.name for b in list_backends()]}.")
    return _backends[name]


def select_backend(request: AttentionRequest, name: str | None = None) -> AttentionBackend:
    """The backend that serves a call: the named one, or the first by measured order that can.

    Raises:
        ValueError: the named backend is unknown or cannot do the call, or none can; the message says why.
    """
    candidates = list_backends(request.work) if name is None else [get_backend(name)]
    reasons = []
    for backend in candidates:
        refusals = backend.refusals(request)
        if not refusals:
            return backend
        reasons.append(f"{backend.name}: " + ", ".join(refusals))
    raise ValueError(
        f"no attention backend for head size {request.head_dim}, {request.dtype}, pages of {request.page_size} on "
        f"{'ROCm' if request.is_hip else request.device_type}. " + "; ".join(reasons) + "."
    )


def supported_kernel_block_sizes(backend: str | None = None, *, largest: int = 256) -> list[int]:
    """Page sizes up to ``largest`` that a backend accepts; None: that every registered backend accepts.

    Raises:
        ValueError: unknown backend.
    """
    chosen = list_backends() if backend is None else [get_backend(backend)]
    return [size for size in range(1, largest + 1) if all(size % b.page_multiple == 0 for b in chosen)]


def choose_page_size(supported: Iterable[int], *, preferred: int = DEFAULT_PAGE_SIZE) -> int:
    """The page size to use: ``preferred`` if the kernel accepts it, else the smallest size it does accept.

    It depends on the kernel alone, never on the frame.

    Raises:
        ValueError: the kernel accepts no page size.
    """
    sizes = sorted(set(supported))
    if not sizes:
        raise ValueError("the attention backend accepts no page size at all.")
    return preferred if preferred in sizes else sizes[0]
