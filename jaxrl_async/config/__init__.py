"""The settings of a run: sections, the bounds of each field, mesh shapes."""
