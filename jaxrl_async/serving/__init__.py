"""Clients of the policy: HTTP, gRPC and the queue of their requests."""
