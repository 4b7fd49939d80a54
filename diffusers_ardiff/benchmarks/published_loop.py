"""The dense cache that rolls, with the habits of the loops that models were published with.

Self-Forcing's loop, and those that grew from it, keep every layer's fill level on the device and read it back in every
layer of every forward, and rotate queries and keys video by video as complex128 products, with angles put together anew
each time. The result is the same; the difference to ``dense_roll`` is what these habits cost.
"""

from __future__ import annotations

from typing import Any

import torch

from ..rope import Rotary
from .bare import BareKernel
from .dense_roll import DenseRollAttnProcessor


class PublishedLoopAttnProcessor(DenseRollAttnProcessor):
    """Self-attention over one layer's dense cache, whose fill level is read back from the device.

    Args:
        host_processor, cache, sink, kernel: as for ``DenseRollAttnProcessor``.
    """

    def __init__(self, host_processor: Any, cache: torch.Tensor, sink: int, kernel: BareKernel) -> None:
        super().__init__(host_processor, cache, sink, kernel)
        self._video_end, self._cache_end = (torch.zeros(1, dtype=torch.long, device=cache.device) for _ in range(2))

    def _rotate(self, hidden_states: torch.Tensor, rotary: Rotary) -> torch.Tensor:
        rows = [_rotate_as_complex(row, *(part[0] for part in rotary)) for row in hidden_states]
        return torch.stack(rows).type_as(hidden_states)

    def _find_place(self, num_tokens: int) -> tuple[int, int]:
        video_end = self.start + num_tokens
        num_new = video_end - int(self._video_end.item())
        end = int(self._cache_end.item()) + num_new
        shift = max(0, end - self._cache.shape[2])
        self._video_end.fill_(video_end)
        self._cache_end.fill_(end - shift)
        return shift, end - shift - num_tokens


def _rotate_as_complex(hidden_states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """One video's (tokens, heads, head_dim) by angles whose cosines and sines are (tokens, 1, head_dim): float64."""
    angles = torch.complex(cos[..., 0::2].double(), sin[..., 1::2].double())
    pairs = torch.view_as_complex(hidden_states.double().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * angles).flatten(-2)
