"""Scores of completions, computed in processes that never import jax."""
