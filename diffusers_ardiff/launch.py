"""What the inside of the opaque op needs to know of one forward, found by a handle that travels as a tensor."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch

from .cache.branch import Branch
from .cache.float8 import UNSCALED, KVScales
from .cache.storage import StagingKey, StagingPools
from .masks import PagedMask


@dataclass(frozen=True, kw_only=True)
class RowLayout:
    """Where the keys of one row lie, as host integers, so that no kernel launch has to read a device tensor.

    ``base_slot`` is the first pool row of a contiguous run, None where the run is fragmented.
    """

    seq_len: int
    base_slot: int | None
    staging_row: int | None = None
    staging_key: StagingKey | None = None
    written_ranges: tuple[range, ...] = ()


@dataclass(frozen=True, kw_only=True, eq=False)
class VisibleKeys:
    """Where the keys lie that a forward sees, where it does not see all that is stored; and a pool of them alone.

    Attributes:
        slots: (R * N,) int64, pool rows to copy, N a row; N is a multiple of the page size and padded with a row's first.
        block_table: (R, N / page size) int32, pages of the copy.
        seq_lens: (R,) int32, visible keys, extra rows included.
        rows: the same for the host.
    """

    slots: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    rows: tuple[RowLayout, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class LaunchPlan:
    """Host-side facts of one forward, for the inside of the opaque op.

    They say how to compute it; ``mask`` and ``visible`` say what is visible: None is everything. ``branches`` own the pages,
    ``scales`` are those of a float8 pool. Two records in it change: the op adds each layer whose rows it has written to
    ``written_layers``, and keeps in ``choices`` which backend serves a request, so that a forward asks once and not once a
    layer.
    """

    page_size: int
    rows: tuple[RowLayout, ...]
    staging: StagingPools | None = None
    backend: str | None = None
    mask: PagedMask | None = None
    visible: VisibleKeys | None = None
    scales: KVScales = UNSCALED
    branches: tuple[Branch, ...] = ()
    written_layers: set[int] = field(default_factory=set)
    choices: dict[Hashable, Any] = field(default_factory=dict)


_plans: weakref.WeakValueDictionary[int, LaunchPlan] = weakref.WeakValueDictionary()
_handles = itertools.count(1)


def register_launch_plan(plan: LaunchPlan) -> torch.Tensor:
    """Give a plan a handle; returns the ``launch`` tensor. The plan lives as long as somebody holds it."""
    handle = next(_handles)
    _plans[handle] = plan
    return torch.tensor([plan.page_size, handle], dtype=torch.int64)


def replace_launch_plan(launch: torch.Tensor, plan: LaunchPlan) -> None:
    """Put another plan behind the handle of a ``launch`` tensor; layer inputs that hold it follow the new one."""
    _plans[int(launch[1])] = plan


def drop_launch_plan(launch: torch.Tensor) -> None:
    """Forget the plan behind a ``launch`` tensor, whoever still holds it."""
    _plans.pop(int(launch[1]), None)


def find_launch_plan(handle: int) -> LaunchPlan | None:
    """The plan behind a handle; None for handle 0.

    Raises:
        RuntimeError: the forward that the handle belongs to is over, or its session was closed.
    """
    if handle == 0:
        return None
    plan = _plans.get(handle)
    if plan is None or any(branch.closed for branch in plan.branches):
        raise RuntimeError(
            "these layer inputs belong to a forward context or a session that no longer exists. Prepare a new one."
        )
    return plan
