"""One transformer forward of a rollout: plain, compiled, or replayed from a captured graph."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ..graphs import CompiledShapes, ForwardCall, GraphSet, graph_key
from ..processors import PagedAttachment


class ForwardRunner:
    """Runs the forwards of one transformer with its paged processors.

    Attributes:
        graphs: captured forwards of the pool that the rollout's sessions live in; None: every forward is launched
            kernel by kernel.
        shapes: shapes that the blocks were compiled for; others run eagerly, so that they compile nothing. None: the
            blocks are as the user left them.
    """

    def __init__(self, attachment: PagedAttachment) -> None:
        self.attachment = attachment
        self.graphs: GraphSet | None = None
        self.shapes: CompiledShapes | None = None

    @torch.no_grad()
    def run(self, call: ForwardCall, *, before_end: Callable[[], None] | None = None) -> torch.Tensor:
        """The transformer's output (rows, channels, frames, height, width); the call's context is opened and closed.

        Without gradients, whoever calls: the ops have none, and blocks compiled without would be compiled again with.

        Args:
            call: what to run.
            before_end: called before the context is closed; if it raises, the forward has failed.

        Raises:
            RuntimeError: the pool of the captured graphs has moved; nothing was claimed or written.
        """
        graphs = self.graphs
        if graphs is not None:
            graphs.check_pools()
        with self.attachment, call.context:
            out = self._launch_or_replay(call, graphs)
            if before_end is not None:
                before_end()
            return out

    def _launch_or_replay(self, call: ForwardCall, graphs: GraphSet | None) -> torch.Tensor:
        key = graph_key(call) if graphs is not None else None
        if graphs is None or key is None:
            return self._launch(call)
        replayed = graphs.replay(key, call)
        if replayed is not None:
            call.context.mark_written()
            return replayed
        out = self._launch(call)
        if graphs.recording:
            graphs.capture(key, call, self._launch)
        return out

    def _launch(self, call: ForwardCall) -> torch.Tensor:
        transformer = self.attachment.transformer
        bound = self.attachment.bind(call.context, call.rotary, call.text)
        with self._compile_scope(call), bound, transformer.cache_context(call.cache_name):
            return transformer(**call.arguments, return_dict=False)[0]

    def _compile_scope(self, call: ForwardCall) -> AbstractContextManager[Any]:
        if self.shapes is None or self.shapes.allows(call):
            return nullcontext()
        return torch.compiler.set_stance("force_eager")
