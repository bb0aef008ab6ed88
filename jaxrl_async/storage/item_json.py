"""A prompt's item as JSON, and back with the very types its scorer was given.

JSON has lists, but no tuples, and only strings for keys. What it lacks becomes
an object with one key that names the type: (1, 2) is {"!tuple": [1, 2]}.
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
  """An item holds a value of a type that has no JSON form here."""


def encode(value: Any) -> Any:
  """The value in types that `json` writes and reads unchanged.

  Raises:
    UnstorableError: names the type that has no such form.
  """
  kind = type(value)
  if value is None or kind in (bool, int, float, str):
    return value
  if kind is list:
    return [encode(x) for x in value]
  if kind is dict:
    # A single key that begins as a tag does would be read as one.
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
  """What `encode` was given."""
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
