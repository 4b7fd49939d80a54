"""diffusers' group offloading on a machine without a second device: weights that are not "on it" are NaN."""

from __future__ import annotations

import pytest
import torch
from diffusers.hooks.group_offloading import ModuleGroup


def offloading_that_spoils_weights(monkeypatch: pytest.MonkeyPatch) -> set[ModuleGroup]:
    """Make diffusers' offloading on the CPU as good as a second device; the groups that are on it now."""
    on_device: set[ModuleGroup] = set()
    kept: dict[torch.Tensor, torch.Tensor] = {}

    def tensors(group: ModuleGroup) -> list[torch.Tensor]:
        return [*group.parameters, *(p for module in group.modules for p in module.parameters())]

    def onload(group: ModuleGroup) -> None:
        on_device.add(group)
        for tensor in tensors(group):
            tensor.data = kept[tensor]

    def offload(group: ModuleGroup) -> None:
        on_device.discard(group)
        for tensor in tensors(group):
            kept.setdefault(tensor, tensor.data)
            tensor.data = torch.full_like(kept[tensor], float("nan"))

    monkeypatch.setattr(ModuleGroup, "onload_", onload)
    monkeypatch.setattr(ModuleGroup, "offload_", offload)
    return on_device
