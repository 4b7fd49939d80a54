"""Points in time on a device, placed without waiting for it."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

Mark = torch.cuda.Event | float


@dataclass(frozen=True)
class Clock:
    """Marks on a device's current stream; on the CPU, of the host's clock."""

    device: torch.device

    def mark(self) -> Mark:
        """Now: behind all work that the current stream has been given."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def wait(self, mark: Mark) -> None:
        """Let the host wait until a mark is reached."""
        if not isinstance(mark, float):
            mark.synchronize()

    def seconds(self, start: Mark, end: Mark) -> float:
        """From one mark to another, both reached."""
        if isinstance(start, float) or isinstance(end, float):
            assert isinstance(start, float) and isinstance(end, float)
            return end - start
        return start.elapsed_time(end) / 1e3
