"""Measurements of the package's parts, each beside its bare kernels in the same run."""

from .op import OpCase, anchor_cases, measure_op, order_cases
from .plot import plot_op
from .timing import Timing, time_interleaved
from .write import measure_write

__all__ = [
    "OpCase",
    "Timing",
    "anchor_cases",
    "measure_op",
    "measure_write",
    "order_cases",
    "plot_op",
    "time_interleaved",
]
