"""Guided decoding: completions that a grammar allows, by llguidance.

llguidance is the optional extra `guided`. A grammar becomes a matcher, which
says after each token which tokens may follow; see `engine.sequence.Guide`.
"""

from collections.abc import Mapping, Sequence
import copy
import json
import re
import threading
from typing import Any

from jaxtyping import Int
import numpy as np

from jaxrl_async.text import tokenizer as tokenizer_lib
from jaxrl_async.tools import formats

# Space between parts of JSON is a space, or a line's end and an indentation.
# Where nothing else is likely, models would write it without an end.
_SPACE = r" |\n {0,40}"
# What stands before and after a call in each format.
_MARKS = {"hermes": ("<tool_call>\n", "\n</tool_call>"), "llama": ("", "")}
_MAX_REASON = 200


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
  """A matcher of one completion, or one to copy for several."""

  def __init__(self, matcher: Any, num_words: int):
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
    matcher = llguidance.LLMatcher(self._vocabulary, grammar, log_level=0)
    if matcher.is_error():
      raise ValueError(_reason(matcher.get_error()))
    return Guide(matcher, -(-self._tokenizer.vocab_size // 32))

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


def has_beginning(tool_format: str) -> bool:
  """Return whether a call of the format is known by its first characters.

  Only then may free text stand before calls that a grammar guides.
  """
  return bool(_MARKS[tool_format][0])


def grammar(
  schema: Mapping[str, Any] | None,
  functions: Sequence[Mapping[str, Any]] = (),
  tool_format: str = "hermes",
  tokenizer: tokenizer_lib.Tokenizer | None = None,
  *,
  may_speak: bool = False,
  is_single: bool = False,
) -> str:
  """Return a grammar in Lark's notation, as llguidance reads it.

  Args:
    schema: the JSON schema of an answer; None if only calls are allowed.
    functions: those that may be called instead, with names and the schemas of
      their parameters.
    tool_format: how calls are written.
    tokenizer: of the policy; it knows which marks are special tokens.
    may_speak: whether any text may be written before and instead of calls.
    is_single: whether there may be one call at most.
  """
  rules: dict[str, str] = {}
  if functions:
    begin, end = (_mark(mark, tokenizer) for mark in _MARKS[tool_format])
    called = _json({"anyOf": [_call(each, tool_format) for each in functions]})
    rules |= {"call": f"{begin} called {end}", "called": called}
    rules["start"] = "call" if is_single else r'call ("\n" call)*'
  if schema is not None:
    rules["answer"] = _json(schema)
    rules["start"] = " | ".join((*filter(None, [rules.get("start")]), "answer"))
  if may_speak:
    rules["TEXT"] = r"/(.|\n)*/"
    if begin.startswith("<"):  # a token of its own
      rules["call"] = "TEXT " + rules["call"]
    else:
      # The call begins as soon as its mark is there.
      mark = _MARKS[tool_format][0]
      rules["begin[lazy]"] = f"TEXT {json.dumps(mark.strip())}"
      rules["call"] = rf'begin "\n" called {end}'
    rules["start"] = "call | TEXT" if is_single else "call* TEXT"
  return "\n".join(f"{name}: {rule}" for name, rule in rules.items())


def _json(schema: Mapping[str, Any]) -> str:
  options = {"whitespace_pattern": _SPACE}
  return "%json " + json.dumps({**schema, "x-guidance": options})


def _call(function: Mapping[str, Any], tool_format: str) -> dict[str, Any]:
  """Return the schema of a call."""
  arguments = formats.FORMATS[tool_format].arguments
  parameters = function.get("parameters") or {"type": "object"}
  # What the schema refers to, as "#/$defs/Place", is within itself.
  parameters = {**parameters, "$id": f"function:///{function['name']}"}
  return {
    "type": "object",
    "properties": {"name": {"const": function["name"]}, arguments: parameters},
    "required": ["name", arguments],
    "additionalProperties": False,
  }


def _mark(text: str, tokenizer: tokenizer_lib.Tokenizer | None) -> str:
  """Return a mark in Lark's notation, in which special tokens stand bare."""
  special = tokenizer and tokenizer.special_token_in(text)
  if not special:
    return json.dumps(text) if text else ""
  before, after = (part and json.dumps(part) for part in text.split(special))
  return f"{before} {special} {after}".strip()
