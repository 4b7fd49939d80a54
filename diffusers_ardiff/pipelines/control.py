"""Events for a stream that runs: an ordered, bounded mailbox that any thread may post to. Knows no tensors."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..validation import check_int

if TYPE_CHECKING:
    from .prompts import PromptChange

MAX_PENDING_EVENTS = 16


class EventQueueFullError(RuntimeError):
    """An event was refused because as many as the stream takes are waiting; it may be sent again under the same id."""


@dataclass(frozen=True, kw_only=True)
class ControlEvent:
    """One change asked for while a stream runs.

    Args:
        event_id: larger than that of every event before.
        change: another prompt; None: the prompt stays.
        controls: for the stream's control hook; None: they stay.
    """

    event_id: int
    change: PromptChange | None = None
    controls: Any = None


class Mailbox:
    """Events in the order of their ids, at most ``max_pending`` of them; every method may be called from any thread.

    Raises:
        ValueError: ``max_pending`` is no whole number >= 1.
    """

    def __init__(self, max_pending: int = MAX_PENDING_EVENTS) -> None:
        self._max_pending = check_int("max_pending_events", max_pending, minimum=1)
        self._pending: deque[ControlEvent] = deque()
        self._lock = threading.Lock()
        self._last_id = -1
        self._closed = False

    def __len__(self) -> int:
        """Events that wait."""
        return len(self._pending)

    @property
    def last_id(self) -> int:
        """The largest id accepted; -1 before the first."""
        return self._last_id

    def post(self, *, change: PromptChange | None = None, controls: Any = None, event_id: int | None = None) -> bool:
        """Append an event; False where its id is not larger than the last one's, and nothing happens.

        Args:
            event_id: whole number >= 0; None: the next one.

        Raises:
            ValueError: bad id.
            EventQueueFullError: ``max_pending`` events wait; the id is not used up.
            RuntimeError: closed.
        """
        if event_id is not None:
            check_int("event_id", event_id, minimum=0)
        with self._lock:
            if self._closed:
                raise RuntimeError("this stream is closed; start a new one.")
            number = self._last_id + 1 if event_id is None else event_id
            if number <= self._last_id:
                return False
            if len(self._pending) >= self._max_pending:
                raise EventQueueFullError(
                    f"{len(self._pending)} events wait for the next chunk, as many as this stream takes. Send fewer, "
                    f"try again after the next chunk, or set a larger max_pending_events."
                )
            self._pending.append(ControlEvent(event_id=number, change=change, controls=controls))
            self._last_id = number
            return True

    def take_pending(self) -> Iterator[ControlEvent]:
        """The events that wait now, oldest first; each leaves the mailbox when it is asked for."""
        for _ in range(len(self)):
            with self._lock:
                event = self._pending.popleft() if self._pending else None
            if event is None:
                return
            yield event

    def close(self) -> None:
        """Drop what waits and refuse what comes."""
        with self._lock:
            self._closed = True
            self._pending.clear()
