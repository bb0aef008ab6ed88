"""Chat templates: from the messages of a chat to the text of a prompt.

A template renders like Hugging Face's `apply_chat_template`, in jinja2's
sandbox. It is code that came with the model, so whoever chooses a model trusts
its template to end. What clients send is data, whose size the server bounds.
A policy without a template accepts a single user message, and the prompt is
that message followed by a newline, which is the format of the small tasks.
"""

from collections.abc import Mapping, Sequence
import datetime
import json
import pathlib
from typing import Any, NoReturn

import jinja2
from jinja2 import ext
from jinja2 import nodes
from jinja2 import sandbox

from jaxrl_async.config import sections
from jaxrl_async.storage import model_files

_CONFIG_FILE = model_files.TOKENIZER_CONFIG
_FILE = "chat_template.jinja"
_FOLDER = "additional_chat_templates"
_PROCESSORS_FILE = "chat_template.json"
# What a directory may have besides tokenizer_config.json.
FILES = (_FILE, _FOLDER, _PROCESSORS_FILE)


class ChatTemplateError(ValueError):
  """The messages cannot be rendered, or the template cannot be compiled."""


class ChatTemplate:
  """A chat template. Any thread may render it.

  Attributes:
    refusal: why every rendering is refused, or "".
  """

  def __init__(
    self,
    source: str | None,
    special_tokens: Mapping[str, str] | None = None,
    *,
    refusal: str = "",
  ):
    """Compile a template.

    Args:
      source: the template in Jinja; None for a policy that has none.
      special_tokens: variables of the template, such as eos_token.
      refusal: why no template can be chosen although the policy has some; every
        rendering is then refused with this message.

    Raises:
      ChatTemplateError: the template cannot be compiled.
    """
    self._template = None if source is None else _compiled(source)
    self._special_tokens = dict(special_tokens or {})
    self.refusal = refusal

  @property
  def exists(self) -> bool:
    """Whether the policy has a template that can be rendered."""
    return self._template is not None and not self.refusal

  def render(
    self, messages: Sequence[dict[str, Any]], *, is_prompt: bool = True
  ) -> str:
    """Return the prompt after which the assistant's answer is written.

    Args:
      messages: of the chat.
      is_prompt: whether the assistant answers next. Otherwise the text ends
        after the last message.

    Raises:
      ChatTemplateError: the template refuses these messages.
    """
    if self.refusal:
      raise ChatTemplateError(self.refusal)
    if self._template is None:
      return _without_template(messages)
    try:
      return self._template.render(
        messages=list(messages),
        tools=None,
        documents=None,
        add_generation_prompt=is_prompt,
        **self._special_tokens,
      )
    except (
      jinja2.TemplateError,
      ArithmeticError,
      AttributeError,
      LookupError,
      MemoryError,
      RecursionError,
      TypeError,
      ValueError,
    ) as error:
      reason = str(error) or type(error).__name__
      raise ChatTemplateError(f"the chat template refused: {reason}") from error


class _Generation(ext.Extension):
  """Support for `{% generation %}`, which marks what the assistant said.

  The marks are for training and have no effect here.
  """

  tags = {"generation"}

  def parse(self, parser: Any) -> nodes.Node | list[nodes.Node]:
    """Return the statements inside the block unchanged."""
    next(parser.stream)
    return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
  raise jinja2.TemplateError(message)


def _tojson(
  value: Any,
  ensure_ascii: bool = False,
  indent: int | str | None = None,
  separators: tuple[str, str] | None = None,
  sort_keys: bool = False,
) -> str:
  # Jinja's own filter escapes HTML.
  return json.dumps(
    value,
    ensure_ascii=ensure_ascii,
    indent=indent,
    separators=separators,
    sort_keys=sort_keys,
  )


def _compiled(source: str) -> jinja2.Template:
  environment = sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True,
    lstrip_blocks=True,
    extensions=[ext.loopcontrols, _Generation],
  )
  environment.filters["tojson"] = _tojson
  environment.globals["raise_exception"] = _raise_exception
  environment.globals["strftime_now"] = lambda format_: (
    datetime.datetime.now().strftime(format_)
  )
  try:
    return environment.from_string(source)
  except jinja2.TemplateSyntaxError as error:
    raise ChatTemplateError(
      f"chat_template, line {error.lineno}: {error}"
    ) from error
  except RecursionError as error:
    raise ChatTemplateError("chat_template: it is nested too deeply") from error


def load(directory: pathlib.Path) -> ChatTemplate:
  """Return the template of a tokenizer's directory.

  If there is none, the result renders the single message of a user. Rendering
  is refused if there are several templates and none is the default, or if the
  only one is in a file that transformers' tokenizers do not read.

  Raises:
    ValueError: a file is damaged, or the template cannot be compiled.
  """
  named = sources(directory)
  special = model_files.special_tokens(directory)
  if "default" in named:
    path, source = named["default"]
    try:
      return ChatTemplate(source, special)
    except ChatTemplateError as error:
      raise ChatTemplateError(f"{path}: {error}") from error
  refusal = ""
  if named:
    refusal = (
      f"this policy has the chat templates {', '.join(sorted(named))}, but no"
      " default one"
    )
  elif (directory / _PROCESSORS_FILE).exists():
    refusal = (
      f"this policy has a chat template in {_PROCESSORS_FILE} only, which"
      f" is not a file of the tokenizer; put it into {_FILE}"
    )
  return ChatTemplate(None, refusal=refusal)


def sources(
  directory: pathlib.Path,
) -> dict[str, tuple[pathlib.Path, str]]:
  """Return path and source of the templates by name.

  Files of their own take precedence over the tokenizer's settings.

  Raises:
    ValueError: a file is damaged.
  """
  files = {}
  if (directory / _FILE).exists():
    files["default"] = directory / _FILE
  for path in sorted(directory.joinpath(_FOLDER).glob("*.jinja")):
    files[path.stem] = path
  if files:
    return {
      name: (path, model_files.read_text(path)) for name, path in files.items()
    }
  path = directory / _CONFIG_FILE
  given = model_files.read_optional(path).get("chat_template")
  named = given
  if isinstance(given, str):
    named = {"default": given}
  elif given is None:
    named = {}
  elif isinstance(given, list) and all(isinstance(x, Mapping) for x in given):
    named = {entry.get("name"): entry.get("template") for entry in given}
  if not isinstance(named, Mapping) or not all(
    isinstance(x, str) for pair in named.items() for x in pair
  ):
    raise ValueError(
      f"{path}: chat_template is {sections.shown(given)}, neither a template"
      " nor a list of named templates"
    )
  return {name: (path, source) for name, source in named.items()}


def _without_template(messages: Sequence[dict[str, Any]]) -> str:
  if len(messages) != 1 or messages[0]["role"] != "user":
    raise ChatTemplateError(
      "this policy has no chat template; send a single message of the user"
    )
  return messages[0]["content"] + "\n"
