"""The timing record of a run, and its replay."""
