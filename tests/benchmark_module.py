"""Imports a benchmark into a test."""

import importlib
import pathlib

from absl import flags

BENCHMARKS = pathlib.Path(__file__).parents[1] / "benchmarks"


def imported(name, monkeypatch):
  """Return the module, whose flags are not parsed.

  They are forgotten, because other benchmarks have flags of the same names.
  """
  monkeypatch.syspath_prepend(BENCHMARKS)
  module = importlib.import_module(name)
  for flag in flags.FLAGS.get_flags_for_module(name):
    delattr(flags.FLAGS, flag.name)
  return module
