"""The bound on staleness: buffer, deadlines, ledger."""
