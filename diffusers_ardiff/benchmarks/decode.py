"""Stream decode of steady chunks: the full VAE plain and prepared for speed, and the light decoder, in one run."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ..pipelines.decode_step import set_conv_layout
from ..pipelines.decode_stream import DecodeStream
from ..pipelines.decoding import DecodeOptions, Decoding
from .clock import Clock
from .models import build_light_decoder, build_vae
from .timing import Timing

VARIANTS: dict[str, tuple[bool, DecodeOptions]] = {
    "wan": (False, DecodeOptions()),
    "wan-channels-last": (False, DecodeOptions(channels_last=True)),
    "light": (True, DecodeOptions()),
    "light-channels-last": (True, DecodeOptions(channels_last=True)),
    "light-compiled-channels-last": (True, DecodeOptions(compile=True, channels_last=True)),
    "wan-compiled-channels-last": (False, DecodeOptions(compile=True, channels_last=True)),
    "wan-compiled": (False, DecodeOptions(compile=True)),
}
"""Name to (light decoder or not, options); those that take a minute to compile come last."""


@dataclass(frozen=True, kw_only=True)
class DecodeCase:
    """Size of one measurement.

    Args:
        height, width: pixels.
        chunk_frames: latent frames decoded together.
        dtype: of weights and activations.
        repeats: chunks timed.
    """

    height: int = 480
    width: int = 832
    chunk_frames: int = 3
    dtype: torch.dtype = torch.bfloat16
    repeats: int = 10


def measure_decode(case: DecodeCase, variants: Sequence[str], device: torch.device) -> Iterator[dict[str, Any]]:
    """Decode the same latents with each variant, one after the other, each when it is asked for.

    Returns: for each ``{"variant", "median_ms", ..., "warmup_seconds", "state_bytes", "work_bytes", "planned_work_bytes",
        "max_error"}``: the largest difference from the first variant of the same decoder, pixels being in [-1, 1].

    Raises:
        ValueError: unknown variant.
    """
    unknown = sorted(set(variants) - set(VARIANTS))
    if unknown:
        raise ValueError(f"unknown variants {unknown}; known: {list(VARIANTS)}.")
    return _measure_each(case, variants, device)


def _measure_each(case: DecodeCase, variants: Sequence[str], device: torch.device) -> Iterator[dict[str, Any]]:
    models: dict[bool, Any] = {}
    size = (1, 16, case.chunk_frames * 3, case.height // 8, case.width // 8)
    latents = torch.randn(size, generator=torch.Generator(device).manual_seed(0), device=device)
    references: dict[bool, torch.Tensor] = {}
    for name in variants:
        is_light, options = VARIANTS[name]
        if is_light not in models:
            models[is_light] = (build_light_decoder if is_light else build_vae)(device, case.dtype)
        model = models[is_light]
        set_conv_layout(model, channels_last=options.channels_last)
        decoding = Decoding(None, model, options) if is_light else Decoding(model, None, options)
        result, frames = _measure(case, decoding, latents, Clock(device))
        reference = references.setdefault(is_light, frames)
        yield {"variant": name, "max_error": (frames - reference).abs().max().item()} | result


@torch.no_grad()
def _measure(
    case: DecodeCase, decoding: Decoding, latents: torch.Tensor, clock: Clock
) -> tuple[dict[str, Any], torch.Tensor]:
    chunks = latents.split(case.chunk_frames, dim=2)
    began = clock.mark()
    stream = decoding.open(clock.device)
    frames = torch.cat([stream.decode(chunk) for chunk in chunks], dim=2).cpu()
    warm = clock.mark()
    clock.wait(warm)
    work = _work_bytes(stream, chunks[-1], clock.device)
    marks = [clock.mark()]
    for _ in range(case.repeats):
        stream.decode(chunks[-1])
        marks.append(clock.mark())
    clock.wait(marks[-1])
    times = [1e3 * clock.seconds(start, end) for start, end in itertools.pairwise(marks)]
    result = asdict(Timing.of(times)) | {
        "warmup_seconds": clock.seconds(began, warm),
        "state_bytes": stream.state_bytes,
        "work_bytes": work,
        "planned_work_bytes": decoding.work_bytes(tuple(chunks[-1].shape)),
    }
    return result, frames


def _work_bytes(stream: DecodeStream, chunk: torch.Tensor, device: torch.device) -> int | None:
    """Peak of one chunk over what is held before it; None on the CPU."""
    if device.type != "cuda":
        stream.decode(chunk)
        return None
    torch.cuda.reset_peak_memory_stats(device)
    held = torch.cuda.memory_allocated(device)
    stream.decode(chunk)
    return torch.cuda.max_memory_allocated(device) - held


def describe_decode(case: DecodeCase, result: dict[str, Any]) -> str:
    """One variant in a line."""
    frames = 4 * case.chunk_frames
    work = "" if result["work_bytes"] is None else f", work {result['work_bytes'] / 2**30:.2f} GiB"
    return (
        f"{result['variant']:<30} {result['median_ms']:8.1f} ms for {frames} frames of {case.width}x{case.height}{work} "
        f"(planned {result['planned_work_bytes'] / 2**30:.2f}), max error {result['max_error']:.2e}, first chunks "
        f"{result['warmup_seconds']:.1f} s"
    )
