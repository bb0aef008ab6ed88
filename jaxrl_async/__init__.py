"""Fully asynchronous reinforcement learning of language-model policies on JAX."""
