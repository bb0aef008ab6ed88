"""Text of growing sequences: whole characters only, up to a stop string.

A character may be split over tokens and a stop string over anything. Both
sides look for stop strings with the same code: the scheduler to end a
sequence, the server to cut its text, so they agree on the token.

Exact for tokenizers whose decoder joins the tokens' bytes (GPT-2, Qwen2,
Llama 3) or characters, and for those with tokens for single bytes beside others
(Llama 2). Of the latter a run of such bytes is text if it is UTF-8 as a whole,
which only the token after it decides; to end there needs no decision.
"""

from collections.abc import Sequence
import copy

import numpy as np

from jaxrl_async.text import tokenizer as tokenizer_lib

_REPLACEMENT = "\ufffd"  # what is decoded for half a character, among others
_MAX_HELD = 3  # bytes that may still become one character
_WINDOW = 16  # tokens, from which on the window is cut where it can be


def are_allowed(strings: Sequence[str]) -> bool:
  """Whether `StopStrings` can look for all of them."""
  return all(s and _REPLACEMENT not in s for s in strings)


class TokenText:
  """Turns the tokens of one sequence into text, piece by piece."""

  def __init__(self, tokenizer: tokenizer_lib.Tokenizer):
    self._tokenizer = tokenizer
    # Some tokens that were turned into text already stay in the window: a
    # decoder may write a word's space only after another word.
    self._window: list[int] = []
    self._num_given = 0  # characters of the window's text

  def add(self, tokens: Sequence[int] | np.ndarray) -> str:
    """The text that these tokens add and that nothing will change."""
    shown = self._tokenizer.is_shown
    self._window += [int(t) for t in tokens if shown(int(t))]
    num_open = self._num_open()
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
    """The rest of the text, if there are no more tokens."""
    return self._tokenizer.decode(self._window)[self._num_given :]

  def finish(self) -> str:
    """The rest, once there will be no more tokens."""
    new = self.pending()
    self._num_given += len(new)
    return new

  def copy(self) -> "TokenText":
    """Another one that goes on from here."""
    other = copy.copy(self)
    other._window = list(self._window)
    return other

  def _num_open(self) -> int:
    """Bytes at the end, of which further ones may still make something else."""
    bytes_ = self._tokenizer.byte_tokens
    count = 0
    while count < len(self._window) and self._window[-1 - count] in bytes_:
      count += 1
    return count

  def _cut(self, text: str) -> None:
    """Forgets tokens from the start, at the edge of a character."""
    decode = self._tokenizer.decode
    for kept in range(4, _WINDOW):
      before = decode(self._window[:-kept])
      rest = decode(self._window[-kept:])
      # A decoder may leave out the spaces that a text begins with.
      start = len(text) - len(rest)
      spaces = " " * (start - len(before))
      if rest and start <= self._num_given and before + spaces + rest == text:
        self._window = self._window[-kept:]
        self._num_given -= start
        return


class StopStrings:
  """Finds the token that completes one of some strings.

  A `scheduler.StopCheck`, for one sequence. Of several strings completed by
  the same token the one that begins first cuts the text.
  """

  def __init__(
    self,
    tokenizer: tokenizer_lib.Tokenizer,
    strings: Sequence[str],
    *,
    min_tokens: int = 0,
  ):
    """Begins before the first token of a completion.

    Args:
      tokenizer: of the tokens to come.
      strings: without an empty one, see `are_allowed`.
      min_tokens: what is completed within fewer tokens does not count.
    """
    if not are_allowed(strings):
      raise ValueError(f"stop strings {strings!r}: one can never be found")
    self._strings = tuple(strings)
    self._text = TokenText(tokenizer)
    # What bytes make so far, if the next token is none of them.
    self._has_pending = bool(strings and tokenizer.byte_tokens)
    self._num_ignored = max(min_tokens - 1, 0)  # tokens that cannot stop it
    self._longest = max(map(len, strings), default=1)
    self._tail = ""  # what may still be the beginning of a string
    self._num_seen = 0  # characters behind it that were searched already

  def __call__(self, tokens: np.ndarray) -> int | None:
    """How many of the tokens belong to the completion if it ends in them."""
    return self.read(tokens)[1]

  def read(
    self, tokens: Sequence[int] | np.ndarray
  ) -> tuple[str, int | None, int]:
    """Takes the next tokens.

    Returns:
      The text they add; as of `__call__`, and then the text is that of these
      tokens alone; how many characters from the end the stop string begins.
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
      pending = self._text.pending() if self._has_pending else ""
      behind = self._find(new + pending) if i >= ignored else None
      if behind is not None:
        # Ended here it is the text: nothing follows that could change it.
        return text + pending, i + 1, behind
      self._remember(new, pending)
    return text, None, 0

  def finish(self) -> str:
    """The text held back, once there will be no more tokens."""
    return self._text.finish()

  def _remember(self, new: str, pending: str = "") -> None:
    text = self._tail + new
    self._tail = text[max(0, len(text) - self._longest + 1) :]
    self._num_seen = max(self._num_seen - len(new), 0)
    if _REPLACEMENT not in pending:  # else it is still to be decided
      self._num_seen = len(pending)

  def _find(self, new: str) -> int | None:
    """Where, from the end, the first string begins that `new` completes."""
    text = self._tail + new
    num_seen = len(self._tail) + self._num_seen
    starts = []
    for string in self._strings:
      earliest = max(0, num_seen - len(string) + 1)
      if (start := text.find(string, earliest)) >= 0:
        starts.append(start)
    return len(text) - min(starts) if starts else None


class CompletionText:
  """The text a client sees of one completion, piece by piece.

  Never half a character, never a part of the stop string, nothing after it.
  """

  def __init__(
    self,
    tokenizer: tokenizer_lib.Tokenizer,
    strings: Sequence[str] = (),
    *,
    min_tokens: int = 0,
  ):
    """As `StopStrings`, but `strings` may be empty."""
    self._strings = tuple(strings)
    self._stops = StopStrings(tokenizer, strings, min_tokens=min_tokens)
    self._held = ""
    self.has_stopped = False

  def add(self, tokens: Sequence[int] | np.ndarray) -> str:
    """What can be shown once these tokens are there."""
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
    """What was held back, once there will be no more tokens."""
    if self.has_stopped:
      return ""
    shown, self._held = self._held + self._stops.finish(), ""
    return shown

  def _possible_beginning(self) -> int:
    """Length of the longest end of the text that a stop string begins with."""
    longest = max(map(len, self._strings), default=1)
    for n in range(min(longest - 1, len(self._held)), 0, -1):
      end = self._held[len(self._held) - n :]
      if any(string.startswith(end) for string in self._strings):
        return n
    return 0
