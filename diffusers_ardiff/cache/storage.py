"""The tensors: one K pool and one V pool a layer. Nothing else in the package allocates keys or values of video tokens.

Shapes: a pool is (num_pages * page_size, num_heads, head_dim), its rows are slots. K and V of a layer are separate
allocations, since two views of one tensor would cost a clone of the whole pool in compiled code.
"""

from __future__ import annotations

import weakref
from dataclasses import replace

import torch

from ..rope import Rotary
from ..transfer import download, upload
from .allocator import PageRun
from .float8 import FLOAT8, UNSCALED, KVScales, as_bytes
from .plan import KVShape
from .ring import FlushMove
from .sink import SinkKeys, turn_keys

StagingKey = tuple[int, str, int]
"""(session id, branch name, history counter): which gathered window a staging row holds."""


def empty_pool(size: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """A pool for writes in any mode; one made under ``torch.inference_mode()`` could be written there only."""
    with torch.inference_mode(False):
        return torch.empty(size, dtype=dtype, device=device)


class StagingPools:
    """Contiguous copies of fragmented branches' windows: one row of ``row_len`` tokens a branch, in every layer.

    ``held[layer][row]`` is the key of the history gathered there last. While the key stays the same only the current
    rows of a forward have to be restaged.
    """

    def __init__(self, like: list[torch.Tensor], *, num_rows: int, row_len: int) -> None:
        size = (num_rows * row_len, *like[0].shape[1:])
        self.row_len = row_len
        self.key_pools = [empty_pool(size, pool.dtype, pool.device) for pool in like]
        self.value_pools = [empty_pool(size, pool.dtype, pool.device) for pool in like]
        self.held: list[list[StagingKey | None]] = [[None] * num_rows for _ in like]

    @property
    def num_bytes(self) -> int:
        """Bytes allocated for staging."""
        return sum(pool.numel() * pool.element_size() for pool in (*self.key_pools, *self.value_pools))


class KVStorage:
    """K and V pools of all layers, uninitialised: lengths are exact, so unwritten slots are never read.

    Args:
        shape: layers, heads and head size.
        num_pages, page_size: pool size.
        dtype, device: of the pools; ``dtype`` is the K/V dtype, independent of the model's.
        scales: of the values in a float8 pool.
        staging: (rows, tokens a row) for fragmented branches; no rows: none.

    Raises:
        ValueError: ``dtype`` does not have ``shape.itemsize`` bytes, or has one byte and is not float8_e4m3fn; scales of
            another pool than a float8 one.
    """

    def __init__(
        self,
        shape: KVShape,
        *,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
        scales: KVScales = UNSCALED,
        staging: tuple[int, int] = (0, 0),
    ) -> None:
        if dtype.itemsize != shape.itemsize:
            raise ValueError(f"the plan counts {shape.itemsize} bytes an element, {dtype} has {dtype.itemsize}.")
        if dtype.itemsize == 1 and dtype != FLOAT8:
            raise ValueError(f"the only dtype of one byte for keys and values is {FLOAT8}, got {dtype}.")
        scales.check_dtype(dtype)
        self.shape = shape
        self.scales = scales
        self.page_size = page_size
        self.num_pages = num_pages
        size = (num_pages * page_size, shape.num_heads, shape.head_dim)
        self.key_pools = [empty_pool(size, dtype, device) for _ in range(shape.num_layers)]
        self.value_pools = [empty_pool(size, dtype, device) for _ in range(shape.num_layers)]
        self.num_copied_runs = 0
        self._tables: weakref.WeakKeyDictionary[PageRun, torch.Tensor] = weakref.WeakKeyDictionary()
        self.layer_indices = [torch.tensor(layer) for layer in range(shape.num_layers)]
        self.staging: StagingPools | None = None
        if staging[0] > 0:
            self.staging = StagingPools(self.key_pools, num_rows=staging[0], row_len=staging[1])

    @property
    def device(self) -> torch.device:
        """Device of the pools."""
        return self.key_pools[0].device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the pools."""
        return self.key_pools[0].dtype

    @property
    def num_bytes(self) -> int:
        """Bytes allocated for pages and staging."""
        staging = self.staging.num_bytes if self.staging is not None else 0
        return staging + sum(pool.numel() * pool.element_size() for pool in (*self.key_pools, *self.value_pools))

    @property
    def _all_pools(self) -> list[torch.Tensor]:
        """K of each layer, then V of each layer, in a form that torch moves by index."""
        return [as_bytes(pool) for pool in (*self.key_pools, *self.value_pools)]

    def table(self, run: PageRun) -> torch.Tensor:
        """Page ids of a run in storage order (int64, CPU), made once a run."""
        if run not in self._tables:
            self._tables[run] = torch.tensor(run.pages, dtype=torch.int64)
        return self._tables[run]

    def slots(self, storage_indices: torch.Tensor, run: PageRun) -> torch.Tensor:
        """Pool rows (int64, CPU) of storage indices (int64, CPU) of a branch."""
        table = self.table(run)
        return table[storage_indices // self.page_size] * self.page_size + storage_indices % self.page_size

    def move(self, run: PageRun, move: FlushMove) -> None:
        """Copy tokens within a branch, in every layer; source and target may overlap."""
        if not move.sources:
            return
        sources = self.slots(torch.tensor(move.sources), run).to(self.device)
        targets = self.slots(torch.tensor(move.targets), run).to(self.device)
        for pool in self._all_pools:
            pool.index_copy_(0, targets, pool.index_select(0, sources))

    def _rows(self, run: PageRun, num_tokens: int) -> slice | torch.Tensor:
        """Pool rows of a run's first storage indices; a slice where they follow each other."""
        if run.is_contiguous:
            first = run.pages[0] * self.page_size
            return slice(first, first + num_tokens)
        return upload(self.slots(torch.arange(num_tokens), run), self.device)

    def copy(self, source: PageRun, target: PageRun, num_tokens: int) -> None:
        """Copy the first ``num_tokens`` storage indices of one run to another, in every layer.

        ``num_copied_runs`` counts the copies that moved bytes.
        """
        if num_tokens == 0:
            return
        source_rows, target_rows = self._rows(source, num_tokens), self._rows(target, num_tokens)
        for pool in self._all_pools:
            pool[target_rows] = pool[source_rows]
        self.num_copied_runs += 1

    def keep_sink(self, run: PageRun, sink: SinkKeys, num_tokens: int) -> SinkKeys:
        """``sink`` with the keys of the first ``num_tokens`` storage indices as they were written, in every layer."""
        if sink.written:
            return sink
        rows = self._rows(run, num_tokens)
        written = (as_bytes(pool)[rows].clone().view(pool.dtype) for pool in self.key_pools)
        return replace(sink, written=tuple(written))

    def turn_sink(self, run: PageRun, sink: SinkKeys, rotary: Rotary | None) -> None:
        """Overwrite the sink's keys in every layer by those of ``keep_sink``, turned; ``rotary`` None puts them back."""
        turn_keys(self.key_pools, self._rows(run, len(sink.written[0])), sink, rotary)

    def read(self, run: PageRun, num_tokens: int) -> list[torch.Tensor]:
        """The first ``num_tokens`` storage indices in host memory: K of each layer, then V of each layer.

        A float8 pool's are its bytes (uint8).
        """
        rows = self._rows(run, num_tokens)
        return [download(pool[rows]) for pool in self._all_pools]

    def write(self, run: PageRun, host: list[torch.Tensor]) -> None:
        """Put back what ``read`` returned, into any run of this pool."""
        rows = self._rows(run, host[0].shape[0])
        for pool, tensor in zip(self._all_pools, host, strict=True):
            pool[rows] = upload(tensor, self.device)

    def fill_(self, value: float) -> None:
        """Overwrite every slot; tests poison unwritten slots with NaN."""
        for pool in (*self.key_pools, *self.value_pools):
            pool.fill_(value)
