"""A stream's prompt: switched at once, by the call's schedule, or by events."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from .calls import NEGATIVE
from .control import ControlEvent
from .live import LiveControl
from .prompts import PromptChange, PromptState, PromptSwitch
from .rollout import Rollout
from .settings import StreamSettings
from .turns import StreamTurn

if TYPE_CHECKING:
    from .host import PipelineHost


class PromptControl(LiveControl):
    """The part of ``ARStream`` that changes its prompt."""

    rollout: Rollout
    _pipeline: PipelineHost
    _settings: StreamSettings
    _prompt: PromptState
    _schedule: list[PromptSwitch]
    _turn: StreamTurn
    _last_event_id: int | None
    _closed: bool

    def set_embeds(self, embeds: Mapping[str, torch.Tensor]) -> None:
        """Replace text by branch name: embeddings (videos, text_len, text_dim). Self K/V stay.

        Raises:
            ValueError: a negative prompt without guidance, or not one row a video.
        """
        self._check_branches(embeds)
        with self._turn.taken():
            self._prompt.set(embeds)

    @torch.no_grad()
    def switch_prompt(
        self,
        prompt: str | list[str] | None = None,
        *,
        prompt_embeds: torch.Tensor | None = None,
        negative_prompt: str | list[str] | None = None,
        negative_prompt_embeds: torch.Tensor | None = None,
        mode: str = "text",
        keep_frames: int = 0,
        blend_chunks: int = 0,
    ) -> None:
        """Change the prompt from the next chunk on; see ``PromptChange`` for the modes.

        Between two chunks; from another thread it waits for the chunk that is being made, where ``update`` does not. A
        commit that is still due runs first, with the old text. If a recache fails, the old text stays and the history
        is stale until the same switch succeeds.

        Raises:
            ValueError: bad arguments; nothing has changed.
            RuntimeError: the stream is closed, or a callback of its own asks while a chunk is being made.
        """
        change = PromptChange(
            prompt=prompt,
            prompt_embeds=prompt_embeds,
            mode=mode,
            keep_frames=keep_frames,
            blend_chunks=blend_chunks,
        )
        with self._turn.between_chunks():
            if self._closed:
                raise RuntimeError("this stream is closed; start a new one.")
            self._apply_change(change, negative_prompt, negative_prompt_embeds)

    def _apply_change(
        self,
        change: PromptChange,
        negative_prompt: str | list[str] | None = None,
        negative_prompt_embeds: torch.Tensor | None = None,
    ) -> None:
        embeds = self._pipeline.encode_branches(
            change.prompt,
            negative_prompt,
            prompt_embeds=change.prompt_embeds,
            negative_prompt_embeds=negative_prompt_embeds,
            num_videos=self.rollout.shape.num_videos,
            text_len=self._settings.rules.text_len,
        )
        self._check_branches(embeds)
        self._prompt.switch(embeds, change.mode, change.keep_frames, change.blend_chunks)

    def _check_branches(self, embeds: Mapping[str, torch.Tensor]) -> None:
        if NEGATIVE in embeds and NEGATIVE not in self.rollout.branch_names:
            raise ValueError("this stream runs without guidance, so it takes no negative prompt.")

    def _apply_schedule(self) -> None:
        while self._schedule and self._schedule[0].latent_frame <= self.rollout.num_latent_frames:
            self._apply_change(self._schedule.pop(0))

    def _apply_events(self) -> None:
        for event in self.rollout.share_each(self.inbox.mailbox.take_pending()):
            try:
                self._apply_event(event)
            except Exception as error:
                error.add_note(f"raised by event {event.event_id}, which is dropped.")
                raise
        self._prompt.begin_chunk()

    def _apply_event(self, event: ControlEvent) -> None:
        if event.change is not None:
            self._apply_change(event.change)
        if event.controls is not None:
            self.rollout.set_controls(event.controls)
        self._last_event_id = event.event_id
