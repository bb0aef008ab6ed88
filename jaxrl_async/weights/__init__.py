"""Versions of the weights: published, adopted, and their files."""
