"""A table: the rows of a dataset's files by number, whatever their format."""

import bisect
from collections.abc import Sequence
import datetime
import decimal
import hashlib
import itertools
import pathlib
from typing import Any, Protocol, runtime_checkable

import numpy as np


class TableError(ValueError):
  """A file cannot be read; the message names it in one line."""


class RowError(ValueError):
  """A row cannot be used; the message begins with its place."""


@runtime_checkable
class Table(Protocol):
  """Rows by number. Any thread may read them."""

  @property
  def digest(self) -> str:
    """A digest of the content."""
    ...

  def __len__(self) -> int:
    """Return the number of rows."""
    ...

  def __getitem__(self, row: int) -> dict[str, Any]:
    """Return a row's columns.

    Raises:
      RowError: the row cannot be read.
    """
    ...

  def where(self, row: int) -> str:
    """Return the place of a row, as messages name it."""
    ...


class Joined:
  """The rows of several tables, one table after the other."""

  def __init__(self, parts: Sequence[Table]):
    """Join at least one table."""
    self._parts = parts
    self._ends = list(itertools.accumulate(map(len, parts)))

  @property
  def digest(self) -> str:
    """A digest of the content of all parts."""
    digests = " ".join(part.digest for part in self._parts)
    return hashlib.blake2b(digests.encode(), digest_size=16).hexdigest()

  def __len__(self) -> int:
    """Return the number of rows of all parts."""
    return self._ends[-1]

  def __getitem__(self, row: int) -> dict[str, Any]:
    """Return a row's columns."""
    part, row = self._part(row)
    return part[row]

  def where(self, row: int) -> str:
    """Return the place of a row in its part."""
    part, row = self._part(row)
    return part.where(row)

  def _part(self, row: int) -> tuple[Table, int]:
    number = bisect.bisect_right(self._ends, row)
    start = self._ends[number - 1] if number else 0
    return self._parts[number], row - start


def digest_of(path: pathlib.Path) -> str:
  """Return a digest of a file's content."""
  with open(path, "rb") as file:
    return hashlib.file_digest(
      file, lambda: hashlib.blake2b(digest_size=16)
    ).hexdigest()


def reason(error: Exception) -> str:
  """Return in one line why a file could not be read."""
  text = getattr(error, "strerror", None) or str(error)
  return " ".join(text.split())[:200] or type(error).__name__


def plain(value: Any, where: str) -> Any:
  """Return a value of a columnar file in the types that JSON has.

  Dates and times become ISO 8601 texts, and decimal numbers texts.

  Args:
    value: of a column.
    where: place of the row, for the message.

  Raises:
    RowError: the value is of another type, such as an image's bytes.
  """
  if value is None or isinstance(value, bool | int | float | str):
    return value
  if isinstance(value, dict):
    return {str(key): plain(x, where) for key, x in value.items()}
  if isinstance(value, list | tuple):
    return [plain(x, where) for x in value]
  if isinstance(value, datetime.date | datetime.time):
    return value.isoformat()
  if isinstance(value, decimal.Decimal | datetime.timedelta):
    return str(value)
  if isinstance(value, np.generic | np.ndarray):
    return plain(value.tolist(), where)
  raise RowError(
    f"{where}: a value of type {type(value).__name__} cannot be used; leave"
    " its column out of the file"
  )
