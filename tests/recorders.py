"""Recorders of whole forwards that need no GPU, and warm-ups with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from diffusers_ardiff import ARDiffusionPipeline
from diffusers_ardiff.pipelines.warmup import WarmupReport, run_warmup


def warm_up(pipe: ARDiffusionPipeline, height: int | None = None, **options: Any) -> WarmupReport:
    """A warm-up that captures without a GPU, and without compiling unless asked to."""
    options = {"compile": False, "recorder": FunctionRecorder()} | options
    return run_warmup(pipe, height, None, **options)


def replays(pipe: ARDiffusionPipeline) -> int:
    """Forwards replayed since the warm-up."""
    return pipe._warm.graphs.num_replays


class FunctionRecorder:
    """Records a function by keeping it; a replay runs it again on what its tensors hold by then.

    Like a CUDA graph, it sees nothing of a later forward but the tensors that were copied in, and its output is the same
    tensor every time.
    """

    def __init__(self) -> None:
        self.num_recorded = 0

    def __call__(self, function: Callable[[], torch.Tensor]) -> FunctionRecording:
        self.num_recorded += 1
        return FunctionRecording(function)


class FunctionRecording:
    def __init__(self, function: Callable[[], torch.Tensor]) -> None:
        self.function = function
        self.out = function().clone()

    def replay(self) -> torch.Tensor:
        return self.out.copy_(self.function())
