"""A video as an iterator of chunks: noise, steps, decoding, prompt switches. Memory goes back when it ends."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from ..transfer import download, upload
from .callbacks import ENDED_EARLY, run_callback
from .checks import ModelPlace
from .denoise import Denoiser
from .frames import check_history_limit, next_chunk_size
from .inputs import check_generators
from .live import Inbox
from .output import ARChunk, FrameOutput
from .prompts import PromptState
from .rolling import RollingWindow, start_denoiser
from .rollout import Rollout
from .settings import CallState, StreamSettings
from .steps import NoiseSource
from .stream_prompts import PromptControl
from .turns import StreamTurn

if TYPE_CHECKING:
    from .host import PipelineHost

RESET_STATES = ("history", "text", "vae")


class ARStream(PromptControl, Iterator[ARChunk]):
    """Chunks of a batch of videos, made one by one as they are asked for; returned by ``ARDiffusionPipeline.stream``.

    A chunk is handed out before its commit forward runs; that one runs when the next chunk is asked for, or before
    anything that needs the history. ``close`` (or leaving a ``with`` block, or the end, or an exception) gives all
    memory back. Threads may share a stream, and streams a transformer: one chunk is made at a time.
    """

    def __init__(
        self,
        pipeline: PipelineHost,
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
        self._last_event_id = None
        self._turn = StreamTurn(rollout.runner.attachment.transformer)
        self._place = ModelPlace.of(pipeline, decodes=settings.output_type != "latent")
        self._closed = self._is_ending = False

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
        goes on with the next call. RuntimeError where its models were moved or cast since it began; it stays open.
        """
        with self._turn.making_chunk():
            try:
                chunk = None if self._is_ending else self._next_chunk()
            except StopIteration as error:
                self._fail(error)
                raise RuntimeError(ENDED_EARLY) from error
            if chunk is None:
                self.close()
                raise StopIteration
            return chunk

    def _next_chunk(self) -> ARChunk | None:
        """None at the end, and where a callback closed the stream."""
        self._check_ready()
        self._pipeline.call_state = self.state
        with self._closed_on_error():
            upcoming = self._reach_next_chunk()
        if upcoming is None:
            return None
        if isinstance(upcoming, int):
            self._apply_events()
        with self._closed_on_error():
            return self._make_chunk(upcoming)

    def _check_ready(self) -> None:
        if self.rollout.offloaded:
            raise RuntimeError("this stream is offloaded; call onload() on it first.")
        self._place.check(self._pipeline)

    @contextmanager
    def _closed_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._fail(error)
            raise

    def _fail(self, error: BaseException) -> None:
        """Close, and let whoever decodes elsewhere know that the video is not whole."""
        self._output.fail(error)
        self.close()

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
        if self._is_ending:
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
        if embeds and not self._is_ending:
            self.set_embeds(embeds)
        self.num_steps += 1
        if settings.on_step is not None:
            settings.on_step()
        return latents, self.state.interrupted or self._is_ending

    # -- control -------------------------------------------------------------------------------------------------

    def reset(self, keep: Sequence[str] = ("text",)) -> None:
        """Start a new video in the same memory, given frames and prompt schedule included; ``keep`` names what stays.

        Args:
            keep: any of ``"history"`` (self K/V and position), ``"text"``, ``"vae"`` (decoder state).

        Raises:
            ValueError: unknown state.
            RuntimeError: the stream is closed, or a callback of its own asks while a chunk is being made.
        """
        if unknown := set(keep) - set(RESET_STATES):
            raise ValueError(f"unknown state {sorted(unknown)} to keep; known: {list(RESET_STATES)}.")
        with self._turn.between_chunks():
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
        with self._turn.between_chunks():
            noise, output = self._noise.fork(generator), self._output.fork()
            rollout, state = self.rollout.fork(), copy.copy(self.state)
            child = ARStream(self._pipeline, rollout, noise, self._settings, state=state, output=output)
            child._prompt, child._window = self._prompt.copy_for(rollout), self._window.copy()
            child._given, child._schedule, child._place = copy.copy(self._given), list(self._schedule), self._place
            child.num_steps, child._num_chunks = self.num_steps, self._num_chunks
            child._num_generated, child._generated_frames = self._num_generated, self._generated_frames
        return child

    @torch.no_grad()
    def offload(self) -> None:
        """Move all but the decoder's state to host memory and give the pages back; see ``Rollout.offload``."""
        with self._turn.between_chunks():
            self.rollout.offload()
            self._window.move(download)

    def onload(self) -> None:
        """Take pages again and go on, bit by bit as if nothing had been; see ``Rollout.onload``."""
        with self._turn.between_chunks():
            self.rollout.onload()
            self._window.move(lambda latents: upload(latents, self.rollout.device))

    def close(self) -> None:
        """Stop and give all memory back; calling it again does nothing.

        While another thread makes a chunk, its denoise step in flight is the last, and this waits for it.
        """
        self._is_ending = True
        if self._closed:
            return
        with self._turn.taken():
            self._release()

    def _release(self) -> None:
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

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._output.fail(error)
        self.close()

    def __del__(self) -> None:
        # Without its turn: nobody makes chunks of it any more, and a collector may run in any thread, whatever that holds.
        if not getattr(self, "_closed", True):
            self._release()
