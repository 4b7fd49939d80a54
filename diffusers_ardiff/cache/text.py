"""Keys and values of the prompt: computed once per prompt, layer and branch, replaced as a whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch


class TextLayerKV(NamedTuple):
    """Cross-attention inputs of one layer, each (rows, text_len, num_heads, head_dim).

    ``image_key`` and ``image_value`` are the added projections of image-conditioned models, None elsewhere.
    """

    key: torch.Tensor
    value: torch.Tensor
    image_key: torch.Tensor | None = None
    image_value: torch.Tensor | None = None


@dataclass(frozen=True)
class TextKV:
    """Text K/V of one prompt in all layers; immutable, so a session switches prompts by one assignment."""

    layers: tuple[TextLayerKV, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes held."""
        return sum(t.numel() * t.element_size() for layer in self.layers for t in layer if t is not None)

    def row(self, index: int) -> TextKV:
        """The text of one row, as views."""
        return TextKV(tuple(_row(layer, index) for layer in self.layers))

    def apply(self, function: Callable[[torch.Tensor], torch.Tensor]) -> TextKV:
        """The same text with ``function`` applied to every tensor, such as a copy to another device."""
        return TextKV(
            tuple(TextLayerKV._make(None if t is None else function(t) for t in layer) for layer in self.layers)
        )


def _row(layer: TextLayerKV, index: int) -> TextLayerKV:
    rows = slice(index, index + 1)
    if layer.image_key is None or layer.image_value is None:
        return TextLayerKV(layer.key[rows], layer.value[rows])
    return TextLayerKV(layer.key[rows], layer.value[rows], layer.image_key[rows], layer.image_value[rows])
