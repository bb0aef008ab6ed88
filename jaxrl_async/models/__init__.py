"""The decoder-only transformer, its families and their checkpoint formats."""
