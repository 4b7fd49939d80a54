"""What the inside of the opaque op needs to know of one forward, found by a handle that travels as a tensor."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

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


class StridedRows(NamedTuple):
    """Rows of a pool that one strided view shows: ``num_rows`` of ``num_keys`` keys, the first at ``base``, in pool rows."""

    base: int
    num_rows: int
    stride: int
    num_keys: int

    @classmethod
    def at(cls, bases: Sequence[int], num_keys: int) -> StridedRows | None:
        """Rows that begin at ``bases``; None where no view shows them in their order."""
        strides = {after - before for before, after in itertools.pairwise(bases)}
        if len(strides) > 1 or any(stride <= 0 for stride in strides):
            return None
        return cls(bases[0], len(bases), strides.pop() if strides else num_keys, num_keys)


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


class WritePass:
    """Tells, in a forward that only writes, which write is the last one: what follows it is computed for nobody.

    By what has been written and not by number, since layers need not run in the order of the pool. A layer that writes
    again begins another pass, such as that of a recorder that runs a forward twice.

    Args:
        num_layers: of the pool.
    """

    def __init__(self, num_layers: int) -> None:
        self.num_layers = num_layers
        self._written: set[int] = set()

    def ends_with(self, layer: int) -> bool:
        """Count a layer that has just written; whether it was the last one of its pass."""
        if layer in self._written:
            self._written.clear()
        self._written.add(layer)
        return len(self._written) == self.num_layers


@dataclass(frozen=True, kw_only=True, eq=False)
class LaunchPlan:
    """Host-side facts of one forward, for the inside of the opaque op.

    They say how to compute it; ``mask`` and ``visible`` say what is visible: None is everything. ``branches`` own the
    pages, ``scales`` are those of a float8 pool. Three records in it change: the op adds each layer whose rows it has
    written to ``written_layers``, and to the ``write_pass`` of a forward that only writes, and keeps in ``choices`` which
    backend serves a request or rows of a signature, so that a forward asks once and not once a layer.
    """

    page_size: int
    rows: tuple[RowLayout, ...]
    staging: StagingPools | None = None
    backend: str | None = None
    mask: PagedMask | None = None
    visible: VisibleKeys | None = None
    scales: KVScales = UNSCALED
    branches: tuple[Branch, ...] = ()
    write_pass: WritePass | None = None
    written_layers: set[int] = field(default_factory=set)
    choices: dict[Hashable, Any] = field(default_factory=dict)

    @cached_property
    def num_keys(self) -> int | None:
        """Keys of every row; None where rows have different numbers of them."""
        lengths = {row.seq_len for row in self.rows}
        return lengths.pop() if len(lengths) == 1 else None

    @cached_property
    def strided_rows(self) -> StridedRows | None:
        """Where the rows' keys lie in the pool, if they are as many in each and at one stride; None: they are not."""
        bases = [row.base_slot for row in self.rows if row.base_slot is not None]
        if len(bases) < len(self.rows) or self.num_keys is None:
            return None
        return StridedRows.at(bases, self.num_keys)

    @cached_property
    def is_staged(self) -> bool:
        """Whether a row has a place in the staging pools."""
        return self.staging is not None and any(row.staging_row is not None for row in self.rows)


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
