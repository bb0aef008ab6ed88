"""Text of growing sequences, and the stop strings that end them.

Tokens may split characters, and a stop string may begin or end in the middle of
a token. Text is therefore produced in whole characters only. The scheduler,
which ends sequences, and the server, which cuts their text, look for stop
strings with the same code, so they agree on the token at which a sequence ends.

The results are exact for tokenizers whose decoder joins bytes (GPT-2, Qwen2,
Llama 3) or characters, and for those that have tokens for single bytes beside
others (Llama 2). With the latter, a run of byte tokens is text only if the
whole run is UTF-8, which is known once the next token is no byte token, or once
the sequence ends.
"""

import codecs
from collections.abc import Sequence
import copy

import numpy as np

from jaxrl_async.text import tokenizer as tokenizer_lib

_REPLACEMENT = "\ufffd"  # what an incomplete character decodes to, among others
_MAX_HELD = 3  # most bytes that may still become one character
_WINDOW = 16  # longer windows are cut where possible


def are_allowed(strings: Sequence[str]) -> bool:
  """Return whether `StopStrings` can look for all of these strings."""
  return all(s and _REPLACEMENT not in s for s in strings)


class TokenText:
  """The text of one sequence, produced piece by piece from its tokens."""

  def __init__(self, tokenizer: tokenizer_lib.Tokenizer):
    self._tokenizer = tokenizer
    # The window keeps some tokens that have been turned into text already: a
    # decoder may write the space of a word only after another word.
    self._window: list[int] = []
    self._num_given = 0  # characters of the window's text
    # The byte tokens at its end. Further ones could still change what they
    # stand for, so they are decoded once they end, however many they are.
    self._num_open = 0
    self._half = b""  # those of a character that is not whole
    self._is_utf8 = True  # whether they could still become text
    self._ended = ""  # what `pending` returned at a whole character
    self._more = ""  # characters since then

  def add(self, tokens: Sequence[int] | np.ndarray) -> str:
    """Return the text that these tokens add and that nothing will change."""
    num_closed = len(self._window) - self._num_open
    for token in map(int, tokens):
      if self._tokenizer.is_shown(token):
        self._take(token)
    num_open = self._num_open
    if len(self._window) - num_open == num_closed:
      return ""
    text = self._tokenizer.decode(self._window[: len(self._window) - num_open])
    stable = len(text)
    while (
      not self._tokenizer.byte_tokens
      and stable > max(self._num_given, len(text) - _MAX_HELD)
      and text[stable - 1] == _REPLACEMENT
    ):
      stable -= 1
    new = text[self._num_given : stable]
    self._num_given = max(stable, self._num_given)
    if len(self._window) > _WINDOW and not num_open:
      self._cut(text)
    return new

  def pending(self) -> str:
    """Return the remaining text under the assumption that no tokens follow."""
    return self._tokenizer.decode(self._window)[self._num_given :]

  def pending_text(self) -> str:
    """Return what `pending` does, or U+FFFD if it ends with bytes of no text.

    All calls together take time in proportion to the tokens.
    """
    if not self._num_open:
      return self.pending()
    if self._half or not self._is_utf8:
      return _REPLACEMENT
    self._ended = self._ended + self._more if self._ended else self.pending()
    self._more = ""
    return self._ended

  def finish(self) -> str:
    """Return the remaining text, once no more tokens will follow."""
    new = self.pending()
    self._num_given += len(new)
    return new

  def copy(self) -> "TokenText":
    """Return an independent copy that continues from here."""
    other = copy.copy(self)
    other._window = list(self._window)
    return other

  def _take(self, token: int) -> None:
    self._window.append(token)
    byte = self._tokenizer.byte_tokens.get(token)
    if byte is None:
      self._num_open = 0
      return
    if not self._num_open:
      self._half, self._is_utf8, self._ended, self._more = b"", True, "", ""
    self._num_open += 1
    if not self._is_utf8:
      return
    half = self._half + bytes([byte])
    try:
      text, num_read = codecs.utf_8_decode(half, "strict", False)
    except UnicodeDecodeError:
      self._is_utf8 = False
    else:
      self._half = half[num_read:]
      self._more += text

  def _cut(self, text: str) -> None:
    """Forget tokens from the start of the window, at a character boundary."""
    decode = self._tokenizer.decode
    for kept in range(4, _WINDOW):
      before = decode(self._window[:-kept])
      rest = decode(self._window[-kept:])
      # A decoder may drop the spaces at the start of a text.
      start = len(text) - len(rest)
      spaces = " " * (start - len(before))
      if rest and start <= self._num_given and before + spaces + rest == text:
        self._window = self._window[-kept:]
        self._num_given -= start
        return


class StopStrings:
  """Finds the token that completes one of some strings, in one sequence.

  An object of this class is a `sequence.StopCheck`. If one token completes
  several strings, the one that begins first cuts the text.
  """

  def __init__(
    self,
    tokenizer: tokenizer_lib.Tokenizer,
    strings: Sequence[str],
    *,
    min_tokens: int = 0,
  ):
    """Begin before the first token of a completion.

    Args:
      tokenizer: of the tokens that will be read.
      strings: the stop strings; `are_allowed` must hold.
      min_tokens: a string that is completed within fewer tokens is ignored.

    Raises:
      ValueError: one of the strings can never be found.
    """
    if not are_allowed(strings):
      raise ValueError(f"stop strings {strings!r}: one can never be found")
    self._strings = tuple(strings)
    self._text = TokenText(tokenizer)
    # Whether the last tokens may be byte tokens whose text is still undecided.
    self._has_pending = bool(strings and tokenizer.byte_tokens)
    # Next tokens that cannot end the sequence.
    self._num_ignored = max(min_tokens - 1, 0)
    self._longest = max(map(len, strings), default=1)
    self._tail = ""  # text that may still be the beginning of a stop string
    self._num_seen = 0  # characters after the tail that were searched already

  def __call__(self, tokens: np.ndarray) -> int | None:
    """Return how many of the tokens belong to the completion if it ends here.

    The result is None if no stop string is completed.
    """
    return self.read(tokens)[1]

  def read(
    self, tokens: Sequence[int] | np.ndarray
  ) -> tuple[str, int | None, int]:
    """Read the next tokens.

    Returns:
      The text that they add; the result of `__call__`; and the distance from
      the end of that text to the beginning of the stop string. If a stop string
      was completed, the text is the whole text of these tokens.
    """
    ignored = min(self._num_ignored, len(tokens))
    self._num_ignored -= ignored
    if self._has_pending:
      return self._read_one_by_one(tokens, ignored)
    text = ""
    if ignored:
      text = self._text.add(tokens[:ignored])
      self._remember(text)
    if ignored == len(tokens):
      return text, None, 0
    before = self._text.copy()
    new = self._text.add(tokens[ignored:])
    if self._find(new) is None:
      self._remember(new)
      return text + new, None, 0
    self._text = before
    more, count, behind = self._read_one_by_one(tokens[ignored:], 0)
    return text + more, count and ignored + count, behind

  def _read_one_by_one(
    self, tokens: Sequence[int] | np.ndarray, ignored: int
  ) -> tuple[str, int | None, int]:
    text = ""
    for i in range(len(tokens)):
      new = self._text.add(tokens[i : i + 1])
      text += new
      pending = self._text.pending_text() if self._has_pending else ""
      behind = self._find(new + pending) if i >= ignored else None
      if behind is not None:
        # If the sequence ends here, nothing follows that could change this
        # text.
        return text + pending, i + 1, behind
      self._remember(new, pending)
    return text, None, 0

  def finish(self) -> str:
    """Return the text held back, once no more tokens will follow."""
    return self._text.finish()

  def _remember(self, new: str, pending: str = "") -> None:
    text = self._tail + new
    self._tail = text[max(0, len(text) - self._longest + 1) :]
    self._num_seen = max(self._num_seen - len(new), 0)
    # Otherwise the pending text is not decided yet.
    if _REPLACEMENT not in pending:
      self._num_seen = len(pending)

  def _find(self, new: str) -> int | None:
    """Return the distance from the end to the first string `new` completes."""
    text = self._tail + new
    num_seen = len(self._tail) + self._num_seen
    starts = []
    for string in self._strings:
      earliest = max(0, num_seen - len(string) + 1)
      if (start := text.find(string, earliest)) >= 0:
        starts.append(start)
    return len(text) - min(starts) if starts else None


def check_of(
  tokenizer: tokenizer_lib.Tokenizer,
  strings: Sequence[str],
  written: Sequence[int] | np.ndarray = (),
) -> StopStrings | None:
  """Return a search for stop strings that goes on after some tokens.

  Args:
    tokenizer: of the tokens that will be read.
    strings: the stop strings; none need no search, and the result is None.
    written: the completion so far, in which none of the strings was found.
  """
  if not strings:
    return None
  check = StopStrings(tokenizer, strings)
  check.read(written)
  return check


class CompletionText:
  """The text of one completion as a client sees it, piece by piece.

  It never contains half a character, a part of the stop string, or anything
  after the stop string.
  """

  def __init__(
    self,
    tokenizer: tokenizer_lib.Tokenizer,
    strings: Sequence[str] = (),
    *,
    min_tokens: int = 0,
  ):
    """Begin before the first token; the arguments are those of StopStrings."""
    self._strings = tuple(strings)
    self._stops = StopStrings(tokenizer, strings, min_tokens=min_tokens)
    self._held = ""
    self.has_stopped = False

  def add(self, tokens: Sequence[int] | np.ndarray) -> str:
    """Return the text that can be shown after these tokens."""
    if self.has_stopped:
      return ""
    text, count, behind = self._stops.read(tokens)
    self._held += text
    if count is not None:
      self.has_stopped = True
      shown = self._held[: len(self._held) - behind]
      self._held = ""
      return shown
    keep = self._possible_beginning()
    shown = self._held[: len(self._held) - keep]
    self._held = self._held[len(self._held) - keep :]
    return shown

  def finish(self) -> str:
    """Return the text that was held back, once no more tokens will follow."""
    if self.has_stopped:
      return ""
    shown, self._held = self._held + self._stops.finish(), ""
    return shown

  def _possible_beginning(self) -> int:
    """Return the length of the longest end that may begin a stop string."""
    longest = max(map(len, self._strings), default=1)
    for n in range(min(longest - 1, len(self._held)), 0, -1):
      end = self._held[len(self._held) - n :]
      if any(string.startswith(end) for string in self._strings):
        return n
    return 0
