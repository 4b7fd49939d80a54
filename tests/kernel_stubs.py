"""Stub attention libraries with their published signatures, the keywords of other features left out.

They compute with torch and check what they are given. ``calls`` lists which function served each call.
"""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch
from dense import dense_attention

Calls = list[str]


def attend_rows(q, k, v, scale: float) -> torch.Tensor:
    """(rows, L, H, D) over (rows, N, H, D). Tiles of V are read whole: a NaN anywhere spoils the result."""
    assert not k.isnan().any() and not v.isnan().any()
    rescale = scale * q.shape[-1] ** 0.5
    return torch.stack([dense_attention(a * rescale, b, c) for a, b, c in zip(q, k, v, strict=True)]).to(q.dtype)


def attend_packed(q, k, v, offsets_q, offsets_k, max_q: int, max_k: int, scale: float) -> torch.Tensor:
    """(sum of L, H, D) over (sum of N, H, D), all checks of the varlen functions."""
    assert offsets_q.dtype == offsets_k.dtype == torch.int32
    lengths_q, lengths_k = offsets_q.diff().tolist(), offsets_k.diff().tolist()
    assert (sum(lengths_q), max(lengths_q)) == (len(q), max_q)
    assert (sum(lengths_k), max(lengths_k)) == (len(k), max_k)
    parts = zip(q.split(lengths_q), k.split(lengths_k), v.split(lengths_k), strict=True)
    return torch.cat([attend_rows(a[None], b[None], c[None], scale)[0] for a, b, c in parts])


def attend_paged(q, k_pages, v_pages, lengths, table, scale: float) -> torch.Tensor:
    """(rows, L, H, D) over pages (pages, B, H, D); only the rows in use are read."""
    assert lengths.dtype == table.dtype == torch.int32
    rows = []
    for query, length, pages in zip(q, lengths.tolist(), table, strict=True):
        keys, values = k_pages[pages].flatten(0, 1)[:length], v_pages[pages].flatten(0, 1)[:length]
        rows.append(attend_rows(query[None], keys[None], values[None], scale)[0])
    return torch.stack(rows)


def flash3_module(calls: Calls) -> ModuleType:
    """Signatures of FlashAttention 3's Python interface, keywords of other features left out."""
    module = ModuleType("flash_attn_interface")

    def flash_attn_func(q, k, v, softmax_scale=None, causal=False, qv=None, window_size=(-1, -1), num_splits=1):
        assert not causal and num_splits >= 1
        calls.append("dense" if num_splits == 1 else f"dense in {num_splits} parts")
        return attend_rows(q, k, v, softmax_scale)

    def flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        seqused_q=None,
        seqused_k=None,
        softmax_scale=None,
        causal=False,
        num_splits=1,
    ):
        assert not causal and num_splits == 1 and seqused_k is None
        calls.append("varlen")
        return attend_packed(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale)

    def flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        k=None,
        v=None,
        cache_seqlens=None,
        page_table=None,
        softmax_scale=None,
        causal=False,
        num_splits=0,
    ):
        assert not causal and num_splits == 1
        calls.append("paged")
        return attend_paged(q, k_cache, v_cache, cache_seqlens, page_table, softmax_scale)

    for function in (flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache):
        setattr(module, function.__name__, function)
    return module


def kernels_0_17(calls: Calls) -> ModuleType:
    """The ``kernels`` package, which loads the hub's FlashAttention 3 from a folder; that of 0.17.2."""
    module = ModuleType("kernels")

    def get_local_kernel(repo_path: Path, *, backend=None, trust_remote_code=False, user_agent=None) -> ModuleType:
        if not list((repo_path / "build").iterdir()):
            raise FileNotFoundError("Cannot find a build variant for this system")
        calls.append(f"loaded {repo_path.name}")
        return flash3_module(calls)

    def get_kernel(*args, **kwargs) -> ModuleType:
        raise AssertionError("it downloads")

    module.get_local_kernel, module.get_kernel = get_local_kernel, get_kernel
    return module


def kernels_0_10(calls: Calls) -> ModuleType:
    """An older one, which wants the name of the package in the folder."""
    module = kernels_0_17(calls)
    load = module.get_local_kernel

    def get_local_kernel(repo_path: Path, package_name: str, backend=None) -> ModuleType:
        assert package_name == "flash_attn3"
        return load(repo_path)

    module.get_local_kernel = get_local_kernel
    return module


def flash2_module(calls: Calls, *, splits: bool = False) -> ModuleType:
    """Signatures of flash-attn 2.x; ``splits``: a version whose varlen function takes ``num_splits``."""
    module = ModuleType("flash_attn")

    def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1)):
        assert not causal and dropout_p == 0.0
        calls.append("dense")
        return attend_rows(q, k, v, softmax_scale)

    def flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p=0.0,
        softmax_scale=None,
        causal=False,
        block_table=None,
    ):
        assert not causal and block_table is None
        calls.append("varlen")
        return attend_packed(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale)

    def varlen_with_splits(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale=None, causal=False, num_splits=0
    ):
        calls.append(f"num_splits={num_splits}")
        return flash_attn_varlen_func(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, 0.0, softmax_scale, causal
        )

    def flash_attn_with_kvcache(
        q, k_cache, v_cache, k=None, v=None, cache_seqlens=None, block_table=None, softmax_scale=None, causal=False,
        num_splits=0,
    ):  # fmt: skip
        assert not causal and num_splits == 1 and k_cache.shape[1] % 256 == 0
        calls.append("paged")
        return attend_paged(q, k_cache, v_cache, cache_seqlens, block_table, softmax_scale)

    module.flash_attn_func = flash_attn_func
    module.flash_attn_varlen_func = varlen_with_splits if splits else flash_attn_varlen_func
    module.flash_attn_with_kvcache = flash_attn_with_kvcache
    return module


def aiter_module(calls: Calls) -> ModuleType:
    """AITER's variable-length function; it returns a tuple of one in its first versions."""
    module = ModuleType("aiter")

    def flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        min_seqlen_q=0,
        dropout_p=0.0,
        softmax_scale=None,
        causal=False,
        return_lse=False,
        block_table=None,
    ):
        assert not causal and block_table is None and max_seqlen_q > 1
        calls.append("aiter")
        return (attend_packed(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale),)

    module.flash_attn_varlen_func = flash_attn_varlen_func
    return module


def torch_2_10_varlen(calls: Calls) -> Callable:
    def varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False, return_aux=None):
        raise AssertionError("it would use its own scale")

    return varlen_attn


def torch_2_11_varlen(calls: Calls) -> Callable:
    def varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1)):
        calls.append("varlen")
        return attend_packed(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale)

    return varlen_attn


def torch_2_12_varlen(calls: Calls) -> Callable:
    def varlen_attn(
        query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, seqused_k=None, block_table=None,
        num_splits=None,
    ):  # fmt: skip
        assert num_splits == 1
        if block_table is None:
            calls.append("varlen")
            return attend_packed(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale)
        assert cu_seq_k is None and key.shape[1] % 256 == 0 and max_k == seqused_k.max()
        calls.append("paged")
        rows = query.unflatten(0, (len(seqused_k), max_q))
        return attend_paged(rows, key, value, seqused_k, block_table, scale).flatten(0, 1)

    return varlen_attn
