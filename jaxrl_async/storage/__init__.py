"""What is written to disk, and how it survives a crash."""
