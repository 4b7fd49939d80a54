"""The figures of one command, kept the moment that they are measured: a machine may be taken away at any time."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from types import FrameType
from typing import Any

from ..doctor import examine

ALARM_SECONDS = 5.0
"""Between the alarms that a time limit gives after the first one."""


class Results:
    """Prints each figure and rewrites the file with it, so a command that is killed keeps what it had.

    The file is replaced as a whole: {"machine", "results", "errors": [{"name", "error"}]}.

    Args:
        path: .json; None: figures are only printed. Its folder is made at once, before work that may take minutes.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
        self.figures: list[dict[str, Any]] = []
        self.errors: list[dict[str, str]] = []

    def add(self, figure: dict[str, Any], text: str) -> None:
        """Print ``text`` and keep ``figure``, plain values."""
        print(text, flush=True)
        self.figures.append(figure)
        self.save()

    def extend(self, key: str, value: Any) -> None:
        """Put another value into the last figure."""
        self.figures[-1][key] = value
        self.save()

    def save(self) -> None:
        """Write the file, where there is one."""
        if self.path is None:
            return
        part = self.path.with_name(f"{self.path.name}.part")
        report = {"machine": self._machine, "results": self.figures, "errors": self.errors}
        part.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        os.replace(part, self.path)

    @cached_property
    def _machine(self) -> dict[str, Any]:
        return asdict(examine())

    def attempt(self, name: str, measure: Callable[[], object], *, limit: float | None = None) -> bool:
        """Call ``measure``; an exception is printed and kept, and the command can go on. Whether there was none.

        Args:
            limit: seconds after which it is given up, at the end of what the device is just asked to do; None: none.
        """
        try:
            with time_limit(limit):
                measure()
        except Exception as error:
            # Kept as text only: the traceback holds what was on the device.
            self.errors.append({"name": name, "error": f"{type(error).__name__}: {error}"})
        else:
            return True
        print(f"error: {name}: {self.errors[-1]['error']}", file=sys.stderr, flush=True)
        self.save()
        return False


class _OutOfTime(BaseException):
    """Not an ``Exception``: code that tries one way after another must not take it for one way's failure."""


@contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """A ``TimeoutError`` in the main thread once the time is over, between two of its Python steps; None: no limit.

    Raises:
        TimeoutError: it took longer.
    """
    if seconds is None:
        yield
        return

    def give_up(number: int, frame: FrameType | None) -> None:
        raise _OutOfTime

    before = signal.signal(signal.SIGALRM, give_up)
    # Again and again: what is raised inside a finalizer is lost.
    signal.setitimer(signal.ITIMER_REAL, seconds, ALARM_SECONDS)
    try:
        yield
    except _OutOfTime:
        raise TimeoutError(f"took longer than {seconds:g} s") from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
