"""Samples of completions, as Parquet files in a run's workdir.

`samples/step_0000000012.parquet` has completions of the train step that made
version 12, and `samples/eval_0000000012.parquet` those of an evaluation of that
version. A file appears when it is complete, and is not changed afterwards, so
it can be read while the run goes on. Each row is one completion.

A run of any length keeps a bounded number of files: those of the last steps,
and of the steps before them every second, fourth, eighth and so on.
"""

from collections.abc import Iterator, Mapping, Sequence
import importlib.util
import os
import pathlib
import re
from typing import Any, NamedTuple

from jaxrl_async.storage import columns
from jaxrl_async.storage import disk

DIRECTORY = "samples"
TRAIN, EVAL = "step", "eval"
_NUM_RECENT = 128
_MAX_OLDER = 384
_NAME = re.compile(r"(step|eval)_(\d{10,})\.parquet")
NOT_WRITTEN = (
  "WARNING: samples/ will not be written, because polars is not installed; the"
  " run goes on without samples of completions"
)


class Part(NamedTuple):
  """A file of samples: of a train step or an evaluation."""

  kind: str
  step: int

  @property
  def name(self) -> str:
    """The name of the file."""
    return f"{self.kind}_{self.step:010}.parquet"


def _schema() -> dict[str, Any]:
  # Importing polars takes half a second, and not at the start of a run.
  import polars as pl

  versions = pl.Struct({"version": pl.Int64, "num_tokens": pl.Int64})
  parts = pl.Struct({"name": pl.String, "value": pl.Float64})
  turns = pl.Struct({"prompt": pl.String, "completion": pl.String})
  return {
    "step": pl.Int64,  # completed train steps
    "fate": pl.String,  # trained, filtered, failed or evaluated
    "chosen": pl.String,  # why this group: best, worst, longest, ...
    "group": pl.Int64,
    "member": pl.Int64,
    "prompt_id": pl.String,
    "prompt": pl.String,
    "completion": pl.String,  # all turns, if there are several
    "answer": pl.String,  # null if none was found
    "expected": pl.String,  # the item's answer, without a worked solution
    "reward": pl.Float64,  # null if it could not be scored
    "parts": pl.List(parts),
    "finish_reason": pl.String,
    "num_tokens": pl.Int64,
    "version_min": pl.Int64,
    "version_max": pl.Int64,
    "versions": pl.List(versions),  # runs of tokens, in their order
    "turns": pl.List(turns),  # empty for a single turn
    "failure": pl.String,
  }


def can_be_written() -> bool:
  """Return whether polars is there, which nothing else in a run needs."""
  return importlib.util.find_spec("polars") is not None


def is_kept(step: int, newest: int) -> bool:
  """Return whether the samples of a step are kept at a later one.

  What is dropped stays dropped, so a run that was continued keeps the same
  files as one that was not interrupted.
  """
  stride = 1
  while newest > stride * _MAX_OLDER:
    stride *= 2
  return step > newest - _NUM_RECENT or step % stride == 0


def parts_in(directory: pathlib.Path) -> list[Part]:
  """Return the files of a directory, in the order of their steps."""
  try:
    names = os.listdir(directory)
  except FileNotFoundError:
    return []
  found = [match for name in names if (match := _NAME.fullmatch(name))]
  parts = [Part(match[1], int(match[2])) for match in found]
  return sorted(parts, key=lambda part: (part.step, part.kind))


class SampleFiles:
  """The directory of a run's samples, for its writer.

  Threads: one at a time.
  """

  def __init__(self, workdir: pathlib.Path):
    self._directory = workdir / DIRECTORY

  def forget_after(self, step: int) -> None:
    """Remove samples of later steps, which will be done again.

    Raises:
      OSError: a file could not be removed.
    """
    for part in parts_in(self._directory):
      if part.step > step:
        (self._directory / part.name).unlink()
    for incomplete in self._directory.glob("*.incomplete"):
      incomplete.unlink()

  def write(self, part: Part, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write a file of samples, and drop those that are not kept any more.

    Args:
      part: which file; one of that name is replaced.
      rows: one for each completion, with the columns of `_schema`.

    Raises:
      OSError: the disk refused it.
    """
    path = self._directory / part.name
    # A fixed list of columns: the types must not depend on the rows.
    columns.write(path, rows, _schema())
    with disk.writing(path):
      for other in parts_in(self._directory):
        if other.kind == part.kind and not is_kept(other.step, part.step):
          (self._directory / other.name).unlink(missing_ok=True)


def read(
  workdir: pathlib.Path, kinds: Sequence[str], *, is_newest_first: bool
) -> Iterator[tuple[Part, list[dict[str, Any]]]]:
  """Yield the rows of each file, also while a run is writing.

  A file that a run drops meanwhile is left out, and one that is damaged too.
  """
  import polars as pl

  parts = [x for x in parts_in(workdir / DIRECTORY) if x.kind in kinds]
  for part in reversed(parts) if is_newest_first else parts:
    try:
      frame = pl.read_parquet(workdir / DIRECTORY / part.name)
    except (OSError, pl.exceptions.PolarsError):
      continue
    yield part, frame.to_dicts()
