"""The rows of Arrow tables in Python's values."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np


class Rows(Sequence[dict]):
  """The rows of a table, by number.

  A float of 16 or 32 bits becomes the float of 64 bits with the same shortest
  text: 0.1 rather than 0.10000000149011612. A time of day that is not whole in
  microseconds is an error of its row, because Python's has no nanoseconds.
  """

  def __init__(self, length: int, schema: Any, at: Callable[[int], Any]):
    """Take what returns a table of one row, by its number."""
    import pyarrow

    self._length, self._at = length, at
    self._kinds = {
      field.name: field.type for field in schema if "float" in str(field.type)
    }
    self._times = {
      i: field.with_type(pyarrow.time64("us"))
      for i, field in enumerate(schema)
      if "time64[ns]" in str(field.type)
    }

  def __len__(self) -> int:
    """Return the number of rows."""
    return self._length

  def __getitem__(self, row):
    """Return the columns of a row."""
    table = self._at(row)
    for i, field in self._times.items():
      table = table.set_column(i, field, table.column(i).cast(field.type))
    (columns,) = table.to_pylist()
    for name, kind in self._kinds.items():
      columns[name] = _shortest(columns[name], kind)
    return columns


def _shortest(value: Any, kind: Any) -> Any:
  """Return a value whose short numbers are as they are written."""
  from pyarrow import types

  if value is None:
    return None
  if types.is_float32(kind):
    return float(str(np.float32(value)))
  if types.is_float16(kind):
    return float(str(np.float16(value)))
  if types.is_dictionary(kind):
    return _shortest(value, kind.value_type)
  if types.is_struct(kind):
    return {each.name: _shortest(value[each.name], each.type) for each in kind}
  if types.is_map(kind):
    key, item = kind.key_type, kind.item_type
    return [(_shortest(k, key), _shortest(x, item)) for k, x in value]
  if hasattr(kind, "value_type"):
    return [_shortest(each, kind.value_type) for each in value]
  return value
