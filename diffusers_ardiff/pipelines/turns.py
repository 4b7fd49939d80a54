"""Whose turn it is: threads that share a transformer take turns, and a stream amid a chunk takes no orders."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

from torch import nn

_turns: WeakKeyDictionary[nn.Module, threading.RLock] = WeakKeyDictionary()
_turns_guard = threading.Lock()


def turn_of(transformer: nn.Module) -> threading.RLock:
    """The lock of a transformer; whoever runs it, or swaps its processors, holds it.

    It belongs to the transformer, not to a pipeline: pipelines made by ``from_pipe`` share one. It is kept beside the
    module, because a lock inside would forbid to copy or pickle it.
    """
    with _turns_guard:
        return _turns.setdefault(transformer, threading.RLock())


class StreamTurn:
    """One stream's way to its transformer.

    Args:
        transformer: that its forwards run.
    """

    def __init__(self, transformer: nn.Module) -> None:
        self._lock = turn_of(transformer)
        self._is_making = False

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Wait for other threads to finish their chunks."""
        with self._lock:
            yield

    @contextmanager
    def between_chunks(self) -> Iterator[None]:
        """As ``taken``; RuntimeError inside a chunk of this stream, where only a callback of its own can be."""
        with self._lock:
            if self._is_making:
                raise RuntimeError(
                    "a chunk of this stream is being made, and this works between two chunks only. Inside a callback, "
                    "return new `latents` or `prompt_embeds`, call close(), or use update(), which the next chunk takes."
                )
            yield

    @contextmanager
    def making_chunk(self) -> Iterator[None]:
        """As ``between_chunks``, and a chunk is being made."""
        with self.between_chunks():
            self._is_making = True
            try:
                yield
            finally:
                self._is_making = False
