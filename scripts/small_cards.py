#!/usr/bin/env python
"""Whether a model runs on a card of 16, 24 or 48 GB: real shapes, random weights, this process held to that much memory.

python scripts/small_cards.py 24 16 48 --output out/small_cards.json
python scripts/small_cards.py --tiny

The prompt is encoded by a text encoder of UMT5-XXL's size first, which is freed then. On a larger GPU
`torch.cuda.set_per_process_memory_fraction` refuses what the small card would not have. Each figure is printed and
written as soon as it is there; a card that fails or takes too long leaves the others their turn. `--tiny` runs the same
steps with small models on the CPU, where no memory is held back.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from diffusers_ardiff import ARDiffusionPipeline
from diffusers_ardiff.benchmarks.models import TEXT_LEN, build_light_decoder, build_pipeline, made_on
from diffusers_ardiff.benchmarks.results import Results
from diffusers_ardiff.pipelines.window import kept_frames
from diffusers_ardiff.recipes import Recipe

DRIVER_BYTES = 700 * 2**20  # what a CUDA context takes of a card, outside of torch's allocator
UMT5_XXL = {"vocab_size": 256384, "d_model": 4096, "d_ff": 10240, "d_kv": 64, "num_heads": 64, "num_layers": 24}
UMT5_TINY = {"vocab_size": 64, "d_model": 4096, "d_ff": 32, "d_kv": 8, "num_heads": 2, "num_layers": 1}


@dataclass(frozen=True, kw_only=True)
class Card:
    """A card and the way to use it.

    ``offload``: the transformer stays in host memory, where its blocks share one block's weights.
    """

    model: str
    sink_frames: int
    window_frames: int
    offload: bool = False
    light_decoder: bool = False


CARDS = {
    24: Card(model="wan-1.3b", sink_frames=3, window_frames=9),
    16: Card(model="wan-1.3b", sink_frames=3, window_frames=6, light_decoder=True),
    48: Card(model="wan-14b", sink_frames=3, window_frames=6, offload=True),
}


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where it runs, and how large models and frames are."""

    tiny: bool

    @property
    def device(self) -> torch.device:
        """The GPU; of small models the CPU."""
        return torch.device("cpu" if self.tiny else "cuda")

    @property
    def size(self) -> tuple[int, int]:
        """Height and width in pixels."""
        return (64, 96) if self.tiny else (480, 832)

    def hold(self, gigabytes: int) -> int:
        """Let go of what an earlier card left, hold this process to a card's memory, and return those bytes."""
        allowed = gigabytes * 10**9 - DRIVER_BYTES
        if not self.tiny:
            total = torch.cuda.get_device_properties(self.device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, allowed / total))
        self.peak()
        return allowed

    def peak(self) -> int:
        """Most bytes reserved since the last call; unused ones are given back. 0 on the CPU."""
        gc.collect()
        if self.tiny:
            return 0
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_reserved()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        return peak

    def wait(self) -> None:
        """For all that the device was asked to do."""
        if not self.tiny:
            torch.cuda.synchronize()


@torch.no_grad()
def encode_like_umt5_xxl(place: Place) -> torch.Tensor:
    """(1, 512, 4096) bfloat16 embeddings, from a text encoder of the real size that is freed afterwards."""
    from transformers import UMT5Config, UMT5EncoderModel

    config = UMT5Config(**(UMT5_TINY if place.tiny else UMT5_XXL), is_gated_act=True)
    with made_on(place.device, torch.bfloat16):
        encoder = UMT5EncoderModel(config).eval()
    ids = torch.randint(0, config.vocab_size, (1, TEXT_LEN), device=place.device)
    return encoder(ids).last_hidden_state.clone()


def prepare(card: Card, place: Place) -> ARDiffusionPipeline:
    """The pipeline as the card wants it."""
    built_on = torch.device("cpu") if card.offload else place.device
    name = "toy" if place.tiny else card.model
    pipe = build_pipeline(name, built_on, share_blocks=card.offload)
    if card.offload:
        pipe.transformer.enable_group_offload(
            place.device, offload_type="block_level", num_blocks_per_group=1, use_stream=not place.tiny
        )
        pipe.vae.to(place.device)
    if card.light_decoder:
        pipe.set_decoder(build_light_decoder(place.device))
    return pipe


def run_stream(pipe: ARDiffusionPipeline, place: Place, call: dict[str, Any]) -> tuple[int, list[float]]:
    """Pixel frames made, and seconds of each chunk."""
    frames, seconds = 0, []
    with pipe.stream(output_type="pt", **call) as stream:
        start = time.perf_counter()
        for chunk in stream:
            frames += chunk.frames.shape[1]
            place.wait()
            seconds.append(time.perf_counter() - start)
            start = time.perf_counter()
    return frames, seconds


def measure(gigabytes: int, place: Place, num_frames: int) -> dict[str, Any]:
    """Run one card.

    Raises:
        torch.OutOfMemoryError: the model does not fit.
    """
    card, began = CARDS[gigabytes], time.perf_counter()
    allowed = place.hold(gigabytes)
    embeds = encode_like_umt5_xxl(place)
    encode_peak = place.peak()
    pipe = prepare(card, place)
    prepared = time.perf_counter()
    recipe = pipe.recipe.replace(
        num_sink_frames=card.sink_frames, num_window_frames=card.window_frames, max_latent_frames=None
    )
    height, width = place.size
    plan = pipe.plan_memory(height, width, recipe=recipe, text_len=TEXT_LEN)
    call: dict[str, Any] = {"num_frames": num_frames, "recipe": recipe, "height": height, "width": width}
    call["prompt_embeds"] = embeds.to(pipe.transformer.dtype)
    frames, seconds = run_stream(pipe, place, call)
    return {
        "card_gb": gigabytes,
        "model": card.model,
        "window": f"{card.sink_frames}+{card.window_frames}",
        "decoder": "light" if card.light_decoder else "vae",
        "offload": card.offload,
        "tiny": place.tiny,
        "frames": frames,
        "seconds_a_chunk": statistics.median(steady(seconds, recipe)),
        "chunk_seconds": seconds,
        "setup_seconds": prepared - began,
        "encode_peak_gb": encode_peak / 1e9,
        "peak_gb": place.peak() / 1e9,
        "planned": str(plan),
        "allowed_gb": allowed / 1e9,
    }


def steady(seconds: list[float], recipe: Recipe) -> list[float]:
    """The chunks after the window is full; the last one of a video too short for that."""
    return seconds[-(-kept_frames(recipe) // recipe.chunk_frames) :] or seconds[-1:]


def describe(result: dict[str, Any]) -> str:
    """One card in two lines."""
    how = ", ".join([f"{result['decoder']} decoder"] + ["group offload"] * result["offload"])
    return (
        f"{result['card_gb']} GB: {result['model']}, window {result['window']}, {how}: ran {result['frames']} frames, "
        f"{result['seconds_a_chunk']:.3f} s a chunk (first {result['chunk_seconds'][0]:.3f}), set up in "
        f"{result['setup_seconds']:.1f} s\n"
        f"  peak {result['peak_gb']:.2f} GB, encoding {result['encode_peak_gb']:.2f}, of {result['allowed_gb']:.2f}; "
        f"{result['planned']}"
    )


def add_card(gigabytes: int, place: Place, num_frames: int, results: Results) -> None:
    """Run one card, and keep what came out."""
    result = measure(gigabytes, place, num_frames)
    results.add(result, describe(result))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 1 if a card did not do."""
    parser = argparse.ArgumentParser(description="Whether a model runs on a small card.")
    parser.add_argument("cards", nargs="*", type=int, metavar="GIGABYTES", help=f"of {list(CARDS)} (default: all)")
    parser.add_argument("--num-frames", type=int, default=69, help="pixel frames (default: %(default)s)")
    parser.add_argument("--limit", type=float, default=90, help="seconds for a card (default: %(default)s)")
    parser.add_argument("--tiny", action="store_true", help="small models and frames, on the CPU")
    parser.add_argument("--output", type=Path, help=".json file")
    args = parser.parse_args(argv)
    cards = args.cards or list(CARDS)
    if unknown := sorted(set(cards) - set(CARDS)):
        parser.error(f"no way is known for cards of {unknown} GB; known: {list(CARDS)}.")
    if not (args.tiny or torch.cuda.is_available()):
        print("error: this needs a CUDA device; --tiny does without.", file=sys.stderr)
        return 2
    results, place = Results(args.output), Place(tiny=args.tiny)
    for gigabytes in cards:
        one_card = partial(add_card, gigabytes, place, args.num_frames, results)
        results.attempt(f"{gigabytes} GB", one_card, limit=args.limit)
    return 1 if results.errors else 0


if __name__ == "__main__":
    sys.exit(main())
