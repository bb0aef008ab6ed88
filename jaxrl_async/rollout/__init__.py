"""The rollout slice."""
