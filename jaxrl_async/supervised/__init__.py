"""Supervised training: SFT, preferences and reward models."""
