"""What families with joint attention share: text rows stand beside the video rows in one attention.

A text row that saw video would differ from chunk to chunk, and every key of a later layer with it; no cache of them
could be right. So text sees text only, and video sees the cached video and the text of its own forward: text keys are
extra rows of the forward, written beside the chunk and never committed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn

from ..attention import paged_write_attn
from ..context import PagedLayerInputs
from ..merged import MergedLayerInputs


class JointRows(NamedTuple):
    """Query, key and value of one stream: (rows, tokens, heads, head_dim) each."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


def count_text_rows(inputs: PagedLayerInputs | MergedLayerInputs, num_tokens: int) -> int:
    """How many text rows a forward of that many video tokens has announced.

    Raises:
        ValueError: none, or the forward is merged.
    """
    if isinstance(inputs, MergedLayerInputs):
        raise ValueError("joint attention takes no merged forwards; commit each chunk in a forward of its own.")
    num_text = inputs.slot_mapping.shape[1] - num_tokens
    if num_text < 1:
        raise ValueError(
            f"the forward context has {inputs.slot_mapping.shape[1]} rows for {num_tokens} video tokens, which leaves none "
            "for the text of a joint transformer: make it with num_extra=<text rows that are no padding>, and the cache "
            "with a RingGeometry of max_extra_tokens of at least that."
        )
    return num_text


def attend_jointly(
    inputs: PagedLayerInputs | MergedLayerInputs, video: JointRows, text: JointRows, *, backend: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Video over the cache, its own rows and the text; text over the text. Rows beyond those announced are padding.

    Returns: (rows, tokens, heads, head_dim) of video, of text.
    """
    num_text = count_text_rows(inputs, video.query.shape[1])
    if num_text > text.key.shape[1]:
        raise ValueError(f"the forward context announced {num_text} text rows, got {text.key.shape[1]}.")
    key, value = text.key[:, :num_text], text.value[:, :num_text]
    assert not isinstance(inputs, MergedLayerInputs)
    video_out = paged_write_attn(inputs, *video, key, value)
    return video_out, dispatch_attention_fn(text.query, key, value, backend=backend)
