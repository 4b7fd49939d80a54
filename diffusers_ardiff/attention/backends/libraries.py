"""Which attention libraries are installed, found once a process and never downloaded."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch

AttentionFn = Callable[..., Any]

FLASH3_MODULES = (("flash_attn_interface", "flash_attn_config"), ("fa3_fwd_interface", "fa3_fwd_config"))
"""(module, module of its build flags) of the source build and of the ``fa3-fwd`` wheel."""
FLASH3_HUB_KERNEL = "kernels-community/flash-attn3"
FLASH3_HEAD_DIMS = (64, 96, 128, 192, 256)


class Flash3Library(NamedTuple):
    """A FlashAttention 3 build: its functions, and what was compiled into it."""

    name: str
    dense: AttentionFn
    varlen: AttentionFn
    paged: AttentionFn | None


class Flash2Library(NamedTuple):
    """A flash-attn 2 build."""

    dense: AttentionFn
    varlen: AttentionFn
    paged: AttentionFn


@cache
def accepts(function: AttentionFn, parameter: str) -> bool:
    """Whether a function's published signature has a parameter."""
    try:
        return parameter in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False


def one_split(function: AttentionFn) -> dict[str, int]:
    """Keywords that pin the number of K/V splits to 1, where the function lets one choose.

    Splits are otherwise a guess from the batch, wrong with paging in some builds, and change the order of the sum.
    """
    return {"num_splits": 1} if accepts(function, "num_splits") else {}


def output_of(result: Any) -> torch.Tensor:
    """The attention output of functions that return it alone in some versions, first of a tuple in others."""
    return result[0] if isinstance(result, tuple) else result


def import_optional(name: str) -> ModuleType | None:
    """The module, None where it is not installed.

    Raises:
        ImportError: it is installed and fails to import, since its binary does not fit this torch, say.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and name.startswith(error.name):
            return None
        raise


@cache
def flash3_build_flags() -> Mapping[str, bool]:
    """Build flags of the FlashAttention 3 that ``find_flash3`` takes; empty where it has none or there is none."""
    for module_name, config_name in FLASH3_MODULES:
        if importlib.util.find_spec(module_name) is not None:
            config = import_optional(config_name)
            return dict(config.CONFIG["build_flags"]) if config is not None else {}
    return {}


@cache
def find_flash3() -> Flash3Library | None:
    """FlashAttention 3: the source build, the ``fa3-fwd`` wheel, or the hub kernel where it lies in the hub cache.

    Raises:
        ImportError: as ``import_optional``.
    """
    for name, _ in FLASH3_MODULES:
        module = import_optional(name)
        if module is not None:
            return _flash3_library(name, module, paged=not flash3_build_flags().get("FLASHATTENTION_DISABLE_PAGEDKV"))
    module = _load_hub_kernel()
    return _flash3_library(FLASH3_HUB_KERNEL, module, paged=True) if module is not None else None


def _flash3_library(name: str, module: ModuleType, *, paged: bool) -> Flash3Library:
    return Flash3Library(
        name=name,
        dense=module.flash_attn_func,
        varlen=module.flash_attn_varlen_func,
        paged=module.flash_attn_with_kvcache if paged else None,
    )


def _load_hub_kernel() -> ModuleType | None:
    path = find_hub_snapshot()
    kernels = import_optional("kernels") if path is not None else None
    if kernels is None:
        return None
    package = {"package_name": "flash_attn3"} if accepts(kernels.get_local_kernel, "package_name") else {}
    try:
        return kernels.get_local_kernel(path, **package)
    except (OSError, ValueError) as error:
        raise ImportError(f"{FLASH3_HUB_KERNEL} in {path} has no build for this machine: {error}") from error


def find_hub_snapshot() -> Path | None:
    """The newest complete download of the hub kernel, None where there is none; nothing is downloaded.

    The ``kernels`` package keeps it as a repository of type kernel, older ones as one of type model, and asks for a
    commit, so no name of a version leads to it.
    """
    from huggingface_hub.constants import HF_HUB_CACHE

    cache_dir = os.environ.get("KERNELS_CACHE") or os.environ.get("HF_KERNELS_CACHE") or HF_HUB_CACHE
    folder = "--".join(FLASH3_HUB_KERNEL.split("/"))
    for kind in ("kernels", "models"):
        builds = (Path(cache_dir) / f"{kind}--{folder}" / "snapshots").glob("*/build")
        newest = max(builds, key=lambda build: build.stat().st_mtime, default=None)
        if newest is not None:
            return newest.parent
    return None


@cache
def find_flash2() -> Flash2Library | None:
    """flash-attn 2, None where it is not installed.

    Raises:
        ImportError: as ``import_optional``.
    """
    module = import_optional("flash_attn")
    if module is None:
        return None
    return Flash2Library(module.flash_attn_func, module.flash_attn_varlen_func, module.flash_attn_with_kvcache)


@cache
def find_aiter() -> AttentionFn | None:
    """AITER's variable-length attention, None where it is not installed.

    Raises:
        ImportError: as ``import_optional``.
    """
    module = import_optional("aiter")
    return module.flash_attn_varlen_func if module is not None else None


@cache
def find_torch_varlen() -> AttentionFn | None:
    """torch's own variable-length attention, None where this torch has none."""
    module = import_optional("torch.nn.attention.varlen")
    return module.varlen_attn if module is not None else None


def missing_cuda(minimum: tuple[int, int], maximum: tuple[int, int] = (99, 0)) -> str | None:
    """Why the current device cannot run a kernel for NVIDIA GPUs of these capabilities (inclusive); None: it can."""
    if torch.version.hip is not None:
        return "does not run on ROCm"
    if not torch.cuda.is_available():
        return "this machine has no CUDA device"
    capability = torch.cuda.get_device_capability()
    if minimum <= capability <= maximum:
        return None
    allowed = f"{minimum[0]}.{minimum[1]}" + (" or later" if maximum[0] == 99 else f" to {maximum[0]}.{maximum[1]}")
    return f"needs a GPU of compute capability {allowed}, this one has {capability[0]}.{capability[1]}"


def why_not_loaded(find: Callable[[], Any], install: str) -> str | None:
    """Why a library is not usable: ``install`` where it is missing, the import's own error where that fails."""
    try:
        return None if find() is not None else install
    except ImportError as error:
        return f"its library fails to import: {error}"
