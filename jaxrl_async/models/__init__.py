"""The decoder-only transformer, its architectures and checkpoint formats."""
