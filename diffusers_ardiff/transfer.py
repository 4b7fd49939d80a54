"""Copies between host and device."""

from __future__ import annotations

import torch


def upload(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Copy a tensor to a device; from the host to a GPU through pinned memory, without a stream synchronisation."""
    if torch.device(device).type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.contiguous().pin_memory().to(device, non_blocking=True)


def download(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor in host memory, pinned where it comes from a GPU; complete when this returns."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")
    return host.copy_(tensor)
