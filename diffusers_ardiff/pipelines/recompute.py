"""A rollout that computes its context's keys again before every chunk (Krea Realtime) instead of committing chunks.

The context is the sink's frames and the last frames of the window, always at positions 0, 1, ...; so positions never
exceed what is visible, and no key is older than one chunk. The sink is the video's first frames, or, with
``encode_first_frame``, one that is encoded from pixels once the first frame lies before all that the window holds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..transfer import download, upload
from .denoise import FrameStep
from .first_frame import FirstFrame
from .rollout import Rollout
from .window import num_past_frames


class RecomputeRollout(Rollout):
    """As ``Rollout``; what it holds is added to the context, and the clean forward runs on all of that.

    Attributes:
        first_frame: makes the context's first frame from pixels; None: it stays the video's.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.first_frame: FirstFrame | None = None  # first, since a pool without room closes what was begun
        super().__init__(*arguments, **options)
        self._sink = self._recent
        self._sink_controls: tuple[Any, ...] = ()

    def begin_commit(self) -> FrameStep | None:
        """The clean forward of the next chunk's context; empties the history, which that forward replaces."""
        if self._uncommitted is None:
            return None
        held = self._uncommitted
        controls = self._recent_controls + (self.controls,) * held.shape[2]
        step = self._context(torch.cat([self._recent, held], dim=2), controls)
        for session in self.sessions:
            session.reset(keep_text=True)
        return step

    def finish_commit(self) -> None:
        """Advance all branches past the context, and count the chunk held among the past frames."""
        if self._uncommitted is None:
            return
        recent = torch.cat([self._recent, self._uncommitted], dim=2)
        controls = self._recent_controls + (self.controls,) * self._uncommitted.shape[2]
        # Frames are dropped from `recent` later than the sink is complete.
        self._sink, self._sink_controls = self._first_frames(recent, controls)
        super().finish_commit()

    def _first_frames(self, recent: torch.Tensor, controls: tuple[Any, ...]) -> tuple[torch.Tensor, tuple[Any, ...]]:
        wanted, num_past = self.recipe.num_sink_frames, num_past_frames(self.recipe)
        if self.first_frame is not None and self.num_latent_frames > wanted + num_past:
            # Of the frame that its pixels come from.
            shown = len(controls) - num_past - 1
            return self.first_frame.latents(), controls[shown : shown + 1]
        if self._sink.shape[2] == wanted:
            return self._sink, self._sink_controls
        return recent[:, :, :wanted].clone(), controls[:wanted]

    def _context(self, recent: torch.Tensor, controls: tuple[Any, ...]) -> FrameStep:
        """The sink's frames and the window's past ones, of which ``recent`` are the last."""
        recipe = self.recipe
        sink, sink_controls = self._first_frames(recent, controls)
        num_tail = min(num_past_frames(recipe), self.num_latent_frames - sink.shape[2])
        tail = recent.shape[2] - num_tail
        return FrameStep(
            latents=torch.cat([sink, recent[:, :, tail:]], dim=2),
            timestep=recipe.commit_timestep,
            controls=sink_controls + controls[tail:],
            start_frame=0,
        )

    def _committed_frames(self, num_frames: int) -> FrameStep:
        return self._context(self._recent, self._recent_controls)

    def _first_frame(self, step: FrameStep, start_frame: int) -> int:
        return self.num_latent_frames if step.start_frame is None else step.start_frame

    @property
    def watch_pixels(self) -> Callable[[torch.Tensor], None] | None:
        """Takes the decoded frames of every chunk; None where they are not needed."""
        return None if self.first_frame is None else self.first_frame.add

    def flush(self, num_frames: int) -> None:
        """Refused: what a flush would drop is computed again before the next chunk.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            f"recipe {self.recipe.name!r} computes its context again before each chunk (context_mode 'recompute'), so "
            "a flush has no effect. Change the prompt with mode 'text', 'recache' or 'blend', or reset the stream."
        )

    def fork(self) -> Rollout:
        """As ``Rollout.fork``."""
        child = super().fork()
        if isinstance(child, RecomputeRollout) and self.first_frame is not None:
            child.first_frame = self.first_frame.copy()
        return child

    def reset(self) -> None:
        """Start over at frame 0 with an empty history; the text stays."""
        super().reset()
        self._move_first_frame(None)
        self._sink, self._sink_controls = self._recent, ()

    def offload(self) -> None:
        """As ``Rollout.offload``."""
        super().offload()
        self._sink = download(self._sink)
        self._move_first_frame(download)

    def onload(self) -> None:
        """As ``Rollout.onload``."""
        super().onload()
        self._sink = upload(self._sink, self.device)
        self._move_first_frame(lambda pixels: upload(pixels, self.device))

    def close(self) -> None:
        """Give all memory back; calling it again does nothing."""
        super().close()
        self._sink, self._sink_controls = self._recent, ()
        self._move_first_frame(None)

    def _move_first_frame(self, move: Callable[[torch.Tensor], torch.Tensor] | None) -> None:
        """Move its pixels; None: forget them."""
        if self.first_frame is not None and move is not None:
            self.first_frame.move(move)
        elif self.first_frame is not None:
            self.first_frame.clear()
