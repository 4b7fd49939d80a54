"""What both training stages share: the budget, the learning rate, the average of the weights, the state on disk."""

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

Objective = Callable[..., torch.Tensor]


@dataclass
class Budget:
    """How long a piece trains: `steps` optimiser steps if given, else `minutes` of wall time from creation."""

    minutes: float
    steps: int | None = None
    start: float = field(default_factory=time.monotonic)

    def progress(self, step: int) -> float:
        """Share of the budget that is used up before `step`, from 0 to 1."""
        if self.steps is not None:
            return min(1.0, step / self.steps)
        return min(1.0, self.elapsed() / (60 * self.minutes))

    def elapsed(self) -> float:
        """Seconds since the budget was opened."""
        return time.monotonic() - self.start


def learning_rate(peak: float, step: int, progress: float, warmup: int = 100) -> float:
    """Linear warm-up over `warmup` steps, cosine decay to 1 % of `peak` over the budget."""
    return peak * min(1.0, (step + 1) / warmup) * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * progress)))


class Average:
    """Exponential moving average of the parameters of a module, with a warm start."""

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.decay = decay
        self.live = list(module.parameters())
        self.mean = [parameter.detach().clone() for parameter in self.live]

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Moves the average towards the parameters after optimiser step `step` (from 0)."""
        torch._foreach_lerp_(self.mean, self.live, 1 - min(self.decay, (1 + step) / (10 + step)))

    @torch.no_grad()
    def apply(self) -> None:
        """Overwrites the parameters with their average."""
        for parameter, mean in zip(self.live, self.mean, strict=True):
            parameter.copy_(mean)


class Trainer:
    """AdamW on the gradients of `objective(*inputs)`, with clipping, schedule, weight average and a log.

    On a GPU the objective and its backward pass are captured once as a CUDA graph and replayed: the models are so
    small that launching their kernels one by one takes longer than running them. So `objective` must take tensors of
    fixed shapes, draw its random numbers from the default generator and never wait for the device.
    """

    def __init__(self, module: nn.Module, objective: Objective, budget: Budget, peak: float, decay: float) -> None:
        self.module, self.objective, self.budget, self.peak = module, objective, budget, peak
        self.device = next(module.parameters()).device
        self.optimizer = torch.optim.AdamW(module.parameters(), lr=peak, betas=(0.9, 0.98), fused=True)
        self.average = Average(module, decay)
        self.step = 0
        self.log: list[dict[str, float]] = []
        self._graph: torch.cuda.CUDAGraph | None = None
        self._next_report = 0.0

    @property
    def progress(self) -> float:
        """Share of the budget that is used up."""
        return self.budget.progress(self.step)

    def train_step(self, *inputs: torch.Tensor) -> None:
        """One optimiser step."""
        if self.device.type != "cuda":
            loss = self._loss_and_gradients(inputs)
        else:
            if self._graph is None:
                self._capture(inputs)
            for static, value in zip(self._inputs, inputs, strict=True):
                static.copy_(value)
            self._graph.replay()
            loss = self._loss
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.peak, self.step, self.progress)
        nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
        self.optimizer.step()
        self.average.update(self.step)
        self.step += 1
        if self.step % 8 == 0 or self.device.type != "cuda":
            self._report(loss.item())  # also keeps the host from running far ahead of the clock

    def _loss_and_gradients(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """Fresh gradients in the parameters; returns the loss."""
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            loss = self.objective(*inputs)
        loss.backward()
        return loss.detach()

    def _capture(self, inputs: Sequence[torch.Tensor]) -> None:
        """Records the forward and backward pass on copies of `inputs`."""
        self._inputs = [value.clone() for value in inputs]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._loss_and_gradients(self._inputs)
        torch.cuda.current_stream().wait_stream(stream)
        self.optimizer.zero_grad(set_to_none=True)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._loss = self._loss_and_gradients(self._inputs)

    def _report(self, loss: float) -> None:
        """A log line every 5 % of the budget."""
        if self.progress < self._next_report:
            return
        self._next_report += 0.05
        self.log.append({"step": self.step, "seconds": round(self.budget.elapsed(), 1), "loss": round(loss, 5)})
        print(json.dumps(self.log[-1]), flush=True)


def save_state(module: nn.Module, path: Path) -> None:
    """Writes all weights in float16 (smaller and, for weights of this size, closer than bfloat16)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: value.detach().half().cpu().contiguous() for name, value in module.state_dict().items()}, path)


def load_state(module: nn.Module, path: Path) -> bool:
    """Loads what `save_state` wrote, if it is there."""
    if not path.exists():
        return False
    module.load_state_dict(load_file(path))
    return True


def write_json(path: Path, **values: object) -> None:
    """Merges `values` into a JSON file."""
    merged = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**merged, **values}, indent=1) + "\n")
