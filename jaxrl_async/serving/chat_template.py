"""Messages of a chat to the text of a prompt.

Rendered as Hugging Face's `apply_chat_template` does it. A policy without a
template gets the one user message and a newline, which is what the prompts of
the small tasks look like.
"""

from collections.abc import Sequence
import datetime
import json
import pathlib
from typing import Any

import jinja2
from jinja2 import ext
from jinja2 import sandbox

_SPECIAL_TOKENS = (
  "bos_token",
  "eos_token",
  "unk_token",
  "sep_token",
  "pad_token",
  "cls_token",
  "mask_token",
)


class ChatTemplateError(ValueError):
  """These messages have no prompt, or the template is none."""


class ChatTemplate:
  """How the messages of a chat become a prompt.

  Immutable, so any thread may use it.
  """

  def __init__(
    self, source: str | None, special_tokens: dict[str, str] | None = None
  ):
    """Compiles a template.

    Args:
      source: in Jinja; None for a policy that has none.
      special_tokens: what the template may name, such as eos_token.

    Raises:
      ChatTemplateError: it cannot be compiled.
    """
    self._special_tokens = special_tokens or {}
    self._template = None
    if source is not None:
      try:
        self._template = _environment().from_string(source)
      except jinja2.TemplateSyntaxError as error:
        raise ChatTemplateError(
          f"chat_template, line {error.lineno}: {error}"
        ) from error

  def render(self, messages: Sequence[dict[str, Any]]) -> str:
    """The prompt after which the assistant's answer is written.

    Raises:
      ChatTemplateError: the template refuses these messages.
    """
    if self._template is None:
      return _without_template(messages)
    try:
      return self._template.render(
        messages=messages,
        tools=None,
        documents=None,
        add_generation_prompt=True,
        **self._special_tokens,
      )
    except (
      jinja2.TemplateError,
      ArithmeticError,
      LookupError,
      RecursionError,
      TypeError,
      ValueError,
    ) as error:  # what an expression on a client's messages may raise
      raise ChatTemplateError(f"the chat template says: {error}") from error


def load(directory: pathlib.Path) -> ChatTemplate:
  """The template of a tokenizer's directory, or the one for none.

  Raises:
    ChatTemplateError: it cannot be compiled.
  """
  path = directory / "tokenizer_config.json"
  settings = json.loads(path.read_text()) if path.is_file() else {}
  source = settings.get("chat_template")
  if isinstance(source, list):  # several, by name
    named = {entry["name"]: entry["template"] for entry in source}
    source = named.get("default")
  file = directory / "chat_template.jinja"
  if file.is_file():
    source = file.read_text()
  special = {}
  for name in _SPECIAL_TOKENS:
    token = settings.get(name)
    token = token["content"] if isinstance(token, dict) else token
    if token is not None:
      special[name] = token
  return ChatTemplate(source, special)


def _without_template(messages: Sequence[dict[str, Any]]) -> str:
  if len(messages) != 1 or messages[0]["role"] != "user":
    raise ChatTemplateError(
      "this policy has no chat template: send one message, of the user"
    )
  return messages[0]["content"] + "\n"


class _Generation(ext.Extension):
  """`{% generation %}` marks what the assistant said; here it says nothing."""

  tags = {"generation"}

  def parse(self, parser: Any) -> Any:
    """What is inside, as it is."""
    next(parser.stream)
    return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> sandbox.ImmutableSandboxedEnvironment:
  def raise_exception(message):
    raise jinja2.TemplateError(message)

  def tojson(
    value, ensure_ascii=False, indent=None, separators=None, sort_keys=False
  ):
    # Jinja's own escapes HTML.
    return json.dumps(
      value,
      ensure_ascii=ensure_ascii,
      indent=indent,
      separators=separators,
      sort_keys=sort_keys,
    )

  def strftime_now(format_):
    return datetime.datetime.now().strftime(format_)

  environment = sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True,
    lstrip_blocks=True,
    extensions=[ext.loopcontrols, _Generation],
  )
  environment.filters["tojson"] = tojson
  environment.globals["raise_exception"] = raise_exception
  environment.globals["strftime_now"] = strftime_now
  return environment
