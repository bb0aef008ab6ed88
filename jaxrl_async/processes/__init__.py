"""Threads and processes: supervision, rendezvous, messages."""
