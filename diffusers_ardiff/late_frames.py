"""Chunks in the order in which their frames are best read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from .pipelines import ARChunk


def one_behind(chunks: Iterable[ARChunk]) -> Iterator[ARChunk]:
    """The chunks of a stream in their order, for a consumer that reads their frames on the host at once.

    Where decoding overlaps, a chunk comes when the next one has been begun: read any earlier, its frames would be waited
    for while the device has nothing else to do. Otherwise it comes at once. A chunk that waits when KeyboardInterrupt
    ends ``chunks`` still comes, since it is whole; any other exception is raised right away.
    """
    waiting: ARChunk | None = None
    try:
        for chunk in chunks:
            if waiting is not None:
                yield waiting
            waiting = chunk if chunk.is_overlapped else None
            if waiting is None:
                yield chunk
    except KeyboardInterrupt:
        if waiting is not None:
            yield waiting
        raise
    if waiting is not None:
        yield waiting
