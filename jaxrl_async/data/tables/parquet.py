"""Rows of Parquet files, through pyarrow (extra `parquet`)."""

import pathlib
from typing import Any

from jaxrl_async.data.tables import table as table_lib


class Parquet:
  """The rows of a file, held in memory in Arrow's columns.

  Parquet is read in groups of many rows. Rows in a random order would
  decompress a whole group each.
  """

  def __init__(self, path: pathlib.Path):
    """Read a file.

    Raises:
      TableError: pyarrow is missing, or cannot read the file.
    """
    try:
      import pyarrow
      from pyarrow import parquet
    except ImportError as error:
      raise table_lib.TableError(
        "parquet: needs pyarrow; pip install jaxrl_async[parquet]"
      ) from error
    self._path = path
    try:
      self.digest = table_lib.digest_of(path)
      self._table = parquet.ParquetFile(path).read()
    except (OSError, ValueError, pyarrow.ArrowException) as error:
      raise table_lib.TableError(
        f"{path} cannot be read: {table_lib.reason(error)}"
      ) from error

  def __len__(self) -> int:
    """Return the number of rows."""
    return self._table.num_rows

  def __getitem__(self, row: int) -> dict[str, Any]:
    """Return a row.

    Raises:
      RowError: it has a value that JSON cannot hold.
    """
    (columns,) = self._table.slice(row, 1).to_pylist()
    return table_lib.plain(columns, self.where(row))

  def where(self, row: int) -> str:
    """Return file and number of a row, from 0."""
    return f"{self._path}: row {row}"
