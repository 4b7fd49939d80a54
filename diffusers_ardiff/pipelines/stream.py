"""A video as an iterator of chunks: noise, steps, decoding, prompt switches. Memory goes back when it ends."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from ..transfer import download, upload
from .callbacks import ENDED_EARLY, run_callback
from .calls import NEGATIVE
from .control import ControlEvent
from .denoise import Denoiser
from .frames import check_history_limit, next_chunk_size
from .inputs import check_generators
from .live import Inbox, LiveControl
from .output import ARChunk, FrameOutput
from .prompts import PromptChange, PromptState
from .rolling import RollingWindow, start_denoiser
from .rollout import Rollout
from .settings import CallState, StreamSettings
from .steps import NoiseSource

if TYPE_CHECKING:
    from .ar_pipeline import ARDiffusionPipeline

RESET_STATES = ("history", "text", "vae")


class ARStream(LiveControl, Iterator[ARChunk]):
    """Chunks of a batch of videos, made one by one as they are asked for; returned by ``ARDiffusionPipeline.stream``.

    A chunk is handed out before its commit forward runs; that one runs when the next chunk is asked for, or before
    anything that needs the history. ``close`` (or leaving a ``with`` block, or the end, or an exception) gives all
    memory back.
    """

    def __init__(
        self,
        pipeline: ARDiffusionPipeline,
        rollout: Rollout,
        noise: NoiseSource,
        settings: StreamSettings,
        *,
        state: CallState,
        output: FrameOutput,
        inbox: Inbox | None = None,
    ) -> None:
        self.inbox = inbox if inbox is not None else Inbox(settings.rules)
        self.rollout = rollout
        self.state = state
        self._pipeline = pipeline
        self._noise = noise
        self._settings = settings
        self._prompt = PromptState(rollout)
        self._output, output.watch = output, rollout.watch_pixels
        self._begin_video()
        self._last_event_id: int | None = None
        self._closed = False

    def _begin_video(self) -> None:
        """Given frames, prompt schedule and counters of a video that begins."""
        self._given = iter(self._settings.given)
        self._schedule = list(self._settings.schedule)
        self._window = RollingWindow()
        self.num_steps = self._num_chunks = self._num_generated = self._generated_frames = 0

    @property
    def closed(self) -> bool:
        """Whether the memory was given back."""
        return self._closed

    @property
    def vae_state_bytes(self) -> int:
        """Bytes the decoder's state holds now."""
        return self._output.state_bytes

    # -- chunks --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def __next__(self) -> ARChunk:
        """The next chunk; StopIteration after the last.

        Raises whatever making a chunk or applying an event raises; the stream is then closed, or, after an event,
        goes on with the next call.
        """
        try:
            chunk = None if self._closed else self._next_chunk()
        except StopIteration as error:
            self.close()
            raise RuntimeError(ENDED_EARLY) from error
        if chunk is None:
            self.close()
            raise StopIteration
        return chunk

    def _next_chunk(self) -> ARChunk | None:
        """None at the end, and where a callback closed the stream."""
        self._check_onloaded()
        self._pipeline.call_state = self.state
        with self._closed_on_error():
            upcoming = self._reach_next_chunk()
        if upcoming is None:
            return None
        if isinstance(upcoming, int):
            self._apply_events()
        with self._closed_on_error():
            return self._make_chunk(upcoming)

    def _check_onloaded(self) -> None:
        if self.rollout.offloaded:
            raise RuntimeError("this stream is offloaded; call onload() on it first.")

    @contextmanager
    def _closed_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.close()
            raise

    def _reach_next_chunk(self) -> torch.Tensor | int | None:
        """Commit what is due, unless the next step does; the next chunk's given latents, or its size, or None at the end."""
        given = next(self._given, None)
        size = self._next_size() if given is None else None
        if given is None and size is None:
            return None
        if not self.rollout.merge_commits:
            self.rollout.commit_held()
        if given is not None:
            return given
        self._apply_schedule()
        return size

    def _next_size(self) -> int | None:
        recipe, start = self.rollout.recipe, self.rollout.num_latent_frames
        size = next_chunk_size(recipe, start, self._settings.total_latent_frames)
        if size is None or self.state.interrupted:
            return None
        check_history_limit(recipe, start, start + size)
        return size

    def _make_chunk(self, upcoming: torch.Tensor | int) -> ARChunk | None:
        if not isinstance(upcoming, int):
            return self._hand_out(upcoming, is_given=True)
        denoiser = self._start_denoising(upcoming)
        while (step := denoiser.step) is not None:
            denoiser.take(self.rollout.predict(step, self.state.guidance_scale))
        return self._hand_out(denoiser.latents)

    def _start_denoising(self, size: int) -> Denoiser:
        """Begin the next chunk, of ``size`` latent frames."""
        place, total = (self._num_generated, self._generated_frames), self._settings.total_latent_frames
        return start_denoiser(self.rollout, self._noise, size, place, self._after_step, self._window, total)

    def _hand_out(self, latents: torch.Tensor, is_given: bool = False) -> ARChunk | None:
        """Keep a finished chunk for its commit, and decode it; None where a callback closed the stream."""
        if self._closed:
            return None
        if not is_given:
            self._num_generated += 1
            self._generated_frames += latents.shape[2]
        start = self.rollout.num_latent_frames
        self.rollout.hold(latents)
        chunk = ARChunk(
            index=self._num_chunks,
            output=self._output.make(latents, self.rollout.recent_latents),
            latents=latents,
            start_latent_frame=start,
            is_given=is_given,
            last_event_id=self._last_event_id,
        )
        self._num_chunks += 1
        return chunk

    def _after_step(self, timestep: float, latents: torch.Tensor) -> tuple[torch.Tensor, bool]:
        settings = self._settings
        # Once more, since a call inside a callback leaves its own state behind.
        self._pipeline.call_state = self.state
        latents, embeds = run_callback(self._pipeline, settings, self._prompt, self.num_steps, timestep, latents)
        if embeds and not self._closed:
            self.set_embeds(embeds)
        self.num_steps += 1
        if settings.on_step is not None:
            settings.on_step()
        return latents, self.state.interrupted or self._closed

    # -- control -------------------------------------------------------------------------------------------------

    def set_embeds(self, embeds: Mapping[str, torch.Tensor]) -> None:
        """Replace text by branch name: embeddings (videos, text_len, text_dim). Self K/V stay.

        Raises:
            ValueError: a negative prompt without guidance, or not one row a video.
        """
        self._check_branches(embeds)
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

        For the thread that iterates, between two chunks; ``update`` is for all others. A commit that is still due runs
        first, with the old text. If a recache fails, the old text stays and the history is stale until the same switch
        succeeds.

        Raises:
            ValueError: bad arguments; nothing has changed.
            RuntimeError: the stream is closed.
        """
        if self._closed:
            raise RuntimeError("this stream is closed; start a new one.")
        change = PromptChange(
            prompt=prompt,
            prompt_embeds=prompt_embeds,
            mode=mode,
            keep_frames=keep_frames,
            blend_chunks=blend_chunks,
        )
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

    def reset(self, keep: Sequence[str] = ("text",)) -> None:
        """Start a new video in the same memory, given frames and prompt schedule included; ``keep`` names what stays.

        Args:
            keep: any of ``"history"`` (self K/V and position), ``"text"``, ``"vae"`` (decoder state).

        Raises:
            ValueError: unknown state.
            RuntimeError: the stream is closed.
        """
        if unknown := set(keep) - set(RESET_STATES):
            raise ValueError(f"unknown state {sorted(unknown)} to keep; known: {list(RESET_STATES)}.")
        if self._closed:
            raise RuntimeError("this stream is closed; start a new one.")
        if "history" not in keep:
            self.rollout.reset()
            self._begin_video()
            self._output.num_frames = 0
        if "text" not in keep:
            self.rollout.clear_text()
            self._prompt.clear()
        if "vae" not in keep:
            self._output.reset_decoder()

    @torch.no_grad()
    def fork(self, generator: Any = None) -> ARStream:
        """A second stream with the same past, prompt and noise to come, in the same pool; copies no keys or values.

        ``generator`` is that of the child's noise, as in a call; None: a copy of this stream's as it is now. A commit
        that is due runs first. Events that wait stay with this stream; the child counts its own.

        Raises ValueError where there is not one generator a video, else like ``Rollout.fork``; nothing changes then.
        """
        check_generators(generator, self.rollout.shape.num_videos)
        noise, output = self._noise.fork(generator), self._output.fork()
        rollout, state = self.rollout.fork(), copy.copy(self.state)
        child = ARStream(self._pipeline, rollout, noise, self._settings, state=state, output=output)
        child._prompt, child._window = self._prompt.copy_for(rollout), self._window.copy()
        child._given, child._schedule = copy.copy(self._given), list(self._schedule)
        child.num_steps, child._num_chunks = self.num_steps, self._num_chunks
        child._num_generated, child._generated_frames = self._num_generated, self._generated_frames
        return child

    @torch.no_grad()
    def offload(self) -> None:
        """Move all but the decoder's state to host memory and give the pages back; see ``Rollout.offload``."""
        self.rollout.offload()
        self._window.move(download)

    def onload(self) -> None:
        """Take pages again and go on, bit by bit as if nothing had been; see ``Rollout.onload``."""
        self.rollout.onload()
        self._window.move(lambda latents: upload(latents, self.rollout.device))

    def close(self) -> None:
        """Stop and give all memory back; calling it again does nothing."""
        if self._closed:
            return
        self._closed = True
        self.inbox.mailbox.close()
        self.rollout.close()
        self._prompt.clear()
        self._output.close()
        self._pipeline.maybe_free_model_hooks()

    def __enter__(self) -> ARStream:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            self.close()
