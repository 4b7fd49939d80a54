"""The mailbox of a running stream: ids, order, bounds, threads."""

from __future__ import annotations

import sys
import threading
from collections import deque
from typing import Any

import pytest

from diffusers_ardiff import EventQueueFullError
from diffusers_ardiff.pipelines.control import Mailbox


def test_ids_increase() -> None:
    mailbox = Mailbox()
    assert [mailbox.post(controls="a", event_id=event_id) for event_id in (None, 7, None, 7, 3, 8, 9)] == [
        True,
        True,
        True,
        False,
        False,
        False,
        True,
    ]
    assert mailbox.last_id == 9
    assert [event.event_id for event in mailbox.take_pending()] == [0, 7, 8, 9]
    assert len(mailbox) == 0 and not mailbox.post(controls="a", event_id=9), "a duplicate of one that is done"


def test_full() -> None:
    """A refused event may come again under its own id."""
    mailbox = Mailbox(2)
    assert mailbox.post(controls=0) and mailbox.post(controls=1)
    with pytest.raises(EventQueueFullError, match=r"^2 events wait for the next chunk, as many as this stream"):
        mailbox.post(controls=2, event_id=5)
    assert not mailbox.post(controls=1, event_id=1), "a duplicate needs no room"
    assert (len(mailbox), mailbox.last_id) == (2, 1)
    next(mailbox.take_pending())
    assert mailbox.post(controls=2, event_id=5)


def test_events_that_come_while_others_are_taken_wait() -> None:
    mailbox = Mailbox()
    mailbox.post(controls=0), mailbox.post(controls=1)
    taken = []
    for event in mailbox.take_pending():
        mailbox.post(controls="later")
        taken.append(event.controls)
    assert taken == [0, 1] and len(mailbox) == 2


@pytest.mark.parametrize("event_id", [-1, 1.0, True, "7"])
def test_bad_ids(event_id: Any) -> None:
    with pytest.raises(ValueError, match="event_id must be a whole number >= 0"):
        Mailbox().post(controls=1, event_id=event_id)


def test_queue_is_touched_under_the_lock_only() -> None:
    """Which two threads meet where is chance, so eight of them prove little."""
    mailbox = Mailbox()

    class Guarded(deque[Any]):
        def append(self, item: Any) -> None:
            assert mailbox._lock.locked()
            super().append(item)

        def popleft(self) -> Any:
            assert mailbox._lock.locked()
            return super().popleft()

        def clear(self) -> None:
            assert mailbox._lock.locked()
            super().clear()

    mailbox._pending = Guarded()
    assert mailbox.post(controls=1) and mailbox.post(controls=2)
    assert next(mailbox.take_pending()).controls == 1
    assert mailbox.post(controls=3), "the lock is free again"
    mailbox.close()
    assert not mailbox._lock.locked()


def test_eight_threads() -> None:
    """Every id is given once, and the queue is in their order."""
    mailbox, start = Mailbox(8 * 200), threading.Barrier(8)

    def post() -> None:
        start.wait()
        for _ in range(200):
            mailbox.post(controls=1)

    threads = [threading.Thread(target=post) for _ in range(8)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
    finally:
        sys.setswitchinterval(interval)
    assert [event.event_id for event in mailbox.take_pending()] == list(range(8 * 200))
