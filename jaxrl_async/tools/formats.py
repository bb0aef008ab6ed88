"""Calls of tools in the text that a policy wrote.

Models write calls in the form that they were trained with:

    hermes   <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>
             of Hermes, Qwen 2.5 and Qwen 3
    llama    {"name": "f", "parameters": {"x": 1}}
             of Llama 3, perhaps after <|python_tag|>; several are separated by
             semicolons

A text may be anything. What looks like a call and is none is returned with the
reason, which the model can be told. Thoughts, from <think> to </think>, are
passed over: a call in them is only considered. A text that closes thoughts
without opening them began with them, because its prompt opened them.
"""

from collections.abc import Callable, Mapping
import dataclasses
import json
import re
from typing import Any, NoReturn

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_PYTHON = "<|python_tag|>"
_THINK, _THOUGHT = "<think>", "</think>"
_TAGS = re.compile("|".join((_OPEN, _CLOSE, _THINK, _THOUGHT)))
# An object that is meant as a call, wherever it stands.
_OBJECT = re.compile(
  r"(?P<think><think>)|(?P<mark><\|python_tag\|>)|"
  r'\{\s*"(?:name|parameters|arguments|function|type)"\s*:'
)
_BEFORE_HERMES, _BEFORE_LLAMA = (
  re.compile(_OPEN + r"\s*"),
  re.compile(r"(?=\{)"),
)
_BETWEEN = re.compile(r"(?:[\s;]|<\|python_tag\|>)*")
_ARGUMENTS = ("arguments", "parameters")
# What else an object may have that is a call without arguments.
_ABOUT = ("id", "type", "function")
_TOO_DEEP = "it is nested too deeply"
_SPACE = re.compile(r"\s*")


@dataclasses.dataclass(frozen=True)
class Call:
  """A call that a policy wrote.

  Attributes:
    name: of the tool.
    arguments: by name.
  """

  name: str
  arguments: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Malformed:
  """What was meant as a call and is none.

  Attributes:
    text: as it was written.
    reason: why it is no call.
  """

  text: str
  reason: str


@dataclasses.dataclass(frozen=True)
class Parsed:
  """What a policy wrote.

  Attributes:
    text: what stands before the first call, or everything without one.
    found: calls, and what was meant as calls, in their order.
  """

  text: str
  found: tuple[Call | Malformed, ...]

  @property
  def calls(self) -> list[Call]:
    """The calls that can be made."""
    return [each for each in self.found if isinstance(each, Call)]

  @property
  def malformed(self) -> list[Malformed]:
    """What was meant as calls."""
    return [each for each in self.found if isinstance(each, Malformed)]


def _refuse(constant: str) -> NoReturn:
  raise ValueError(f"{constant} is no number in JSON")


# Strings may go over several lines, as models write them.
_DECODER = json.JSONDecoder(strict=False, parse_constant=_refuse)


def _call_at(text: str, start: int) -> tuple[Call | str, int]:
  """Return the call that an object in JSON is, or why it is none, and its end.

  What is no object ends where that was noticed, or at the start.
  """
  end = start
  try:
    value, end = _DECODER.raw_decode(text, start)
    # What an encoder refuses, as an infinite number or half a character, no
    # tool could be given.
    json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    return _call_of(value), end
  except RecursionError:
    return _TOO_DEEP, start
  except json.JSONDecodeError as error:
    reason = f"it is no JSON: {error.msg}, character {error.pos - start}"
    return reason, max(end, min(error.pos, len(text)))
  except UnicodeEncodeError:
    return "a text in it is not valid Unicode", end
  except ValueError as error:
    return str(error), end


def _call_of(value: Any) -> Call | str:
  if not isinstance(value, dict):
    return "it is no object with a name and arguments"
  if isinstance(value.get("function"), dict):
    value = value["function"]
  name = value.get("name")
  if not isinstance(name, str) or not name:
    return "it has no name"
  others = value.keys() - {"name", *_ABOUT}
  if others and others.isdisjoint(_ARGUMENTS):
    return f"it has no arguments, but {min(others)!r:.40}"
  arguments = value.get("arguments", value.get("parameters"))
  if isinstance(arguments, str) and arguments.strip():
    try:
      arguments = _DECODER.decode(arguments.strip())  # in JSON once more
    except json.JSONDecodeError as error:
      return f"its arguments are no JSON: {error.msg}, character {error.pos}"
    json.dumps(arguments, ensure_ascii=False, allow_nan=False).encode()
  arguments = arguments or {}
  if not isinstance(arguments, dict):
    return "its arguments are no object"
  return Call(name, arguments)


def _after(skipped: re.Pattern[str], text: str, position: int) -> int:
  """Return where the text goes on after what may be empty."""
  found = skipped.match(text, position)
  return found.end() if found else position


def _start_of_answer(text: str, before_call: re.Pattern[str]) -> int:
  """Return where the text goes on after thoughts that it did not open.

  Args:
    text: what the model wrote.
    before_call: what the object of a call may follow.
  """
  closed = text.find(_THOUGHT)
  if closed < 0 or 0 <= text.find(_THINK) < closed:
    return 0
  position = 0
  while found := before_call.search(text, position, closed):
    call, end = _call_at(text, found.end())
    if isinstance(call, Call) and end > closed:
      return 0  # the mark is a part of an argument, and ends no thoughts
    position = max(end, found.end(), found.start() + 1)
  return closed + len(_THOUGHT)


def hermes(text: str) -> Parsed:
  """Return the calls between <tool_call> and </tool_call>.

  The last call need not be closed.
  """
  position, first = _start_of_answer(text, _BEFORE_HERMES), len(text)
  found: list[Call | Malformed] = []
  tags = list(_TAGS.finditer(text, position))
  thinks = False
  for number, tag in enumerate(tags):
    if tag.start() < position:
      continue  # in a call, or in thoughts
    thinks = tag[0] == _THINK or (thinks and tag[0] != _THOUGHT)
    if thinks or tag[0] != _OPEN:
      continue
    start = _after(_SPACE, text, tag.end())
    call, end = _call_at(text, start)
    after = _after(_SPACE, text, end)
    is_closed = text.startswith(_CLOSE, after)
    if isinstance(call, Call) and not is_closed and after < len(text):
      call = f"{_CLOSE} does not follow the object"
    first = min(first, tag.start())
    if isinstance(call, Call):
      found.append(call)
      position = end
      continue
    # It ends where it is closed, or where the next call begins.
    bound = len(text)
    for later in range(number + 1, len(tags)):
      if tags[later].start() >= end and tags[later][0] in (_OPEN, _CLOSE):
        bound = tags[later].start()
        break
    found.append(Malformed(text[tag.end() : bound].strip(), call))
    position = bound
  return Parsed(text[:first], tuple(found))


def llama(text: str) -> Parsed:
  """Return the calls that are objects in JSON.

  An object at the beginning, or after <|python_tag|>, is meant as a call;
  elsewhere one that begins with a name or parameters is.
  """
  start = _start_of_answer(text, _BEFORE_LLAMA)
  position = _after(_SPACE, text, start)
  first, is_meant = len(text), text.startswith("{", position)
  found: list[Call | Malformed] = []
  while position < len(text):
    if is_meant:
      at = _after(_BETWEEN, text, position)
    else:
      candidate = _OBJECT.search(text, position)
      if candidate is None:
        break
      if candidate["think"]:
        closed = text.find(_THOUGHT, candidate.end())
        position = closed + len(_THOUGHT) if closed >= 0 else len(text)
        continue
      at = candidate.start()
      if candidate["mark"]:
        position, is_meant = at, True
        continue
      position = at
    if at == len(text):
      break
    first = min(first, position)
    call, end = _call_at(text, at)
    if isinstance(call, Call):
      found.append(call)
    else:
      # What is too deep would be tried again from each object in it.
      end = len(text) if call == _TOO_DEEP else max(end, at + 1)
      following = _OBJECT.search(text, end)
      end = following.start() if following else len(text)
      found.append(Malformed(text[at:end].strip(), call))
    at = _after(_BETWEEN, text, end)
    position, is_meant = end, text.startswith("{", at)
  return Parsed(text[:first], tuple(found))


@dataclasses.dataclass(frozen=True)
class Format:
  """A form in which models write calls.

  Attributes:
    parse: finds the calls in a text; it raises for no text.
    marks: texts that may be special tokens of a tokenizer, which it does not
      show in a text otherwise.
    arguments: name of the arguments in a call.
  """

  parse: Callable[[str], Parsed]
  marks: tuple[str, ...]
  arguments: str


FORMATS: Mapping[str, Format] = {
  "hermes": Format(hermes, (_OPEN, _CLOSE, _THINK, _THOUGHT), "arguments"),
  "llama": Format(llama, (_PYTHON, _THINK, _THOUGHT), "parameters"),
}


def in_template(source: str) -> str | None:
  """Return the name of the format that a chat template writes, if it is known.

  Args:
    source: text of the template.
  """
  if _OPEN in source and "<function=" not in source:  # as Qwen3-Coder writes
    return "hermes"
  if _PYTHON in source or re.search(r'"parameters\\?"\s*:\s*', source):
    return "llama"
  return None


def text_of(tokens: Any, tokenizer: Any, form: Format) -> str:
  """Return the text of what a policy wrote, with the marks of a format.

  Args:
    tokens: that the policy wrote.
    tokenizer: of the policy, a `text.tokenizer.Tokenizer`.
    form: whose marks are shown although they are special tokens.
  """
  hidden = [mark for mark in form.marks if tokenizer.special_token_in(mark)]
  if not hidden:
    return tokenizer.decode(tokens)
  parts, rest = [], []
  for token in map(int, tokens):
    if (name := tokenizer.name_of(token)) in hidden:
      parts += [tokenizer.decode(rest), name]
      rest = []
    else:
      rest.append(token)
  return "".join([*parts, tokenizer.decode(rest)])
