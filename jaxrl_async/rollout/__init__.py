"""The generation slice."""
