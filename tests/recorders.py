"""Recorders of whole forwards that need no GPU, warm-ups with them, and compilers that watch compiled code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


class GraphWatch:
    """A backend of ``torch.compile`` whose graphs, like Inductor's, refuse inputs of other strides than they were made for.

    Args:
        compiler: (graph, inputs) -> what runs; None: the graph as it is.

    Attributes:
        outputs: tensors that the last graph gave.
    """

    def __init__(self, compiler: Callable[..., Callable[..., Any]] | None = None) -> None:
        self.outputs: list[torch.Tensor] = []
        self._compiler = compiler

    def __call__(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """The compiled graph."""
        expected = _strides(inputs)
        run = graph if self._compiler is None else self._compiler(graph, inputs)

        def checked(*arguments: Any) -> Any:
            found = _strides(arguments)
            assert found == expected, f"strides {found} in a graph made for {expected}"
            made = run(*arguments)
            self.outputs = [tensor for tensor in made if isinstance(tensor, torch.Tensor)]
            return made

        return checked


def _strides(values: Sequence[Any]) -> list[tuple[int, ...]]:
    return [value.stride() for value in values if isinstance(value, torch.Tensor)]


def copied_state(watch: GraphWatch, state: Sequence[torch.Tensor]) -> list[tuple[int, ...]]:
    """Shapes of the state tensors that are not, as they are, what the last graph gave."""
    given = {(tensor.data_ptr(), tensor.stride()) for tensor in watch.outputs}
    return [tuple(tensor.shape) for tensor in state if (tensor.data_ptr(), tensor.stride()) not in given]
