"""The prompt of a running stream: what can change it, and how the change meets the history."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ..validation import check_int
from .rollout import Rollout

SWITCH_MODES = ("text", "recache", "flush", "blend")


def check_switch(mode: str, keep_frames: int = 0, blend_chunks: int = 0) -> None:
    """Raise ValueError for an unknown switch mode, or a number that does not go with it."""
    if mode not in SWITCH_MODES:
        raise ValueError(f"unknown prompt switch mode {mode!r}; known: {list(SWITCH_MODES)}.")
    check_int("keep_frames", keep_frames, minimum=0)
    if keep_frames and mode != "flush":
        raise ValueError(f"keep_frames={keep_frames} only goes with mode 'flush', got mode {mode!r}.")
    check_int("blend_chunks", blend_chunks, minimum=0)
    if mode == "blend" and not blend_chunks:
        raise ValueError("mode 'blend' needs blend_chunks, over how many chunks the prompt moves; at least 1, got 0.")
    if blend_chunks and mode != "blend":
        raise ValueError(f"blend_chunks={blend_chunks} only goes with mode 'blend', got mode {mode!r}.")


def check_tensor(name: str, value: object) -> None:
    """Raise TypeError for anything but a tensor."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"`{name}` must be a tensor, got {value!r}.")


def count_prompts(prompt: str | list[str] | None, prompt_embeds: torch.Tensor | None, name: str = "prompt") -> int:
    """How many prompts there are.

    Raises:
        ValueError: both or none given, an empty list, or embeddings of another rank.
        TypeError: a prompt is no string, or embeddings are no tensor.
    """
    if (prompt is None) == (prompt_embeds is None):
        raise ValueError(f"give either `{name}` or `{name}_embeds`, exactly one of them.")
    if prompt_embeds is not None:
        check_tensor(f"{name}_embeds", prompt_embeds)
        if prompt_embeds.ndim != 3 or prompt_embeds.shape[0] == 0:
            raise ValueError(
                f"`{name}_embeds` must be (prompts, text_len, text_dim), got {tuple(prompt_embeds.shape)}."
            )
        return prompt_embeds.shape[0]
    prompts = [prompt] if isinstance(prompt, str) else prompt
    if not isinstance(prompts, list) or not all(isinstance(text, str) for text in prompts):
        raise TypeError(f"`{name}` must be a string or a list of strings, got {prompt!r}.")
    if not prompts:
        raise ValueError(f"`{name}` is an empty list; give at least one prompt.")
    return len(prompts)


@dataclass(frozen=True, kw_only=True)
class PromptChange:
    """Another prompt, and what becomes of the history.

    Args:
        prompt: new prompt, for all videos or one each; or
        prompt_embeds: (videos or 1, text_len, text_dim).
        mode: ``"text"``: only the text changes, history stays as it was written; ``"recache"``: the window's keys are
            rewritten under the new text; ``"flush"``: only the sink and the last ``keep_frames`` frames stay;
            ``"blend"``: over ``blend_chunks`` chunks the embeddings move in equal steps from those in force to the
            new ones, and history stays.
        keep_frames: latent frames kept by a flush.
        blend_chunks: n of a blend; chunk k of n has weight k / n of the new embeddings.

    Raises:
        ValueError: both or none of the prompts, or a number that does not go with the mode.
    """

    prompt: str | list[str] | None = None
    prompt_embeds: torch.Tensor | None = None
    mode: str = "text"
    keep_frames: int = 0
    blend_chunks: int = 0

    def __post_init__(self) -> None:
        check_switch(self.mode, self.keep_frames, self.blend_chunks)
        if (self.prompt is None) == (self.prompt_embeds is None):
            raise ValueError("a prompt switch takes either `prompt` or `prompt_embeds`.")

    def check_rows(self, num_videos: int, what: str) -> None:
        """Raise ValueError or TypeError unless there is one prompt, or as many as go evenly into the videos."""
        num_prompts = count_prompts(self.prompt, self.prompt_embeds)
        if num_videos % num_prompts:
            raise ValueError(f"{what} has {num_prompts} prompts for {num_videos} videos; give 1, or one each.")


@dataclass(frozen=True, kw_only=True)
class PromptSwitch(PromptChange):
    """A change of prompt during a call, at the first chunk that starts at or after ``latent_frame``.

    Args:
        latent_frame: absolute latent frame, given ones included. The other arguments are those of ``PromptChange``.
    """

    latent_frame: int

    def __post_init__(self) -> None:
        check_int("latent_frame", self.latent_frame, minimum=0)
        super().__post_init__()


@dataclass(frozen=True, kw_only=True)
class _Blend:
    """A blend that is not over; ``old`` and ``new`` are (videos, text_len, text_dim)."""

    old: torch.Tensor
    new: torch.Tensor
    num_chunks: int
    num_done: int = 0

    def advance(self) -> _Blend:
        return dataclasses.replace(self, num_done=self.num_done + 1)

    @property
    def is_over(self) -> bool:
        return self.num_done == self.num_chunks

    @property
    def embeds(self) -> torch.Tensor:
        if self.is_over:
            return self.new.clone()
        mixed = torch.lerp(self.old.float(), self.new.float(), self.num_done / self.num_chunks)
        return mixed.to(self.new.dtype)


def _version(tensor: torch.Tensor) -> int | None:
    """Grows with every edit in place; None where torch does not count (inference mode)."""
    return None if tensor.is_inference() else tensor._version


class PromptState:
    """Embeddings of a rollout by branch name, with the blends that are under way."""

    def __init__(self, rollout: Rollout) -> None:
        self.embeds: dict[str, torch.Tensor] = {}
        self._rollout = rollout
        self._blends: dict[str, _Blend] = {}
        self._blends_before: dict[str, _Blend] = {}
        self._versions: dict[str, int | None] = {}

    def is_current(self, name: str, embeds: torch.Tensor) -> bool:
        """Whether these are the embeddings in force, not edited in place since."""
        return embeds is self.embeds.get(name) and _version(embeds) == self._versions[name]

    def copy_for(self, rollout: Rollout) -> PromptState:
        """The same prompt and blends for another rollout, whose text K/V are set already."""
        copied = PromptState(rollout)
        # Copies: a callback may edit one stream's embeddings in place.
        copied.embeds = {name: embeds.clone() for name, embeds in self.embeds.items()}
        copied._versions = {name: _version(embeds) for name, embeds in copied.embeds.items()}
        copied._blends.update(self._blends)
        return copied

    def set(self, embeds: Mapping[str, torch.Tensor]) -> None:
        """Replace text by branch name: embeddings (videos, text_len, text_dim). Self K/V stay; ends these blends."""
        self._rollout.set_text(self._rollout.compute_text(embeds))
        self._keep(embeds)

    def switch(self, embeds: Mapping[str, torch.Tensor], mode: str, keep_frames: int, blend_chunks: int) -> None:
        """Replace text by branch name, in one of ``SWITCH_MODES``; a commit that is due runs first, with the old text.

        Raises:
            ValueError: a blend between embeddings of different shapes, or from none; nothing has changed.
        """
        if mode == "blend":
            self._start_blend(embeds, blend_chunks)
            return
        text = self._rollout.compute_text(embeds)
        if mode == "recache":
            self._rollout.recache(text)
        else:
            self._rollout.commit_held()
            if mode == "flush":
                self._rollout.flush(keep_frames)
            self._rollout.set_text(text)
        self._keep(embeds)

    def begin_chunk(self) -> None:
        """Take every blend one step further; called once before each chunk that is denoised."""
        self._blends_before = dict(self._blends)
        if not self._blends:
            return
        blends = {name: blend.advance() for name, blend in self._blends.items()}
        self.set({name: blend.embeds for name, blend in blends.items()})
        self._blends = {name: blend for name, blend in blends.items() if not blend.is_over}

    def undo_begin_chunk(self) -> None:
        """Put the blends where they stood before the last ``begin_chunk``: its chunk is going to be made again."""
        self._blends = dict(self._blends_before)

    def clear(self) -> None:
        """Forget the prompt and the blends; the rollout's text K/V are cleared by itself."""
        self.embeds.clear()
        self._blends.clear()

    def _keep(self, embeds: Mapping[str, torch.Tensor]) -> None:
        self.embeds.update(embeds)
        for name in embeds:
            self._versions[name] = _version(embeds[name])
            self._blends.pop(name, None)

    def _start_blend(self, embeds: Mapping[str, torch.Tensor], num_chunks: int) -> None:
        for name, new in embeds.items():
            old = self.embeds.get(name)
            if old is None or old.shape != new.shape:
                have = "none" if old is None else tuple(old.shape)
                raise ValueError(
                    f"a blend needs {name} prompt embeddings (videos, text_len, text_dim) of one shape, the stream has "
                    f"{have} and the new ones are {tuple(new.shape)}. Give embeddings of the same length, or switch "
                    "with another mode."
                )
        self._blends |= {
            name: _Blend(old=self.embeds[name], new=new, num_chunks=num_chunks) for name, new in embeds.items()
        }
