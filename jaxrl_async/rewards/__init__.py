"""Rewards: completions are scored in separate processes."""
