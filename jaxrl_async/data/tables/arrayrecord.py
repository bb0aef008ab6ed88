"""Rows of ArrayRecord files, each record of which is a JSON object."""

import pathlib
from typing import Any

from jaxrl_async.data.tables import jsonl
from jaxrl_async.data.tables import table as table_lib


class ArrayRecord:
  """The records of a file, read when they are asked for."""

  def __init__(self, path: pathlib.Path):
    """Open a file.

    Raises:
      TableError: it cannot be read.
    """
    # Grain depends on it, but not on every system.
    try:
      import array_record.python.array_record_module as array_record_module
    except ImportError as error:
      raise table_lib.TableError(
        "arrayrecord: needs array-record; pip install array-record"
      ) from error
    self._path = path
    try:
      self.digest = table_lib.digest_of(path)
      self._reader = array_record_module.ArrayRecordReader(str(path))
      self._num_rows = self._reader.num_records()
    except (OSError, ValueError, RuntimeError, IndexError) as error:
      raise table_lib.TableError(
        f"{path} cannot be read: {table_lib.reason(error)}"
      ) from error

  def __len__(self) -> int:
    """Return the number of records."""
    return self._num_rows

  def __getitem__(self, row: int) -> dict[str, Any]:
    """Return a record.

    Raises:
      RowError: it cannot be read, or is not a JSON object.
    """
    try:
      (record,) = self._reader.read([row])
    except (ValueError, RuntimeError, IndexError) as error:
      raise table_lib.RowError(
        f"{self.where(row)}: {table_lib.reason(error)}"
      ) from error
    return jsonl.parse(record, self.where(row))

  def where(self, row: int) -> str:
    """Return file and number of a record, from 0."""
    return f"{self._path}: record {row}"
