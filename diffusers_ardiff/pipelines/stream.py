"""A video as an iterator of chunks: noise, steps, decoding, prompt switches. Memory goes back when it ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch

from ..validation import check_int
from .frames import check_history_limit, next_chunk_size
from .output import ARChunk
from .rollout import NEGATIVE, POSITIVE, Rollout
from .steps import NoiseSource, add_noise, predict_clean
from .vae_stream import VaeDecodeStream

if TYPE_CHECKING:
    from .ar_pipeline import ARDiffusionPipeline

SWITCH_MODES = ("text", "recache", "flush")
RESET_STATES = ("history", "text", "vae")


@dataclass(frozen=True, kw_only=True)
class PromptSwitch:
    """A change of prompt during a call, at the first chunk that starts at or after ``latent_frame``.

    Args:
        latent_frame: absolute latent frame, given ones included.
        prompt: new prompt, for all videos or one each; or
        prompt_embeds: (videos or 1, text_len, text_dim).
        mode: ``"text"``: only the text changes, history stays as it was written; ``"recache"``: the window's keys are
            rewritten under the new text; ``"flush"``: only the sink and the last ``keep_frames`` frames stay.
        keep_frames: latent frames kept by a flush.
    """

    latent_frame: int
    prompt: str | list[str] | None = None
    prompt_embeds: torch.Tensor | None = None
    mode: str = "text"
    keep_frames: int = 0

    def __post_init__(self) -> None:
        check_int("latent_frame", self.latent_frame, minimum=0)
        check_switch(self.mode, self.keep_frames)
        if (self.prompt is None) == (self.prompt_embeds is None):
            raise ValueError("a prompt switch takes either `prompt` or `prompt_embeds`.")


def check_switch(mode: str, keep_frames: int) -> None:
    """Raise ValueError for an unknown switch mode, or frames kept by a mode that keeps everything."""
    if mode not in SWITCH_MODES:
        raise ValueError(f"unknown prompt switch mode {mode!r}; known: {list(SWITCH_MODES)}.")
    check_int("keep_frames", keep_frames, minimum=0)
    if keep_frames and mode != "flush":
        raise ValueError(f"keep_frames={keep_frames} only goes with mode 'flush', got mode {mode!r}.")


StepCallback = Callable[["ARDiffusionPipeline", int, float, dict[str, Any]], dict[str, Any] | None]


@dataclass(kw_only=True)
class CallState:
    """What callbacks read and change while a stream runs; the pipeline keeps it, and no memory with it, afterwards.

    Args:
        guidance_scale: may be changed between steps.
        num_timesteps: denoise steps of all chunks together; 0 for an endless stream.
        interrupted: stop after the current step.
    """

    guidance_scale: float
    num_timesteps: int = 0
    interrupted: bool = False


@dataclass(kw_only=True)
class StreamSettings:
    """How one stream runs; checked by the pipeline before it is made.

    Args:
        given: clean latents of each given chunk, in order.
        num_frames, total_latent_frames: pixel and latent frames to hand out in all, given ones included; None: endless.
        output_type: form of ``ARChunk.frames``.
        text_len: rows of the prompt embeddings of later prompts; None: the pipeline's default.
        schedule: prompt switches, sorted by frame.
        callback, callback_tensors: ``callback_on_step_end`` and the names of the tensors it gets.
        on_step: called after each step, for progress bars.
    """

    given: Sequence[torch.Tensor]
    num_frames: int | None
    total_latent_frames: int | None
    output_type: str
    text_len: int | None = None
    schedule: Sequence[PromptSwitch] = ()
    callback: StepCallback | None = None
    callback_tensors: Sequence[str] = ("latents",)
    on_step: Callable[[], None] | None = None


class ARStream(Iterator[ARChunk]):
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
        decoder: VaeDecodeStream | None,
    ) -> None:
        self.rollout = rollout
        self.state = state
        self.num_steps = 0
        self._pipeline = pipeline
        self._noise = noise
        self._settings = settings
        self._embeds: dict[str, torch.Tensor] = {}
        self._given = iter(settings.given)
        self._schedule = list(settings.schedule)
        self._vae = decoder
        self._num_chunks = self._num_generated = self._generated_frames = self._frames_out = 0
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether the memory was given back."""
        return self._closed

    @property
    def vae_state_bytes(self) -> int:
        """Bytes the decoder's state holds now."""
        return self._vae.state_bytes if self._vae is not None else 0

    # -- chunks --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def __next__(self) -> ARChunk:
        """The next chunk; StopIteration after the last."""
        if self._closed:
            raise StopIteration
        self._pipeline.call_state = self.state
        try:
            chunk = self._next_chunk()
        except BaseException:
            self.close()
            raise
        if chunk is None:
            self.close()
            raise StopIteration
        return chunk

    def _next_chunk(self) -> ARChunk | None:
        rollout = self.rollout
        start = rollout.num_latent_frames
        given = next(self._given, None)
        size = next_chunk_size(rollout.recipe, start, self._settings.total_latent_frames)
        if given is None and (size is None or self.state.interrupted):
            return None
        if given is None:
            check_history_limit(rollout.recipe, start, start + cast(int, size))
        rollout.commit_held()
        latents = given if given is not None else self._generate(cast(int, size))
        rollout.hold(latents)
        chunk = ARChunk(
            index=self._num_chunks,
            frames=self._decode(latents),
            latents=latents,
            start_latent_frame=start,
            is_given=given is not None,
        )
        self._num_chunks += 1
        return chunk

    def _generate(self, size: int) -> torch.Tensor:
        """Denoise the next chunk of ``size`` latent frames."""
        self._apply_schedule()
        rollout, noise = self.rollout, self._noise
        shape = rollout.shape.chunk(size)
        timesteps, sigmas = (fn(self._num_generated) for fn in (rollout.recipe.timesteps, rollout.recipe.sigmas))
        latents = noise.initial(shape, self._generated_frames)
        for step, (timestep, sigma) in enumerate(zip(timesteps, sigmas, strict=True)):
            velocity = rollout.predict(latents, timestep, self.state.guidance_scale)
            latents = predict_clean(latents, velocity, sigma)
            if step + 1 < len(sigmas):
                latents = add_noise(latents, noise.step(shape, self._num_generated, step), sigmas[step + 1])
            latents = self._after_step(timestep, latents)
            if self.state.interrupted:
                break
        self._num_generated += 1
        self._generated_frames += size
        return latents

    def _after_step(self, timestep: float, latents: torch.Tensor) -> torch.Tensor:
        settings = self._settings
        if settings.callback is not None:
            known = {
                "latents": latents,
                "prompt_embeds": self._embeds.get(POSITIVE),
                "negative_prompt_embeds": self._embeds.get(NEGATIVE),
            }
            passed = {name: known[name] for name in settings.callback_tensors}
            changed = settings.callback(self._pipeline, self.num_steps, timestep, passed) or {}
            latents = changed.get("latents", latents)
            self._take_embeds(changed.get("prompt_embeds"), changed.get("negative_prompt_embeds"))
        self.num_steps += 1
        if settings.on_step is not None:
            settings.on_step()
        return latents

    def _take_embeds(self, positive: torch.Tensor | None, negative: torch.Tensor | None) -> None:
        given = {POSITIVE: positive, NEGATIVE: negative}
        changed = {
            name: embeds
            for name, embeds in given.items()
            if embeds is not None and embeds is not self._embeds.get(name)
        }
        if changed:
            self.set_embeds(changed)

    def _decode(self, latents: torch.Tensor) -> Any:
        settings = self._settings
        if self._vae is None:
            limit = settings.total_latent_frames
            kept = latents if limit is None else latents[:, :, : limit - self._frames_out]
            self._frames_out += kept.shape[2]
            return kept
        video = self._vae.decode(latents)
        if settings.num_frames is not None:
            video = video[:, :, : settings.num_frames - self._frames_out]
        self._frames_out += video.shape[2]
        return self._pipeline.video_processor.postprocess_video(video, output_type=settings.output_type)

    # -- control -------------------------------------------------------------------------------------------------

    def set_embeds(self, embeds: Mapping[str, torch.Tensor]) -> None:
        """Replace text by branch name: embeddings (videos, text_len, text_dim). Self K/V stay."""
        self.rollout.set_text(self.rollout.compute_text(embeds))
        self._embeds.update(embeds)

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
    ) -> None:
        """Change the prompt from the next chunk on; see ``PromptSwitch`` for the modes.

        A commit that is still due runs first, with the old text. If a recache fails, the old text stays and the
        history is stale until the same switch succeeds.

        Raises:
            ValueError: bad arguments; nothing has changed.
            RuntimeError: the stream is closed.
        """
        if self._closed:
            raise RuntimeError("this stream is closed; start a new one.")
        check_switch(mode, keep_frames)
        embeds = self._pipeline.encode_branches(
            prompt,
            negative_prompt,
            prompt_embeds=prompt_embeds,
            negative_prompt_embeds=negative_prompt_embeds,
            num_videos=self.rollout.shape.num_videos,
            text_len=self._settings.text_len,
        )
        if NEGATIVE in embeds and NEGATIVE not in self.rollout.branch_names:
            raise ValueError("this stream runs without guidance, so it takes no negative prompt.")
        text = self.rollout.compute_text(embeds)
        if mode == "recache":
            self.rollout.recache(text)
        else:
            self.rollout.commit_held()
            if mode == "flush":
                self.rollout.flush(keep_frames)
            self.rollout.set_text(text)
        self._embeds.update(embeds)

    def _apply_schedule(self) -> None:
        while self._schedule and self._schedule[0].latent_frame <= self.rollout.num_latent_frames:
            switch = self._schedule.pop(0)
            self.switch_prompt(
                switch.prompt, prompt_embeds=switch.prompt_embeds, mode=switch.mode, keep_frames=switch.keep_frames
            )

    def reset(self, keep: Sequence[str] = ("text",)) -> None:
        """Start a new video in the same memory; what is named in ``keep`` stays.

        Args:
            keep: any of ``"history"`` (self K/V and position), ``"text"``, ``"vae"`` (decoder state).

        Raises:
            ValueError: unknown state.
            RuntimeError: the stream is closed.
        """
        unknown = set(keep) - set(RESET_STATES)
        if unknown:
            raise ValueError(f"unknown state {sorted(unknown)} to keep; known: {list(RESET_STATES)}.")
        if self._closed:
            raise RuntimeError("this stream is closed; start a new one.")
        if "history" not in keep:
            self.rollout.reset()
            self._num_chunks = self._num_generated = self._generated_frames = self._frames_out = 0
        if "text" not in keep:
            self.rollout.clear_text()
            self._embeds.clear()
        if "vae" not in keep and self._vae is not None:
            self._vae.reset()

    def close(self) -> None:
        """Stop and give all memory back; calling it again does nothing."""
        if self._closed:
            return
        self._closed = True
        self.rollout.close()
        self._embeds.clear()
        self._vae = None
        self._pipeline.maybe_free_model_hooks()

    def __enter__(self) -> ARStream:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            self.close()
