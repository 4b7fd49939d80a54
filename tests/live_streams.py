"""Streams whose prompts are embeddings, and what the tests of live control do with them."""

from __future__ import annotations

from typing import Any

import torch
from tiny_components import random_embeds, seed

from diffusers_ardiff import ARDiffusionPipeline
from diffusers_ardiff.pipelines import ARStream

OLD, NEW, THIRD = random_embeds(1), random_embeds(2), random_embeds(3)


def live_call(**call: Any) -> dict[str, Any]:
    """Arguments of a latent stream under ``OLD`` from seed 0 unless told otherwise."""
    return {"prompt_embeds": OLD, "generator": seed(0), "output_type": "latent"} | call


def stream_of(pipe: ARDiffusionPipeline, **call: Any) -> ARStream:
    return pipe.stream(**live_call(**call))


def take(stream: ARStream, count: int) -> torch.Tensor:
    """Latents of the next chunks, joined."""
    return torch.cat([next(stream).latents for _ in range(count)], dim=2)


def switched_latents(pipe: ARDiffusionPipeline, num_before: int, num_after: int, **switch: Any) -> torch.Tensor:
    """Latents of a stream with one immediate switch after ``num_before`` chunks."""
    with stream_of(pipe) as stream:
        before = [take(stream, num_before)] if num_before else []
        stream.switch_prompt(**switch)
        return torch.cat([*before, take(stream, num_after)], dim=2)
