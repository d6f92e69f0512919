"""Kernels for compute capability 7.0 and later."""
