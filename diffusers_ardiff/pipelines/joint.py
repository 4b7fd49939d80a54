"""One transformer forward for several rollouts: each keeps its position, fill level, text and controls."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..cache import Branch
from ..context import PagedForwardContext
from .batch_text import BatchText
from .denoise import FrameStep
from .rollout import Rollout


@dataclass(frozen=True, kw_only=True, eq=False)
class JointRows:
    """The rows that one rollout brings to a joint forward, checked and ready.

    Args:
        rollout: whose sessions they are.
        branches: one a video.
        num_tokens, num_extra: tokens and extra rows of each.
        max_past: tokens of the past that each sees beside the sink; None: all that are stored.
        arguments: of the transformer, its text excepted.
    """

    rollout: Rollout
    branches: tuple[Branch, ...]
    num_tokens: int
    num_extra: int
    max_past: int | None
    arguments: Mapping[str, Any]

    @property
    def text_len(self) -> int:
        """Rows of the prompt's embeddings."""
        text = self.branches[0].text
        return 0 if text is None else text.layers[0].key.shape[1]


def prepare_rows(rollout: Rollout, branch_name: str, step: FrameStep) -> JointRows:
    """Check one rollout's part of a joint forward, and run its control hook; nothing is claimed or written.

    Raises what the rollout's own forward would raise before it writes: stale, offloaded, no prompt, a hook that fails.
    """
    rollout.check_open()
    branches = tuple(session.branch(branch_name) for session in rollout.sessions)
    num_tokens, num_extra = rollout.calls.count_tokens(step)
    for branch in branches:
        branch.check_idle("a forward")
        branch.ring.plan_forward(num_tokens, num_extra)
        if branch.text is None:
            raise RuntimeError(f"branch {branch.name!r} has no prompt; set one before the next chunk.")
    start_frame = branches[0].committed_tokens // rollout.tokens_per_frame
    arguments = rollout.arguments(branch_name, step, start_frame=start_frame)
    return JointRows(
        rollout=rollout,
        branches=branches,
        num_tokens=num_tokens,
        num_extra=num_extra,
        max_past=rollout.calls.max_past_tokens(rollout.recipe, step),
        arguments=arguments,
    )


class JointForward:
    """Runs forwards of several rollouts of one transformer and one pool; keeps what their rows have in common.

    Text K/V are joined once for each set of rows, and again where a text was replaced.
    """

    def __init__(self) -> None:
        self._text = BatchText()

    def run(self, rows: Sequence[JointRows]) -> list[torch.Tensor]:
        """The transformer's output, a tensor a rollout, in the order of ``rows``.

        Args:
            rows: of one branch name, one number of tokens, one visible past and one text length.

        Raises:
            ValueError: control hooks gave arguments that can't be joined.
        """
        # In the order of their pages, whichever streams come first: captured forwards are known by it.
        placed = sorted(rows, key=lambda part: part.branches[0].run.pages[0])
        first = placed[0].rollout
        branches = [branch for part in placed for branch in part.branches]
        arguments = join_arguments([part.arguments for part in placed])
        text = self._text.get(branches)
        if text is None:
            raise RuntimeError("a rollout of a joint forward lost its prompt after it was checked.")
        for part in placed:
            part.rollout.drop_joined_text()
        forward = PagedForwardContext(
            branches,
            num_tokens=rows[0].num_tokens,
            num_extra=rows[0].num_extra,
            backend=first.runner.attachment.backend,
            max_past_tokens=rows[0].max_past,
        )
        for part in placed:
            part.rollout.calls.angles.turn_sinks(forward, part.branches)
        out = first.runner.run(first.calls.joint(forward, arguments, text, branch=branches[0].name))
        parts = dict(zip(placed, out.split([len(part.branches) for part in placed]), strict=True))
        return [parts[part] for part in rows]

    def clear(self) -> None:
        """Let go of the joined text; the branches keep theirs."""
        self._text.clear()


def join_arguments(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The transformer's arguments of all rows, tensors joined along their first dimension.

    Raises:
        ValueError: one part has an argument that another lacks, or one that is no tensor with a row a video.
    """
    names = {name for part in parts for name in part}
    return {name: _join(name, parts) for name in sorted(names)}


def _join(name: str, parts: Iterable[Mapping[str, Any]]) -> torch.Tensor:
    values = []
    for part in parts:
        value, num_rows = part.get(name), part["hidden_states"].shape[0]
        if not isinstance(value, torch.Tensor) or value.ndim == 0 or value.shape[0] != num_rows:
            got = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            raise ValueError(
                f"streams that share a forward need `{name}` from the control hook of each, a tensor with one row a "
                f"video ({num_rows} here), got {got}. Let every hook set it, or ask these streams for their chunks one "
                "by one."
            )
        values.append(value)
    return torch.cat(values)
