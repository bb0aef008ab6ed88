"""Policies: stored, in memory, served and exported."""
