"""Rows of a file with one JSON object in each line."""

from collections.abc import Iterator, Mapping
import hashlib
import json
import mmap
import os
import pathlib
from typing import Any

import numpy as np


class RowError(ValueError):
  """A row cannot be used; the message begins with file and line."""


class JsonLines:
  """A file's rows by number, read when they are asked for.

  Only the place of each row is held in memory. Blank lines are left out.

  Attributes:
    path: of the file.
    digest: of the file's content.
  """

  def __init__(self, path: pathlib.Path):
    """Find the rows of a file.

    Raises:
      OSError: the file cannot be read.
    """
    self.path = path
    digest = hashlib.blake2b(digest_size=16)
    starts, lines, place = [], [], 0
    with open(path, "rb") as file:
      for number, line in enumerate(file, 1):
        digest.update(line)
        if line.strip():
          starts.append(place)
          lines.append(number)
        place += len(line)
    self.digest = digest.hexdigest()
    self._starts = np.array(starts, np.int64)
    self._lines = np.array(lines, np.int64)
    self._data = _mapped(path)

  def __len__(self) -> int:
    """Return the number of rows."""
    return len(self._starts)

  def __getitem__(self, row: int) -> dict[str, Any]:
    """Return a row.

    Raises:
      RowError: it is not a JSON object.
    """
    start = int(self._starts[row])
    end = self._data.find(b"\n", start)
    line = self._data[start : end if end >= 0 else len(self._data)]
    try:
      value = json.loads(line)
    except ValueError as error:
      raise RowError(f"{self.where(row)}: not JSON: {error}") from error
    if not isinstance(value, dict):
      raise RowError(f"{self.where(row)}: not a JSON object")
    return value

  def where(self, row: int) -> str:
    """Return file and line of a row, as messages name it."""
    return f"{self.path}:{self._lines[row]}"


def _mapped(path: pathlib.Path) -> mmap.mmap | bytes:
  """Return the content of a file, without reading it."""
  with open(path, "rb") as file:
    if not os.fstat(file.fileno()).st_size:
      return b""  # nothing can be mapped
    return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def item_of(
  rows: JsonLines, row: int, fields: Mapping[str, str]
) -> dict[str, Any]:
  """Return a row as an item of a source.

  Args:
    rows: of the file.
    row: number of the row.
    fields: which column is the item's "question", and which its "answer". The
      other columns become its metadata.

  Raises:
    RowError: the row lacks one of these columns, or the question is no text.
  """
  columns = rows[row]
  for entry, column in fields.items():
    if column not in columns:
      have = ", ".join(map(repr, columns)) or "no column"
      raise RowError(
        f"{rows.where(row)}: no column {column!r} for the {entry}; it has"
        f" {have}"
      )
  question = columns[fields["question"]]
  if not isinstance(question, str) or not question.strip():
    raise RowError(
      f"{rows.where(row)}: the column {fields['question']!r} is"
      f" {question!r:.40}, not a text"
    )
  named = set(fields.values())
  metadata = {k: v for k, v in columns.items() if k not in named}
  entries = {entry: columns[column] for entry, column in fields.items()}
  return {"index": row, **entries, "metadata": metadata}


def bad_rows(
  rows: JsonLines, fields: Mapping[str, str]
) -> Iterator[tuple[int, RowError]]:
  """Yield the number of each row that cannot be used, and why."""
  for row in range(len(rows)):
    try:
      item_of(rows, row, fields)
    except RowError as error:
      yield row, error
