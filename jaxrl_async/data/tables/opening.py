"""Opens the table that a URI names, whatever its format."""

from collections.abc import Mapping, Sequence
import glob
import gzip
import hashlib
import io
import json
import mmap
import os
import pathlib
import types
from typing import Any
import zlib

import numpy as np

from jaxrl_async.data.tables import arrow
from jaxrl_async.data.tables import hugging_face
from jaxrl_async.data.tables import table as table_lib
from jaxrl_async.data.tables import uri as uri_lib
from jaxrl_async.environments import verifiers

_NONE: Mapping[str, Any] = types.MappingProxyType({})


def open_table(
  uri: uri_lib.Uri, params: Mapping[str, Any] = _NONE
) -> table_lib.Table:
  """Open the files of a URI, or make the tasks of an environment.

  Args:
    params: settings of the environment.
  """
  if uri.kind == uri_lib.VERIFIERS:
    return _environment(uri, params)
  if uri.kind not in _FILES:
    return hugging_face.open_split(uri)
  read, names = _FILES[uri.kind]
  parts = []
  for path in _paths(uri.place, names):
    # A pipe or a device may have no end.
    if path.exists() and not path.is_file():
      raise table_lib.TableError(
        f"{path} is neither a file nor a directory; copy its content to a file"
      )
    try:
      parts.append(read(path))
    except table_lib.TableError:
      raise
    except (
      OSError,
      EOFError,
      ValueError,
      RuntimeError,
      LookupError,
      zlib.error,
    ) as error:
      raise table_lib.TableError(
        f"{path} cannot be read: {table_lib.reason(error)}"
      ) from error
  return table_lib.joined(parts)


def test_split(uri: uri_lib.Uri) -> uri_lib.Uri | None:
  """Return the dataset's own split for evaluations, or None if it has none."""
  if uri.kind in _FILES or uri.kind == uri_lib.VERIFIERS:
    return None
  return hugging_face.test_split(uri)


def _paths(place: str, names: tuple[str, ...]) -> list[pathlib.Path]:
  """Return the files of a path, a pattern or a directory, in order of name."""
  path = pathlib.Path(place).expanduser()
  try:
    if path.is_dir():
      found = sorted({p for name in names for p in path.glob(name)})
      if not found:
        raise table_lib.TableError(f"{path} holds no file {' or '.join(names)}")
      return found
    if glob.has_magic(place) and not path.exists():
      found = sorted(map(pathlib.Path, glob.glob(str(path))))
      if not found:
        raise table_lib.TableError(f"no file matches {place}")
      return found
  except table_lib.TableError:
    raise
  except (OSError, ValueError) as error:
    raise table_lib.TableError(
      f"{place!r:.60} cannot be read: {table_lib.reason(error)}"
    ) from error
  return [path]


def _environment(
  uri: uri_lib.Uri, params: Mapping[str, Any]
) -> table_lib.Table:
  try:
    rows = verifiers.rows(uri.place, dict(uri.options), params)
  except verifiers.UnusableError as error:
    raise table_lib.TableError(str(error)) from error
  content = json.dumps(rows, sort_keys=True).encode()
  digest = hashlib.blake2b(content, digest_size=16).hexdigest()
  return table_lib.Table(
    rows, table_lib.checked_object, digest, lambda row: f"{uri}: task {row}"
  )


# -- formats -------------------------------------------------------------------


class _Lines(Sequence[bytes]):
  """The lines of a file's content that are not blank.

  Only the place of each of them is held in memory, and the content of a file
  that is compressed (.gz).
  """

  def __init__(self, data: mmap.mmap | bytes):
    self._data = data
    file = data if isinstance(data, mmap.mmap) else io.BytesIO(data)
    digest = hashlib.blake2b(digest_size=16)
    starts, numbers, place = [], [], 0
    for number, line in enumerate(iter(file.readline, b""), 1):
      digest.update(line)
      if line.strip():
        starts.append(place)
        numbers.append(number)
      place += len(line)
    self.digest = digest.hexdigest()
    self.numbers = np.array(numbers, np.int64)
    self._starts = np.array(starts, np.int64)

  def __len__(self) -> int:
    return len(self._starts)

  def __getitem__(self, row):
    start = int(self._starts[row])
    end = self._data.find(b"\n", start)
    return self._data[start : end if end >= 0 else len(self._data)]


def _json_lines(path: pathlib.Path) -> table_lib.Table:
  lines = _Lines(_content(path))
  return table_lib.Table(
    lines,
    table_lib.from_json,
    lines.digest,
    lambda row: f"{path}:{lines.numbers[row]}",
  )


def _json_list(path: pathlib.Path) -> table_lib.Table:
  content = _content(path)[:]
  try:
    rows = json.loads(content)
  except RecursionError as error:
    raise ValueError("it is nested too deeply") from error
  if not isinstance(rows, list):
    raise table_lib.TableError(
      f"{path} is no list of objects; for a file with an object in each line"
      " use jsonl:"
    )
  digest = hashlib.blake2b(content, digest_size=16).hexdigest()
  return table_lib.Table(
    rows, table_lib.checked_object, digest, lambda row: f"{path}: row {row}"
  )


def _parquet(path: pathlib.Path) -> table_lib.Table:
  try:
    from pyarrow import parquet
  except ImportError as error:
    raise table_lib.TableError(
      "parquet: needs pyarrow; pip install jaxrl_async[parquet]"
    ) from error
  # All of it, because rows in a random order would decompress a group each.
  columns = parquet.ParquetFile(path).read()
  return table_lib.Table(
    arrow.Rows(
      columns.num_rows, columns.schema, lambda row: columns.slice(row, 1)
    ),
    table_lib.plain,
    _digest_of(path),
    lambda row: f"{path}: row {row}",
  )


def _array_record(path: pathlib.Path) -> table_lib.Table:
  # Grain depends on it, but not on every system.
  try:
    import array_record.python.array_record_module as array_record_module
  except ImportError as error:
    raise table_lib.TableError(
      "arrayrecord: needs array-record; pip install array-record"
    ) from error
  digest = _digest_of(path)
  reader = array_record_module.ArrayRecordReader(str(path))

  def read(row: int, where: str):
    try:
      (record,) = reader.read([row])
    except (ValueError, RuntimeError, IndexError) as error:
      raise table_lib.RowError(f"{where}: {table_lib.reason(error)}") from error
    return table_lib.from_json(record, where)

  return table_lib.Table(
    range(reader.num_records()),
    read,
    digest,
    lambda row: f"{path}: record {row}",
  )


def _content(path: pathlib.Path) -> mmap.mmap | bytes:
  """Return the content of a file; one that is not compressed is mapped."""
  if path.suffix == ".gz":
    return gzip.decompress(path.read_bytes())
  with open(path, "rb") as file:
    if not os.fstat(file.fileno()).st_size:
      return b""  # nothing can be mapped
    return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _digest_of(path: pathlib.Path) -> str:
  with open(path, "rb") as file:
    return hashlib.file_digest(
      file, lambda: hashlib.blake2b(digest_size=16)
    ).hexdigest()


# How each format is read, and the files that it takes from a directory.
_FILES = {
  "jsonl": (_json_lines, ("*.jsonl", "*.jsonl.gz")),
  "json": (_json_list, ("*.json", "*.json.gz")),
  "parquet": (_parquet, ("*.parquet",)),
  "arrayrecord": (_array_record, ("*.arrayrecord*",)),
}
