"""Environments of other packages, in processes of their own."""
