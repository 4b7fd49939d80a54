"""Calling parts of a transformer that diffusers' block-level group offloading brings in as whole blocks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from diffusers.hooks.group_offloading import GroupOffloadingHook, GroupOffloadingType, ModuleGroup


@contextmanager
def parts_onloaded(transformer: torch.nn.Module) -> Iterator[None]:
    """Within the block, a part that is called finds its weights on the device, one group of blocks at a time.

    Block-level offloading moves a group when its first block is called; a layer called by itself would meet weights on
    the host. Leaf-level offloading hangs on the layers themselves and needs nothing.
    """
    owners = _owners(transformer)
    if not owners:
        yield
        return
    current: list[ModuleGroup] = []

    def bring(part: torch.nn.Module, _arguments: Any) -> None:
        group = owners[part]
        if current != [group]:
            _leave(current)
            group.onload_()
            current.append(group)
            if group.stream is not None:
                group.stream.synchronize()

    handles = [part.register_forward_pre_hook(bring) for part in owners]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        _leave(current)


def _leave(current: list[ModuleGroup]) -> None:
    for group in current:
        group.offload_()
    current.clear()


def _owners(transformer: torch.nn.Module) -> dict[torch.nn.Module, ModuleGroup]:
    """Each module below a block-level group, and its group."""
    owners: dict[torch.nn.Module, ModuleGroup] = {}
    for module in transformer.modules():
        registry = getattr(module, "_diffusers_hook", None)
        hook = registry.get_hook("group_offloading") if registry is not None else None
        if isinstance(hook, GroupOffloadingHook) and hook.config.offload_type is GroupOffloadingType.BLOCK_LEVEL:
            for whole in hook.group.modules:
                owners.update(dict.fromkeys(whole.modules(), hook.group))
    return owners
