"""Attention backends, one file each; importing this package registers them."""

from . import flash2, flash3, reference, rocm, sdpa, triton_paged, varlen

__all__ = ["flash2", "flash3", "reference", "rocm", "sdpa", "triton_paged", "varlen"]
