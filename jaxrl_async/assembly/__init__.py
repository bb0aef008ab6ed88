"""A configuration with everything that it refers to; parts of a run."""
