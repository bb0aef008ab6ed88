"""Runs the cases of many seeds, and counts what went wrong."""

import collections
from collections.abc import Iterable
import dataclasses
import pathlib
import tempfile

from simulation import case as case_lib
from simulation import controller
from simulation import watched_buffer

_MEMORY = pathlib.Path("/dev/shm")  # holds the files, where there is one
# What the real code raises if it is used, or works, in a wrong way.
_ERRORS = (
  ArithmeticError,
  AssertionError,
  AttributeError,
  LookupError,
  RuntimeError,
  TypeError,
  ValueError,
)


@dataclasses.dataclass(kw_only=True)
class Summary:
  """What came of some seeds.

  Attributes:
    failures: for each seed that failed, what failed.
    num_groups: groups that ended.
    faults: how often each kind of fault has happened.
    seen: how many trained groups were of interest, and why.
  """

  num_seeds: int = 0
  failures: dict[int, str] = dataclasses.field(default_factory=dict)
  num_groups: int = 0
  faults: collections.Counter[str] = dataclasses.field(
    default_factory=collections.Counter
  )
  seen: collections.Counter[str] = dataclasses.field(
    default_factory=collections.Counter
  )

  @property
  def num_deadlocks(self) -> int:
    """The number of seeds that stood still."""
    return sum(text.startswith("deadlock") for text in self.failures.values())


def run(seeds: Iterable[int], most_failures: int = 10) -> Summary:
  """Run the cases of these seeds, until so many have failed.

  Args:
    seeds: the seeds.
    most_failures: where to stop.
  """
  summary = Summary()
  memory = str(_MEMORY) if _MEMORY.is_dir() else None
  with tempfile.TemporaryDirectory(dir=memory) as directory:
    for seed in seeds:
      case = case_lib.of_seed(seed)
      _run(case, pathlib.Path(directory), summary)
      if len(summary.failures) >= most_failures:
        break
  return summary


def joined(summaries: Iterable[Summary]) -> Summary:
  """Return the sum of what came of several sets of seeds."""
  total = Summary()
  for one in summaries:
    total.num_seeds += one.num_seeds
    total.num_groups += one.num_groups
    total.failures |= one.failures
    total.faults += one.faults
    total.seen += one.seen
  return total


def _run(
  case: case_lib.Case, directory: pathlib.Path, summary: Summary
) -> None:
  summary.num_seeds += 1
  world = controller.World(case, directory)
  try:
    summary.num_groups += world.run()
  except watched_buffer.Violation as violation:
    summary.failures[case.seed] = str(violation)
  except _ERRORS as error:
    summary.failures[case.seed] = f"{type(error).__name__}: {error}"
  summary.faults += world.faults
  summary.seen += world.seen
