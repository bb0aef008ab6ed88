"""The JSON form of items: all types come back, and what has none is refused."""

import datetime
import enum
import json

from hypothesis import given
from hypothesis import strategies as st
import numpy as np
import pytest

from jaxrl_async.storage import item_json

_SCALARS = (
  st.none()
  | st.booleans()
  | st.integers()
  | st.floats()
  | st.text(max_size=4)
  | st.sampled_from(["!tuple", "!dict", np.str_("a"), np.int8(3)])
  | st.builds(np.float32, st.floats(width=32))
)
_KEYS = st.text(max_size=3) | st.sampled_from(["!set", 3, (1, "a"), None])
_ITEMS = st.recursive(
  _SCALARS,
  lambda inner: (
    st.lists(inner, max_size=3)
    | st.lists(inner, max_size=3).map(tuple)
    | st.dictionaries(_KEYS, inner, max_size=3)
    | st.sets(st.integers() | st.text(max_size=2), max_size=3)
    | st.frozensets(st.integers(), max_size=3)
  ),
)


def same(one, other):
  """Equal in value, type and order, NaN and numpy's types included."""
  if type(one) is not type(other):
    return False
  if isinstance(one, list | tuple):
    return len(one) == len(other) and all(map(same, one, other))
  if isinstance(one, dict):
    return same(list(one), list(other)) and same(
      list(one.values()), list(other.values())
    )
  return one == other or repr(one) == repr(other)


@given(_ITEMS)
def test_any_item_comes_back_with_its_types(item):
  text = json.dumps(item_json.encode(item))
  assert same(item_json.decode(json.loads(text)), item)


class Colour(enum.StrEnum):
  RED = "red"


@pytest.mark.parametrize(
  "value",
  [object(), datetime.date(2000, 1, 1), Colour.RED, 1j, np.zeros(2)],
)
def test_a_type_without_a_form_is_refused_by_name(value):
  with pytest.raises(item_json.UnstorableError, match=type(value).__name__):
    item_json.encode({"metadata": [value]})
