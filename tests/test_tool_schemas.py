"""Descriptions of functions as tools, and checks of arguments."""

import enum
import json
from typing import Any, Literal, Optional

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import jsonschema
import pytest

from jaxrl_async.tools import schema


class Colour(enum.StrEnum):
  RED = "red"
  BLUE = "blue"


def nothing():
  """Take no arguments."""


def multiply(a: int, b: float = 2.0) -> float:
  """Multiply two numbers.

  Args:
    a: the first number
    b: the second number: it may be
      any number
  """
  return a * b


def several(
  text: str, is_short: bool, words: list[str], counts: dict[str, int]
):
  """Take several types.

  With a second paragraph.

  Args:
    text: a text
    is_short: whether it is short

    words: its words
    counts: of each word

  Returns:
    nothing
  """
  del text, is_short, words, counts


def optional(a: int | None = None, b: Optional[list[int]] = None):  # noqa: UP045
  """Take what may be null.

  Args:
    a: a number
    b: several
  """
  del a, b


def unions(a: int | str, b: list[int] | str | None, c: int | float = 1):
  """Take one of several types.

  Args:
    a: one
    b: two
    c: three
  """
  del a, b, c


def choices(a: Literal["x", "y"], b: Literal[1, "z", None], c: Colour):
  """Take one of several values.

  Args:
    a: letters
    b: anything
    c: a colour
  """
  del a, b, c


def chosen(drink: str):
  """Take what the docstring allows.

  Args:
    drink: what to drink (choices: ["tea", "coffee"])
  """
  del drink


def nested(a: list[list[dict[str, float]]], b: tuple[int, str], c: Any):
  """Take what is in one another.

  Args:
    a: lists
    b: a pair
    c: whatever there is
  """
  del a, b, c


def bare(a: list, b: dict, c: tuple, d: None):
  """Take types without what is in them.

  Args:
    a: a list
    b: an object
    c: a tuple
    d: nothing
  Raises:
    ValueError: never
  """
  del a, b, c, d


def typed(a: int, b: str):
  """Have types in the docstring.

  Args:
    a: a line
       that goes on: here
    b: another
  """
  del a, b


async def waits(seconds: float):
  """Wait.

  Args:
    seconds: for so long
  """
  del seconds


def one_line(a: int):
  """Take one argument.

  Args:
    a: 1
  """
  del a


FUNCTIONS = [
  *(nothing, multiply, several, optional, unions, choices, chosen, nested),
  *(bare, typed, waits, one_line),
]


@pytest.mark.slow
def test_functions_are_described_as_by_transformers():
  transformers = pytest.importorskip("transformers.utils")
  for function in FUNCTIONS:
    expected = transformers.get_json_schema(function)
    expected["function"].pop("return", None)
    assert schema.of_function(function) == expected


def undescribed(a: int):
  """Say nothing of it."""
  del a


def test_an_argument_needs_no_description():
  described = schema.of_function(undescribed, "renamed")
  assert described["function"]["name"] == "renamed"
  parameters = described["function"]["parameters"]
  assert parameters["properties"] == {"a": {"type": "integer"}}


def no_hint(a):
  """Have no hint."""
  del a


def any_number(*values: int):
  """Take any number."""
  del values


def by_position(a: int, /):
  """Take it by position."""
  del a


def unknown_type(a: set[int]):
  """Take a set."""
  del a


def unknown_name(a: "Missing"):  # noqa: F821
  """Name what is not there."""
  del a


def no_attribute(a: "json.Missing"):
  """Name what a module does not have."""
  del a


def no_type(a: {"x": int}):  # noqa: F821
  """Have a hint that is no type."""
  del a


def no_number(a: "1/0"):  # noqa: F722
  """Have a hint that cannot be evaluated."""
  del a


def keys_of_numbers(a: dict[int, str]):
  """Take a dict whose keys JSON has as texts."""
  del a


@pytest.mark.parametrize(
  "function, reason",
  [
    (lambda a: a, "has no docstring"),
    (no_hint, "has no type hint for 'a'"),
    (any_number, "takes any number"),
    (by_position, "only by position"),
    (unknown_type, r"a: the type set\[int\] is not one"),
    (unknown_name, "has a wrong hint"),
    (no_attribute, "has a wrong hint"),
    (no_type, "no_type: a: "),
    (no_number, "has a wrong hint"),
    (keys_of_numbers, r"a: the type dict\[int, str\] is not one"),
  ],
)
def test_a_function_that_cannot_be_described_is_refused(function, reason):
  with pytest.raises(ValueError, match=reason):
    schema.of_function(function)


def parameters_of(function):
  return schema.of_function(function)["function"]["parameters"]


@pytest.mark.parametrize(
  "function, arguments, reason",
  [
    (multiply, {"a": 1}, ""),
    (multiply, {"a": 1.0, "b": 2}, ""),
    (multiply, {"a": 1.5}, "a: 1.5 is not of type integer"),
    (multiply, {"a": True}, "a: True is not of type integer"),
    (multiply, {}, "a is missing"),
    (multiply, {"a": 1, "c": 2}, "there is no argument 'c'; there are a, b"),
    (multiply, [], "the arguments: [] is not of type object"),
    (several, {"text": 1}, "is_short is missing"),
    (optional, {"a": None, "b": [1]}, ""),
    (optional, {"b": [1, "x"]}, "b[1]: 'x' is not of type integer"),
    (unions, {"a": "x", "b": [1]}, ""),
    (unions, {"a": [], "b": "x"}, "a: [] is not of type integer or string"),
    (choices, {"a": "z", "b": 1, "c": "red"}, 'a: \'z\' is none of ["x", "y"]'),
    (choices, {"a": "x", "b": True, "c": "red"}, "b: True is not of type"),
    (nested, {"a": [[{"x": 1}]], "b": [1, "x"], "c": []}, ""),
    (nested, {"a": [[{"x": "y"}]], "b": [1, "x"], "c": 1}, "a[0][0].x: 'y' is"),
    (nested, {"a": [], "b": [1], "c": 1}, "b has 1 entries, not 2"),
  ],
)
def test_arguments_are_checked(function, arguments, reason):
  found = schema.reason_against(arguments, parameters_of(function))
  assert found.startswith(reason) and bool(found) == bool(reason)


_VALUES = st.recursive(
  st.none()
  | st.booleans()
  | st.integers(-2, 2)
  | st.sampled_from([1.0, 1.5])
  | st.sampled_from(["x", "red", "tea", "z"]),
  lambda inner: (
    st.lists(inner, max_size=2)
    | st.dictionaries(st.sampled_from("ab"), inner, max_size=2)
  ),
  max_leaves=4,
)


@settings(deadline=None)
@given(st.sampled_from([multiply, unions, choices, chosen, nested]), st.data())
def test_what_is_refused_is_what_the_standard_refuses(function, data):
  parameters = parameters_of(function)
  arguments = {name: data.draw(_VALUES) for name in parameters["properties"]}
  # The standard does not know this word of transformers.
  text = json.dumps(parameters)
  if '"nullable"' in text:
    kind = parameters["properties"]["b"]
    parameters["properties"]["b"] = {"anyOf": [kind, {"type": "null"}]}
  if "b" in parameters["properties"] and function is nested:
    parameters["properties"]["b"] |= {"minItems": 2, "items": False}
  is_valid = jsonschema.Draft202012Validator(parameters).is_valid(arguments)
  reason = schema.reason_against(arguments, parameters_of(function))
  assert (reason == "") == is_valid
