"""Dense attention kernels alone, on plain contiguous keys and values: what the op is compared with."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from ..attention.backends import flash3
from ..attention.backends.libraries import find_flash3, output_of

BareKernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(query (R, L, H, D), keys (R, N, H, D), values) -> (R, L, H, D)."""

_SDPA_KERNELS = {"sdpa_cudnn": SDPBackend.CUDNN_ATTENTION, "sdpa_flash": SDPBackend.FLASH_ATTENTION}


def bare_kernels(device: torch.device, dtype: torch.dtype, head_dim: int) -> dict[str, BareKernel]:
    """The dense kernels that run here at this dtype and head size, by name."""
    if device.type == "cpu":
        return {"sdpa": _sdpa}
    candidates = {name: _pinned_sdpa(backend) for name, backend in _SDPA_KERNELS.items()}
    if flash3.unavailable() is None:
        candidates["fa3"] = _flash3
    return {name: kernel for name, kernel in candidates.items() if _runs(kernel, device, dtype, head_dim)}


def _runs(kernel: BareKernel, device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    rows = torch.zeros(1, 64, 2, head_dim, dtype=dtype, device=device)
    try:
        kernel(rows, rows, rows)
    except RuntimeError:
        return False
    return True


def _sdpa(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    out = scaled_dot_product_attention(query.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2))
    return out.transpose(1, 2)


def _pinned_sdpa(backend: SDPBackend) -> BareKernel:
    def call(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(backend):
            return _sdpa(query, keys, values)

    return call


def _flash3(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    library = find_flash3()
    if library is None:
        raise RuntimeError(flash3.INSTALL)
    return output_of(library.dense(query, keys, values, causal=False))
