"""Descriptions of tools as JSON schemas, and arguments checked against them.

A Python function with type hints and a docstring in Google's style becomes the
description that chat templates and OpenAI's interface take. It equals that of
transformers' `get_json_schema`, without the type that the function returns.
"""

from collections.abc import Callable, Mapping
import enum
import inspect
import json
import re
import types
import typing
from typing import Any

_SCALARS = {
  int: "integer",
  float: "number",
  str: "string",
  bool: "boolean",
  type(None): "null",
}
_TYPES = {**_SCALARS, list: "array", tuple: "array", dict: "object"}
_NOT_IN = "is not one of the types that JSON has"
# Of a docstring: what stands before its sections, and the arguments.
_ABOUT = re.compile(
  r"^(.*?)\s*(?:\n\s*(?:Args|Returns|Raises|Yields):|\Z)", re.S
)
_ARGUMENTS = re.compile(r"\n\s*Args:\n(.*?)\s*(?:\n\w+:|\Z)", re.S)
_ARGUMENT = re.compile(
  r"(?:^|\n)([ \t]*)(\w+)(?:[ \t]*\([^)\n]*\))?:\s*(.*?)\s*"
  r"(?=\n(?!\1[ \t])[ \t]*\w+(?:[ \t]*\([^)\n]*\))?:|\Z)",
  re.S,
)
_CHOICES = re.compile(r"\(choices:\s*(.*?)\)\s*$", re.I)
_MAX_SHOWN = 60


def of_function(
  function: Callable[..., Any], name: str | None = None
) -> dict[str, Any]:
  """Return the description of a function as a tool.

  Args:
    function: has a type hint for each argument, and a docstring. What its
      section "Args:" says of an argument is described too.
    name: of the tool; by default that of the function.

  Raises:
    ValueError: the function cannot be described, and why.
  """
  name = name or function.__name__
  if not (text := inspect.getdoc(function)):
    raise ValueError(f"the tool {name} has no docstring")
  try:
    hints = typing.get_type_hints(function)
  except (
    *(ArithmeticError, AttributeError, LookupError),
    *(NameError, SyntaxError, TypeError),
  ) as error:
    raise ValueError(f"the tool {name} has a wrong hint: {error}") from error
  described = _described_arguments(text)
  properties, required = {}, []
  for argument, parameter in inspect.signature(function).parameters.items():
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
      raise ValueError(f"the tool {name} takes any number of arguments")
    if parameter.kind is parameter.POSITIONAL_ONLY:
      raise ValueError(f"the tool {name} takes {argument!r} only by position")
    if argument not in hints:
      raise ValueError(f"the tool {name} has no type hint for {argument!r}")
    try:
      schema = _of_hint(hints[argument])
      about = described.get(argument)
      if about and (choices := _CHOICES.search(about)):
        schema["enum"] = json.loads(choices[1])
        about = about[: choices.start()].strip()
    except (TypeError, ValueError) as error:
      raise ValueError(f"the tool {name}: {argument}: {error}") from error
    if about:
      schema["description"] = about
    properties[argument] = schema
    if parameter.default is parameter.empty:
      required.append(argument)
  parameters = {"type": "object", "properties": properties}
  if required:
    parameters["required"] = required
  about = _ABOUT.match(text)
  assert about is not None
  return of_parameters(name, about[1].strip(), parameters)


def of_parameters(
  name: str, description: str, parameters: Mapping[str, Any]
) -> dict[str, Any]:
  """Return the description of a tool, from the schema of its arguments."""
  return {
    "type": "function",
    "function": {
      "name": name,
      "description": description,
      "parameters": dict(parameters),
    },
  }


def _described_arguments(text: str) -> dict[str, str]:
  found = _ARGUMENTS.search(text)
  if found is None:
    return {}
  lines = [line for line in found[1].split("\n") if line.strip()]
  arguments = _ARGUMENT.findall("\n".join(lines))
  return {name: re.sub(r"\s*\n\s*", " ", about) for _, name, about in arguments}


def _of_hint(hint: Any) -> dict[str, Any]:
  """Return the schema of a type."""
  origin, inner = typing.get_origin(hint), typing.get_args(hint)
  if hint is Any:
    return {}
  if hint in _TYPES:
    return {"type": _TYPES[hint]}
  if isinstance(hint, type) and issubclass(hint, enum.Enum) and len(hint):
    return _of_values([member.value for member in hint])
  if origin is typing.Literal:
    return _of_values(list(inner))
  if origin in (typing.Union, types.UnionType):
    return _of_union([x for x in inner if x is not type(None)], len(inner))
  if origin is list and inner:
    return {"type": "array", "items": _of_hint(inner[0])}
  if origin is tuple and len(inner) > 1 and Ellipsis not in inner:
    return {"type": "array", "prefixItems": [_of_hint(x) for x in inner]}
  if origin is tuple and len(inner) == 2:
    return {"type": "array", "items": _of_hint(inner[0])}
  if origin is dict and len(inner) == 2 and inner[0] in (str, Any):
    return {"type": "object", "additionalProperties": _of_hint(inner[1])}
  raise ValueError(f"the type {hint} {_NOT_IN}")


def _of_union(kinds: list[Any], num_all: int) -> dict[str, Any]:
  schemas = [_of_hint(kind) for kind in kinds]
  if len(schemas) == 1:
    made = schemas[0]
  elif all(schema.keys() == {"type"} for schema in schemas):
    names = sorted({schema["type"] for schema in schemas})
    made = {"type": names[0] if len(names) == 1 else names}
  else:
    made = {"anyOf": schemas}
  return made | {"nullable": True} if len(kinds) < num_all else made


def _of_values(values: list[Any]) -> dict[str, Any]:
  if unknown := [value for value in values if type(value) not in _SCALARS]:
    raise ValueError(f"the value {unknown[0]!r} {_NOT_IN}")
  names = list(dict.fromkeys(_SCALARS[type(value)] for value in values))
  return {"type": names[0] if len(names) == 1 else names, "enum": values}


def as_hinted(
  function: Callable[..., Any], arguments: Mapping[str, Any]
) -> dict[str, Any]:
  """Return arguments with the types of a function's hints that JSON lacks.

  Args:
    function: as `of_function` takes it.
    arguments: that fit its description.
  """
  hints = typing.get_type_hints(function)
  return {name: _as(value, hints[name]) for name, value in arguments.items()}


def _as(value: Any, hint: Any) -> Any:
  """Return a value as an enum, a tuple or a whole number, if a type is that."""
  origin, inner = typing.get_origin(hint), typing.get_args(hint)
  if isinstance(hint, type) and issubclass(hint, enum.Enum):
    return hint(value)
  if hint is int and isinstance(value, float):  # 3.0, which JSON takes for 3
    return int(value)
  if origin in (typing.Union, types.UnionType):
    fitting = [x for x in inner if not _reason(value, _of_hint(x), "")]
    return _as(value, fitting[0])
  if origin is dict:
    return {name: _as(each, inner[1]) for name, each in value.items()}
  if origin is list:
    return [_as(each, inner[0]) for each in value]
  if origin is tuple and Ellipsis not in inner:
    return tuple(map(_as, value, inner))
  if hint is tuple or origin is tuple:
    return tuple(_as(each, inner[0]) if inner else each for each in value)
  return value


def reason_against(arguments: Any, parameters: Mapping[str, Any]) -> str:
  """Return what is wrong with the arguments of a call, or nothing.

  Args:
    arguments: of the call, by name.
    parameters: the schema of the arguments. Of what a schema can say, types,
      names, choices and alternatives are checked; the tool sees the rest.
  """
  known = parameters.get("properties", {})
  if isinstance(arguments, dict) and not parameters.get("additionalProperties"):
    for name in arguments:
      if name not in known:
        names = ", ".join(known) or "none"
        return f"there is no argument {name!r:.{_MAX_SHOWN}}; there are {names}"
  return _reason(arguments, parameters, "")


def _reason(value: Any, schema: Any, where: str) -> str:
  """Return how a value differs from a schema, or nothing."""
  if not isinstance(schema, Mapping):  # as true, which takes anything
    return f"{where or 'it'} is not allowed" if schema is False else ""
  if value is None and schema.get("nullable"):
    return ""
  shown = f"{where or 'the arguments'}: {value!r:.{_MAX_SHOWN}}"
  for key in ("anyOf", "oneOf"):
    kinds = schema.get(key)
    if kinds and all(_reason(value, each, where) for each in kinds):
      return f"{shown} is none of {json.dumps(kinds)}"
  if kinds := schema.get("type"):
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if not any(_is_of(value, kind) for kind in kinds):
      return f"{shown} is not of type {' or '.join(map(str, kinds))}"
  choices = schema.get("enum")
  # True equals 1 in Python, and is no integer in JSON.
  if choices is not None and not any(
    value == x and isinstance(value, bool) == isinstance(x, bool)
    for x in choices
  ):
    return f"{shown} is none of {json.dumps(choices, ensure_ascii=False)}"
  return "".join(_reasons_inside(value, schema, where)[:1])


def _reasons_inside(value: Any, schema: Mapping[str, Any], where: str) -> list:
  """Return how the parts of a value differ from a schema."""
  reasons = []
  if isinstance(value, dict):
    properties = schema.get("properties", {})
    others = schema.get("additionalProperties", True)
    for name in schema.get("required", ()):
      if name not in value:
        reasons.append(f"{_inside(where, name)} is missing")
    for name, each in value.items():
      inner = properties.get(name, others)
      reasons.append(_reason(each, inner, _inside(where, name)))
  elif isinstance(value, list):
    first = schema.get("prefixItems", ())
    if first and len(value) != len(first):
      reasons.append(f"{where} has {len(value)} entries, not {len(first)}")
    for number, each in enumerate(value):
      is_first = number < len(first)
      inner = first[number] if is_first else schema.get("items", True)
      reasons.append(_reason(each, inner, f"{where}[{number}]"))
  return [reason for reason in reasons if reason]


def _inside(where: str, name: str) -> str:
  name = name[:_MAX_SHOWN]
  return f"{where}.{name}" if where else name


def _is_of(value: Any, kind: str) -> bool:
  """Return whether a value is of a type of JSON; 3.0 is an integer there."""
  if kind == "number":
    return isinstance(value, int | float) and not isinstance(value, bool)
  if kind == "integer":
    is_whole = isinstance(value, float) and value.is_integer()
    return is_whole or (isinstance(value, int) and not isinstance(value, bool))
  kinds = {name: key for key, name in _TYPES.items()} | {"array": list}
  return isinstance(value, kinds[kind]) if kind in kinds else True
