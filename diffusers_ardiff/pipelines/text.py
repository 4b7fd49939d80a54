"""From prompts to embeddings, by Wan's rule: fixed length, exact zeros behind the prompt, every row attended."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from diffusers.pipelines.wan.pipeline_wan import prompt_clean
from diffusers.utils import logging

from .calls import NEGATIVE, POSITIVE
from .prompts import count_prompts

MAX_TEXT_LEN = 512

logger = logging.get_logger(__name__)


def default_text_len(tokenizer: Any) -> int:
    """Rows of the prompt embeddings where the user names none: the tokenizer's own limit, at most 512."""
    return min(int(tokenizer.model_max_length), MAX_TEXT_LEN)


@torch.no_grad()
def encode_text(
    tokenizer: Any, text_encoder: Any, prompts: list[str], text_len: int, device: torch.device
) -> torch.Tensor:
    """Embeddings (prompts, text_len, text_dim) in the text encoder's dtype; rows behind a prompt's end are zero."""
    tokens = tokenizer(
        [prompt_clean(prompt) for prompt in prompts],
        padding="max_length",
        max_length=text_len,
        truncation=True,
        add_special_tokens=True,
        return_attention_mask=True,
        return_tensors="pt",
    )
    _warn_of_cut_ends(tokenizer, prompts, tokens.attention_mask)
    mask = tokens.attention_mask.to(device)
    embeds = text_encoder(tokens.input_ids.to(device), mask).last_hidden_state
    # where, not a product: a non-finite padding row must not survive as NaN.
    return torch.where(mask[..., None] > 0, embeds, embeds.new_zeros(()))


def _warn_of_cut_ends(tokenizer: Any, prompts: list[str], mask: torch.Tensor) -> None:
    """Say which words of a prompt do not reach the model; a prompt that leaves a row free is whole."""
    text_len = mask.shape[1]
    for index in mask.bool().all(dim=1).nonzero().flatten().tolist():
        ids = tokenizer(prompt_clean(prompts[index]), add_special_tokens=True, verbose=False).input_ids
        if len(ids) > text_len:
            logger.warning(
                f"a prompt has {len(ids)} tokens and {text_len} fit (max_sequence_length); cut off was: "
                f"{tokenizer.decode(ids[text_len - 1 :], skip_special_tokens=True)!r}"
            )


def expand_rows(embeds: torch.Tensor, num_videos: int, name: str) -> torch.Tensor:
    """Repeat each prompt's rows so that there is one a video.

    Raises:
        ValueError: ``num_videos`` is no multiple of the prompts given.
    """
    if num_videos % embeds.shape[0]:
        raise ValueError(f"`{name}` has {embeds.shape[0]} prompts for {num_videos} videos; give 1, or one each.")
    return embeds.repeat_interleave(num_videos // embeds.shape[0], dim=0)


class PromptEncoding:
    """The pipeline's methods around prompts; needs its tokenizer, text encoder and execution device."""

    tokenizer: Any
    text_encoder: Any
    if TYPE_CHECKING:

        @property
        def _execution_device(self) -> torch.device: ...

    def encode_prompt(
        self,
        prompt: str | list[str] | None,
        negative_prompt: str | list[str] | None = None,
        do_classifier_free_guidance: bool = True,
        num_videos_per_prompt: int = 1,
        prompt_embeds: torch.Tensor | None = None,
        negative_prompt_embeds: torch.Tensor | None = None,
        max_sequence_length: int | None = None,
        device: torch.device | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Embeddings of prompts and negative prompts, each (videos, text_len, text_dim).

        Args:
            prompt, prompt_embeds: exactly one of them.
            negative_prompt, negative_prompt_embeds: at most one; an empty prompt where guidance needs one.
            max_sequence_length: rows of the embeddings; None: the tokenizer's limit, at most 512.

        Raises:
            ValueError, TypeError: bad prompts.
        """
        num_videos = count_prompts(prompt, prompt_embeds) * num_videos_per_prompt
        if negative_prompt is None and negative_prompt_embeds is None:
            negative_prompt = ""
        options: dict[str, Any] = {"num_videos": num_videos, "text_len": max_sequence_length, "device": device}
        positive = self._embed(prompt, prompt_embeds, "prompt", **options)
        if not do_classifier_free_guidance:
            return positive, None
        return positive, self._embed(negative_prompt, negative_prompt_embeds, "negative_prompt", **options)

    def _embed(
        self,
        prompt: str | list[str] | None,
        embeds: torch.Tensor | None,
        name: str,
        *,
        num_videos: int,
        text_len: int | None = None,
        device: torch.device | None = None,
    ) -> torch.Tensor:
        count_prompts(prompt, embeds, name)
        device = device or self._execution_device
        if embeds is None:
            prompts = [prompt] if isinstance(prompt, str) else list(prompt or [])
            text_len = default_text_len(self.tokenizer) if text_len is None else text_len
            embeds = encode_text(self.tokenizer, self.text_encoder, prompts, text_len, device)
        return expand_rows(embeds.to(device), num_videos, name)

    def encode_branches(
        self,
        prompt: str | list[str] | None,
        negative_prompt: str | list[str] | None = None,
        *,
        prompt_embeds: torch.Tensor | None = None,
        negative_prompt_embeds: torch.Tensor | None = None,
        num_videos: int,
        text_len: int | None = None,
    ) -> dict[str, torch.Tensor]:
        """Embeddings by branch name, of the prompts given; the negative branch only where one is given."""
        options: dict[str, Any] = {"num_videos": num_videos, "text_len": text_len}
        embeds = {POSITIVE: self._embed(prompt, prompt_embeds, "prompt", **options)}
        if negative_prompt is not None or negative_prompt_embeds is not None:
            embeds[NEGATIVE] = self._embed(negative_prompt, negative_prompt_embeds, "negative_prompt", **options)
        return embeds
