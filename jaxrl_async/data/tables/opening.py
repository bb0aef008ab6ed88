"""Opens the table that a URI names."""

import glob
import pathlib

from jaxrl_async.data.tables import arrayrecord
from jaxrl_async.data.tables import hugging_face
from jaxrl_async.data.tables import jsonl
from jaxrl_async.data.tables import parquet
from jaxrl_async.data.tables import table as table_lib
from jaxrl_async.data.tables import uri as uri_lib

# The class of each format, and the files that it takes from a directory.
_FILES = {
  "jsonl": (jsonl.JsonLines, ("*.jsonl", "*.jsonl.gz")),
  "json": (jsonl.JsonList, ("*.json", "*.json.gz")),
  "parquet": (parquet.Parquet, ("*.parquet",)),
  "arrayrecord": (arrayrecord.ArrayRecord, ("*.arrayrecord*",)),
}


def open_table(uri: uri_lib.Uri) -> table_lib.Table:
  """Open the files of a URI.

  Raises:
    TableError: there are none, or they cannot be read.
  """
  if uri.kind not in _FILES:
    return hugging_face.HuggingFace(uri)
  kind, names = _FILES[uri.kind]
  paths = _paths(uri.place, names)
  for path in paths:
    # A pipe or a device may have no end.
    if path.exists() and not path.is_file():
      raise table_lib.TableError(
        f"{path} is neither a file nor a directory; copy its content to a file"
      )
  parts = [kind(path) for path in paths]
  return parts[0] if len(parts) == 1 else table_lib.Joined(parts)


def test_split(uri: uri_lib.Uri) -> uri_lib.Uri | None:
  """Return the dataset's own split for evaluations, or None if it has none.

  Raises:
    TableError: the dataset cannot be read.
  """
  if uri.kind in _FILES:
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
  except (OSError, ValueError) as error:
    if isinstance(error, table_lib.TableError):
      raise
    raise table_lib.TableError(
      f"{place!r:.60} cannot be read: {table_lib.reason(error)}"
    ) from error
  return [path]
