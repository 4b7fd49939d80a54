"""Merged forwards: the clean rows of one chunk and the first noisy rows of the next, in one pass over the layers.

In every layer the first are written and attend as in a commit forward; then the second are written, as if the first had
been committed, and attend as in a denoise forward. Integers only, no tensors.
"""

from __future__ import annotations

import copy
from typing import NamedTuple

from .layout import ForwardSpan
from .ring import RingState


class MergedSpans(NamedTuple):
    """The two forwards of a merged one; the second begins where the first ends."""

    committed: ForwardSpan
    upcoming: ForwardSpan


def plan_merged(ring: RingState, num_tokens: int) -> MergedSpans:
    """Check a commit of ``num_tokens`` tokens and a denoise forward of as many after it. Changes nothing.

    Raises:
        ValueError, RuntimeError: as ``RingState.plan_forward``, for either.
    """
    committed, after = ring.plan_forward(num_tokens), copy.copy(ring)
    after.begin(committed)
    after.finish(committed, succeeded=True)
    after.commit()
    return MergedSpans(committed, after.plan_forward(num_tokens))


def begin_merged(ring: RingState, spans: MergedSpans) -> None:
    """Record that both are about to write."""
    for span in spans:
        ring.begin(span)


def finish_merged(ring: RingState, spans: MergedSpans, *, succeeded: bool) -> None:
    """Commit the first and leave the second pending; after a failure the branch is stale.

    Some layers may have overwritten tokens that the first rows must see when they are tried again, others not.
    """
    if not succeeded:
        ring.mark_stale()
        return
    ring.finish(spans.committed, succeeded=True)
    ring.commit(spans.committed)
    ring.finish(spans.upcoming, succeeded=True)
