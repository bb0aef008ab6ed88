"""Fully asynchronous reinforcement learning of language models, on JAX."""
