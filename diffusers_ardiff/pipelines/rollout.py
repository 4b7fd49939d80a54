"""One autoregressive rollout in latent space: sessions, forwards, commits, window changes. Knows no text and no VAE."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ..cache import KVManager, Session, TextKV
from ..context import PagedForwardContext
from ..merged import MergedForwardContext
from ..parallel import VideoGroups
from ..recipes import Recipe
from ..transfer import download, upload
from .apart import predict_apart
from .batch_text import BatchText
from .calls import NEGATIVE, POSITIVE, ForwardCalls
from .denoise import FrameStep
from .forwards import ForwardRunner
from .hook import ControlHook
from .rollout_text import RolloutText
from .window import LatentShape, kept_frames


class Rollout(RolloutText):
    """The latent state of a batch of videos: one session a video, all of them rows of each forward.

    Args:
        runner: runs the forwards; the paged processors are attached for the length of each only.
        manager: pool to open the sessions in.
        recipe: chunk, window, steps.
        shape: latent shape.
        guided: keep a negative branch for classifier-free guidance.
        device: where the transformer runs.
        groups: the ranks that make the videos together; this one then holds its share. None: this one alone.

    Attributes:
        control_hook: edits the transformer's arguments in every forward; None: nobody does.
        controls: what the hook gets for the chunk held and those to come; changed by ``set_controls``.
        merge_commits: run the commit of a chunk held in one forward with the first step of the next chunk, where both
            have one size and nothing came between them. Without guidance and control hook only, and for recipes whose
            commit and next step see the same frames at the same positions.
        calls: makes the calls of the runner.
    """

    def __init__(
        self,
        runner: ForwardRunner,
        manager: KVManager,
        recipe: Recipe,
        shape: LatentShape,
        *,
        guided: bool,
        device: torch.device,
        groups: VideoGroups | None = None,
    ) -> None:
        self.recipe = recipe
        self.shape = shape
        self.device = device
        self.branch_names = (POSITIVE, NEGATIVE) if guided else (POSITIVE,)
        self.groups = groups
        self.local_names = self.branch_names if groups is None else groups.layout.local_branches(self.branch_names)
        self.num_latent_frames = 0
        self.merge_commits = False
        self.control_hook: ControlHook | None = None
        self.controls: Any = None
        self.runner = runner
        self.calls = ForwardCalls(runner.attachment, shape, recipe.rope, device)
        self._text = BatchText()
        self._recent = torch.zeros(shape.chunk(0), device=device)
        self._recent_controls: tuple[Any, ...] = ()
        self._uncommitted: torch.Tensor | None = None
        self.sessions: list[Session] = []
        try:
            for _ in range(shape.num_videos):
                self.sessions.append(manager.open_session(self.local_names))
        except BaseException:
            self.close()
            raise

    @property
    def tokens_per_frame(self) -> int:
        """C, tokens of one latent frame."""
        return self.calls.tokens_per_frame

    @property
    def watch_pixels(self) -> Callable[[torch.Tensor], None] | None:
        """Takes the decoded frames of every chunk; None where they are not needed, as here."""
        return None

    @property
    def recent_latents(self) -> torch.Tensor:
        """Clean latents (videos, channels, frames, height, width) of the last S + W committed frames."""
        return self._recent

    # -- forwards ------------------------------------------------------------------------------------------------

    def predict(self, step: FrameStep, guidance_scale: float) -> torch.Tensor:
        """One denoise step's velocity for the next chunk; writes its K/V, advances nothing. A commit that is due runs
        before it, or with it (``merge_commits``).

        Args:
            step: the noisy chunk.
            guidance_scale: weight of the positive branch; the negative one runs only where there is one and the
                scale is above 1.0.
        """
        held = self._uncommitted
        if held is not None and self.merge_commits and held.shape == step.latents.shape:
            return self._forward_merged(held, step)
        self.commit_held()
        if self.local_names != self.branch_names:
            forward = partial(self._forward, self.local_names[0], step)
            like = step.latents.to(self.runner.attachment.transformer.dtype)
            return predict_apart(self.groups, forward, like, guidance_scale)
        positive = self._forward(POSITIVE, step)
        if NEGATIVE not in self.branch_names or guidance_scale <= 1.0:
            return positive
        negative = self._forward(NEGATIVE, step)
        return negative + guidance_scale * (positive - negative)

    def agree(self) -> None:
        """Wait for the other ranks before a commit, so that all of them commit or none."""
        if self.groups is not None:
            self.groups.agree("a commit")

    def share_each(self, items: Iterator[Any]) -> Iterator[Any]:
        """The items that the first rank was given, on all that make the videos together; one by one, none is None."""
        return items if self.groups is None else self.groups.share_each(items)

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
        for name in self.local_names:
            self._forward(name, step, only_writes=True)
        self.agree()
        self.finish_commit()

    def begin_commit(self) -> FrameStep | None:
        """The clean forward of the chunk held, for every branch; None where none is. ``finish_commit`` comes after it."""
        if self._uncommitted is None:
            return None
        return FrameStep(latents=self._uncommitted, timestep=self.recipe.commit_timestep)

    def finish_commit(self) -> None:
        """Advance all branches past the clean forward of the chunk held."""
        if self._uncommitted is None:
            return
        for session in self.sessions:
            session.commit()
        self._keep_committed(self._uncommitted)

    def _keep_committed(self, latents: torch.Tensor) -> None:
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

        After a merged forward that failed, the window is first rewritten under the old text, and the chunk held is
        committed. Raises whatever a forward raises; the branch is then stale until the same recache succeeds.
        """
        if self._uncommitted is not None and any(b.ring.stale for session in self.sessions for b in session.branches):
            self._rewrite_window(dict.fromkeys(self.local_names))
        self.commit_held()
        self._rewrite_window(text)
        self.set_text(text)

    def _rewrite_window(self, text: Mapping[str, TextKV | None]) -> None:
        """Rewrite the window's keys in the branches named, under these texts (None: the branch's own)."""
        for name, value in text.items():
            span = self.sessions[0].branch(name).ring.recache_span()
            if span is not None:
                step = self._committed_frames(span[1] // self.tokens_per_frame)
                self._forward(name, step, start=span[0], text=value, only_writes=True)

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
        child.sessions, child._text, child.calls = [], self._text.copy(), self.calls.copy()
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
        self._recent_controls = ()
        self._text.clear()
        self._recent = self._recent.new_empty(0)
        self.calls.close()
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

    def arguments(self, branch_name: str, step: FrameStep, *, start_frame: int) -> dict[str, Any]:
        """The transformer's arguments for these frames but for its text; ``start_frame`` is the cache's next frame."""
        hooked = replace(
            step,
            controls=step.controls if step.controls is not None else (self.controls,) * step.num_frames,
            start_frame=self._first_frame(step, start_frame),
        )
        return self.calls.arguments(hooked, self.control_hook, branch=branch_name)

    def _first_frame(self, step: FrameStep, start_frame: int) -> int:
        """Absolute latent frame of a step's first frame."""
        return start_frame if step.start_frame is None else step.start_frame

    def _forward(
        self,
        branch_name: str,
        step: FrameStep,
        *,
        start: int | None = None,
        text: TextKV | None = None,
        only_writes: bool = False,
    ) -> torch.Tensor:
        """The transformer's output for these frames; it means nothing where the forward only writes."""
        self.check_open()
        branches = [session.branch(branch_name) for session in self.sessions]
        text = text or self._text_of(branches)
        num_tokens, num_extra = self.calls.count_tokens(step)
        backend = self.runner.attachment.backend
        forward = PagedForwardContext(
            branches,
            num_tokens=num_tokens,
            num_extra=num_extra,
            start=start,
            backend=backend,
            max_past_tokens=self.calls.max_past_tokens(self.recipe, step),
        )
        if only_writes:
            forward.write_only()
        arguments = self.arguments(branch_name, step, start_frame=forward.starts[0] // self.tokens_per_frame)
        return self.runner.run(self.calls.plain(forward, arguments, text, branch=branch_name))

    def _forward_merged(self, held: torch.Tensor, step: FrameStep) -> torch.Tensor:
        """Commit the chunk held and predict the next one's velocity in one forward."""
        self.check_open()
        branches = [session.branch(POSITIVE) for session in self.sessions]
        text = self._text.double(self._text_of(branches))
        num_tokens, _ = self.calls.count_tokens(step)
        forward = MergedForwardContext(branches, num_tokens=num_tokens, backend=self.runner.attachment.backend)
        timesteps = (self.recipe.commit_timestep, step.timestep)
        call = self.calls.merged(forward, (held, step.latents), timesteps, text)
        out = self.runner.run(call, before_end=self.agree)
        self._keep_committed(held)
        return out[len(branches) :]
