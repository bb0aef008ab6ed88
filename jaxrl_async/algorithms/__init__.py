"""The equations: advantages, token logprobs, losses, divergences."""
