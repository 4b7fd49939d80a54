"""One autoregressive rollout in latent space: sessions, forwards, commits, window changes. Knows no text and no VAE."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

from ..cache import Branch, KVManager, Session, TextKV
from ..context import PagedForwardContext
from ..merged import MergedForwardContext
from ..parallel import VideoGroups
from ..recipes import Recipe
from ..transfer import download, upload
from .batch_text import BatchText
from .calls import NEGATIVE, POSITIVE, ForwardCalls
from .forwards import ForwardRunner
from .hook import ControlHook
from .window import LatentShape, kept_frames


class Rollout:
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
            have one size and nothing came between them. Without guidance and control hook only.
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
        self._calls = ForwardCalls(runner.attachment, shape, device)
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
        return self._calls.tokens_per_frame

    @property
    def recent_latents(self) -> torch.Tensor:
        """Clean latents (videos, channels, frames, height, width) of the last S + W committed frames."""
        return self._recent

    # -- text ----------------------------------------------------------------------------------------------------

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

    # -- forwards ------------------------------------------------------------------------------------------------

    def predict(self, latents: torch.Tensor, timestep: float, guidance_scale: float) -> torch.Tensor:
        """One denoise step's velocity for the next chunk; writes its K/V, advances nothing. A commit that is due runs
        before it, or with it (``merge_commits``).

        Args:
            latents: (videos, channels, frames, height, width) noisy chunk.
            timestep: of all its frames, in [0, 1000].
            guidance_scale: weight of the positive branch; the negative one runs only where there is one and the
                scale is above 1.0.
        """
        held = self._uncommitted
        if held is not None and self.merge_commits and held.shape == latents.shape:
            return self._forward_merged(held, latents, timestep)
        self.commit_held()
        if self.local_names != self.branch_names:
            return self._predict_apart(latents, timestep, guidance_scale)
        positive = self._forward(POSITIVE, latents, timestep)
        if NEGATIVE not in self.branch_names or guidance_scale <= 1.0:
            return positive
        negative = self._forward(NEGATIVE, latents, timestep)
        return negative + guidance_scale * (positive - negative)

    def _predict_apart(self, latents: torch.Tensor, timestep: float, guidance_scale: float) -> torch.Tensor:
        """As ``predict``, with the branches on ranks of their own."""
        (name,), groups = self.local_names, self.groups
        assert groups is not None
        if guidance_scale <= 1.0:
            local = self._forward(name, latents, timestep) if name == POSITIVE else None
            return groups.from_positive(local, latents.to(self.runner.attachment.transformer.dtype))
        positive, negative = groups.gather_branches(self._forward(name, latents, timestep))
        return negative + guidance_scale * (positive - negative)

    def agree(self) -> None:
        """Wait for the other ranks before a commit, so that all of them commit or none."""
        if self.groups is not None:
            self.groups.agree("a commit")

    def hold(self, clean_latents: torch.Tensor) -> None:
        """Take a finished chunk; its commit forward runs later, by ``commit_held``."""
        self.commit_held()
        # A copy: the caller hands the chunk out, and what users do to it must not reach the history.
        self._uncommitted = clean_latents.to(self.device, torch.float32, copy=True)
        self.num_latent_frames += clean_latents.shape[2]

    def commit_held(self) -> None:
        """Run the clean forward of the chunk held, if there is one, in every branch, then advance all of them."""
        if self._uncommitted is None:
            return
        for name in self.local_names:
            self._forward(name, self._uncommitted, self.recipe.commit_timestep)
        self.agree()
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
                num_frames = span[1] // self.tokens_per_frame
                first = self._recent.shape[2] - num_frames
                latents, controls = self._recent[:, :, first:], self._recent_controls[first:]
                timestep = self.recipe.commit_timestep
                self._forward(name, latents, timestep, start=span[0], text=value, controls=controls)

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
        self._check_open()
        self.commit_held()
        child = copy.copy(self)
        child.sessions, child._text, child._calls = [], self._text.copy(), self._calls.copy()
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
        self._check_open()
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
        self._check_open()
        for session in self.sessions:
            session.onload()
        self._recent = upload(self._recent, self.device)

    def close(self) -> None:
        """Give all pages back; calling it again does nothing."""
        self._uncommitted = self.controls = self.control_hook = None
        self._recent_controls = ()
        self._text.clear()
        self._recent = self._recent.new_empty(0)
        self._calls.close()
        for session in self.sessions:
            session.close()
        # A closed session still knows its pool; a stream that somebody keeps must not keep the pool.
        self.sessions.clear()

    def _check_open(self) -> None:
        if not self.sessions:
            raise RuntimeError("this rollout is closed; start a new one.")

    def _forward(
        self,
        branch_name: str,
        latents: torch.Tensor,
        timestep: float,
        *,
        start: int | None = None,
        text: TextKV | None = None,
        controls: tuple[Any, ...] | None = None,
    ) -> torch.Tensor:
        """The transformer's output for these frames; ``controls`` is one a frame, None: the current ones."""
        self._check_open()
        branches = [session.branch(branch_name) for session in self.sessions]
        text = text or self._text_of(branches)
        num_frames = latents.shape[2]
        forward = PagedForwardContext(
            branches,
            num_tokens=num_frames * self.tokens_per_frame,
            start=start,
            backend=self.runner.attachment.backend,
        )
        frame_controls = controls if controls is not None else (self.controls,) * num_frames
        control = (self.control_hook, frame_controls)
        return self.runner.run(
            self._calls.plain(forward, latents, timestep, text, branch=branch_name, control=control)
        )

    def _forward_merged(self, held: torch.Tensor, latents: torch.Tensor, timestep: float) -> torch.Tensor:
        """Commit the chunk held and predict the next one's velocity in one forward."""
        self._check_open()
        branches = [session.branch(POSITIVE) for session in self.sessions]
        text = self._text.double(self._text_of(branches))
        forward = MergedForwardContext(
            branches,
            num_tokens=latents.shape[2] * self.tokens_per_frame,
            backend=self.runner.attachment.backend,
        )
        timesteps = (self.recipe.commit_timestep, timestep)
        out = self.runner.run(self._calls.merged(forward, (held, latents), timesteps, text), before_end=self.agree)
        self._keep_committed(held)
        return out[len(branches) :]

    def _text_of(self, branches: list[Branch]) -> TextKV:
        text = self._text.get(branches)
        if text is None:
            raise RuntimeError(f"branch {branches[0].name!r} has no prompt; set one before the next chunk.")
        return text
