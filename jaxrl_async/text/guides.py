"""Guided decoding: completions that a grammar allows, by llguidance.

llguidance is the optional extra `guided`. A grammar becomes a matcher, which
says after each token which tokens may follow; see `engine.sequence.Guide`.
"""

import collections
import copy
import functools
import re
import threading
from typing import Any

from jaxtyping import Int
import numpy as np

from jaxrl_async.text import tokenizer as tokenizer_lib

_MAX_REASON = 200
_MAX_KEPT = 2_048  # grammars: each question may have its own


class _Vocabulary:
  """A tokenizer as llguidance takes it: the bytes of each token."""

  def __init__(self, tokenizer: tokenizer_lib.Tokenizer):
    self._tokenizer = tokenizer
    self.eos_token_id = tokenizer.eos_id
    self.bos_token_id = None
    ids = range(tokenizer.vocab_size)
    self.special_token_ids = [i for i in ids if not tokenizer.is_shown(i)]
    self.tokens = [self._bytes_of(i) for i in ids]

  def _bytes_of(self, token: int) -> bytes:
    if not self._tokenizer.is_shown(token):
      return self._tokenizer.name_of(token).encode()
    own = self._tokenizer.bytes_of(token)
    return self._tokenizer.decode([token]).encode() if own is None else own

  def __call__(self, text: str) -> list[int]:
    return self._tokenizer.encode(text).tolist()


class Guide:
  """A matcher of one completion, or one to copy for several.

  Attributes:
    grammar: that it was made of.
  """

  def __init__(self, matcher: Any, num_words: int, grammar: str):
    self.grammar = grammar
    self._matcher = matcher
    self._num_words = num_words

  def copy(self) -> "Guide":
    """Return one that is independent of this."""
    made = copy.copy(self)
    made._matcher = self._matcher.deep_copy()
    return made

  @property
  def error(self) -> str:
    """Why the grammar cannot be followed any further, or ""."""
    if not self._matcher.is_error():
      return ""
    return _reason(self._matcher.get_error())

  def allow(self, row: Int[np.ndarray, "W"]) -> None:
    """Set the bits of the tokens that are allowed, and no others."""
    row[:] = 0  # the model may have more tokens than the tokenizer
    mask = row[: self._num_words]
    # After an error this allows an end token alone.
    self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)

  def take(self, tokens: Int[np.ndarray, "T"]) -> None:
    """Take tokens that were drawn, the last of which may end the sequence."""
    for token in tokens.tolist():
      if not self._matcher.is_stopped():  # or after an error, which it keeps
        self._matcher.consume_token(token)


class Guides:
  """Makes guides for one tokenizer.

  Threads: any thread may call `guide`. The first call takes seconds.
  """

  def __init__(self, tokenizer: tokenizer_lib.Tokenizer):
    """Make nothing yet, as few servers are asked for guides."""
    self._tokenizer = tokenizer
    self._lock = threading.Lock()
    self._vocabulary: Any = None
    self._kept: collections.OrderedDict[str, Guide] = collections.OrderedDict()

  def guide(self, grammar: str) -> Guide:
    """Return the guide of a grammar.

    Raises:
      ImportError: the extra is not installed.
      ValueError: the grammar is wrong, or needs what is not supported.
    """
    import llguidance  # pyright: ignore[reportMissingImports]

    with self._lock:
      if self._vocabulary is None:
        self._vocabulary = self._read(llguidance)
      if grammar not in self._kept:
        matcher = llguidance.LLMatcher(self._vocabulary, grammar, log_level=0)
        if matcher.is_error():
          raise ValueError(_reason(matcher.get_error()))
        num_words = -(-self._tokenizer.vocab_size // 32)
        self._kept[grammar] = Guide(matcher, num_words, grammar)
        if len(self._kept) > _MAX_KEPT:
          self._kept.popitem(last=False)
      self._kept.move_to_end(grammar)
      return self._kept[grammar].copy()

  def _read(self, llguidance: Any) -> Any:
    ends = list(self._tokenizer.end_tokens)
    slices = llguidance.LLTokenizer.json_slices()
    try:
      # This knows every kind of tokens whose bytes depend on their neighbours.
      return llguidance.LLTokenizer(
        self._tokenizer.to_json(), eos_token=ends, slices=slices
      )
    except ValueError:  # no such kind, as with one token for each character
      wrapped = llguidance.TokenizerWrapper(_Vocabulary(self._tokenizer))
      return llguidance.LLTokenizer(wrapped, eos_token=ends, slices=slices)


def _reason(error: str) -> str:
  """Return the first line of an error, without a place in a grammar."""
  line = error.strip().partition("\n")[0]
  return re.sub(r"^at \d+\(\d+\): ", "", line)[:_MAX_REASON]


@functools.lru_cache(maxsize=4)
def of(tokenizer: tokenizer_lib.Tokenizer) -> Guides:
  """Return the guides of a tokenizer, which all of this process share.

  So it is read once, whoever asks for guides.
  """
  return Guides(tokenizer)
