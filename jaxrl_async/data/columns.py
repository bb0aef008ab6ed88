"""From the columns of a row to an item of a source."""

from collections.abc import Container, Mapping, Sequence
import dataclasses
from typing import Any

from jaxrl_async.config import sections
from jaxrl_async.data.tables import table as table_lib

_QUESTION, _ANSWER, _MESSAGES = "question", "answer", "messages"
REPLY = "reply"  # the last message of a chat, if it is the assistant's


@dataclasses.dataclass(frozen=True)
class Columns:
  """Which columns of a table are which entries of an item.

  Attributes:
    fields: column by entry. Without an entry for the question or the answer it
      is the column of that name; "" means that there is none. `messages` names
      a column of chat messages, which are the prompt as they are. Then the
      question is their text, unless a column is named for it. Columns that are
      no entry become the item's metadata.
      A chat may end with the assistant's answer. This is the entry `reply`
      then, and the answer unless a column is named for it. The prompt is what
      comes before it.
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
    """Check that some of these rows has what the template names.

    Raises:
      sections.ConfigError: none has.
    """
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
    columns, where, named = table[row], table.where(row), self.by_entry
    entries = {}
    for entry, column in named.items():
      if column not in columns:
        have = ", ".join(map(repr, columns)) or "no column"
        raise table_lib.RowError(
          f"{where}: no column {column!r} for the {entry}; it has {have:.200}"
        )
      value = columns[column]
      if value is None or (isinstance(value, str) and not value.strip()):
        raise table_lib.RowError(f"{where}: the column {column!r} is empty")
      entries[entry] = value
    if _MESSAGES in entries:
      messages = _checked(entries[_MESSAGES], named[_MESSAGES], where)
      if messages[-1]["role"] == "assistant":
        entries[REPLY] = messages.pop()["content"]
        entries.setdefault(_ANSWER, entries[REPLY])
      entries[_MESSAGES] = messages
      text = "\n".join(message["content"] for message in messages)
      entries.setdefault(_QUESTION, text)
    question = entries.get(_QUESTION)
    if not isinstance(question, str):
      raise table_lib.RowError(
        f"{where}: the column {named.get(_QUESTION, _QUESTION)!r} is"
        f" {question!r:.40}, not a text"
      )
    try:
      question.encode()
    except UnicodeEncodeError as error:
      raise table_lib.RowError(
        f"{where}: the question is not valid Unicode ({error.reason})"
      ) from error
    used = set(named.values())
    metadata = {k: v for k, v in columns.items() if k not in used}
    if missing := self._not_in(metadata):
      raise table_lib.RowError(
        f"{where}: no column {missing[0]!r} for the template"
      )
    return {"index": row, **entries, "metadata": metadata}


def _checked(messages: Any, column: str, where: str) -> list[dict[str, str]]:
  """Return the messages of a chat with role and content alone.

  Raises:
    RowError: they are no messages, or nothing is to be answered.
  """
  is_chat = isinstance(messages, list) and all(
    isinstance(message, dict)
    and isinstance(message.get("role"), str)
    and isinstance(message.get("content"), str)
    for message in messages
  )
  if not (is_chat and messages):
    raise table_lib.RowError(
      f"{where}: the column {column!r} is {messages!r:.60}, not a list of"
      " messages, each with a text as role and as content"
    )
  if all(message["role"] == "assistant" for message in messages):
    raise table_lib.RowError(
      f"{where}: the column {column!r} has messages of the assistant alone;"
      " there is nothing to answer"
    )
  return [{"role": m["role"], "content": m["content"]} for m in messages]
