"""Evaluations, in a run and alone."""
