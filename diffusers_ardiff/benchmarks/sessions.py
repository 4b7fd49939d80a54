"""Several sessions in one forward against one forward each, launched and replayed, and what a fork costs; random weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, WanTransformer3DModel

from ..cache import Branch, KVManager, KVShape, RingGeometry, Session
from ..context import PagedForwardContext
from ..pipelines import ARDiffusionPipeline, ARStream, StreamBatch
from ..recipes import Recipe
from .timing import Timing


@dataclass(frozen=True, kw_only=True)
class TogetherCase:
    """Shapes of a model and of its streams; lengths in latent frames, sizes in pixels."""

    num_layers: int = 30
    num_heads: int = 12
    head_dim: int = 128
    ffn_dim: int = 8960
    text_len: int = 512
    text_dim: int = 4096
    height: int = 480
    width: int = 832
    chunk_frames: int = 1
    window_frames: int = 21
    num_streams: int = 2
    dtype: torch.dtype = torch.bfloat16

    @property
    def label(self) -> str:
        """Short name for tables."""
        return (
            f"{self.num_streams} streams, {self.num_layers} layers of {self.num_heads} x {self.head_dim}, "
            f"{self.height}x{self.width}, chunk {self.chunk_frames}, window {self.window_frames}"
        )

    def recipe(self) -> Recipe:
        """Four steps and a commit."""
        return Recipe(
            name="benchmark",
            chunk_frames=self.chunk_frames,
            num_window_frames=self.window_frames,
            denoising_steps=(1000, 750, 500, 250),
            height=self.height,
            width=self.width,
        )

    def warmup_call(self) -> dict[str, Any]:
        """Arguments of a warm-up for all streams."""
        return {"num_streams": self.num_streams, "text_len": self.text_len, "decode": False}

    def pipeline(self, device: torch.device) -> ARDiffusionPipeline:
        """A pipeline of random weights without text encoder and VAE."""
        with device:
            transformer: Any = WanTransformer3DModel(
                num_layers=self.num_layers,
                num_attention_heads=self.num_heads,
                attention_head_dim=self.head_dim,
                ffn_dim=self.ffn_dim,
                text_dim=self.text_dim,
            )
        for name, parameter in transformer.named_parameters():
            # As `from_pretrained(dtype=...)` leaves them.
            if not set(name.split(".")) & set(transformer._keep_in_fp32_modules):
                parameter.data = parameter.data.to(self.dtype)
        return ARDiffusionPipeline(
            tokenizer=None,  # type: ignore[arg-type]
            text_encoder=None,  # type: ignore[arg-type]
            vae=None,  # type: ignore[arg-type]
            scheduler=FlowMatchEulerDiscreteScheduler(),
            transformer=transformer.eval().requires_grad_(False),
            recipe=self.recipe(),
        )


Setup = Callable[[ARDiffusionPipeline, TogetherCase], KVManager]
"""Prepares a pipeline and returns the pool for its streams, before any chunk is made."""


def eager(pipeline: ARDiffusionPipeline, case: TogetherCase) -> KVManager:
    """Every forward is launched kernel by kernel."""
    return pipeline.create_cache(num_videos=case.num_streams, text_len=case.text_len, decode=False)


def replayed(pipeline: ARDiffusionPipeline, case: TogetherCase) -> KVManager:
    """Every forward is replayed from a CUDA graph, alone and together."""
    print(f"  {pipeline.warmup(**case.warmup_call(), compile=False)}", flush=True)
    return warm_manager(pipeline)


def warm_manager(pipeline: ARDiffusionPipeline) -> KVManager:
    """The pool that a warm-up keeps."""
    if pipeline._warm is None:
        raise RuntimeError("this pipeline is not warm; call warmup() first.")
    return pipeline._warm.manager


MODES: dict[str, Setup] = {"eager": eager, "replayed": replayed}
"""Ways to run the transformer, each measured by itself."""


def modes_of(device: torch.device) -> dict[str, Setup]:
    """The modes that a device can do."""
    return {name: setup for name, setup in MODES.items() if name == "eager" or device.type == "cuda"}


def measure_together(
    case: TogetherCase, *, device: torch.device, repeats: int, modes: Mapping[str, Setup] | None = None
) -> dict[str, Any]:
    """Wall time of the streams' next chunks, steady state: one after the other, and in joint forwards.

    Args:
        modes: to measure; None: all of ``MODES`` that the device can do.

    Returns: for each mode milliseconds a round of chunks, ``one_by_one`` and ``together``; ``throughput_ratio``, the
        first median over the second; ``replayed_forwards``, how many of all that were measured came from a graph.
    """
    if modes is None:
        modes = modes_of(device)
    results = {}
    for mode, setup in modes.items():
        pipeline = case.pipeline(device)
        pool = setup(pipeline, case)
        with ExitStack() as stack:
            streams = [stack.enter_context(_open(pipeline, pool, case, number)) for number in range(case.num_streams)]
            before = _count_replays(pipeline)
            results[mode] = _time_both(StreamBatch(streams), case, device, repeats)
            results[mode]["replayed_forwards"] = _count_replays(pipeline) - before
        pipeline.cooldown()
    return {"label": case.label, "case": _plain(case), "together": results}


def _count_replays(pipeline: ARDiffusionPipeline) -> int:
    graphs = pipeline._warm.graphs if pipeline._warm is not None else None
    return graphs.num_replays if graphs is not None else 0


def _open(pipeline: ARDiffusionPipeline, pool: KVManager, case: TogetherCase, number: int) -> ARStream:
    generator = torch.Generator(device=pool.storage.device).manual_seed(number)
    embeds = torch.randn(
        1, case.text_len, case.text_dim, generator=generator, device=generator.device, dtype=case.dtype
    )
    return pipeline.stream(prompt_embeds=embeds, generator=generator, cache=pool, output_type="latent")


def _time_both(batch: StreamBatch, case: TogetherCase, device: torch.device, repeats: int) -> dict[str, Any]:
    def one_by_one() -> None:
        for stream in batch.streams:
            next(stream)

    # Full windows, then a round of each kind to load kernels.
    for _ in range(-(-case.window_frames // case.chunk_frames) + 1):
        batch.step()
    one_by_one()
    batch.step()
    rounds = {"one_by_one": one_by_one, "together": batch.step}
    samples: dict[str, list[float]] = {name: [] for name in rounds}
    for _ in range(repeats):
        for name, make in rounds.items():
            samples[name].append(_seconds(make, device) * 1e3)
    times = {name: Timing.of(values) for name, values in samples.items()}
    ratio = times["one_by_one"].median_ms / times["together"].median_ms
    return {name: asdict(timing) for name, timing in times.items()} | {"throughput_ratio": ratio}


@dataclass(frozen=True, kw_only=True)
class ForkCase:
    """A world to fork: lengths in latent frames of ``tokens_per_frame`` tokens."""

    num_layers: int = 40
    num_heads: int = 40
    head_dim: int = 128
    tokens_per_frame: int = 1560
    sink_frames: int = 9
    window_frames: int = 9
    chunk_frames: int = 3
    dtype: torch.dtype = torch.bfloat16

    @property
    def label(self) -> str:
        """Short name for tables."""
        frames = self.sink_frames + self.window_frames
        return f"fork of {frames} frames of {self.tokens_per_frame}, {self.num_layers} x {self.num_heads} x {self.head_dim}"

    def pool(self, device: torch.device) -> KVManager:
        """Room for the world and one fork."""
        tokens = self.tokens_per_frame
        geometry = RingGeometry(
            sink_tokens=self.sink_frames * tokens, window_tokens=self.window_frames * tokens, page_size=16
        )
        shape = KVShape(
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            head_dim=self.head_dim,
            itemsize=self.dtype.itemsize,
        )
        return KVManager(geometry, shape, max_sessions=2, dtype=self.dtype, device=device)


def measure_fork(case: ForkCase, *, device: torch.device, repeats: int) -> dict[str, Any]:
    """Time and bytes of a fork, of the first write after it (which copies the window) and of the next one (which does not).

    Returns: ``fork_ms``, ``first_write_ms``, ``next_write_ms``, the bytes copied in each, and the copy's ``gb_per_s``
    (read and written). A write here is all that a forward does before its first layer.
    """
    pool = case.pool(device)
    parent = pool.open_session()
    total = case.sink_frames + case.window_frames
    while parent.branch().committed_tokens < (total + case.chunk_frames) * case.tokens_per_frame:
        _claim(parent.branch(), case).mark_committed()
    window_bytes = total * case.tokens_per_frame * pool.storage.shape.bytes_per_token
    samples: dict[str, list[float]] = {"fork": [], "first_write": [], "next_write": []}
    copies: dict[str, int] = dict.fromkeys(samples, 0)
    for _ in range(repeats + 1):
        children: list[Session] = []
        actions: dict[str, Callable[[], object]] = {
            "fork": lambda children=children: children.append(parent.fork()),  # type: ignore[misc]
            "first_write": lambda children=children: _claim(children[0].branch(), case).close(),  # type: ignore[misc]
            "next_write": lambda children=children: _claim(children[0].branch(), case).close(),  # type: ignore[misc]
        }
        for name, action in actions.items():
            before = pool.storage.num_copied_runs
            samples[name].append(_seconds(action, device) * 1e3)
            copies[name] = pool.storage.num_copied_runs - before
        children[0].close()
    # The first round loads kernels.
    times = {f"{name}_ms": asdict(Timing.of(values[1:])) for name, values in samples.items()}
    copied = {f"{name}_bytes": count * window_bytes for name, count in copies.items()}
    speed = 2 * window_bytes / times["first_write_ms"]["median_ms"] / 1e6
    pool.close()
    return {"label": case.label, "case": _plain(case), "fork": times | copied | {"gb_per_s": speed}}


def _claim(branch: Branch, case: ForkCase) -> PagedForwardContext:
    context = PagedForwardContext([branch], num_tokens=case.chunk_frames * case.tokens_per_frame).prepare()
    context.mark_written()  # What lies in the pages makes no difference to what a copy takes.
    return context


def _seconds(action: Callable[[], object], device: torch.device) -> float:
    _wait_for(device)
    start = time.perf_counter()
    action()
    _wait_for(device)
    return time.perf_counter() - start


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _plain(case: TogetherCase | ForkCase) -> dict[str, Any]:
    return asdict(case) | {"dtype": str(case.dtype).removeprefix("torch.")}


def tiny_cases() -> tuple[TogetherCase, ForkCase]:
    """Both measurements at a size for a CPU."""
    together = TogetherCase(
        num_layers=2,
        num_heads=2,
        head_dim=12,
        ffn_dim=32,
        text_len=7,
        text_dim=16,
        height=32,
        width=48,
        window_frames=3,
        dtype=torch.float32,
    )
    fork = replace(
        ForkCase(),
        num_layers=2,
        num_heads=2,
        head_dim=8,
        tokens_per_frame=24,
        sink_frames=1,
        window_frames=3,
        chunk_frames=1,
        dtype=torch.float32,
    )
    return together, fork


def describe(result: dict[str, Any]) -> str:
    """One result in a few lines."""
    lines = [result["label"]]
    for mode, entry in result.get("together", {}).items():
        one, joint = entry["one_by_one"]["median_ms"], entry["together"]["median_ms"]
        lines.append(f"  {mode}: one by one {one:.2f} ms, together {joint:.2f} ms a round of chunks")
        lines.append(
            f"  {mode}: {entry['throughput_ratio']:.3f} x the throughput, {entry['replayed_forwards']} forwards replayed"
        )
    fork = result.get("fork")
    if fork is not None:
        for name in ("fork", "first_write", "next_write"):
            lines.append(f"  {name}: {fork[f'{name}_ms']['median_ms']:.3f} ms, {fork[f'{name}_bytes']:,} bytes copied")
        lines.append(f"  the copy: {fork['gb_per_s']:.0f} GB/s read and written")
    return "\n".join(lines)
