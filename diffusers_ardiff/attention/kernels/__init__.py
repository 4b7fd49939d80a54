"""Triton kernels, each behind one function that checks shapes. The modules here need triton to be imported."""
