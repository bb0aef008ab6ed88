"""Chat templates: from the messages of a chat to the text of a prompt.

A template renders like Hugging Face's `apply_chat_template`, in jinja2's
sandbox. It is code that came with the model, so whoever chooses a model trusts
its template to end. What clients send is data, whose size the server bounds.
A policy without a template accepts a single user message, and the prompt is
that message followed by a newline, which is the format of the small tasks.

Templates pass over what they do not know, such as a role or the calls of tools.
`ChatTemplate.check` finds that out: it renders the chat with marks in place of
its texts, and looks for the marks.
"""

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import copy
import datetime
import json
import pathlib
from typing import Any, NoReturn

from jaxtyping import Int32
import jinja2
from jinja2 import ext
from jinja2 import nodes
from jinja2 import sandbox
import numpy as np

from jaxrl_async.config import sections
from jaxrl_async.storage import model_files
from jaxrl_async.text import tokenizer as tokenizer_lib

_CONFIG_FILE = model_files.TOKENIZER_CONFIG
_FILE = "chat_template.jinja"
_FOLDER = "additional_chat_templates"
_PROCESSORS_FILE = "chat_template.json"
# What a directory may have besides tokenizer_config.json.
FILES = (_FILE, _FOLDER, _PROCESSORS_FILE)
# What an assistant thought before it answered, the first name first. Templates
# leave the thoughts of earlier turns out on purpose.
_THOUGHTS = ("reasoning_content", "thinking", "reasoning")
_MAX_KNOWN = 10_000  # forms of chats that are remembered

Messages = Sequence[Mapping[str, Any]]


class ChatTemplateError(ValueError):
  """The messages cannot be rendered, or the template cannot be compiled."""


class ChatTemplate:
  """A chat template. Any thread may render it.

  Attributes:
    source: the template in Jinja; None for a policy that has none.
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
    self.source = source
    self._template = None if source is None else _compiled(source)
    self._special_tokens = dict(special_tokens or {})
    self._known: set[int] = set()  # forms of chats that are written whole
    self.refusal = refusal

  @property
  def exists(self) -> bool:
    """Whether the policy has a template that can be rendered."""
    return self._template is not None and not self.refusal

  def render(
    self,
    messages: Messages,
    tools: Sequence[Any] | None = None,
    *,
    is_prompt: bool = True,
  ) -> str:
    """Return the prompt after which the assistant's answer is written.

    Args:
      messages: of the chat.
      tools: that the assistant may call, as the template takes them.
      is_prompt: whether the assistant answers next. Otherwise the text ends
        after the last message.

    Raises:
      ChatTemplateError: the template refuses these messages.
    """
    if self.refusal:
      raise ChatTemplateError(self.refusal)
    if self._template is None:
      return _without_template(messages)
    given = [_as_given(message) for message in messages]
    try:
      return self._rendered(given, tools, is_prompt)
    except ChatTemplateError:
      if (written := _with_text_arguments(given)) == given:
        raise
      with contextlib.suppress(ChatTemplateError):
        return self._rendered(written, tools, is_prompt)
      raise

  def _rendered(
    self, messages: Messages, tools: Sequence[Any] | None, is_prompt: bool
  ) -> str:
    assert self._template is not None
    try:
      return self._template.render(
        messages=messages,
        tools=tools or None,
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
      reason = " ".join(str(error).split()) or type(error).__name__
      raise ChatTemplateError(f"the chat template refused: {reason}") from error

  def check(
    self,
    messages: Messages,
    tools: Sequence[Any] | None = None,
    *,
    tokenizer: tokenizer_lib.Tokenizer,
  ) -> None:
    """Check that the whole chat reaches the policy, and as text.

    Only the form of a chat decides what a template writes, so each form is
    rendered once. A template that refuses the marks reads the texts. What it
    leaves out is then not found out.

    Args:
      messages: of the chat.
      tools: as in `render`.
      tokenizer: of the policy.

    Raises:
      ChatTemplateError: the template refuses the messages or passes over a part
        of them, or a text has a special token, which would end a turn or begin
        another one.
    """
    for text in _texts([*messages, *(tools or ())]):
      if token := tokenizer.special_token_in(text):
        raise ChatTemplateError(
          f"a message has the special token {token!r} in its text"
        )
    marked, marked_tools, marks = _marked(messages, tools)
    form = hash(repr((marked, marked_tools)))
    if form in self._known:
      return
    is_prompt = messages[-1].get("role") != "assistant"
    try:
      text = self.render(marked, marked_tools, is_prompt=is_prompt)
    except ChatTemplateError:
      self.render(messages, tools, is_prompt=is_prompt)
      return
    for mark, what in marks.items():
      if mark not in text:
        raise ChatTemplateError(f"the chat template does not write {what}")
    if len(self._known) >= _MAX_KNOWN:
      self._known.clear()
    self._known.add(form)

  def tokens(
    self,
    messages: Messages,
    tools: Sequence[Any] | None = None,
    *,
    tokenizer: tokenizer_lib.Tokenizer,
  ) -> Int32[np.ndarray, "T"]:
    """Return the tokens of a prompt, all of whose messages are in it.

    No special tokens are added, since the template writes these.

    Raises:
      ChatTemplateError: as `check`.
      ValueError: the text cannot be tokenized.
    """
    self.check(messages, tools, tokenizer=tokenizer)
    return tokenizer.encode(self.render(messages, tools))


def _as_given(message: Mapping[str, Any]) -> dict[str, Any]:
  """Return a message as transformers gives it to a template.

  What is null is left out, and the thoughts have the names that templates use.
  """
  given = {k: v for k, v in message.items() if v is not None}
  for name in _THOUGHTS:
    if name in given:
      thoughts = given[name]
      return {"thinking": thoughts, **given, "reasoning_content": thoughts}
  return given


def _with_text_arguments(messages: Messages) -> list[dict[str, Any]]:
  """Return a chat with the arguments of calls in JSON, as DeepSeek wants."""
  made = copy.deepcopy([dict(message) for message in messages])
  for message in made:
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
      function = call.get("function", call) if isinstance(call, dict) else None
      if isinstance(function, dict) and isinstance(
        function.get("arguments"), dict
      ):
        function["arguments"] = _tojson(function["arguments"])
  return made


def _texts(value: Any) -> Iterator[str]:
  """Yield every text in messages or tools, names of entries among them."""
  if isinstance(value, str):
    yield value
  elif isinstance(value, Mapping):
    yield from _texts([*value, *value.values()])
  elif isinstance(value, list | tuple):
    for each in value:
      yield from _texts(each)


def _marked(
  messages: Messages, tools: Sequence[Any] | None
) -> tuple[list[dict[str, Any]], list[Any], dict[str, str]]:
  """Return a chat with marks instead of texts, and what each mark stands for.

  An empty text stays as it is, and so does what no template has to write.
  """
  marks: dict[str, str] = {}

  def mark(what: str) -> str:
    text = f"qz{len(marks)}zq"
    marks[text] = what
    return text

  def mark_function(call: Any, what: str) -> Any:
    call = copy.deepcopy(call)
    function = call.get("function", call) if isinstance(call, dict) else None
    if isinstance(function, dict):
      if function.get("name"):
        function["name"] = mark(f"the name of {what}")
      arguments = function.get("arguments")
      if isinstance(arguments, dict):
        given = {key: mark(f"the arguments of {what}") for key in arguments}
        function["arguments"] = given
    return call

  made = []
  for number, given in enumerate(messages, 1):
    where = f"message {number}, which is of the role {given.get('role')!r}"
    message = dict(given)
    is_last = number == len(messages) and message.get("role") == "assistant"
    text = message.get("content")
    if isinstance(text, str) and text.strip():
      message["content"] = mark(f"the content of {where}")
    thoughts = [
      name
      for name in _THOUGHTS
      if isinstance(message.get(name), str) and message[name].strip()
    ]
    if is_last and thoughts:  # of which a template writes one
      what = mark(f"the {thoughts[0]} of {where}")
      message |= dict.fromkeys(thoughts, what)
    if isinstance(message.get("tool_calls"), list):
      message["tool_calls"] = [
        mark_function(call, f"a call in {where}")
        for call in message["tool_calls"]
      ]
    if "function_call" in message:
      message["function_call"] = mark_function(
        message["function_call"], f"the function_call in {where}"
      )
    made.append(message)
  made_tools = [mark_function(tool, "a tool (tools)") for tool in tools or ()]
  return made, made_tools, marks


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
      f"chat_template, line {error.lineno}: {' '.join(str(error).split())}"
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


def copy_to(source: pathlib.Path, target: pathlib.Path) -> None:
  """Write the templates of a tokenizer's directory into files of their own.

  Raises:
    ValueError: a file is damaged.
    OSError: a file cannot be written.
  """
  for name, (_, text) in sources(source).items():
    path = target / (_FILE if name == "default" else f"{_FOLDER}/{name}.jinja")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _without_template(messages: Messages) -> str:
  if len(messages) != 1 or messages[0]["role"] != "user":
    raise ChatTemplateError(
      "this policy has no chat template; send a single message of the user"
    )
  return messages[0]["content"] + "\n"
