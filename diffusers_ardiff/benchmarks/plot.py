"""Charts of measurements; needs matplotlib."""

from __future__ import annotations

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
    """Time and memory of every chunk, a line a rollout; the baseline's times dashed.

    Raises:
        ImportError: matplotlib is not installed.
    """
    pyplot = _pyplot()
    figure, (times, memory) = pyplot.subplots(2, 1, figsize=(8, 6), sharex=True)
    for index, result in enumerate(results):
        color, label = f"C{index}", f"window {result['window']}, decoder {result['decoder']}"
        times.plot([chunk["seconds"] for chunk in result["chunks"]], color=color, label=label)
        if "baseline" in result:
            name = result["baseline"]["name"]
            times.plot(
                result["baseline"]["chunk_seconds"], "--", color=color, label=f"window {result['window']}, {name}"
            )
        peaks = [chunk["peak_bytes"] for chunk in result["chunks"]]
        memory.plot([peak / 2**30 for peak in peaks if peak is not None], color=color, label=label)
    times.set_ylabel("s a chunk")
    memory.set_ylabel("peak GiB in a chunk")
    memory.set_xlabel("chunk")
    for axis in (times, memory):
        axis.set_ylim(bottom=0)
    times.legend(fontsize=8)
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
