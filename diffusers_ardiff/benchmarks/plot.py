"""Charts of measurements; needs matplotlib."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def plot_op(results: Sequence[dict[str, Any]], path: Path) -> None:
    """One panel a case: dense kernels alone in grey, the op with each backend in colour.

    Raises:
        ImportError: matplotlib is not installed.
    """
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(1, len(results), figsize=(4.2 * len(results), 4), squeeze=False)
    for axis, result in zip(axes[0], results, strict=True):
        op_ms = {name: entry.get("chunk_mean_ms", entry["median_ms"]) for name, entry in result["op"].items()}
        dense_ms = {f"{name} alone": entry["median_ms"] for name, entry in result["dense"].items()}
        heights = dense_ms | op_ms
        bars = axis.bar(
            range(len(heights)), list(heights.values()), color=["0.7"] * len(dense_ms) + ["C0"] * len(op_ms)
        )
        axis.bar_label(bars, fmt="%.2f", fontsize=8)
        axis.set_xticks(range(len(heights)), list(heights), rotation=45, ha="right", fontsize=8)
        axis.set_title(result["label"], fontsize=9)
        axis.set_ylabel("ms a call (median)")
    _save(figure, path)


def plot_rollout(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Time of every chunk, a line a rollout, the baseline's dashed; below it the peak memory, where it was measured.

    Raises:
        ImportError: matplotlib is not installed.
    """
    pyplot = _pyplot()
    peaks = [[chunk["peak_bytes"] for chunk in result["chunks"]] for result in results]
    num_panels = 1 if None in itertools.chain(*peaks) else 2
    figure, axes = pyplot.subplots(num_panels, 1, figsize=(8, 3 * num_panels), sharex=True, squeeze=False)
    for index, result in enumerate(results):
        window, color = f"window {result['window']}", f"C{index}"
        times = [chunk["seconds"] for chunk in result["chunks"]]
        axes[0, 0].plot(times, color=color, label=f"{window}, decoder {result['decoder']}")
        if "baseline" in result:
            label = f"{window}, {result['baseline']['name']}, nothing decoded"
            axes[0, 0].plot(result["baseline"]["chunk_seconds"], "--", color=color, label=label)
        if num_panels == 2:
            axes[1, 0].plot([peak / 2**30 for peak in peaks[index]], color=color)
    for axis, label in zip(axes[:, 0], ("s a chunk", "peak GiB in a chunk"), strict=False):
        axis.set_ylim(bottom=0)
        axis.set_ylabel(label)
    axes[-1, 0].set_xlabel("chunk")
    axes[0, 0].legend(fontsize=8)
    _save(figure, path)


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError("a plot needs matplotlib: pip install matplotlib, or leave --plot out.") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _save(figure: Any, path: Path) -> None:
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    _pyplot().close(figure)
