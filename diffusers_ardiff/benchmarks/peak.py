"""The most memory that a part of a benchmark took."""

from __future__ import annotations

import torch


def peak_so_far(device: torch.device) -> int | None:
    """Most bytes on the device since ``reset_peak``; None on the CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def reset_peak(device: torch.device) -> None:
    """Let the peak begin at what is allocated now."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
