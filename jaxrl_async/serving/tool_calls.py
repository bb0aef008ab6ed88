"""Calls of tools in what a policy writes, for clients that read them apart.

The text before the first call is sent as it comes. From where a call may begin
the text is held back until the completion ends. Then it is parsed as a whole,
since what stands in thoughts is no call.
"""

import json
import re
from typing import Any
import uuid

from jaxrl_async.tools import formats

# With what a call may begin in each format.
_BEGINNINGS = {"hermes": ("<tool_call>",), "llama": ("<|python_tag|>", "{")}


class CallText:
  """The text of a completion, divided into text to show and calls."""

  def __init__(self, form: str):
    """Begin with an empty text; `form` is a name of `formats.FORMATS`."""
    self._parse = formats.FORMATS[form].parse
    self._beginnings = _BEGINNINGS[form]
    self._begin = re.compile("|".join(map(re.escape, self._beginnings)))
    self._given: list[str] = []
    self._held: list[str] = []
    self._has_begun = False

  def add(self, text: str) -> str:
    """Return the text to show after further text has been written."""
    self._given.append(text)
    self._held.append(text)
    if self._has_begun or not text:
      return ""
    text = "".join(self._held)
    begin = self._begin.search(text)
    self._has_begun = begin is not None
    end = begin.start() if begin else self._end_of_certain(text)
    # Space before a call belongs to the call.
    shown = text[:end].rstrip()
    self._held = [text[len(shown) :]]
    return shown

  def _end_of_certain(self, text: str) -> int:
    """Return where the text ends that no further text makes part of a call."""
    end = len(text)
    for beginning in self._beginnings:
      for length in range(1, len(beginning)):
        if text.endswith(beginning[:length]):
          end = min(end, len(text) - length)
    return end

  def finish(self, text: str) -> tuple[str, list[formats.Call]]:
    """Return the remaining text to show, and the calls.

    If anything was meant as a call and is none, all of it is text.

    Args:
      text: the last text of the completion.
    """
    self._given.append(text)
    held = "".join([*self._held, text])
    whole = "".join(self._given)
    parsed = self._parse(whole)
    if parsed.malformed or not parsed.calls:
      return held, []
    num_shown = len(whole) - len(held)
    return parsed.text.rstrip()[num_shown:], parsed.calls


def record(call: formats.Call) -> dict[str, Any]:
  """Return a call as OpenAI's interface describes it."""
  arguments = json.dumps(call.arguments, ensure_ascii=False)
  return {
    "id": f"call_{uuid.uuid4().hex[:24]}",
    "type": "function",
    "function": {"name": call.name, "arguments": arguments},
  }
