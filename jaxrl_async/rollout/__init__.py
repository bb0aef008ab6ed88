"""The rollout worker and the episodes it plays."""
