"""Every field of a config with values that nobody should have to survive."""

import enum
import pathlib
import runpy

from ml_collections import config_dict

from jaxrl_async.config import fields as fields_lib
from jaxrl_async.config import sections

TINY = pathlib.Path(__file__).parents[1] / "configs" / "tiny.py"
LONG = "x" * 5_000
TEXTS = (
  "",
  LONG,
  "/" + LONG,
  "/tmp/" + "y/" * 3_000,
  "nu\0l",
  "\0",
  "ü💥\udcff",
  "new\nline",
  "/dev/null",
  "/dev/null/below",
  "/proc/none",
  "{",
  "{question}" * 600_000,
)
NUMBERS = (
  *(-1, 0, 1, 2, 3, 255, 10**5, 10**6),
  *(2**31 - 1, 2**31, 2**32, 2**63, 10**30, 10**400, -(10**5_000)),
)
FLOATS = (
  *(-1.0, 0.0, 0.5, 1.0, 1e-3, 1e-7, 1.0 - 1e-9, 1e-30, 1e-38, 1e-45, 1e-320),
  *(1e3, 1e9, 1e10, 1e30, 3e38, 1e39, 1e300, float("nan"), float("inf")),
)
TUPLES = (
  (),
  (1,),
  (1, 1),
  (2, 1),
  (0,),
  (-1, 24),
  (24,),
  (8, 24),
  (8, 24, 24),
  (2**63,),
  tuple(range(1, 25)),
  tuple(range(10_000)),
  ("data",),
  ("data", "data"),
  ("tensor", "data"),
  (LONG,),
  ("nu\0l",),
  (float("nan"),),
)
PARAMS = tuple(
  config_dict.ConfigDict(values)
  for values in (
    {},
    {"min_terms": 10**400},
    {"min_terms": float("nan")},
    {LONG: 1},
    {"min_terms": object()},
    {"seed": 1},
    {"a": {"b": (1, 2)}},
    {"nu\0l": "\0"},
  )
)
WRONG = (None, True, b"bytes", [1], {}, object(), enum.Enum)
VALUES = (*WRONG, *TEXTS, *NUMBERS, *FLOATS, *TUPLES, *PARAMS)


def get_config() -> sections.Config:
  """The run of configs/tiny.py, made anew."""
  return runpy.run_path(str(TINY))["get_config"]()


def put(config, path, value):
  """Sets one field by its path."""
  *sections, name = path.split(".")
  for section in sections:
    config = getattr(config, section)
  setattr(config, name, value)


def paths():
  """Of every field."""
  return [path for path, *_ in fields_lib.walk(sections.Config())]


def value_of(config, path):
  """One field by its path."""
  for name in path.split("."):
    config = getattr(config, name)
  return config
