"""The context of a merged forward: the commit of one chunk and the first denoise step of the next. See ``cache.merged``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from .cache import Branch, ForwardSpan
from .cache.merged import plan_merged
from .context import PagedForwardContext, PagedLayerInputs


class MergedLayerInputs(NamedTuple):
    """Tensors of one layer for the two halves of the batch: rows to commit first, rows of the next chunk second."""

    committed: PagedLayerInputs
    upcoming: PagedLayerInputs


class MergedForwardContext(PagedForwardContext):
    """One forward of 2 R rows over R branches: the clean rows of their last chunk, then noisy rows of the next one.

    If it succeeds, the first are committed, and the second are like those of any denoise forward. If it fails, branches
    that have a history are stale.

    Args:
        branches: as in ``PagedForwardContext``.
        num_tokens: L, of each of the two chunks.
        backend: as in ``PagedForwardContext``.

    Raises: as ``PagedForwardContext``, for either chunk.
    """

    def __init__(self, branches: Sequence[Branch], *, num_tokens: int, backend: str | None = None) -> None:
        super().__init__(branches, num_tokens=num_tokens, backend=backend)
        self._merged = [plan_merged(branch.ring, num_tokens) for branch in branches]
        self._written_layers = [set(), set()]

    @property
    def upcoming_starts(self) -> tuple[int, ...]:
        """Absolute position of the first token of each row's next chunk."""
        return tuple(spans.upcoming.start for spans in self._merged)

    def _claim_branches(self) -> None:
        for branch, spans in zip(self.branches, self._merged, strict=True):
            branch.open_merged(spans)

    def _release_branches(self, *, succeeded: bool) -> None:
        for branch, spans in zip(self.branches, self._merged, strict=True):
            branch.close_merged(spans, succeeded=succeeded)

    def _spans_by_part(self) -> Sequence[Sequence[ForwardSpan]]:
        return [[spans.committed for spans in self._merged], [spans.upcoming for spans in self._merged]]

    @staticmethod
    def join_parts(parts: Sequence[PagedLayerInputs]) -> Any:
        """One layer's inputs of both halves as ``MergedLayerInputs``."""
        return MergedLayerInputs(*parts)

    def write_only(self) -> PagedForwardContext:
        """Refused: the second half is read.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError("a merged forward denoises its second chunk, so its output is read.")

    def mark_committed(self) -> None:
        """Refused: a merged forward commits its first rows itself.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            "a merged forward commits its first chunk by itself, and its second is only being denoised."
        )
