"""Text K/V of all rows of a forward. The branches own their rows; the rows joined are kept here, and only that."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..cache import Branch, TextKV, TextLayerKV


class BatchText:
    """Joins the text of one branch of each session; again only where a session's text was replaced."""

    def __init__(self) -> None:
        self._joined: dict[str, tuple[list[TextKV], TextKV]] = {}
        self._doubled: tuple[TextKV, TextKV] | None = None

    def set(self, branches: Sequence[Branch], text: TextKV) -> None:
        """Give each branch its row of ``text``, as views."""
        rows = [text.row(index) for index in range(len(branches))]
        for branch, row in zip(branches, rows, strict=True):
            branch.text = row
        self._joined[branches[0].name] = (rows, text)

    def get(self, branches: Sequence[Branch]) -> TextKV | None:
        """The text of all branches, a row each; None where one has none."""
        rows = [branch.text for branch in branches if branch.text is not None]
        if len(rows) < len(branches):
            return None
        name = branches[0].name
        known, _ = self._joined.get(name, ([], None))
        if len(known) != len(rows) or any(have is not row for have, row in zip(known, rows, strict=True)):
            if len(rows) == 1:
                # As it is: a stream that is alone and in a batch in turns must not have its text joined every time.
                self._joined[name] = (rows, rows[0])
            else:
                self.set(branches, _join(rows))
        return self._joined[name][1]

    def double(self, text: TextKV) -> TextKV:
        """The rows of ``text`` twice, for a merged forward; made once a prompt."""
        if self._doubled is None or self._doubled[0] is not text:
            self._doubled = (text, text.apply(lambda tensor: torch.cat([tensor, tensor])))
        return self._doubled[1]

    def copy(self) -> BatchText:
        """For a fork, whose branches hold the same rows."""
        copied = BatchText()
        copied._joined.update(self._joined)
        return copied

    def clear(self) -> None:
        """Let go of the joined rows; the branches keep theirs."""
        self._joined.clear()
        self._doubled = None


def _join(rows: Sequence[TextKV]) -> TextKV:
    layers = []
    for parts in zip(*(row.layers for row in rows), strict=True):
        tensors = ([t for t in column if t is not None] for column in zip(*parts, strict=True))
        layers.append(TextLayerKV._make(torch.cat(column) if column else None for column in tensors))
    return TextKV(tuple(layers))
