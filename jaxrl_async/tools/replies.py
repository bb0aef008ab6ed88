"""What follows a turn with calls: the results, as tokens of the next prompt.

Token in, token out: what the policy wrote stays as it is, and only the tokens
after it are made here. They are what the chat template writes after the
content of an assistant's message, found with a mark in place of the content.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_async.text import chat_template as chat_template_lib
from jaxrl_async.text import tokenizer as tokenizer_lib
from jaxrl_async.tools import calls

_MARK = "qzwrittenzq"
_ASKED = {"role": "user", "content": "qzaskedzq"}
_WRITTEN = {"role": "assistant", "content": _MARK}


class Replies:
  """Renders the results of calls for one policy.

  A template that passes over the role "tool" gets the results as a message of
  the user.
  """

  def __init__(
    self,
    tokenizer: tokenizer_lib.Tokenizer,
    template: chat_template_lib.ChatTemplate | None,
    tools: Sequence[Mapping[str, Any]] = (),
  ):
    """Find out how the template ends a turn.

    Args:
      tokenizer: of the policy.
      template: of the policy; without one, results stand between
        <tool_response> and </tool_response>.
      tools: descriptions, on which templates may depend.

    Raises:
      ChatTemplateError: the template takes no results of tools.
    """
    self._tokenizer = tokenizer
    self._template = template if template and template.exists else None
    self._tools = list(tools)
    self._ends_of_turns: frozenset[int] = frozenset()
    self._has_role = False
    if self._template is not None:
      self._has_role = self._takes(_results(["f"], ["qz"]))
      if not self._has_role:
        as_user = _as_user(["qz"])
        self._template.check([_ASKED, _WRITTEN, as_user], tokenizer=tokenizer)
      written = self._after([_ASKED, _WRITTEN], is_prompt=False)
      first = tokenizer.encode(written)[:1].tolist()
      if set(first) <= set(tokenizer.end_tokens):
        self._ends_of_turns = frozenset(first)

  def tokens(
    self, written: np.ndarray, names: Sequence[str], results: Sequence[str]
  ) -> np.ndarray:
    """Return the tokens to append to a turn.

    Args:
      written: the turn, whose last token may end it already.
      names: of the tools.
      results: of the calls, in their order.
    """
    if self._template is None:
      return self._encode(plain(results))
    reply = _results(names, results) if self._has_role else [_as_user(results)]
    tokens = self._encode(self._after([_ASKED, _WRITTEN, *reply]))
    last, first = int(written[-1]), int(tokens[0])
    is_ended = last in self._tokenizer.end_tokens
    # The policy has ended its turn. Where a turn ends with the beginning of the
    # next one, it may have written that.
    if last == first or (is_ended and first in self._ends_of_turns):
      return tokens[1:]
    return tokens

  def _takes(self, reply: list[dict[str, Any]]) -> bool:
    assert self._template is not None
    try:
      self._template.check(
        [_ASKED, _WRITTEN, *reply], tokenizer=self._tokenizer
      )
    except chat_template_lib.ChatTemplateError:
      return False
    return True

  def _after(
    self, messages: list[dict[str, Any]], *, is_prompt: bool = True
  ) -> str:
    """Return what the template writes after the content of the turn."""
    assert self._template is not None
    text = self._template.render(messages, self._tools, is_prompt=is_prompt)
    return text.partition(_MARK)[2]

  def _encode(self, text: str) -> np.ndarray:
    return self._tokenizer.encode(text)

  def safe(self, text: str, max_tokens: int) -> str:
    """Return a result that can be shown, cut with a note if it is too long.

    Special tokens are taken out of it, which would end a turn or begin another
    one, and characters that the tokenizer lacks become question marks.

    Args:
      text: of the result.
      max_tokens: that it may have.
    """
    whole = text.removesuffix(calls.NOTE)
    shown = whole.encode("utf-8", "replace").decode()
    while token := self._tokenizer.special_token_in(shown):
      shown = shown.replace(token, "")
    try:
      tokens = self._encode(shown)
    except ValueError:
      foreign = {c for c in set(shown) if not self._is_known(c)}
      shown = "".join("?" if c in foreign else c for c in shown)
      tokens = self._encode(shown)
    if len(tokens) > max_tokens:
      # A character may be cut at the end.
      shown = self._tokenizer.decode(tokens[:max_tokens]).rstrip("\ufffd")
    elif whole == text:
      return shown
    return shown + calls.NOTE

  def _is_known(self, character: str) -> bool:
    try:
      return len(self._encode(character)) > 0
    except ValueError:
      return False


def _results(
  names: Sequence[str], results: Sequence[str]
) -> list[dict[str, Any]]:
  return [
    {"role": "tool", "name": name, "content": result}
    for name, result in zip(names, results, strict=True)
  ]


def _as_user(results: Sequence[str]) -> dict[str, Any]:
  return {"role": "user", "content": plain(results).strip()}


def plain(results: Sequence[str]) -> str:
  """Return results as text, as a policy without a chat template is shown."""
  responses = [f"<tool_response>{x}</tool_response>\n" for x in results]
  return "\n" + "".join(responses)
