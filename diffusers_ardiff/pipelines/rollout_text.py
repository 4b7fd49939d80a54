"""The prompts of a rollout: text K/V of the rows of each branch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from ..cache import Branch, Session, TextKV
from .batch_text import BatchText
from .forwards import ForwardRunner
from .window import LatentShape


class RolloutText:
    """A rollout's methods around its prompts."""

    shape: LatentShape
    device: torch.device
    runner: ForwardRunner
    sessions: list[Session]
    local_names: tuple[str, ...]
    _text: BatchText
    if TYPE_CHECKING:

        def commit_held(self) -> None: ...

    def compute_text(self, embeds: Mapping[str, torch.Tensor]) -> dict[str, TextKV]:
        """Text K/V of each branch held here, from (videos, text_len, text_dim) embeddings; nothing is stored yet.

        Raises:
            ValueError: not one row a video.
        """
        for name, value in embeds.items():
            if value.shape[0] != self.shape.num_videos:
                raise ValueError(
                    f"the {name} prompt embeddings have {value.shape[0]} rows for {self.shape.num_videos} videos; give "
                    "one each."
                )
        held = {name: value.to(self.device) for name, value in embeds.items() if name in self.local_names}
        return {name: self.runner.attachment.compute_text_kv(value) for name, value in held.items()}

    def set_text(self, text: Mapping[str, TextKV]) -> None:
        """Replace the text of the branches named; self K/V stay as they are. A commit that is due runs first.

        Raises:
            KeyError: unknown branch.
        """
        self.commit_held()
        rows = {name: [session.branch(name) for session in self.sessions] for name in text}
        for name, value in text.items():
            self._text.set(rows[name], value)

    def clear_text(self) -> None:
        """Forget the prompt, after a commit that is due; the next forward needs another one first."""
        self.commit_held()
        self._text.clear()
        for session in self.sessions:
            for branch in session.branches:
                branch.text = None

    def _text_of(self, branches: list[Branch]) -> TextKV:
        text = self._text.get(branches)
        if text is None:
            raise RuntimeError(f"branch {branches[0].name!r} has no prompt; set one before the next chunk.")
        return text
