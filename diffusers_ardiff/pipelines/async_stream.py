"""A stream for asyncio: every chunk is made in a worker thread, so the event loop stays free."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import TypeVar

from .live import Inbox, LiveControl
from .output import ARChunk
from .stream import ARStream

Result = TypeVar("Result")


class AsyncARStream(LiveControl, AsyncIterator[ARChunk]):
    """Chunks of a batch of videos, awaited one by one; returned by ``ARDiffusionPipeline.astream``.

        async with pipe.astream("a red circle") as stream:
            async for chunk in stream:
                await send(chunk.frames)

    The stream opens (text, memory) when the first chunk is asked for; ``update`` works from the start. A task that is
    cancelled while it awaits a chunk lets the denoise step in flight finish, closes the stream and gives all memory
    back before ``CancelledError`` goes on. The end, an error and leaving the ``async with`` block close it too.

    Args:
        open_stream: makes the stream whose events go to ``inbox``; called in a worker thread.
        inbox: takes the events.
    """

    def __init__(self, open_stream: Callable[[], ARStream], inbox: Inbox) -> None:
        self.inbox = inbox
        self._open_stream: Callable[[], ARStream] | None = open_stream
        self._stream: ARStream | None = None
        self._is_ending = False
        self._lock = asyncio.Lock()

    @property
    def closed(self) -> bool:
        """Whether the memory was given back."""
        return self._open_stream is None and (self._stream is None or self._stream.closed)

    async def __anext__(self) -> ARChunk:
        """The next chunk; StopAsyncIteration after the last. Raises like ``ARStream.__next__``."""
        async with self._lock:
            chunk = await self._run(self._next_chunk)
        if chunk is None:
            raise StopAsyncIteration
        return chunk

    async def aclose(self) -> None:
        """Stop after the denoise step in flight and give all memory back; calling it again does nothing."""
        self._end()
        async with self._lock:
            await self._run(self._close)

    async def __aenter__(self) -> AsyncARStream:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    def _next_chunk(self) -> ARChunk | None:
        self._open()
        if self._stream is None or self._is_ending:
            return None
        # A default, because StopIteration can't leave a worker thread.
        chunk = next(self._stream, None)
        # A chunk that was cut short is nobody's.
        return None if self._is_ending else chunk

    def _open(self) -> None:
        if self._open_stream is None:
            return
        try:
            self._stream = self._open_stream()
        except BaseException:
            self.inbox.mailbox.close()
            raise
        finally:
            self._open_stream = None

    def _end(self) -> None:
        self._is_ending = True
        if self._stream is not None:
            self._stream.state.interrupted = True

    def _close(self) -> None:
        self._open_stream = None
        self.inbox.mailbox.close()
        if self._stream is not None:
            self._stream.close()

    async def _run(self, work: Callable[[], Result]) -> Result:
        """Run in a worker thread; a cancelled caller waits for the thread, since no other may touch the memory."""
        thread = asyncio.create_task(asyncio.to_thread(work))
        try:
            return await asyncio.shield(thread)
        except asyncio.CancelledError:
            self._end()
            await _settle(thread)
            await _settle(asyncio.create_task(asyncio.to_thread(self._close)))
            raise


async def _settle(task: asyncio.Task) -> None:
    """Wait for a task to end, however often the caller is cancelled meanwhile; what it raises is dropped."""
    while not task.done():
        with suppress(asyncio.CancelledError):
            await asyncio.wait({task})
    if not task.cancelled():
        task.exception()
