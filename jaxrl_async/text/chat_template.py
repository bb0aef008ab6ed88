"""Chat templates: from the messages of a chat to the text of a prompt.

A template renders like Hugging Face's `apply_chat_template`, within a deadline.
A policy without a template accepts a single user message, and the prompt is
that message followed by a newline, which is the format of the small tasks.
"""

from collections.abc import Mapping, Sequence
import json
import math
import pathlib
import subprocess
import sys
import threading
from typing import Any
import weakref

from jaxrl_async.config import sections
from jaxrl_async.storage import model_files
from jaxrl_async.text import template_process

DEADLINE_S = 5.0
_START_S = 60.0  # for the start of Python and the compilation of the template

_CONFIG_FILE = model_files.TOKENIZER_CONFIG
_FILE = "chat_template.jinja"
_FOLDER = "additional_chat_templates"
_PROCESSORS_FILE = "chat_template.json"
# What a directory may have besides tokenizer_config.json.
FILES = (_FILE, _FOLDER, _PROCESSORS_FILE)


class ChatTemplateError(ValueError):
  """The messages cannot be rendered, or the template cannot be compiled."""


class ChatTemplate:
  """A chat template, rendered by a separate process (`template_process`).

  Threads: any may render; they take turns.

  Attributes:
    refusal: why every rendering is refused, or "".
  """

  def __init__(
    self,
    source: str | None,
    special_tokens: Mapping[str, str] | None = None,
    *,
    refusal: str = "",
    deadline_s: float = DEADLINE_S,
  ):
    """Compile a template.

    Args:
      source: the template in Jinja; None for a policy that has none.
      special_tokens: variables of the template, such as eos_token.
      refusal: why no template can be chosen although the policy has some; every
        rendering is then refused with this message.
      deadline_s: longest time of a rendering, including the wait for its turn.

    Raises:
      ChatTemplateError: the template cannot be compiled.
    """
    self._source = source
    self._special_tokens = dict(special_tokens or {})
    self.refusal = refusal
    self._deadline_s = deadline_s
    self._turn = threading.Lock()
    self._process: _Process | None = None
    if source is not None:
      self._process = _Process(source)

  @property
  def exists(self) -> bool:
    """Whether the policy has a template that can be rendered."""
    return self._source is not None and not self.refusal

  def render(
    self, messages: Sequence[dict[str, Any]], *, is_prompt: bool = True
  ) -> str:
    """Return the prompt after which the assistant's answer is written.

    This takes up to `deadline_s`, so it must not run on an event loop.

    Args:
      messages: of the chat.
      is_prompt: whether the assistant answers next. Otherwise the text ends
        after the last message.

    Raises:
      ChatTemplateError: the template refuses these messages, or takes too long.
    """
    if self.refusal:
      raise ChatTemplateError(self.refusal)
    if self._source is None:
      return _without_template(messages)
    variables = {
      "messages": list(messages),
      "tools": None,
      "documents": None,
      "add_generation_prompt": is_prompt,
      **self._special_tokens,
    }
    if not self._turn.acquire(timeout=self._deadline_s):
      raise ChatTemplateError("the chat template is busy with other messages")
    try:
      if self._process is None or self._process.has_ended:
        self._process = _Process(self._source)
      reply = self._process.ask({"variables": variables}, self._deadline_s)
      if reply is None:
        self._process = None
    finally:
      self._turn.release()
    if reply is None:
      raise ChatTemplateError(
        f"the chat template did not end within {self._deadline_s:g} s, or"
        " needed too much memory"
      )
    if "error" in reply:
      raise ChatTemplateError(f"the chat template refused: {reply['error']}")
    return reply["text"]


class _Process:
  """A running `template_process` with one template."""

  def __init__(self, source: str):
    # -P keeps the directory of that file out of the import path.
    self._popen = subprocess.Popen(
      [sys.executable, "-P", template_process.__file__],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=subprocess.DEVNULL,
      text=True,
    )
    self._end = weakref.finalize(self, _end, self._popen)
    reply = self.ask({"source": source}, _START_S)
    if reply is None:
      raise ChatTemplateError("chat_template: it cannot be compiled in time")
    if "error" in reply:
      self._end()
      raise ChatTemplateError(f"chat_template, {reply['error']}")

  @property
  def has_ended(self) -> bool:
    """Whether the process has ended, for whatever reason."""
    return self._popen.poll() is not None

  def ask(
    self, request: dict[str, Any], deadline_s: float
  ) -> dict[str, Any] | None:
    """Return the reply; None if there was none in time.

    The process is killed if it does not reply in time.
    """
    stdin, stdout = self._popen.stdin, self._popen.stdout
    assert stdin is not None and stdout is not None
    # Killing the process ends a write to it or a read from it that blocks.
    timer = threading.Timer(deadline_s, self._popen.kill)
    timer.daemon = True
    timer.start()
    try:
      alarm_s = math.ceil(deadline_s) + 1
      stdin.write(json.dumps(request | {"alarm_s": alarm_s}) + "\n")
      stdin.flush()
      line = stdout.readline()
    except BrokenPipeError:
      line = ""
    finally:
      timer.cancel()
    if not line.endswith("\n"):
      self._end()
      return None
    return json.loads(line)


def _end(popen: subprocess.Popen) -> None:
  popen.kill()
  popen.wait()
  for pipe in (popen.stdin, popen.stdout):
    assert pipe is not None
    try:
      pipe.close()
    except BrokenPipeError:  # data that was not written yet
      pass


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
