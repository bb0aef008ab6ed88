"""Grammars of answers and calls of tools, for guided decoding."""

from collections.abc import Mapping, Sequence
import json
from typing import Any

from jaxrl_async.text import tokenizer as tokenizer_lib
from jaxrl_async.tools import formats

# Space between parts of JSON is a space, or a line's end and an indentation.
# Where nothing else is likely, models would write it without an end.
_SPACE = r" |\n {0,40}"
# What stands before and after a call in each format.
_MARKS = {"hermes": ("<tool_call>\n", "\n</tool_call>"), "llama": ("", "")}


def has_beginning(tool_format: str) -> bool:
  """Return whether a call of the format is known by its first characters.

  Only then may free text stand before calls that a grammar guides.
  """
  return bool(_MARKS[tool_format][0])


def grammar(
  schema: Mapping[str, Any] | None,
  functions: Sequence[Mapping[str, Any]] = (),
  tool_format: str = "hermes",
  tokenizer: tokenizer_lib.Tokenizer | None = None,
  *,
  may_speak: bool = False,
  is_single: bool = False,
) -> str:
  """Return a grammar in Lark's notation, as llguidance reads it.

  Args:
    schema: the JSON schema of an answer; None if only calls are allowed.
    functions: those that may be called instead, with names and the schemas of
      their parameters.
    tool_format: how calls are written.
    tokenizer: of the policy; it knows which marks are special tokens.
    may_speak: whether any text may be written before and instead of calls.
    is_single: whether there may be one call at most.
  """
  rules: dict[str, str] = {}
  if functions:
    begin, end = (_mark(mark, tokenizer) for mark in _MARKS[tool_format])
    called = _json({"anyOf": [_call(each, tool_format) for each in functions]})
    rules |= {"call": f"{begin} called {end}", "called": called}
    rules["start"] = "call" if is_single else r'call ("\n" call)*'
  if schema is not None:
    rules["answer"] = _json(schema)
    rules["start"] = " | ".join((*filter(None, [rules.get("start")]), "answer"))
  if may_speak:
    rules["TEXT"] = r"/(.|\n)*/"
    if begin.startswith("<"):  # a token of its own
      rules["call"] = "TEXT " + rules["call"]
    else:
      # The call begins as soon as its mark is there.
      mark = _MARKS[tool_format][0]
      rules["begin[lazy]"] = f"TEXT {json.dumps(mark.strip())}"
      rules["call"] = rf'begin "\n" called {end}'
    rules["start"] = "call | TEXT" if is_single else "call* TEXT"
  return "\n".join(f"{name}: {rule}" for name, rule in rules.items())


def _json(schema: Mapping[str, Any]) -> str:
  options = {"whitespace_pattern": _SPACE}
  return "%json " + json.dumps({**schema, "x-guidance": options})


def _call(function: Mapping[str, Any], tool_format: str) -> dict[str, Any]:
  """Return the schema of a call."""
  arguments = formats.FORMATS[tool_format].arguments
  parameters = function.get("parameters") or {"type": "object"}
  # What the schema refers to, as "#/$defs/Place", is within itself.
  parameters = {**parameters, "$id": f"function:///{function['name']}"}
  return {
    "type": "object",
    "properties": {"name": {"const": function["name"]}, arguments: parameters},
    "required": ["name", arguments],
    "additionalProperties": False,
  }


def _mark(text: str, tokenizer: tokenizer_lib.Tokenizer | None) -> str:
  """Return a mark in Lark's notation, in which special tokens stand bare."""
  special = tokenizer and tokenizer.special_token_in(text)
  if not special:
    return json.dumps(text) if text else ""
  before, after = (part and json.dumps(part) for part in text.split(special))
  return f"{before} {special} {after}".strip()
