"""How a function over fixed tensors is captured and run again: by CUDA graphs, or by whatever a test brings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch


class Recording(Protocol):
    """A captured function."""

    def replay(self) -> torch.Tensor:
        """Run it again on what its input tensors hold now; returns the output tensor, the same one every time."""
        ...


Recorder = Callable[[Callable[[], torch.Tensor]], Recording]
"""Captures a function that reads and writes fixed tensors."""


class CudaRecorder:
    """Captures CUDA graphs that share one memory pool; replays must therefore not overlap."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, function: Callable[[], torch.Tensor]) -> Recording:
        """Run ``function`` once on a side stream, as capturing asks for, then capture it."""
        side = torch.cuda.Stream(self._device)
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            function()
        torch.cuda.current_stream(self._device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile, such as one that writes video.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            out = function()
        return _CudaRecording(graph, out)


@dataclass(frozen=True, eq=False)
class _CudaRecording:
    graph: torch.cuda.CUDAGraph
    out: torch.Tensor

    def replay(self) -> torch.Tensor:
        self.graph.replay()
        return self.out
