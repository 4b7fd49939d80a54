"""Work done once, before the first video: compile the blocks, capture whole forwards, keep the pool they live in.

A warm-up runs one short stream: every chunk while the window fills, the first overwrite, the steady state. Each new
shape is compiled and each new ``GraphKey`` captured. Later calls of the same size open their sessions in the same pages
of the same pool, so they meet the same keys. With several streams each does so alone, then all do together.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch

from ..cache import KVManager
from ..graphs import CompiledShapes, GraphSet
from ..recording import CudaRecorder, Recorder
from ..validation import check_int
from .inputs import CacheOptions
from .memory import CachePlanner, count_replay_texts
from .warm_state import WarmKey, WarmState
from .warm_stream import run_chunks, run_recaches

if TYPE_CHECKING:
    from .host import PipelineHost

CompileOptions = bool | Mapping[str, Any]
"""True: diffusers' ``compile_repeated_blocks`` with fixed shapes; a mapping: more arguments for it, such as ``mode``."""


@dataclass(frozen=True, kw_only=True)
class WarmupReport:
    """What a warm-up did.

    Args:
        total_seconds: all of it.
        chunk_seconds: of each chunk it made, or round of chunks made together; compilation and captures are in the
            first of them.
        capture_seconds: spent on capturing forwards.
        num_compiled_shapes: shapes of forwards that run compiled from now on; others run eagerly.
        num_graphs: forwards captured, one a run of pages and fill level of the window; as many for joint forwards.
        pool_bytes: K/V pool that stays allocated until ``cooldown``.
        text_bytes: text K/V that captured forwards read, allocated as long.
        decoder_seconds: spent on compiling the decoder; 0 where ``set_decoder`` asked for none, or nothing is decoded.
    """

    total_seconds: float
    chunk_seconds: tuple[float, ...]
    capture_seconds: float
    num_compiled_shapes: int
    num_graphs: int
    pool_bytes: int
    text_bytes: int = 0
    decoder_seconds: float = 0.0

    def __str__(self) -> str:
        text = f", their text {self.text_bytes / 2**30:.3f} GiB" if self.text_bytes else ""
        decoder = f", decoder compiled in {self.decoder_seconds:.1f} s" if self.decoder_seconds else ""
        return (
            f"warm after {self.total_seconds:.1f} s: {len(self.chunk_seconds)} chunks, the first in "
            f"{self.chunk_seconds[0]:.1f} s, the last in {self.chunk_seconds[-1]:.3f} s; {self.num_compiled_shapes} "
            f"shapes compiled, {self.num_graphs} forwards captured in {self.capture_seconds:.1f} s, pool "
            f"{self.pool_bytes / 2**30:.3f} GiB{text}{decoder}."
        )


class WarmUp:
    """The pipeline's methods around warm-up."""

    _warm: WarmState | None = None
    if TYPE_CHECKING:

        @property
        def _execution_device(self) -> torch.device: ...

    def warmup(
        self,
        height: int | None = None,
        width: int | None = None,
        *,
        compile: CompileOptions = True,
        cuda_graphs: bool = True,
        recache: bool = False,
        **call: Any,
    ) -> WarmupReport:
        """Compile the transformer's blocks, capture whole forwards as CUDA graphs, and keep a pool for later calls.

        Calls and streams of the same size, window, number of videos and guidance then run in that pool, from their
        first chunk on as fast as later ones. Others work as before, in a pool of their own; so does one stream more
        than ``num_streams``. A new warm-up replaces the last one. Text of another length and chunks of other sizes
        (given images) run eagerly, and so do recaches without ``recache``; ``control_hook`` calls that add arguments
        are not replayed. With ``decode`` (the default) the decoder runs too, and is compiled where ``set_decoder`` asks
        for it, as by ``warmup_decoder``.

        Args:
            height, width: pixels; None: the recipe's.
            compile: compile the blocks, for the shapes met here only; a mapping is handed on to
                ``compile_repeated_blocks``.
            cuda_graphs: capture forwards; needs a CUDA device.
            recache: also compile and capture the recache of a prompt switch, at every fill level of the window: one more
                shape for each number of frames it rewrites.
            **call: ``recipe``, ``num_videos``, ``guided``, ``text_len``, ``decode``, ``cache`` (``CacheOptions``), as in
                ``plan_memory``, and ``merge_commits`` as in a call; ``num_streams``, how many streams at a time find room
                in the pool (1). Each is captured alone, and all of them in the joint forwards of a ``StreamBatch``, at
                equal fill levels of their windows; other joint forwards are launched kernel by kernel.

        Raises:
            RuntimeError: graphs without a CUDA device, or of a model that is offloaded or cached by hooks.
            ValueError: bad arguments, or blocks that were compiled already while ``compile`` is asked for.
            MemoryLimitError: more than ``CacheOptions.limit_bytes``.
        """
        recorder: Recorder | None = None
        if cuda_graphs:
            device = self._execution_device
            if device.type != "cuda":
                raise RuntimeError(
                    f"CUDA graphs need a CUDA device, the pipeline runs on {device}. Move it there, or call "
                    "warmup(cuda_graphs=False)."
                )
            recorder = CudaRecorder(device)
        pipeline = cast("PipelineHost", self)
        return run_warmup(pipeline, height, width, compile=compile, recorder=recorder, recache=recache, **call)

    def cooldown(self) -> None:
        """Undo ``warmup``: free graphs and pool, run the blocks eagerly again. No-op where there is nothing to undo.

        Streams that are open keep their pool, and their graphs, until they close.
        """
        warm, self._warm = self._warm, None
        if warm is not None and warm.shapes is not None:
            for block in warm.attachment.transformer.blocks:
                block._compiled_call_impl = None

    @property
    def warm_text_bytes(self) -> int:
        """Bytes of text K/V that captured forwards of the last warm-up keep."""
        graphs = self._warm.graphs if self._warm is not None else None
        return graphs.text_bytes if graphs is not None else 0

    def warm_pool(self, planner: CachePlanner) -> KVManager | None:
        """The pool of the last warm-up, if it serves such a call and has room for it now."""
        return self._warm.pool_for(planner) if self._warm is not None else None


def run_warmup(
    pipeline: PipelineHost,
    height: int | None,
    width: int | None,
    *,
    compile: CompileOptions,
    recorder: Recorder | None,
    recache: bool = False,
    **call: Any,
) -> WarmupReport:
    """``WarmUp.warmup`` with any recorder; see there."""
    start = time.perf_counter()
    num_streams = check_int("num_streams", call.pop("num_streams", 1), minimum=1)
    merge_commits = call.pop("merge_commits", False)
    planner = pipeline.plan_cache(height, width, **call)
    pool_planner = _for_streams(planner, num_streams)
    num_texts = 0 if recorder is None else count_replay_texts(merge_commits=merge_commits)
    # Joint forwards read a text of their own, as large as those of all streams.
    pool_planner.plan(num_replay_texts=num_texts * (1 if num_streams == 1 else 2))
    transformer = pipeline.transformer
    if recorder is not None:
        _check_capturable(transformer, planner.options)
    # First: two pools at a time may not fit.
    pipeline.cooldown()
    if compile:
        _compile_blocks(transformer, {} if compile is True else compile)
    try:
        # Before the pool is there, and not in the seconds of a chunk.
        decoder_seconds = _warm_decoder(pipeline, planner)
        manager = pool_planner.build()
        warm = WarmState(
            key=WarmKey.of(planner),
            manager=manager,
            attachment=pipeline.paged_attachment(planner.options.backend),
            shapes=CompiledShapes() if compile else None,
            graphs=GraphSet(manager.storage, transformer, recorder) if recorder is not None else None,
        )
        pipeline._warm = warm
        seconds = run_chunks(pipeline, planner, warm, num_streams=num_streams, merge_commits=merge_commits)
        if recache:
            run_recaches(pipeline, planner, warm, num_streams=num_streams)
    except BaseException:
        pipeline.cooldown()
        raise
    graphs, shapes = warm.graphs, warm.shapes
    return WarmupReport(
        total_seconds=time.perf_counter() - start,
        chunk_seconds=seconds,
        capture_seconds=graphs.capture_seconds if graphs is not None else 0.0,
        num_compiled_shapes=len(shapes) if shapes is not None else 0,
        num_graphs=len(graphs) if graphs is not None else 0,
        pool_bytes=manager.storage.num_bytes,
        text_bytes=graphs.text_bytes if graphs is not None else 0,
        decoder_seconds=decoder_seconds,
    )


def _warm_decoder(pipeline: PipelineHost, planner: CachePlanner) -> float:
    """Compile the decoder for the planned size, where it is to be compiled; seconds it took."""
    if planner.decoding is None or not planner.decoding.options.compile:
        return 0.0
    shape, factor = planner.shape, pipeline.vae_scale_factor_spatial
    size = (shape.height * factor, shape.width * factor)
    return pipeline.warmup_decoder(*size, recipe=planner.recipe, num_videos=shape.num_videos)


def _for_streams(planner: CachePlanner, num_streams: int) -> CachePlanner:
    """The planner of a pool in which so many such calls find room."""
    num_videos = planner.shape.num_videos * num_streams
    return replace(planner, shape=replace(planner.shape, num_videos=num_videos))


def _compile_blocks(transformer: Any, options: Mapping[str, Any]) -> None:
    if any(getattr(block, "_compiled_call_impl", None) is not None for block in transformer.blocks):
        raise ValueError(
            "the transformer's blocks are compiled already. Call warmup(compile=False) to keep your own compilation."
        )
    transformer.compile_repeated_blocks(**{"fullgraph": True, "dynamic": False, **options})


def _check_capturable(transformer: Any, options: CacheOptions) -> None:
    """Raise RuntimeError for a model whose forwards differ from one to the next in what a graph would fix."""
    hooks = [name for name in _hook_names(transformer) if name.startswith("group_offloading")]
    is_offloaded = any(getattr(module, "_hf_hook", None) is not None for module in transformer.modules()) or hooks
    if is_offloaded or getattr(transformer, "is_cache_enabled", False):
        raise RuntimeError(
            "forwards of a model that is offloaded, or whose blocks a cache skips (enable_cache), can't be captured. "
            "Undo that first, or call warmup(cuda_graphs=False)."
        )
    if options.shuffle_seed is not None:
        raise RuntimeError("a pool that is fragmented on purpose (shuffle_seed) can't be captured; leave it out.")


def _hook_names(transformer: Any) -> list[str]:
    registries = (getattr(module, "_diffusers_hook", None) for module in transformer.modules())
    return [name for registry in registries if registry is not None for name in registry.hooks]
