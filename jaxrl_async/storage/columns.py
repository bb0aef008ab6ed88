"""Rows of named values in Parquet files, for programs and for people.

polars writes and reads them. A file is written as a whole or not at all.
"""

from collections.abc import Mapping, Sequence
import io
import pathlib
from typing import Any

from jaxrl_async.storage import disk


def write(
  path: pathlib.Path,
  rows: Sequence[Mapping[str, Any]],
  schema: Mapping[str, Any],
) -> None:
  """Write rows to a file, which is replaced if it exists.

  Equal rows give equal bytes.

  Args:
    path: of the file.
    rows: each with a value, or None, for every column.
    schema: the columns in order and their types, which are Python's or those of
      polars.

  Raises:
    StorageError: the file could not be written.
  """
  import polars  # half a second, which only those who write should wait for

  table = polars.DataFrame(list(rows), schema=dict(schema), orient="row")
  data = io.BytesIO()  # polars has errors of its own for a disk that refuses
  table.write_parquet(data, compression="zstd")
  with disk.replacing(path) as incomplete:
    path.parent.mkdir(exist_ok=True)
    incomplete.write_bytes(data.getvalue())


def read(path: pathlib.Path) -> list[dict[str, Any]]:
  """Return the rows of a file.

  Raises:
    FileNotFoundError: there is no file.
    ValueError: the file is damaged.
  """
  import polars

  if not path.exists():
    raise FileNotFoundError(f"{path} does not exist")
  try:
    return polars.read_parquet(path).to_dicts()
  except polars.exceptions.PolarsError as error:
    reason = " ".join(str(error).split())
    raise ValueError(f"{path} is not a Parquet file: {reason}") from error
