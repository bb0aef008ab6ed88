"""Putting the parts together: train, serve, evaluate, dry run."""
