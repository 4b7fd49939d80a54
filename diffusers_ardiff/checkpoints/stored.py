"""The weights in a checkpoint file, without a transformer to put them into."""

import os
from collections.abc import Mapping
from pathlib import Path

import torch

from .files import read_checkpoint
from .load import unwrap_weights


def stored_weights(path: str | os.PathLike[str], *, use_ema: bool = True) -> Mapping[str, torch.Tensor]:
    """Memory-mapped tensors by their names in the file.

    Raises:
        FileNotFoundError, ValueError: as ``load_ar_checkpoint``, for what can be said without a transformer.
    """
    content = read_checkpoint(Path(path))
    try:
        return unwrap_weights(content, use_ema)[1]
    except ValueError as error:
        raise ValueError(f"checkpoint '{os.fspath(path)}' was not loaded: {error}") from error
