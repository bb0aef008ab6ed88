"""From the columns of a row to an item of a source."""

from collections.abc import Container, Mapping, Sequence
import contextlib
import dataclasses
import json
import math
from typing import Any

from jaxrl_async.config import sections
from jaxrl_async.data.tables import table as table_lib

_QUESTION, _ANSWER, _MESSAGES = "question", "answer", "messages"
TOOLS = "tools"  # that the assistant of a chat may call
# The last message of a chat, if it is the assistant's, and its text.
TURN, REPLY = "turn", "reply"


@dataclasses.dataclass(frozen=True)
class Columns:
  """Which columns of a table are which entries of an item.

  Attributes:
    fields: column by entry, or a path in a column of objects ("a.b"). Without
      an entry for the question or the answer it is the column of that name; ""
      means that there is none. Columns that are no entry become the item's
      metadata.
      `messages` names a column of chat messages, which are the prompt as they
      are. Then the question is their text, unless a column is named for it.
      `tools`, or the column of that name, are those that the assistant may
      call; a row may have none.
      A chat may end with the assistant's message. This is the entry `turn`
      then, its text the entry `reply`, and its content the answer unless a
      column is named for it. The prompt is what comes before it.
    in_template: names that the template uses. Each is the question or a column
      of the metadata.
  """

  fields: Mapping[str, str]
  in_template: tuple[str, ...] = ()

  @property
  def by_entry(self) -> dict[str, str]:
    """The columns that are read, by entry."""
    named = {_QUESTION: _QUESTION, _ANSWER: _ANSWER, **self.fields}
    if _MESSAGES in self.fields:
      for entry in (_QUESTION, _ANSWER):
        if entry not in self.fields:
          del named[entry]
    return {entry: column for entry, column in named.items() if column}

  def check_template(self, field: str, rows: Sequence[dict[str, Any]]) -> None:
    """Check that some of these rows has what the template names."""
    used = set(self.by_entry.values())
    missing = [self._not_in(row.keys() - used) for row in rows]
    if missing and all(missing):
      known = {"question", *rows[0]} - (used - {"question"})
      raise sections.ConfigError(
        f"{field}: the data has no column {missing[0][0]!r}"
        f"{sections.did_you_mean(missing[0][0], known)}"
      )

  def _not_in(self, metadata: Container[str]) -> list[str]:
    return [
      name
      for name in self.in_template
      if name != _QUESTION and name not in metadata
    ]

  def item(self, table: table_lib.Table, row: int) -> dict[str, Any]:
    """Return a row as an item.

    Raises:
      RowError: a column is missing or empty, or not of the right type.
    """
    columns, where = table[row], table.where(row)
    named = self.by_entry
    if _MESSAGES in named and TOOLS not in self.fields and TOOLS in columns:
      named[TOOLS] = TOOLS
    entries = {}
    for entry, column in named.items():
      try:
        value = _at(columns, column)
      except LookupError:
        have = ", ".join(map(repr, columns)) or "no column"
        raise table_lib.RowError(
          f"{where}: no column {column!r} for the {entry}; it has {have:.200}"
        ) from None
      is_empty = value is None or (isinstance(value, str) and not value.strip())
      if entry == TOOLS and (is_empty or value == []):
        continue
      if is_empty:
        raise table_lib.RowError(f"{where}: the column {column!r} is empty")
      try:
        entries[entry] = _READ[entry](value) if entry in _READ else value
      except ValueError as error:
        raise table_lib.RowError(
          f"{where}: the column {column!r} is {error}"
        ) from error
    if messages := entries.get(_MESSAGES):
      if all(message["role"] == "assistant" for message in messages):
        raise table_lib.RowError(
          f"{where}: the column {named[_MESSAGES]!r} has messages of the"
          " assistant alone; there is nothing to answer"
        )
      if messages[-1]["role"] == "assistant":
        entries[TURN] = messages.pop()
        entries[REPLY] = text_of(entries[TURN])
        if (entries[TURN].get("content") or "").strip():
          entries.setdefault(_ANSWER, entries[TURN]["content"])
      text = "\n".join(map(text_of, messages))
      entries.setdefault(_QUESTION, text)
    question = entries.get(_QUESTION)
    if not isinstance(question, str):
      raise table_lib.RowError(
        f"{where}: the column {named.get(_QUESTION, _QUESTION)!r} is"
        f" {question!r:.40}, not a text"
      )
    try:
      json.dumps([entries, columns], ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
      raise table_lib.RowError(
        f"{where}: a text is not valid Unicode ({error.reason})"
      ) from error
    used = set(named.values())
    metadata = {k: v for k, v in columns.items() if k not in used}
    if missing := self._not_in(metadata):
      raise table_lib.RowError(
        f"{where}: no column {missing[0]!r} for the template"
      )
    return {"index": row, **entries, "metadata": metadata}


def _at(columns: Mapping[str, Any], name: str) -> Any:
  """Return a column, or what is at a path in one, such as "a.b"."""
  if name in columns:
    return columns[name]
  value: Any = columns
  for part in name.split("."):
    if not isinstance(value, Mapping):
      raise LookupError(name)
    value = value[part]
  return value


def _answer(value: Any) -> str:
  """Return an answer as a text, with which texts can be compared."""
  is_number = isinstance(value, int | float) and not isinstance(value, bool)
  if isinstance(value, str):
    return value
  if is_number and math.isfinite(value):
    return table_lib.number_text(value)
  raise ValueError(
    f"{value!r:.60}, neither a text nor a number; name a column in it, as a.b,"
    " or none"
  )


def chat(value: Any) -> list[dict[str, Any]]:
  """Return the messages of a chat as a template takes them.

  They keep all of their entries. Those that are null are left out, because the
  columns of a file fill in what a message does not have. Arguments of calls in
  JSON become objects, as most templates want them.

  Raises:
    ValueError: they are no messages.
  """
  is_chat = isinstance(value, list) and all(map(_is_message, value))
  if not (is_chat and value):
    raise ValueError(
      f"{value!r:.60}, not a list of messages, each with a text as role and as"
      " content"
    )
  return [_message(message) for message in value]


def text_of(message: Mapping[str, Any]) -> str:
  """Return the content of a message, and its calls in JSON."""
  calls = message.get("tool_calls")
  parts = [
    message.get("content"),
    calls and json.dumps(calls, ensure_ascii=False),
  ]
  return "\n".join(filter(None, parts))


def _is_message(value: Any) -> bool:
  if not isinstance(value, dict) or not isinstance(value.get("role"), str):
    return False
  content, calls = value.get("content"), value.get("tool_calls")
  return isinstance(content, str) or (
    content is None and bool(calls) and _are_objects(calls)
  )


def _are_objects(value: Any) -> bool:
  return isinstance(value, list) and all(isinstance(x, dict) for x in value)


def _message(given: dict[str, Any]) -> dict[str, Any]:
  """Return a message without what is null, or calls of which there are none."""
  message = _without_nulls(given)
  if not message.get("tool_calls", True):
    del message["tool_calls"]
  for call in message.get("tool_calls", ()):
    function = call.get("function", call)
    if isinstance(function, dict):
      arguments = function.get("arguments")
      function["arguments"] = _parsed(arguments, dict)
  return message


def _without_nulls(value: Any) -> Any:
  """Return a value without the entries of objects that are null."""
  if isinstance(value, dict):
    return {k: _without_nulls(x) for k, x in value.items() if x is not None}
  if isinstance(value, list):
    return [_without_nulls(x) for x in value]
  return value


def _parsed(value: Any, kind: type) -> Any:
  """Return what a text in JSON describes, if it is of that kind."""
  if isinstance(value, str):
    with contextlib.suppress(ValueError, RecursionError):
      parsed = json.loads(value)
      return parsed if isinstance(parsed, kind) else value
  return value


def _tools(value: Any) -> list[dict[str, Any]]:
  """Return tools as a template takes them."""
  tools = _parsed(value, list)
  if not _are_objects(tools):
    raise ValueError(f"{value!r:.60}, not a list of tools")
  return _without_nulls(tools)


# What is made of the value of an entry.
_READ = {_ANSWER: _answer, _MESSAGES: chat, TOOLS: _tools}
