"""The programs made of all parts: training, serving, evaluation, dry run."""
