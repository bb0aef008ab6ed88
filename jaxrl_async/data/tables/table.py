"""A table: the rows of a dataset's files by number, whatever their format."""

import bisect
from collections.abc import Callable, Sequence
import dataclasses
import datetime
import decimal
import hashlib
import itertools
import json
from typing import Any

import numpy as np

# What a format's library raises if it cannot turn a value into one of Python's,
# such as a time beyond the year 9999.
_CONVERSION = (
  ArithmeticError,
  AttributeError,
  ImportError,
  LookupError,
  OSError,
  RuntimeError,
  TypeError,
  ValueError,
)


class TableError(ValueError):
  """A file cannot be read; the message names it in one line."""


class RowError(ValueError):
  """A row cannot be used; the message begins with its place."""


@dataclasses.dataclass(frozen=True)
class Table:
  """The rows of a file or of a split, by number. Any thread may read them.

  Attributes:
    stored: the rows as they are stored, a sequence.
    read: returns the columns of a stored row that is at a place.
    digest: of the content.
    where: returns the place of a row, as messages name it.
  """

  stored: Any
  read: Callable[[Any, str], dict[str, Any]]
  digest: str
  where: Callable[[int], str]

  def __len__(self) -> int:
    """Return the number of rows."""
    return len(self.stored)

  def __getitem__(self, row: int) -> dict[str, Any]:
    """Return a row's columns."""
    where = self.where(row)
    try:
      return self.read(self.stored[row], where)
    except RowError:
      raise
    except _CONVERSION as error:
      raise RowError(f"{where}: cannot be read: {reason(error)}") from error


def joined(parts: Sequence[Table]) -> Table:
  """Return the rows of several tables, one table after the other."""
  if len(parts) == 1:
    return parts[0]
  ends = list(itertools.accumulate(map(len, parts)))

  def at(row: int) -> tuple[Table, int]:
    number = bisect.bisect_right(ends, row)
    return parts[number], row - (ends[number - 1] if number else 0)

  def read(row: int, where: str) -> dict[str, Any]:
    part, own = at(row)
    return part.read(part.stored[own], where)

  def where(row: int) -> str:
    part, own = at(row)
    return part.where(own)

  digests = " ".join(part.digest for part in parts)
  digest = hashlib.blake2b(digests.encode(), digest_size=16).hexdigest()
  return Table(range(ends[-1]), read, digest, where)


def reason(error: Exception) -> str:
  """Return in one line why a file could not be read."""
  text = getattr(error, "strerror", None) or str(error)
  return " ".join(text.split())[:200] or type(error).__name__


def from_json(text: bytes, where: str) -> dict[str, Any]:
  """Return the object that a text in JSON describes."""
  try:
    value = json.loads(text)
  except (ValueError, RecursionError) as error:
    raise RowError(f"{where}: not JSON: {error}") from error
  return checked_object(value, where)


def checked_object(value: Any, where: str) -> dict[str, Any]:
  """Return a value, or raise a RowError unless it is an object of JSON."""
  if not isinstance(value, dict):
    raise RowError(f"{where}: not a JSON object")
  return value


def number_text(value: int | float | decimal.Decimal) -> str:
  """Return the shortest text of exactly this number, without an exponent.

  42.0 becomes "42", and 1e-05 "0.00001".
  """
  text = format(decimal.Decimal(str(value)), "f")
  if "." in text:
    text = text.rstrip("0").rstrip(".")
  return "0" if text == "-0" else text


def plain(value: Any, where: str) -> Any:
  """Return a value of a columnar file in the types that JSON has.

  Dates and times become ISO 8601 texts, and decimal numbers their shortest
  texts.
  """
  if value is None or isinstance(value, bool | int | float | str):
    return value
  if isinstance(value, dict):
    return {str(key): plain(x, where) for key, x in value.items()}
  if isinstance(value, list | tuple):
    return [plain(x, where) for x in value]
  if isinstance(value, datetime.date | datetime.time):
    return value.isoformat()
  if isinstance(value, decimal.Decimal):
    return number_text(value)
  if isinstance(value, datetime.timedelta):
    return str(value)
  if isinstance(value, np.generic | np.ndarray):
    return plain(value.tolist(), where)
  raise RowError(
    f"{where}: a value of type {type(value).__name__} cannot be used; leave"
    " its column out of the file"
  )
