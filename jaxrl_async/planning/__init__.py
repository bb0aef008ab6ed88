"""Estimates made before a run: memory, and the rate of matrix products."""
