"""Estimates made before a run: memory, compiled programs, their least time."""
