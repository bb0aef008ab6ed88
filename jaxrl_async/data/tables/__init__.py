"""Files of datasets as tables of rows, one format a module."""
