"""Rows of JSON: a file with an object in each line, or with a list of them."""

import gzip
import hashlib
import io
import json
import mmap
import os
import pathlib
from typing import Any
import zlib

import numpy as np

from jaxrl_async.data.tables import table as table_lib


class JsonLines:
  """The rows of a JSON Lines file, read when they are asked for.

  Only the place of each row is held in memory, and the content of a file that
  is compressed (.gz). Blank lines are left out.
  """

  def __init__(self, path: pathlib.Path):
    """Find the rows of a file.

    Raises:
      TableError: the file cannot be read.
    """
    self._path = path
    digest = hashlib.blake2b(digest_size=16)
    starts, lines, place = [], [], 0
    try:
      if path.suffix == ".gz":
        self._data: mmap.mmap | bytes = gzip.decompress(path.read_bytes())
        content: Any = io.BytesIO(self._data)
      else:
        self._data = _mapped(path)
        content = open(path, "rb")
      with content as file:
        for number, line in enumerate(file, 1):
          digest.update(line)
          if line.strip():
            starts.append(place)
            lines.append(number)
          place += len(line)
    except (OSError, EOFError, ValueError, zlib.error) as error:
      raise table_lib.TableError(
        f"{path} cannot be read: {table_lib.reason(error)}"
      ) from error
    self.digest = digest.hexdigest()
    self._starts = np.array(starts, np.int64)
    self._lines = np.array(lines, np.int64)

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
    return parse(line, self.where(row))

  def where(self, row: int) -> str:
    """Return file and line of a row."""
    return f"{self._path}:{self._lines[row]}"


class JsonList:
  """The rows of a JSON file that is one list of objects, held in memory."""

  def __init__(self, path: pathlib.Path):
    """Read a file.

    Raises:
      TableError: the file cannot be read, or is no list.
    """
    self._path = path
    try:
      content = path.read_bytes()
      if path.suffix == ".gz":
        content = gzip.decompress(content)
      self._rows = json.loads(content)
    except (OSError, EOFError, ValueError, zlib.error, RecursionError) as error:
      raise table_lib.TableError(
        f"{path} cannot be read: {table_lib.reason(error)}"
      ) from error
    if not isinstance(self._rows, list):
      raise table_lib.TableError(
        f"{path} is no list of objects; for a file with an object in each line"
        " use jsonl:"
      )
    self.digest = hashlib.blake2b(content, digest_size=16).hexdigest()

  def __len__(self) -> int:
    """Return the number of rows."""
    return len(self._rows)

  def __getitem__(self, row: int) -> dict[str, Any]:
    """Return a row.

    Raises:
      RowError: it is not an object.
    """
    return _object(self._rows[row], self.where(row))

  def where(self, row: int) -> str:
    """Return file and number of a row, from 0."""
    return f"{self._path}: row {row}"


def parse(text: bytes, where: str) -> dict[str, Any]:
  """Return the object that a text in JSON describes.

  Raises:
    RowError: it is not a JSON object.
  """
  try:
    value = json.loads(text)
  except (ValueError, RecursionError) as error:
    raise table_lib.RowError(f"{where}: not JSON: {error}") from error
  return _object(value, where)


def _object(value: Any, where: str) -> dict[str, Any]:
  if not isinstance(value, dict):
    raise table_lib.RowError(f"{where}: not a JSON object")
  return value


def _mapped(path: pathlib.Path) -> mmap.mmap | bytes:
  """Return the content of a file, without reading it."""
  with open(path, "rb") as file:
    if not os.fstat(file.fileno()).st_size:
      return b""  # nothing can be mapped
    return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
