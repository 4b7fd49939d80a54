"""``update``: what a stream can be told while it runs, checked in the thread that says it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from .control import MAX_PENDING_EVENTS, Mailbox
from .prompts import PromptChange


@dataclass(frozen=True, kw_only=True)
class EventRules:
    """What a stream can take, known before it is open.

    Args:
        num_videos: rows of every forward.
        text_len, text_dim: size of the prompt embeddings that its memory was planned for.
        encodes_text: whether the pipeline has a tokenizer and a text encoder.
        takes_controls: whether the stream has a control hook.
        max_pending_events: events that may wait for the next chunk.
        is_leader: whether this is the first of the ranks that make the videos; it takes the events of all.
    """

    num_videos: int
    text_len: int
    text_dim: int
    encodes_text: bool
    takes_controls: bool
    max_pending_events: int = MAX_PENDING_EVENTS
    is_leader: bool = True

    def check(self, change: PromptChange | None, controls: Any) -> None:
        """Raise ValueError or TypeError for an event that could only fail later."""
        if not self.is_leader:
            raise ValueError(
                "this rank takes no events: call update() on the first rank of the team, which shares them."
            )
        if change is None and controls is None:
            raise ValueError("an event needs a prompt, `prompt_embeds` or `controls`.")
        if controls is not None and not self.takes_controls:
            raise ValueError("this stream has no `control_hook`, so nothing would read `controls`; start it with one.")
        if change is None:
            return
        change.check_rows(self.num_videos, "the event")
        if change.prompt_embeds is None and not self.encodes_text:
            raise ValueError("the pipeline was made without a text encoder; give `prompt_embeds`.")
        if change.prompt_embeds is not None and change.prompt_embeds.shape[1:] != (self.text_len, self.text_dim):
            raise ValueError(
                f"`prompt_embeds` of an event must be (videos or 1, {self.text_len}, {self.text_dim}), the text length "
                f"that this stream was planned for, got {tuple(change.prompt_embeds.shape)}."
            )


class Inbox:
    """A mailbox that accepts only what the stream can take."""

    def __init__(self, rules: EventRules) -> None:
        self.mailbox = Mailbox(rules.max_pending_events)
        self._rules = rules

    def post(self, change: PromptChange | None, controls: Any, event_id: int | None) -> bool:
        """Check and append an event; see ``LiveControl.update``."""
        self._rules.check(change, controls)
        return self.mailbox.post(change=_own(change), controls=controls, event_id=event_id)


def _own(change: PromptChange | None) -> PromptChange | None:
    """A copy that the caller cannot change any more while the event waits."""
    if change is None:
        return None
    prompt = list(change.prompt) if isinstance(change.prompt, list) else change.prompt
    embeds = change.prompt_embeds.detach().clone() if change.prompt_embeds is not None else None
    return dataclasses.replace(change, prompt=prompt, prompt_embeds=embeds)


class LiveControl:
    """Base of streams: events from any thread or asyncio task, applied at the next chunk."""

    inbox: Inbox

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A shallow copy would share the pages, and give them back while the other one uses them."""
        raise TypeError("a stream can't be copied or pickled, it holds pages of a pool; fork() makes a second one.")

    def update(
        self,
        prompt: str | list[str] | None = None,
        *,
        prompt_embeds: torch.Tensor | None = None,
        controls: Any = None,
        mode: str = "text",
        keep_frames: int = 0,
        blend_chunks: int = 0,
        event_id: int | None = None,
    ) -> bool:
        """Ask for another prompt or other controls from the next chunk on; returns at once, from any thread.

        Events that wait are applied in the order of their ids before the next chunk is denoised; one that comes while
        a chunk is being made waits for the next. An event whose application fails (a text encoder that raises, say)
        raises in ``next(stream)``: it is dropped, what it would have changed stays as it was, later events still wait,
        and the stream stays open. Only a recache that fails leaves the history stale, until the same recache succeeds.

        Args:
            prompt, prompt_embeds, mode, keep_frames, blend_chunks: see ``PromptChange``.
            controls: for the stream's ``control_hook``; None: they stay as they are.
            event_id: whole number; None: the next one. An id that is not larger than all before is ignored.

        Returns: whether the event was accepted; False for a duplicate or an older one.

        Raises:
            ValueError, TypeError: bad arguments.
            EventQueueFullError: ``max_pending_events`` events wait.
            RuntimeError: the stream is closed.
        """
        if prompt is not None or prompt_embeds is not None:
            change = PromptChange(
                prompt=prompt,
                prompt_embeds=prompt_embeds,
                mode=mode,
                keep_frames=keep_frames,
                blend_chunks=blend_chunks,
            )
            return self.inbox.post(change, controls, event_id)
        if (mode, keep_frames, blend_chunks) != ("text", 0, 0):
            raise ValueError(f"mode {mode!r} with its numbers goes with a new prompt only; the event has none.")
        return self.inbox.post(None, controls, event_id)
