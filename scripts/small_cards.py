#!/usr/bin/env python
"""Whether a model runs on a card of 16, 24 or 48 GB: real shapes, random weights, this process held to that much memory.

python scripts/small_cards.py 24 16 48 --output out/small_cards.json

Each card runs in a process of its own, the prompt encoded by a text encoder of UMT5-XXL's size first. On a larger GPU
`torch.cuda.set_per_process_memory_fraction` refuses what the small card would not have.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from diffusers_ardiff import ARDiffusionPipeline
from diffusers_ardiff.benchmarks.models import TEXT_LEN, build_light_decoder, build_pipeline

DRIVER_BYTES = 700 * 2**20  # what a CUDA context takes of a card, outside of torch's allocator
HEIGHT, WIDTH = 480, 832


@dataclass(frozen=True, kw_only=True)
class Card:
    """A card and the way to use it."""

    model: str
    sink_frames: int
    window_frames: int
    prepare: Callable[[ARDiffusionPipeline, torch.device], None]
    built_on: str = "cuda"
    light_decoder: bool = False


def _to_device(pipe: ARDiffusionPipeline, device: torch.device) -> None:
    pipe.to(device)


def _offload_blocks(pipe: ARDiffusionPipeline, device: torch.device) -> None:
    pipe.transformer.enable_group_offload(
        device, offload_type="block_level", num_blocks_per_group=4, use_stream=True, low_cpu_mem_usage=True
    )
    pipe.vae.to(device)


CARDS = {
    24: Card(model="wan-1.3b", sink_frames=3, window_frames=9, prepare=_to_device),
    16: Card(model="wan-1.3b", sink_frames=3, window_frames=6, prepare=_to_device, light_decoder=True),
    48: Card(model="wan-14b", sink_frames=3, window_frames=6, prepare=_offload_blocks, built_on="cpu"),
}


def encode_like_umt5_xxl(device: torch.device) -> torch.Tensor:
    """(1, 512, 4096) bfloat16 embeddings, from a text encoder of the real size that is freed afterwards."""
    from transformers import UMT5Config, UMT5EncoderModel

    config = UMT5Config(
        vocab_size=256384, d_model=4096, d_ff=10240, d_kv=64, num_heads=64, num_layers=24, is_gated_act=True
    )
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            encoder = UMT5EncoderModel(config).eval()
    finally:
        torch.set_default_dtype(default)
    ids = torch.randint(0, config.vocab_size, (1, TEXT_LEN), device=device)
    with torch.no_grad():
        return encoder(ids).last_hidden_state.clone()


def measure(gigabytes: int, num_frames: int) -> dict[str, Any]:
    """Run one card; what came out, or the error."""
    card, device = CARDS[gigabytes], torch.device("cuda")
    total = torch.cuda.get_device_properties(device).total_memory
    allowed = gigabytes * 10**9 - DRIVER_BYTES
    torch.cuda.set_per_process_memory_fraction(min(1.0, allowed / total))
    embeds = encode_like_umt5_xxl(device)
    encode_peak = torch.cuda.max_memory_reserved()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    pipe = build_pipeline(card.model, torch.device(card.built_on))
    card.prepare(pipe, device)
    if card.light_decoder:
        pipe.set_decoder(build_light_decoder(device))
    recipe = pipe.recipe.replace(
        num_sink_frames=card.sink_frames, num_window_frames=card.window_frames, max_latent_frames=None
    )
    plan = pipe.plan_memory(HEIGHT, WIDTH, recipe=recipe)
    frames, seconds = 0, []
    call: dict[str, Any] = {"num_frames": num_frames, "recipe": recipe, "height": HEIGHT, "width": WIDTH}
    with pipe.stream(prompt_embeds=embeds.to(pipe.transformer.dtype), output_type="pt", **call) as stream:
        start = time.perf_counter()
        for chunk in stream:
            frames += chunk.frames.shape[1]
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
            start = time.perf_counter()
    return {
        "card_gb": gigabytes,
        "model": card.model,
        "window": f"{card.sink_frames}+{card.window_frames}",
        "decoder": "light" if card.light_decoder else "vae",
        "frames": frames,
        "seconds_a_chunk": sorted(seconds)[len(seconds) // 2],
        "first_chunk_seconds": seconds[0],
        "encode_peak_gb": encode_peak / 1e9,
        "peak_gb": torch.cuda.max_memory_reserved() / 1e9,
        "planned": str(plan),
        "allowed_gb": allowed / 1e9,
    }


def _run(gigabytes: int, num_frames: int, answers: Any) -> None:
    try:
        answers.put(measure(gigabytes, num_frames))
    except Exception as error:
        answers.put({"card_gb": gigabytes, "error": f"{type(error).__name__}: {error}"})


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 1 if a card did not do."""
    parser = argparse.ArgumentParser(description="Whether a model runs on a small card.")
    parser.add_argument("cards", nargs="*", type=int, choices=CARDS, default=list(CARDS), help="gigabytes")
    parser.add_argument("--num-frames", type=int, default=129, help="pixel frames (default: %(default)s)")
    parser.add_argument("--output", type=Path, help=".json file")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("error: this needs a CUDA device.", file=sys.stderr)
        return 2
    context = multiprocessing.get_context("spawn")
    results = []
    for gigabytes in args.cards:
        answers = context.Queue()
        process = context.Process(target=_run, args=(gigabytes, args.num_frames, answers))
        process.start()
        results.append(answers.get())
        process.join()
        print(json.dumps(results[-1], indent=2), flush=True)
    if args.output is not None:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    return 1 if any("error" in result for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
