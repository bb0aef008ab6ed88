"""The item of a prompt as JSON, restored with exactly the same types.

A scorer must see the types that the dataset made, but JSON has no tuples and
only strings as keys. A value that JSON lacks becomes an object whose single key
names its type: (1, 2) is stored as {"!tuple": [1, 2]}.
"""

from typing import Any

import numpy as np

_COLLECTIONS: dict[str, type] = {
  "!tuple": tuple,
  "!set": set,
  "!frozenset": frozenset,
}
_TAGS = {kind: tag for tag, kind in _COLLECTIONS.items()}
_DICT, _NUMPY = "!dict", "!numpy"


class UnstorableError(TypeError):
  """An item holds a value of a type that cannot be stored as JSON here."""


def encode(value: Any) -> Any:
  """Return the value in types that `json` writes and reads unchanged.

  Raises:
    UnstorableError: it names the type that cannot be stored.
  """
  kind = type(value)
  if value is None or kind in (bool, int, float, str):
    return value
  if kind is list:
    return [encode(x) for x in value]
  if kind is dict:
    # A single key that begins like a tag would be read as one.
    is_plain = all(type(key) is str for key in value) and not (
      len(value) == 1 and next(iter(value)).startswith("!")
    )
    if is_plain:
      return {key: encode(x) for key, x in value.items()}
    return {_DICT: [[encode(key), encode(x)] for key, x in value.items()]}
  if kind in _TAGS:
    return {_TAGS[kind]: [encode(x) for x in value]}
  if isinstance(value, np.generic):
    plain = value.item()
    if type(plain) in (bool, int, float, str):
      return {_NUMPY: [value.dtype.str, plain]}
  raise UnstorableError(f"{value!r:.60} of type {kind.__name__}")


def decode(value: Any) -> Any:
  """Return the value that `encode` was given."""
  if type(value) is list:
    return [decode(x) for x in value]
  if type(value) is not dict:
    return value
  if len(value) == 1:
    ((tag, content),) = value.items()
    if tag in _COLLECTIONS:
      return _COLLECTIONS[tag](decode(x) for x in content)
    if tag == _DICT:
      return {decode(key): decode(x) for key, x in content}
    if tag == _NUMPY:
      dtype, plain = content
      return np.dtype(dtype).type(plain)
  return {key: decode(x) for key, x in value.items()}
