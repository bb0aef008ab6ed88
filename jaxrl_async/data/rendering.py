"""From an item to the tokens of its prompt: the template, or a chat."""

from collections.abc import Mapping
import dataclasses
import string
from typing import Any

from jaxtyping import Int32
import numpy as np

from jaxrl_async.config import sections
from jaxrl_async.data import columns as columns_lib
from jaxrl_async.text import chat_template as chat_template_lib
from jaxrl_async.text import tokenizer as tokenizer_lib


@dataclasses.dataclass(frozen=True, slots=True)
class Style:
  """How the prompts of one source are made; see `sections.TaskSection`."""

  template: str
  chat: bool
  system: str


def style_of(task: sections.TaskSection, source: str) -> Style:
  """Return the style of a source: its own in a mixture, else the task's."""
  # ConfigDict.get looks for names like one that is missing, which is slow.
  own: Any = task.sources[source] if source in task.sources else {}
  names = [field.name for field in dataclasses.fields(Style)]
  return Style(*(own.get(name, getattr(task, name)) for name in names))


def tokens(
  style: Style,
  item: Mapping[str, Any],
  source: str,
  *,
  tokenizer: tokenizer_lib.Tokenizer,
  chat_template: chat_template_lib.ChatTemplate | None,
) -> Int32[np.ndarray, "T"]:
  """Return the prompt of an item, without checking its length.

  Messages of the item are rendered by the chat template as they are.

  Raises:
    sections.ConfigError: the prompt cannot be made.
    ValueError: the text cannot be tokenized.
  """
  if "messages" not in item and not style.chat:
    return tokenizer.encode_prompt(render(style.template, item, source))
  if chat_template is None:
    raise sections.ConfigError(
      f"task.chat: {source} has chats, but there is no chat template"
    )
  try:
    messages = messages_of(style, item, source)
    tools = item.get(columns_lib.TOOLS)
    return chat_template.tokens(messages, tools, tokenizer=tokenizer)
  except chat_template_lib.ChatTemplateError as error:
    raise sections.ConfigError(f"task.chat: {source}: {error}") from error


def check_chat(
  style: Style,
  item: Mapping[str, Any],
  source: str,
  *,
  tokenizer: tokenizer_lib.Tokenizer,
  chat_template: chat_template_lib.ChatTemplate,
) -> None:
  """Check that the template writes the whole chat of an item, if it is one."""
  if "messages" in item or style.chat:
    messages = messages_of(style, item, source)
    if columns_lib.TURN in item:
      messages.append(item[columns_lib.TURN])
    tools = item.get(columns_lib.TOOLS)
    chat_template.check(messages, tools, tokenizer=tokenizer)


def messages_of(
  style: Style, item: Mapping[str, Any], source: str
) -> list[dict[str, Any]]:
  """Return the messages of an item's chat, up to the answer."""
  if "messages" in item:
    messages = list(item["messages"])
  else:
    text = render(style.template, item, source)
    messages = [{"role": "user", "content": text}]
  if style.system and messages[0]["role"] != "system":
    messages.insert(0, {"role": "system", "content": style.system})
  return messages


def render(template: str, item: Mapping[str, Any], source_name: str) -> str:
  """Fill in the template with the question and the item's metadata."""
  fields = {**item.get("metadata", {}), "question": item["question"]}
  try:
    for root in named_fields(template):
      if root not in fields:
        raise sections.ConfigError(
          f"task.template: {source_name} has no field {root!r}"
          f"{sections.did_you_mean(root, map(str, fields))}"
        )
    return string.Formatter().vformat(template, (), fields)
  except sections.ConfigError:
    raise
  except (ValueError, LookupError, AttributeError, TypeError) as error:
    raise sections.ConfigError(
      f"task.template: {template!r} cannot be filled in: {error}"
    ) from error


def named_fields(template: str) -> tuple[str, ...]:
  """Return the fields that a template names; "a.b" and "a[0]" name a."""
  wanted = [name for _, name, _, _ in string.Formatter().parse(template)]
  roots = [name.partition(".")[0].partition("[")[0] for name in wanted if name]
  return tuple(dict.fromkeys(roots))
