"""Tools that a policy may call: descriptions, call formats, the episode."""
