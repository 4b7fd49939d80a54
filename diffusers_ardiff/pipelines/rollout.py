"""One autoregressive rollout in latent space: sessions, forwards, commits, window changes. Knows no text and no VAE."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

from ..cache import KVManager, Session, TextKV
from ..context import PagedForwardContext
from ..processors import PagedAttachment, TransformerGeometry
from ..recipes import Recipe
from ..rope import VideoRope
from ..transfer import download, upload
from .angles import FrameAngles
from .batch_text import BatchText
from .denoise import FrameStep
from .hook import ControlHook, ControlInputs, apply_hook
from .window import LatentShape, kept_frames

POSITIVE, NEGATIVE = "positive", "negative"
CACHE_CONTEXT = {POSITIVE: "cond", NEGATIVE: "uncond"}


class Rollout:
    """The latent state of a batch of videos: one session a video, all of them rows of each forward.

    Args:
        attachment: paged processors of the transformer; attached here for the length of each forward only.
        manager: pool to open the sessions in.
        recipe: chunk, window, steps.
        shape: latent shape.
        guided: keep a negative branch for classifier-free guidance.
        device: where the transformer runs.

    Attributes:
        control_hook: edits the transformer's arguments in every forward; None: nobody does.
        controls: what the hook gets for the chunk held and those to come; changed by ``set_controls``.
    """

    def __init__(
        self,
        attachment: PagedAttachment,
        manager: KVManager,
        recipe: Recipe,
        shape: LatentShape,
        *,
        guided: bool,
        device: torch.device,
    ) -> None:
        self.recipe = recipe
        self.shape = shape
        self.device = device
        self.branch_names = (POSITIVE, NEGATIVE) if guided else (POSITIVE,)
        self.num_latent_frames = 0
        self.control_hook: ControlHook | None = None
        self.controls: Any = None
        self.attachment = attachment
        self._geometry: TransformerGeometry = attachment.geometry
        # Text K/V are bound in every forward; the host only needs a row to run its text embedder on.
        transformer = attachment.transformer
        stub = (shape.num_videos, 1, transformer.config["text_dim"])
        self.text_stub = torch.zeros(stub, dtype=transformer.dtype, device=device)
        self._text = BatchText()
        self._recent = torch.zeros(shape.chunk(0), device=device)
        self._recent_controls: tuple[Any, ...] = ()
        self._uncommitted: torch.Tensor | None = None
        self.angles = self.make_angles()
        self.sessions: list[Session] = []
        try:
            for _ in range(shape.num_videos):
                self.sessions.append(manager.open_session(self.branch_names))
        except BaseException:
            self.close()
            raise

    @property
    def tokens_per_frame(self) -> int:
        """C, tokens of one latent frame."""
        return self._geometry.tokens_per_frame(self.shape.height, self.shape.width)

    def make_angles(self) -> FrameAngles:
        """Rotary angles of this frame size, with nothing kept yet."""
        _, patch_height, patch_width = self._geometry.patch_size
        grid = (self.shape.height // patch_height, self.shape.width // patch_width)
        return FrameAngles(VideoRope(head_dim=self._geometry.head_dim), grid, self.recipe.rope, self.device)

    @property
    def recent_latents(self) -> torch.Tensor:
        """Clean latents (videos, channels, frames, height, width) of the last S + W committed frames."""
        return self._recent

    # -- text ----------------------------------------------------------------------------------------------------

    def compute_text(self, embeds: Mapping[str, torch.Tensor]) -> dict[str, TextKV]:
        """Text K/V of each branch from (videos, text_len, text_dim) embeddings; nothing is stored yet.

        Raises:
            ValueError: not one row a video.
        """
        for name, value in embeds.items():
            if value.shape[0] != self.shape.num_videos:
                raise ValueError(
                    f"the {name} prompt embeddings have {value.shape[0]} rows for {self.shape.num_videos} videos; give "
                    "one each."
                )
        return {name: self.attachment.compute_text_kv(value.to(self.device)) for name, value in embeds.items()}

    def set_text(self, text: Mapping[str, TextKV]) -> None:
        """Replace the text of the branches named; self K/V stay as they are.

        Raises:
            KeyError: unknown branch.
        """
        rows = {name: [session.branch(name) for session in self.sessions] for name in text}
        for name, value in text.items():
            self._text.set(rows[name], value)

    def clear_text(self) -> None:
        """Forget the prompt; the next forward needs another one first."""
        self._text.clear()
        for session in self.sessions:
            for branch in session.branches:
                branch.text = None

    # -- forwards ------------------------------------------------------------------------------------------------

    def predict(self, step: FrameStep, guidance_scale: float) -> torch.Tensor:
        """One denoise step's velocity for the next chunk; writes its K/V, advances nothing.

        Args:
            step: the noisy chunk.
            guidance_scale: weight of the positive branch; the negative one runs only where there is one and the
                scale is above 1.0.
        """
        positive = self._forward(POSITIVE, step)
        if NEGATIVE not in self.branch_names or guidance_scale <= 1.0:
            return positive
        negative = self._forward(NEGATIVE, step)
        return negative + guidance_scale * (positive - negative)

    def hold(self, clean_latents: torch.Tensor) -> None:
        """Take a finished chunk; its commit forward runs later, by ``commit_held``."""
        self.commit_held()
        # A copy: the caller hands the chunk out, and what users do to it must not reach the history.
        self._uncommitted = clean_latents.to(self.device, torch.float32, copy=True)
        self.num_latent_frames += clean_latents.shape[2]

    def commit_held(self) -> None:
        """Run the clean forward of the chunk held, if there is one, in every branch, then advance all of them."""
        step = self.begin_commit()
        if step is None:
            return
        for name in self.branch_names:
            self._forward(name, step)
        self.finish_commit()

    def begin_commit(self) -> FrameStep | None:
        """The clean forward of the chunk held, for every branch; None where none is. ``finish_commit`` comes after it."""
        if self._uncommitted is None:
            return None
        return FrameStep(latents=self._uncommitted, timestep=self.recipe.commit_timestep)

    def finish_commit(self) -> None:
        """Advance all branches past the clean forward of the chunk held."""
        latents = self._uncommitted
        if latents is None:
            return
        for session in self.sessions:
            session.commit()
        self._recent = torch.cat([self._recent, latents], dim=2)[:, :, -kept_frames(self.recipe) :].clone()
        controls = (self.controls,) * latents.shape[2]
        self._recent_controls = (self._recent_controls + controls)[-kept_frames(self.recipe) :]
        self._uncommitted = None

    def set_controls(self, controls: Any) -> None:
        """Replace the controls; a commit that is due runs first, under those its chunk was denoised with."""
        self.commit_held()
        self.controls = controls

    def recache(self, text: Mapping[str, TextKV]) -> None:
        """Rewrite the window's keys under a new text, then keep that text. No-op on an empty history.

        Raises whatever the forward raises; the branch is then stale until the same recache succeeds.
        """
        self.commit_held()
        for name, value in text.items():
            span = self.sessions[0].branch(name).ring.recache_span()
            if span is not None:
                step = self._committed_frames(span[1] // self.tokens_per_frame)
                self._forward(name, step, start=span[0], text=value)
        self.set_text(text)

    def _committed_frames(self, num_frames: int) -> FrameStep:
        """The clean forward of the last frames committed."""
        first = self._recent.shape[2] - num_frames
        return FrameStep(
            latents=self._recent[:, :, first:],
            timestep=self.recipe.commit_timestep,
            controls=self._recent_controls[first:],
        )

    def flush(self, num_frames: int) -> None:
        """Keep the sink and the last ``num_frames`` latent frames of history; positions go on."""
        self.commit_held()
        for session in self.sessions:
            session.flush(num_frames * self.tokens_per_frame)

    def reset(self) -> None:
        """Start over at frame 0 with an empty history; the text stays."""
        self._uncommitted = None
        self.num_latent_frames = 0
        self._recent, self._recent_controls = self._recent[:, :, :0], ()
        for session in self.sessions:
            session.reset(keep_text=True)

    def fork(self) -> Rollout:
        """A second rollout with the same past and text, in the same pool; a commit that is due runs first.

        Raises:
            OutOfPagesError: the pool has too few sessions free; this rollout stays as it is.
            RuntimeError: closed, offloaded or stale.
        """
        self.check_open()
        self.commit_held()
        child = copy.copy(self)
        child.sessions, child._text, child.angles = [], self._text.copy(), self.make_angles()
        try:
            for session in self.sessions:
                child.sessions.append(session.fork())
        except BaseException:
            child.close()
            raise
        return child

    @property
    def offloaded(self) -> bool:
        """Whether a session's keys and values are in host memory; no forward runs then."""
        return any(session.offloaded for session in self.sessions)

    def offload(self) -> None:
        """Move K/V, text K/V and clean latents to host memory and give the pages back; a commit that is due runs first.

        Raises:
            RuntimeError: closed, or a commit is due on sessions that the pool has evicted.
        """
        self.check_open()
        self.commit_held()
        for session in self.sessions:
            session.offload()
        self._text.clear()
        self._recent = download(self._recent)

    def onload(self) -> None:
        """Take pages again and put every byte back; no-op where nothing is offloaded.

        Raises:
            OutOfPagesError: the pool has too few sessions free; call it again when it has.
            RuntimeError: closed.
        """
        self.check_open()
        for session in self.sessions:
            session.onload()
        self._recent = upload(self._recent, self.device)

    def close(self) -> None:
        """Give all pages back; calling it again does nothing."""
        self._uncommitted = self.controls = self.control_hook = None
        self.angles.clear()
        self._recent_controls = ()
        self._text.clear()
        self._recent, self.text_stub = self._recent.new_empty(0), self.text_stub.new_empty(0)
        for session in self.sessions:
            session.close()
        # A closed session still knows its pool; a stream that somebody keeps must not keep the pool.
        self.sessions.clear()

    def check_open(self) -> None:
        """Raise RuntimeError on a closed rollout."""
        if not self.sessions:
            raise RuntimeError("this rollout is closed; start a new one.")

    def drop_joined_text(self) -> None:
        """Let go of this rollout's own join of its rows' text, after another one was made that includes them."""
        self._text.clear()

    def _forward(
        self,
        branch_name: str,
        step: FrameStep,
        *,
        start: int | None = None,
        text: TextKV | None = None,
    ) -> torch.Tensor:
        """The transformer's output for these frames."""
        self.check_open()
        branches = [session.branch(branch_name) for session in self.sessions]
        text = text or self._text.get(branches)
        if text is None:
            raise RuntimeError(f"branch {branch_name!r} has no prompt; set one before the next chunk.")
        num_tokens, num_extra = self.count_tokens(step)
        forward = PagedForwardContext(
            branches, num_tokens=num_tokens, num_extra=num_extra, start=start, backend=self.attachment.backend
        )
        rotary = self.angles.prepare(forward)
        transformer, stub = self.attachment.transformer, self.text_stub
        arguments = self.arguments(branch_name, step, start_frame=forward.starts[0] // self.tokens_per_frame)
        cache_context = transformer.cache_context(CACHE_CONTEXT[branch_name])
        with self.attachment, forward, self.attachment.bind(forward, rotary, text), cache_context:
            return transformer(**arguments, encoder_hidden_states=stub, return_dict=False)[0]

    def count_tokens(self, step: FrameStep) -> tuple[int, int]:
        """(tokens, extra rows) of one video in a forward."""
        num_extra = step.num_extra_frames * self.tokens_per_frame
        return step.num_frames * self.tokens_per_frame - num_extra, num_extra

    def arguments(self, branch_name: str, step: FrameStep, *, start_frame: int) -> dict[str, Any]:
        """The transformer's arguments for these frames but for its text; ``start_frame`` is the cache's next frame."""
        latents = step.latents.to(self.text_stub.dtype)
        if isinstance(step.timestep, tuple):
            # Wan takes several timesteps as one a token.
            tokens = torch.tensor(step.timestep).repeat_interleave(self.tokens_per_frame)
            timesteps = upload(tokens, self.device).expand(len(latents), -1)
        else:
            timesteps = torch.full((len(latents),), step.timestep, device=self.device)
        if self.control_hook is None:
            return {"hidden_states": latents, "timestep": timesteps}
        inputs = ControlInputs(
            # A clone: a hook that edits in place must not reach the latents that the next step starts from.
            latents=latents.clone(),
            timestep=timesteps,
            frame_controls=step.controls if step.controls is not None else (self.controls,) * step.num_frames,
            start_latent_frame=self._first_frame(step, start_frame),
            branch=branch_name,
        )
        return apply_hook(self.control_hook, inputs)

    def _first_frame(self, step: FrameStep, start_frame: int) -> int:
        """Absolute latent frame of a step's first frame."""
        return start_frame if step.start_frame is None else step.start_frame
