"""Attention over padded and packed rows: reference, blocks, kernels."""
