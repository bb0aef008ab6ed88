"""Serving a policy: OpenAI's HTTP interface and JetStream's gRPC service."""
