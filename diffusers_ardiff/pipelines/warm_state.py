"""What a warm-up leaves behind: a pool, compiled shapes, captured forwards, and which calls they serve."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ..cache import KVManager, RingGeometry
from ..graphs import CompiledShapes, GraphSet
from ..processors import PagedAttachment
from .forwards import ForwardRunner
from .inputs import CacheOptions
from .memory import CachePlanner
from .window import LatentShape


@dataclass(frozen=True, kw_only=True)
class WarmKey:
    """Calls that a warm pool serves."""

    ring: RingGeometry
    shape: LatentShape
    dtype: torch.dtype
    device: torch.device
    guided: bool
    options: CacheOptions

    @classmethod
    def of(cls, planner: CachePlanner) -> WarmKey:
        """The key of a call."""
        return cls(
            ring=planner.ring(),
            shape=planner.shape,
            dtype=planner.kv_dtype,
            device=planner.device,
            guided=planner.guided,
            options=replace(planner.options, limit_bytes=None),
        )


@dataclass(kw_only=True, eq=False)
class WarmState:
    """What a warm-up left behind.

    Args:
        key: calls it serves.
        manager: the pool.
        attachment: the processors that were compiled and captured.
        shapes: compiled shapes, None without compilation.
        graphs: captured forwards, None without captures.
    """

    key: WarmKey
    manager: KVManager
    attachment: PagedAttachment
    shapes: CompiledShapes | None
    graphs: GraphSet | None

    def pool_for(self, planner: CachePlanner) -> KVManager | None:
        """The pool, if it serves such a call and has room for it now."""
        needed = planner.shape.num_videos * planner.num_branches * self.manager.geometry.num_pages
        serves = WarmKey.of(planner) == self.key and self.manager.allocator.num_free >= needed
        return self.manager if serves else None

    def equip(self, runner: ForwardRunner, manager: KVManager) -> None:
        """Let forwards run compiled, and replay where their sessions lie in the warm pool.

        Raises:
            RuntimeError: they would replay, but the transformer or the pool is not what was captured.
        """
        is_same_host = runner.attachment is self.attachment
        if self.shapes is not None:
            # Other processors would compile the blocks again; they know no shape, so they run eagerly.
            runner.shapes = self.shapes if is_same_host else CompiledShapes()
        if self.graphs is None or manager is not self.manager:
            return
        if not is_same_host:
            raise RuntimeError(
                "the transformer or its blocks were replaced after warmup(). Call pipe.warmup() again, or "
                "pipe.cooldown() to go on without it."
            )
        self.graphs.check_pools()
        self.graphs.check_weights()
        runner.graphs = self.graphs

    def set_recording(self, recording: bool) -> None:
        """Whether new shapes are compiled and new forwards captured."""
        for kept in (self.shapes, self.graphs):
            if kept is not None:
                kept.recording = recording
        if self.graphs is not None and not recording:
            self.graphs.num_replays = 0
