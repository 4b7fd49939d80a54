"""The tensors that one layer's attention needs, and how they are built from branches and spans."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch

from .cache.branch import Branch
from .cache.layout import ForwardSpan
from .cache.storage import KVStorage
from .launch import LaunchPlan, RowLayout, VisibleKeys, WritePass, register_launch_plan
from .masks import PagedMask
from .transfer import upload


class PagedLayerInputs(NamedTuple):
    """Tensors that one layer's attention needs. R rows (branches), L tokens and A extra rows a row.

    All but the pools and ``layer_index`` are shared by the layers of a forward.

    Attributes:
        key_pool, value_pool: (num_slots, num_heads, head_dim), this layer's pools.
        slot_mapping: (R, L + A) int64, pool row of each new token, then of each extra row.
        block_table: (R, pages a branch) int32, page ids in storage order.
        seq_lens: (R,) int32, storage indices to read, extra rows included.
        layer_index: () int64 on the CPU.
        launch: (2,) int64 on the CPU: page size, and the handle of this forward's ``LaunchPlan`` (0: none).
    """

    key_pool: torch.Tensor
    value_pool: torch.Tensor
    slot_mapping: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    layer_index: torch.Tensor
    launch: torch.Tensor


class ForwardInputs(Protocol):
    """Where processors take a forward's tensors from: a prepared context, or the fixed tensors of a captured forward."""

    @property
    def storage(self) -> KVStorage:
        """The pools that the forward writes to."""
        ...

    @property
    def unwritten_layers(self) -> tuple[int, ...]:
        """Layers that the forward has written nothing into so far."""
        ...

    def use_backend(self, name: str) -> None:
        """Compute with the attention backend of that name; ValueError or RuntimeError where another one is set."""
        ...

    def layer_inputs(self, layer: int) -> Any:
        """Tensors of one layer."""
        ...


def build_layer_inputs(
    branches: Sequence[Branch],
    spans: Sequence[ForwardSpan],
    *,
    backend: str | None,
    mask: PagedMask | None,
    max_past: int | None,
    written_layers: set[int],
    only_writes: bool = False,
) -> tuple[LaunchPlan, list[PagedLayerInputs]]:
    """The launch plan of one forward and the tensors of every layer, copied to the pool's device without waiting."""
    storage = branches[0].storage
    plan = LaunchPlan(
        page_size=storage.page_size,
        rows=tuple(_row_layout(branch, span) for branch, span in zip(branches, spans, strict=True)),
        staging=storage.staging,
        backend=backend,
        mask=mask,
        visible=None if max_past is None else _visible_keys(branches, spans, max_past),
        scales=storage.scales,
        branches=tuple(branches),
        written_layers=written_layers,
        write_pass=WritePass(storage.shape.num_layers) if only_writes else None,
    )
    slots = torch.stack(
        [
            storage.slots(torch.cat([torch.arange(r.start, r.stop) for r in row.written_ranges]), branch.run)
            for row, branch in zip(plan.rows, branches, strict=True)
        ]
    )
    tables = torch.stack([storage.table(branch.run) for branch in branches]).to(torch.int32)
    lengths = torch.tensor([row.seq_len for row in plan.rows], dtype=torch.int32)
    slot_mapping, block_table, seq_lens = (upload(t, storage.device) for t in (slots, tables, lengths))
    launch = register_launch_plan(plan)
    layers = zip(storage.key_pools, storage.value_pools, storage.layer_indices, strict=True)
    return plan, [
        PagedLayerInputs(keys, values, slot_mapping, block_table, seq_lens, index, launch)
        for keys, values, index in layers
    ]


def _visible_keys(branches: Sequence[Branch], spans: Sequence[ForwardSpan], max_past: int) -> VisibleKeys | None:
    """None where every row sees all that is stored."""
    geometry, storage = branches[0].ring.geometry, branches[0].storage
    hidden = [span.visible_ranges(geometry, max_past) for span in spans]
    if all(ranges is None for ranges in hidden):
        return None
    ranges_by_row = [ranges or (range(span.seq_len),) for ranges, span in zip(hidden, spans, strict=True)]
    lengths = [sum(len(part) for part in ranges) for ranges in ranges_by_row]
    num_pages = -(-max(lengths) // storage.page_size)
    size = num_pages * storage.page_size
    slots = []
    for branch, ranges, length in zip(branches, ranges_by_row, lengths, strict=True):
        indices = torch.cat([torch.arange(part.start, part.stop) for part in ranges])
        padding = indices.new_full((size - length,), int(indices[0]))
        slots.append(storage.slots(torch.cat([indices, padding]), branch.run))
    table = torch.arange(len(slots) * num_pages, dtype=torch.int32).view(len(slots), num_pages)
    device = storage.device
    return VisibleKeys(
        slots=upload(torch.cat(slots), device),
        block_table=upload(table, device),
        seq_lens=upload(torch.tensor(lengths, dtype=torch.int32), device),
        rows=tuple(RowLayout(seq_len=length, base_slot=row * size) for row, length in enumerate(lengths)),
    )


def _row_layout(branch: Branch, span: ForwardSpan) -> RowLayout:
    run = branch.run
    return RowLayout(
        seq_len=span.seq_len,
        base_slot=run.pages[0] * branch.storage.page_size if run.is_contiguous else None,
        staging_row=branch.staging_row,
        staging_key=branch.staging_key if branch.staging_row is not None else None,
        written_ranges=span.written_ranges(branch.ring.geometry),
    )
