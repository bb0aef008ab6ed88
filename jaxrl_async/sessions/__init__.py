"""Agents that call the policy in training through OpenAI's interface."""
