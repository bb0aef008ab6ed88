"""Stop strings and text piece by piece, against decoding all at once."""

import byte_level
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import llama_tokenizer
import numpy as np
import pytest

from jaxrl_async.text import stop_strings
from jaxrl_async.text import tokenizer as tokenizer_lib

byte_level_tokenizers = pytest.mark.parametrize("name", byte_level.NAMES)
few = settings(max_examples=60, deadline=None, derandomize=True)


LLAMA = {"llama": {}, "gemma": {"strips": False}}
NEWLINE = 13  # <0x0A>
EURO = [229, 133, 175]  # <0xE2> <0x82> <0xAC>


def load(name):
  if name == "characters":
    return tokenizer_lib.character_level()
  if name in LLAMA:
    return llama_tokenizer.wrapped(**LLAMA[name])
  return byte_level.load(name)


def chunks(tokens, sizes):
  """The tokens in calls of those sizes, over and over."""
  start, i = 0, 0
  while start < len(tokens):
    size = sizes[i % len(sizes)]
    yield np.asarray(tokens[start : start + size], np.int32)
    start, i = start + size, i + 1


def whole_characters(tokenizer, text):
  """A text without the bytes at its end that may still become one."""
  if tokenizer.byte_tokens:  # a run of them, however long
    return text.rstrip("\ufffd")
  for _ in range(3):
    text = text.removesuffix("\ufffd")
  return text


def find(tokenizer, tokens, strings, min_tokens=0):
  """Decodes everything after each token: how many tokens, and the text."""
  num_seen = 0
  for count in range(1, len(tokens) + 1):
    whole = whole_characters(tokenizer, tokenizer.decode(tokens[:count]))
    starts = [
      start
      for s in strings
      if (start := whole.find(s, max(0, num_seen - len(s) + 1))) >= 0
    ]
    num_seen = max(num_seen, len(whole))
    if starts and count >= min_tokens:
      return count, whole[: min(starts)]
  return None, tokenizer.decode(tokens)


def check(tokenizer, tokens, strings, sizes, min_tokens=0):
  expected_count, expected_text = find(tokenizer, tokens, strings, min_tokens)
  count = None
  shown = stop_strings.CompletionText(tokenizer, strings, min_tokens=min_tokens)
  pieces = [shown.add(piece) for piece in chunks(tokens, sizes)]
  pieces.append(shown.finish())
  assert "".join(pieces) == expected_text
  assert shown.has_stopped == (expected_count is not None)
  if not strings:
    return
  stops = stop_strings.StopStrings(tokenizer, strings, min_tokens=min_tokens)
  before = 0
  for piece in chunks(tokens, sizes):
    found = stops(piece)
    if found is not None:
      assert 1 <= found <= len(piece)
      count = before + found
      break
    before += len(piece)
  assert count == expected_count


class Counted(tokenizer_lib.Tokenizer):
  """Remembers how many tokens each call has decoded."""

  def __init__(self, inner):
    self._inner = inner
    self.byte_tokens = inner.byte_tokens
    self.is_shown = inner.is_shown
    self.decoded = []

  def decode(self, tokens):
    self.decoded.append(len(tokens))
    return self._inner.decode(tokens)


TEXTS = st.text(
  st.sampled_from("ab =\n1")
  | st.sampled_from("aé€😀界ö\u200d")
  | st.characters(codec="utf-8"),
  max_size=30,
)
SIZES = st.lists(st.integers(1, 5), min_size=1, max_size=4)


@few
@given(
  text=st.text("ab =\n", max_size=40),
  strings=st.lists(st.text("ab =\n", min_size=1, max_size=4), max_size=3),
  sizes=SIZES,
  min_tokens=st.integers(0, 20),
)
def test_characters_stop_where_the_whole_text_does(
  text, strings, sizes, min_tokens
):
  tokenizer = load("characters")
  check(tokenizer, tokenizer.encode(text).tolist(), strings, sizes, min_tokens)


@byte_level_tokenizers
@few
@given(data=st.data(), text=TEXTS, sizes=SIZES, min_tokens=st.integers(0, 9))
def test_written_text_stops_where_the_whole_text_does(
  name, data, text, sizes, min_tokens
):
  tokenizer = load(name)
  n = len(text)
  strings = []
  if n and "\ufffd" not in text:
    for _ in range(data.draw(st.integers(0, 2))):
      start = data.draw(st.integers(0, n - 1))
      strings.append(text[start : start + data.draw(st.integers(1, 5))])
  check(tokenizer, tokenizer.encode(text).tolist(), strings, sizes, min_tokens)


@byte_level_tokenizers
@few
@given(
  tokens=st.lists(
    st.integers(0, 255) | st.integers(0, 50256) | st.just(50256), max_size=60
  ),
  strings=st.lists(st.sampled_from(["a", "é", " the", "b c"]), max_size=2),
  sizes=SIZES,
)
def test_any_tokens_give_the_text_of_decoding_them_all(
  name, tokens, strings, sizes
):
  # The first 256 tokens are single bytes: most of it is no UTF-8 at all.
  check(load(name), tokens, strings, sizes)


@byte_level_tokenizers
def test_half_a_character_is_never_shown(name):
  tokenizer = load(name)
  tokens = tokenizer.encode("naïve 😀界!").tolist()
  assert sum("\ufffd" in tokenizer.decode([token]) for token in tokens) >= 3
  shown = stop_strings.CompletionText(tokenizer)
  pieces = [shown.add([token]) for token in tokens] + [shown.finish()]
  assert not any("\ufffd" in piece for piece in pieces)
  assert "".join(pieces) == "naïve 😀界!"
  shown = stop_strings.CompletionText(tokenizer)
  cut = tokenizer.encode("界")[:1]
  assert shown.add(cut) == ""
  assert shown.finish() == tokenizer.decode(cut) == "\ufffd"


def test_a_possible_beginning_is_held_back_and_given_when_it_was_none():
  tokenizer = load("characters")
  shown = stop_strings.CompletionText(tokenizer, ["END"])
  add = [shown.add(tokenizer.encode(c)) for c in "an ENormous ENEND"]
  assert "".join(add) == "an ENormous EN"
  assert add[3:6] == ["", "", "ENo"]
  assert add[12:] == ["", "", "EN", "", ""]
  assert shown.has_stopped
  assert shown.add(tokenizer.encode("more")) == ""
  assert shown.finish() == ""


@pytest.mark.parametrize("name", [*byte_level.NAMES, *LLAMA])
def test_a_long_text_is_decoded_in_windows(name):
  tokenizer = load(name)
  if name in LLAMA:
    # Each word begins with a space, which a decoder takes from the first one.
    tokens = tokenizer.encode(" a 1" * 400).tolist() + 500 * [2]
  else:
    tokens = np.random.default_rng(0).integers(0, 50256, 3000).tolist()
  counted = Counted(tokenizer)
  text = stop_strings.TokenText(counted)
  pieces = [text.add([token]) for token in tokens] + [text.finish()]
  assert "".join(pieces) == tokenizer.decode(tokens)
  assert max(counted.decoded) < 40


@st.composite
def byte_tokens(draw, max_size=40):
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


@pytest.mark.parametrize("name", LLAMA)
@few
@given(
  tokens=byte_tokens(),
  strings=st.lists(
    st.sampled_from(["€", "\n", "a", "é\n", " the", "1"]), max_size=2
  ),
  sizes=SIZES,
  min_tokens=st.integers(0, 12),
)
def test_tokens_of_single_bytes_stop_at_the_last_byte(
  name, tokens, strings, sizes, min_tokens
):
  check(load(name), tokens, strings, sizes, min_tokens)


def test_bytes_are_shown_when_it_is_known_what_they_make():
  tokenizer = load("llama")
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
  # A stop string of bytes needs no token after it.
  stops = stop_strings.StopStrings(tokenizer, ["\n\n"])
  assert [stops(np.array([t])) for t in (NEWLINE, NEWLINE)] == [None, 1]


@pytest.mark.parametrize("strings", [(), ("€!",)])
@pytest.mark.parametrize("text", [b"\xf0\x9f\x98\x80", b"\n", b"\n\xff"])
def test_a_long_run_of_bytes_is_decoded_a_few_times(text, strings):
  tokenizer = load("llama")
  tokens = [3 + byte for byte in text * 500] + tokenizer.encode(
    "the a 1 a 1 the"
  ).tolist()
  counted = Counted(tokenizer)
  shown = stop_strings.CompletionText(counted, strings)
  found = "".join(shown.add([token]) for token in tokens) + shown.finish()
  assert found == tokenizer.decode(tokens)
  assert sum(counted.decoded) < 100 * len(tokens)


def test_strings_that_cannot_be_found_are_refused():
  for strings in ([""], ["a", "\ufffd"]):
    with pytest.raises(ValueError, match="never be found"):
      stop_strings.StopStrings(load("characters"), strings)
