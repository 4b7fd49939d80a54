"""Host-to-device copies that do not make the host wait."""

from __future__ import annotations

import torch


def upload(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Copy a host tensor to a device; to a GPU through pinned memory, without a stream synchronisation."""
    if torch.device(device).type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
