"""Rollouts: the coordinator, its replicas and the thread that drives them."""
