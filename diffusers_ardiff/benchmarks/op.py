"""``paged_write_attn`` in the steady state of a rollout: the window full, the ring wrapped; one row, or ragged ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import torch

from ..attention import AttentionRequest, list_backends, paged_write_attn
from ..cache import Branch, KVManager, KVShape, RingGeometry
from ..context import PagedForwardContext, PagedLayerInputs
from .bare import bare_kernels
from .timing import Timing, Variant, time_interleaved

NUM_LAYERS = 2
"""Pools and inputs that the repeats rotate through, so that no call finds its keys in a cache."""
FORWARDS_A_CHUNK = 5
"""Four denoising steps and the commit."""


@dataclass(frozen=True, kw_only=True)
class OpCase:
    """Shapes of one measurement.

    Args:
        num_keys: the whole window: sink, history and the chunk's own rows.
        rows: sessions as rows of one call. Beyond one they are ragged: row i of n sees about (i + 1) / n of the window.
        fragmented: pages in random order.
        masked: the chunk's thirds are full spans, causal among each other.
    """

    num_heads: int
    head_dim: int
    num_queries: int
    num_keys: int
    sink_tokens: int = 0
    page_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    fragmented: bool = False
    rows: int = 1
    masked: bool = False

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise ValueError(f"a measurement takes one row or more, got {self.rows}.")
        if not 1 <= self.num_queries <= self.num_keys - self.sink_tokens:
            raise ValueError(
                f"{self.num_queries} queries do not fit into a window of {self.num_keys - self.sink_tokens} tokens: "
                "use as many queries as the window (keys less sink) has tokens, or fewer."
            )

    @property
    def label(self) -> str:
        """Short name for tables and plots."""
        kinds = [f"{self.rows} ragged rows"] * (self.rows > 1)
        kinds += ["fragmented"] * self.fragmented + ["masked"] * self.masked
        shape = f"{self.num_heads} x {self.head_dim}, q {self.num_queries}, kv {self.num_keys}"
        return ", ".join([shape, *kinds])

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self) | {"dtype": str(self.dtype).removeprefix("torch.")}


def anchor_cases(dtype: torch.dtype = torch.bfloat16) -> list[OpCase]:
    """The shapes of Wan models at 832x480: windows of 12 and 21 frames, chunks of 3 frames and of 1, 12 and 40 heads."""
    base = OpCase(num_heads=12, head_dim=128, num_queries=4680, num_keys=32760, dtype=dtype)
    return [
        replace(base, num_keys=18720, sink_tokens=4680),
        base,
        replace(base, num_queries=1560),
        replace(base, num_heads=40),
        replace(base, fragmented=True),
    ]


def order_cases(dtype: torch.dtype = torch.bfloat16) -> list[OpCase]:
    """The kinds of work whose order of backends is set apart: dense, fragmented, ragged, masked, and both of these."""
    base = OpCase(num_heads=12, head_dim=128, num_queries=4680, num_keys=32760, dtype=dtype)
    ragged, masked = replace(base, rows=3), replace(base, masked=True)
    scattered = [replace(case, fragmented=True) for case in (base, ragged, masked)]
    return [base, ragged, masked, *scattered]


def usable_backends(case: OpCase, device: torch.device) -> list[str]:
    """Backends that can serve a case here, the float32 reference left out: it would take minutes."""
    request = AttentionRequest(
        device_type=device.type,
        dtype=case.dtype,
        head_dim=case.head_dim,
        page_size=case.page_size,
        is_hip=device.type == "cuda" and torch.version.hip is not None,
        needs_mask=case.masked,
    )
    return [b.name for b in list_backends() if b.name != "reference" and not b.refusals(request)]


class OpRows(NamedTuple):
    """New tokens of a forward, (R, L, H, D) each."""

    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor


class SteadyState:
    """One forward a backend in the steady state, and random inputs. Close it to give the pools back."""

    def __init__(self, case: OpCase, backends: Sequence[str], device: torch.device) -> None:
        self.case = case
        geometry = RingGeometry(
            sink_tokens=case.sink_tokens, window_tokens=case.num_keys - case.sink_tokens, page_size=case.page_size
        )
        shape = KVShape(
            num_layers=NUM_LAYERS, num_heads=case.num_heads, head_dim=case.head_dim, itemsize=case.dtype.itemsize
        )
        self.manager = KVManager(
            geometry,
            shape,
            max_sessions=len(backends) * case.rows,
            dtype=case.dtype,
            device=device,
            shuffle_seed=0 if case.fragmented else None,
        )
        storage = self.manager.storage
        for pool in (*storage.key_pools, *storage.value_pools):
            pool.normal_()
        self.contexts = {name: self._open_context(name) for name in backends}
        size = (case.rows, case.num_queries, case.num_heads, case.head_dim)
        self.rows = [
            OpRows(*(torch.randn(size, dtype=case.dtype, device=device) for _ in range(3))) for _ in range(NUM_LAYERS)
        ]

    def _open_context(self, backend: str) -> PagedForwardContext:
        case = self.case
        branches = [self.manager.open_session().branch() for _ in range(case.rows)]
        for index, branch in enumerate(branches):
            committed = case.num_keys * (index + 1) // case.rows - (case.num_queries if index + 1 < case.rows else 0)
            while branch.committed_tokens < committed:
                self._forward([branch]).mark_committed()
        return self._forward(branches, backend, self._spans(branches) if case.masked else None)

    def _spans(self, branches: Sequence[Branch]) -> list[list[tuple[int, int]]]:
        third = max(1, self.case.num_queries // 3)
        steps = range(0, self.case.num_queries, third)
        return [[(b.committed_tokens + s, b.committed_tokens + s + third) for s in steps] for b in branches]

    def _forward(
        self,
        branches: Sequence[Branch],
        backend: str | None = None,
        spans: list[list[tuple[int, int]]] | None = None,
    ) -> PagedForwardContext:
        num_tokens = self.case.num_queries
        context = PagedForwardContext(
            branches, num_tokens=num_tokens, backend=backend, full_attn_spans=spans
        ).prepare()
        context.mark_written()  # The pool is full of numbers already.
        return context

    def inputs(self, backend: str, index: int) -> PagedLayerInputs:
        """Layer inputs of a repeat."""
        return self.contexts[backend].layer_inputs(index % NUM_LAYERS)

    def op(self, backend: str) -> Variant:
        """The op as a denoising step calls it."""

        def call(index: int) -> torch.Tensor:
            return paged_write_attn(self.inputs(backend, index), *self.rows[index % NUM_LAYERS])

        return call

    def op_with_new_history(self, backend: str) -> Variant:
        """The op as the first step of a chunk calls it: a fragmented window is gathered whole."""
        op, branches = self.op(backend), self.contexts[backend].branches

        def call(index: int) -> object:
            staging = self.manager.storage.staging
            for branch in branches:
                if staging is not None and branch.staging_row is not None:
                    staging.held[index % NUM_LAYERS][branch.staging_row] = None
            return op(index)

        return call

    def close(self) -> None:
        """End all forwards and sessions."""
        for context in self.contexts.values():
            context.close()
        self.manager.close()


def measure_op(
    case: OpCase, *, backends: Sequence[str] | None = None, device: torch.device, warmup: int = 10, repeats: int = 50
) -> dict[str, Any]:
    """Time the op with each backend, and each dense kernel alone, in turns.

    Returns: ``{"case", "dense": {kernel: times}, "op": {backend: times and ratios to each kernel}, "order"}``. A
    fragmented case also has ``first_ms`` (the window gathered whole) and ``chunk_mean_ms`` over five forwards. Ragged and
    masked cases have no dense kernel that does the same work, so no ``dense`` and no ratios. ``order``: the backends, the
    fastest first, what ``rank`` and ``rank_for`` should say.

    Raises:
        ValueError: a named backend is unknown or cannot serve the case.
    """
    names = list(backends) if backends is not None else usable_backends(case, device)
    state = SteadyState(case, names, device)
    try:
        dense = {} if case.masked or case.rows > 1 else _bare_variants(case, device)
        variants: dict[str, Variant] = {f"dense/{name}": call for name, call in dense.items()}
        variants |= {f"op/{name}": state.op(name) for name in names}
        if case.fragmented:
            variants |= {f"first/{name}": state.op_with_new_history(name) for name in names}
        times = time_interleaved(variants, device=device, warmup=warmup, repeats=repeats)
    finally:
        state.close()
    bare = {name: times[f"dense/{name}"] for name in dense}
    results = {name: _op_result(times[f"op/{name}"], times.get(f"first/{name}"), bare) for name in names}
    return {
        "case": case.to_dict(),
        "label": case.label,
        "dense": {name: asdict(timing) for name, timing in bare.items()},
        "op": results,
        "order": sorted(names, key=lambda name: results[name].get("chunk_mean_ms", results[name]["median_ms"])),
    }


def _bare_variants(case: OpCase, device: torch.device) -> dict[str, Variant]:
    def randn(num_tokens: int) -> list[torch.Tensor]:
        size = (1, num_tokens, case.num_heads, case.head_dim)
        return [torch.randn(size, dtype=case.dtype, device=device) for _ in range(NUM_LAYERS)]

    query, keys, values = randn(case.num_queries), randn(case.num_keys), randn(case.num_keys)
    kernels = bare_kernels(device, case.dtype, case.head_dim)

    def variant(name: str) -> Variant:
        return lambda i: kernels[name](query[i % NUM_LAYERS], keys[i % NUM_LAYERS], values[i % NUM_LAYERS])

    return {name: variant(name) for name in kernels}


def _op_result(steady: Timing, first: Timing | None, dense: dict[str, Timing]) -> dict[str, Any]:
    result: dict[str, Any] = asdict(steady)
    a_forward = steady.median_ms
    if first is not None:
        a_forward = (first.median_ms + (FORWARDS_A_CHUNK - 1) * steady.median_ms) / FORWARDS_A_CHUNK
        result |= {"first_ms": first.median_ms, "chunk_mean_ms": a_forward}
    result["ratio"] = {name: a_forward / timing.median_ms for name, timing in dense.items()}
    return result
