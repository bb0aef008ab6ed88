"""Imports a benchmark that has flags into a test."""

import importlib
import pathlib

from absl import flags

BENCHMARKS = pathlib.Path(__file__).parents[1] / "benchmarks"


def imported(name):
  """Return the module, whose flags are not parsed.

  They are forgotten, because other programs have flags of the same names.
  """
  others = {
    flag: flags.FLAGS[flag]
    for flag in list(flags.FLAGS)
    if not flags.FLAGS.find_module_defining_flag(flag, "").startswith("absl")
  }
  for other in others:
    delattr(flags.FLAGS, other)
  before = set(flags.FLAGS)
  try:
    return importlib.import_module(name)
  finally:
    for own in set(flags.FLAGS) - before:
      delattr(flags.FLAGS, own)
    for other, flag in others.items():
      flags.FLAGS[other] = flag
