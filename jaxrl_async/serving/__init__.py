"""Serving a policy: OpenAI's HTTP interface over a request queue."""
