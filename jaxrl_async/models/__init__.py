"""The policy: one decoder, used by trainer and engine alike."""
