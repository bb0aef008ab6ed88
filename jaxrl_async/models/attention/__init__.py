"""Attention over packed rows: a reference, blocks, and kernels."""
