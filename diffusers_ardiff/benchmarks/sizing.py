"""Memory per rank of the real models on 1 to 8 GPUs, computed by the memory plan; nothing is allocated or measured."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..cache import MemoryPlan
from ..parallel import ParallelLayout, legal_degrees
from ..pipelines import CacheOptions
from .chunk import PRESETS, TEXT_LEN, chunk_recipe, random_pipeline
from .report import window_label
from .results import Results

MAX_RANKS = 8


@dataclass(frozen=True, kw_only=True)
class Sizing:
    """Bytes of each rank for one video at one window.

    Args:
        plan: of a rank: pages, text K/V, clean latents, and an estimate of a forward's working memory.
        weights_bytes: of the transformer; every rank holds all of them.
    """

    model: str
    window: str
    guided: bool
    ulysses_degree: int
    guidance_parallel: bool
    plan: MemoryPlan
    weights_bytes: int

    @property
    def num_ranks(self) -> int:
        """GPUs that the video takes."""
        return self.ulysses_degree * (2 if self.guidance_parallel else 1)

    @property
    def total_bytes(self) -> int:
        """All of a rank; text encoder and decoder left out."""
        return self.weights_bytes + self.plan.peak_bytes

    def __str__(self) -> str:
        how = f"{self.ulysses_degree}" + (" x 2" if self.guidance_parallel else "")
        sizes = (self.plan.pool_bytes, self.plan.text_bytes, self.plan.forward_bytes, self.total_bytes)
        cells = [self.model, self.window, "yes" if self.guided else "no", f"{self.num_ranks}", how]
        return f"| {' | '.join([*cells, *(f'{size / 1e9:.1f}' for size in sizes)])} |"


def size_model(model: str, window: str, height: int, width: int) -> Iterator[Sizing]:
    """Every legal way to make one video on up to ``MAX_RANKS`` GPUs, in bfloat16."""
    pipe = random_pipeline(model, torch.device("meta"), torch.bfloat16)
    weights = sum(p.numel() * p.element_size() for p in pipe.transformer.parameters())
    recipe = chunk_recipe(window, height, width)
    for guided in (False, True):
        planner = pipe.plan_cache(
            recipe=recipe, guided=guided, text_len=TEXT_LEN, decode=False, cache=CacheOptions(page_size=16)
        )
        # The meta device has no attention backend; the sizes are those of any.
        planner = replace(planner, device=torch.device("cpu"))
        for apart in (False, True) if guided else (False,):
            for degree in legal_degrees(planner.geometry.num_heads):
                num_ranks = degree * (2 if apart else 1)
                if num_ranks > MAX_RANKS:
                    continue
                layout = ParallelLayout(ulysses_degree=degree, guidance_parallel=apart, world_size=num_ranks)
                yield Sizing(
                    model=model,
                    window=window_label(recipe),
                    guided=guided,
                    ulysses_degree=degree,
                    guidance_parallel=apart,
                    plan=replace(planner, layout=layout).plan(with_work=True),
                    weights_bytes=weights,
                )


def run_sizing(options: argparse.Namespace, results: Results) -> None:
    """Print the table as Markdown."""
    print("| model | window | guided | GPUs | Ulysses | K/V | text K/V | a forward's work | with weights, GB a GPU |")
    print("|---|---|---|---|---|---|---|---|---|")
    for model in options.presets:
        for window in options.windows:
            for sizing in size_model(model, window, options.height, options.width):
                totals = {"num_ranks": sizing.num_ranks, "total_bytes": sizing.total_bytes}
                results.add(asdict(sizing) | totals, str(sizing))


def add_sizing_command(commands: Any) -> None:
    """Add ``sizing`` to the benchmark script's commands."""
    parser = commands.add_parser("sizing", help="memory per GPU on 1 to 8 GPUs, computed by the plan")
    parser.add_argument("--presets", nargs="+", choices=sorted(PRESETS), default=["wan-1.3b", "wan-14b"])
    parser.add_argument("--windows", nargs="+", default=["3+9", "0+21"], help="sink+recent latent frames")
    parser.add_argument("--height", type=int, default=480)
    parser.add_argument("--width", type=int, default=832)
    parser.add_argument("--output", type=Path, help=".json")
    parser.set_defaults(run=run_sizing, write_only=False, plot=None)
