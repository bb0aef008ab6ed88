"""Tokenizers with tokens for single bytes: text piece by piece, and stops."""

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import llama_tokenizer
import numpy as np
import pytest

from jaxrl_async.text import stop_strings
from jaxrl_async.text import tokenizer as tokenizer_lib

KINDS = [{}, {"strips": False}]
few = settings(max_examples=40, deadline=None, derandomize=True)
SIZES = st.lists(st.integers(1, 5), min_size=1, max_size=4)
NEWLINE = 13  # <0x0A>
EURO = [229, 133, 175]  # <0xE2> <0x82> <0xAC>


def pieces(shown, tokens, sizes):
  start = i = 0
  while start < len(tokens):
    yield shown.add(np.array(tokens[start : start + sizes[i % len(sizes)]]))
    start += sizes[i % len(sizes)]
    i += 1


@st.composite
def token_lists(draw, max_size=40):
  """Bytes in runs, whole characters among them, words, special tokens."""
  parts = st.one_of(
    st.lists(st.integers(3, 258), min_size=1, max_size=6),
    st.text("é€😀\n界", min_size=1, max_size=3).map(
      lambda text: [3 + byte for byte in text.encode()]
    ),
    st.lists(st.integers(259, 330), min_size=1, max_size=9),
    st.lists(st.integers(0, 2), min_size=1, max_size=2),
  )
  return sum(draw(st.lists(parts, max_size=max_size // 4)), [])


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_pieces_are_the_text_of_decoding_all_tokens(kind):
  tokenizer = llama_tokenizer.wrapped(**kind)

  @few
  @given(tokens=token_lists(), sizes=SIZES)
  def check(tokens, sizes):
    shown = stop_strings.TokenText(tokenizer)
    text = "".join(pieces(shown, tokens, sizes)) + shown.finish()
    assert text == tokenizer.decode(tokens)

  check()


def find(tokenizer, tokens, strings, min_tokens):
  """Decodes everything after each token: how many tokens, and the text."""
  num_seen = 0
  for count in range(1, len(tokens) + 1):
    whole = tokenizer.decode(tokens[:count]).rstrip("\ufffd")
    starts = [
      start
      for s in strings
      if (start := whole.find(s, max(0, num_seen - len(s) + 1))) >= 0
    ]
    num_seen = max(num_seen, len(whole))
    if starts and count >= min_tokens:
      return count, whole[: min(starts)]
  return None, tokenizer.decode(tokens)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_stop_string_is_found_at_its_last_byte_in_calls_of_any_size(kind):
  tokenizer = llama_tokenizer.wrapped(**kind)

  @few
  @given(
    tokens=token_lists(),
    strings=st.lists(
      st.sampled_from(["€", "\n", "a", "é\n", " the", "1"]),
      min_size=1,
      max_size=2,
    ),
    sizes=SIZES,
    min_tokens=st.integers(0, 12),
  )
  def check(tokens, strings, sizes, min_tokens):
    count, text = find(tokenizer, tokens, strings, min_tokens)
    options = {"min_tokens": min_tokens}
    shown = stop_strings.CompletionText(tokenizer, strings, **options)
    found = "".join(pieces(shown, tokens, sizes)) + shown.finish()
    assert (found, shown.has_stopped) == (text, count is not None)
    stops = stop_strings.StopStrings(tokenizer, strings, **options)
    before = start = 0
    for size in sizes * len(tokens):
      kept = stops(np.array(tokens[start : start + size], np.int32))
      if kept is not None:
        before = start + kept
        break
      start += size
    assert before == (count or 0)

  check()


def test_bytes_are_shown_when_it_is_known_what_they_make():
  tokenizer = llama_tokenizer.wrapped()
  (a,) = tokenizer.encode("a").tolist()[-1:]
  shown = stop_strings.TokenText(tokenizer)
  assert [shown.add([t]) for t in [*EURO, NEWLINE, a]] == [*4 * [""], "€\n a"]
  # The same, and a byte that makes nothing of all of them.
  shown = stop_strings.TokenText(tokenizer)
  assert [shown.add([t]) for t in [*EURO, 258, a]] == 4 * [""] + [
    4 * "\ufffd" + " a"
  ]
  shown = stop_strings.TokenText(tokenizer)
  assert shown.add(EURO) == ""
  assert shown.finish() == "€"


def test_a_stop_string_of_bytes_needs_no_token_after_it():
  tokenizer = llama_tokenizer.wrapped()
  stops = stop_strings.StopStrings(tokenizer, ["\n\n"])
  assert [stops(np.array([t])) for t in (NEWLINE, NEWLINE)] == [None, 1]
  shown = stop_strings.CompletionText(tokenizer, ["€"])
  assert shown.add([*tokenizer.encode("a the").tolist(), *EURO]) == "a the"
  assert shown.has_stopped


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_long_text_is_decoded_in_windows(kind):
  decoded = []

  class Counted(tokenizer_lib.Tokenizer):
    def __init__(self, inner):
      self._inner = inner
      self.byte_tokens = inner.byte_tokens
      self.is_shown = inner.is_shown

    def decode(self, tokens):
      decoded.append(len(tokens))
      return self._inner.decode(tokens)

  tokenizer = llama_tokenizer.wrapped(**kind)
  # Each word begins with a space, which a decoder takes from the first one.
  tokens = tokenizer.encode(" a 1" * 400).tolist() + 500 * [2]
  shown = stop_strings.TokenText(Counted(tokenizer))
  text = "".join(shown.add([token]) for token in tokens) + shown.finish()
  assert text == tokenizer.decode(tokens)
  assert max(decoded) < 40


@pytest.mark.parametrize("strings", [(), ("€!",)])
@pytest.mark.parametrize("text", [b"\xf0\x9f\x98\x80", b"\n", b"\n\xff"])
def test_a_long_run_of_bytes_is_decoded_a_few_times(text, strings):
  decoded = []

  class Counted(tokenizer_lib.Tokenizer):
    def __init__(self, inner):
      self._inner = inner
      self.byte_tokens = inner.byte_tokens
      self.is_shown = inner.is_shown

    def decode(self, tokens):
      decoded.append(len(tokens))
      return self._inner.decode(tokens)

  tokenizer = llama_tokenizer.wrapped()
  tokens = [3 + byte for byte in text * 500] + tokenizer.encode(
    "the a 1 a 1 the"
  ).tolist()
  shown = stop_strings.CompletionText(Counted(tokenizer), strings)
  found = "".join(shown.add([token]) for token in tokens) + shown.finish()
  assert found == tokenizer.decode(tokens)
  assert sum(decoded) < 100 * len(tokens)
