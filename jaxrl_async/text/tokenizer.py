"""Tokenizers: from text to token ids and back, in Hugging Face format.

`character_level` builds the tokenizer of the small tasks. It has one token per
character, so that a policy with a few hundred thousand parameters can learn
them in minutes. `load` reads it back, as it reads any other `tokenizer.json`
with the files beside it.
"""

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import copy
import hashlib
import json
import pathlib
import re
from typing import Any

from jaxtyping import Int, Int32
import numpy as np
import tokenizers

from jaxrl_async.config import sections
from jaxrl_async.storage import model_files

# These brackets are not printable ASCII, so no text spells a special token.
PAD_TOKEN = "⟨pad⟩"
EOS_TOKEN = "⟨eos⟩"
ALPHABET = "\n" + "".join(chr(code) for code in range(32, 127))
_MAX_VOCABULARY = 2**24
# GPT-2's alphabet: bytes that print stand for themselves, and the others are
# counted from 256 on.
_PRINTED = [*range(33, 127), *range(161, 173), *range(174, 256)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTED]
_BYTE_OF = {chr(byte): byte for byte in _PRINTED}
_BYTE_OF |= {chr(256 + i): byte for i, byte in enumerate(_OTHERS)}
_ADD_SPACE = "add_prefix_space"
# Of these transformers 5 sets it, whatever tokenizer.json says.
_PREFIX_SPACE = {"GPT2Tokenizer", "RobertaTokenizer", "Qwen2Tokenizer", "qwen2"}
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Tokenizer:
  """A `tokenizers.Tokenizer` that knows which tokens end a sequence.

  It is immutable once built, so any thread may use it.

  Attributes:
    eos_id: the token that ends a worked solution.
    pad_id: the token at unused positions.
    end_tokens: tokens each of which ends a sequence; `eos_id` comes first.
    vocab_size: the largest id plus one. Within a model, at most its rows.
    num_needed: the rows that a model must have. Special tokens behind all
      others may lie past them, such as the marks of images in a model of texts;
      but not the ends and the padding.
    byte_tokens: the byte of each token that stands for one, as in Llama 2. A
      run of them becomes characters only as a whole. There are none in
      tokenizers all of whose tokens consist of bytes.
  """

  def __init__(
    self,
    tokenizer: tokenizers.Tokenizer,
    *,
    eos_token: str,
    pad_token: str,
    special_tokens: Mapping[str, str] | None = None,
    end_tokens: Sequence[int] = (),
  ):
    """Take over a tokenizer.

    Args:
      tokenizer: it is changed: it no longer truncates or pads, and its special
        tokens are marked as special.
      eos_token: the token of `eos_id`.
      pad_token: the token of `pad_id`.
      special_tokens: all tokens that have a name, by name.
      end_tokens: further ids that end a sequence.

    Raises:
      ValueError: one of those tokens does not exist.
    """
    self._tokenizer = tokenizer
    self.eos_id = _token_id(tokenizer, eos_token)
    self.pad_id = _token_id(tokenizer, pad_token)
    self.end_tokens = tuple(dict.fromkeys((self.eos_id, *end_tokens)))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    added = {t.content for t in tokenizer.get_added_tokens_decoder().values()}
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    self.max_token_characters = max(map(len, vocabulary))
    named = dict(special_tokens or {})
    named |= {"eos_token": eos_token, "pad_token": pad_token}
    self._special_tokens = {k: v for k, v in named.items() if v in vocabulary}
    # As in transformers, every token with a name is special, even if
    # tokenizer.json lists it among the ordinary tokens.
    tokenizer.add_special_tokens(
      [token for token in self._special_tokens.values() if token not in added]
    )
    special = {
      token.content
      for token in tokenizer.get_added_tokens_decoder().values()
      if token.special
    }
    self.vocab_size = max(vocabulary.values()) + 1
    if self.vocab_size > _MAX_VOCABULARY:
      raise ValueError(f"token id {self.vocab_size - 1} is too large")
    if unknown := [i for i in self.end_tokens if i >= self.vocab_size]:
      raise ValueError(
        f"end token {unknown[0]} is not in the vocabulary of"
        f" {self.vocab_size} tokens"
      )
    self._special = re.compile("|".join(map(re.escape, sorted(special))))
    ordinary = vocabulary.keys() - special
    needed = {*self.end_tokens, self.pad_id, *map(vocabulary.get, ordinary)}
    self.num_needed = max(filter(None, needed), default=0) + 1
    # Bytes are written as single characters too, but make up any text.
    is_character_level = all(
      len(token) == 1 for token in ordinary
    ) and not _has_part(tokenizer.decoder, "ByteLevel")
    self._alphabet = frozenset(ordinary) if is_character_level else None
    self._is_shown = np.zeros(self.vocab_size, bool)
    for token in ordinary:
      self._is_shown[vocabulary[token]] = True
    for token_id in self.end_tokens:
      self._is_shown[token_id] = False
    self._has_bytes = _has_part(tokenizer.decoder, "ByteLevel")
    self._added = added | special
    has_byte_tokens = _has_byte_fallback(tokenizer)
    self.byte_tokens = {
      vocabulary[token]: int(token[3:5], 16)
      for token in ordinary
      if has_byte_tokens and _BYTE_TOKEN.fullmatch(token)
    }

  def encode(self, text: str) -> Int32[np.ndarray, "T"]:
    """Return the token ids of a text, without tokens before or after it.

    Use this for text inside a sequence, or for text that already contains its
    special tokens, such as a rendered chat. For text that begins a sequence use
    `encode_prompt`.

    Raises:
      ValueError: a character is not in the alphabet, or is none of Unicode, or
        the model has no row for a token; none is dropped silently.
    """
    return self._encode(text, add_special_tokens=False)

  def encode_prompt(self, text: str) -> Int32[np.ndarray, "T"]:
    """Return the token ids of a text that begins a sequence.

    They include the special tokens that the tokenizer puts around a text, such
    as Llama's first token, and equal transformers' `tokenizer(text).input_ids`.

    Raises:
      ValueError: as `encode`.
    """
    return self._encode(text, add_special_tokens=True)

  def _encode(self, text: str, *, add_special_tokens: bool) -> np.ndarray:
    if self._alphabet is not None and not self._alphabet.issuperset(text):
      foreign = next(c for c in text if c not in self._alphabet)
      raise ValueError(
        f"character {foreign!r} (U+{ord(foreign):04X}) is not in the "
        f"tokenizer's alphabet of {len(self._alphabet)} characters"
      )
    try:
      text.encode()  # or the library raises a TypeError
    except UnicodeEncodeError as error:
      raise ValueError(
        f"a text is not valid Unicode ({error.reason})"
      ) from error
    with _library_errors("the tokenizer says"):
      # A batch of one is used because the library's `encode` holds Python's
      # global lock while it runs.
      (encoding,) = self._tokenizer.encode_batch_fast(
        [text], add_special_tokens=add_special_tokens
      )
    ids = np.asarray(encoding.ids, np.int32)
    if (beyond := ids[ids >= self.vocab_size]).size:
      raise ValueError(
        f"{sections.shown(self.name_of(int(beyond[0])))} is the token"
        f" {beyond[0]}, and the model has {self.vocab_size}"
      )
    return ids

  def special_token_in(self, text: str) -> str | None:
    """Return the first special token that a text spells, or None."""
    found = self._special.search(text)
    return found and found[0]

  def decode(self, tokens: Int[np.ndarray, "T"] | Sequence[int]) -> str:
    """Return the text of the tokens, without those that are not shown.

    Not shown are special tokens, tokens that end a sequence, and ids that only
    the model has.
    """
    ids = np.asarray(tokens, np.int64)
    ids = ids[ids < self.vocab_size]
    return self._tokenizer.decode(
      ids[self._is_shown[ids]].tolist(), skip_special_tokens=False
    )

  def decode_all(self, tokens: Sequence[int]) -> str:
    """Return the text of the tokens, in which special ones have their names."""
    ids = [token for token in tokens if token < self.vocab_size]
    return self._tokenizer.decode(ids, skip_special_tokens=False)

  def name_of(self, token: int) -> str:
    """Return how the vocabulary writes a token; "" if only the model has it."""
    return self._tokenizer.id_to_token(token) or ""

  def bytes_of(self, token: int) -> bytes | None:
    """Return the bytes that a token stands for, or None if it is a text."""
    if token in self.byte_tokens:
      return bytes([self.byte_tokens[token]])
    name = self.name_of(token)
    if not self._has_bytes or name in self._added:
      return None
    if not _BYTE_OF.keys() >= set(name):
      return name.encode()  # as the decoder reads it
    return bytes(_BYTE_OF[character] for character in name)

  def is_shown(self, token: int) -> bool:
    """Return whether a token can add to a text."""
    return token < self.vocab_size and bool(self._is_shown[token])

  def showing(self, names: Sequence[str]) -> "Tokenizer":
    """Return the same tokenizer, which shows these special tokens in texts."""
    made = copy.copy(self)
    made._is_shown = self._is_shown.copy()
    for name in names:
      token = self._tokenizer.token_to_id(name)
      if token is not None and token not in self.end_tokens:
        made._is_shown[token] = True
    return made

  def within(self, num_rows: int) -> "Tokenizer":
    """Return the same tokenizer for a model with so many rows.

    A text with a token past them is refused.
    """
    if num_rows >= self.vocab_size:
      return self
    made = copy.copy(self)
    made.vocab_size = num_rows
    return made

  def to_json(self) -> str:
    """Return the contents of a `tokenizer.json`."""
    return self._tokenizer.to_str()

  def digest(self) -> str:
    """Return a digest that is equal only if two tokenizers encode alike."""
    text = self._tokenizer.to_str()
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

  def save(self, directory: str | pathlib.Path) -> None:
    """Write `tokenizer.json`, `tokenizer_config.json` and the end tokens.

    The end tokens are written to `generation_config.json`, where `load` and
    transformers find them.
    """
    directory = pathlib.Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    self._tokenizer.save(str(directory / model_files.TOKENIZER))
    settings = {
      "tokenizer_class": "PreTrainedTokenizerFast",
      **self._special_tokens,
      "clean_up_tokenization_spaces": False,
    }
    _write_json(directory / model_files.TOKENIZER_CONFIG, settings)
    self.save_end_tokens(directory)

  def save_end_tokens(self, directory: pathlib.Path) -> None:
    """Write the end tokens to the directory's `generation_config.json`."""
    path = directory / model_files.GENERATION_CONFIG
    ends = {"eos_token_id": list(self.end_tokens)}
    _write_json(path, model_files.read_optional(path) | ends)


def character_level() -> Tokenizer:
  """Return a tokenizer of 98 tokens, one per character.

  They are padding, end of sequence, newline and printable ASCII.
  """
  vocabulary = {PAD_TOKEN: 0, EOS_TOKEN: 1}
  vocabulary |= {c: 2 + i for i, c in enumerate(ALPHABET)}
  tokenizer = tokenizers.Tokenizer(
    # The unknown token does not exist, so an unknown character is an error.
    tokenizers.models.WordLevel(vocabulary, unk_token="⟨unknown⟩")
  )
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split(  # pyright: ignore[reportAttributeAccessIssue]
    tokenizers.Regex(r"[\s\S]"), "isolated"
  )
  tokenizer.decoder = tokenizers.decoders.Fuse()  # pyright: ignore[reportAttributeAccessIssue]
  tokenizer.add_special_tokens([PAD_TOKEN, EOS_TOKEN])
  return Tokenizer(tokenizer, eos_token=EOS_TOKEN, pad_token=PAD_TOKEN)


def load(directory: str | pathlib.Path) -> Tokenizer:
  """Read a tokenizer in Hugging Face format.

  If no file names the end-of-sequence token, it is the first end token of the
  model, or else the only special token. If no file names a padding token, the
  end-of-sequence token is used.

  Raises:
    FileNotFoundError: the directory has no `tokenizer.json`.
    ValueError: a file is damaged, the end-of-sequence token is unknown, or the
      model's end tokens are not special tokens of this tokenizer.
  """
  directory = pathlib.Path(directory)
  path = directory / model_files.TOKENIZER
  # This gives a better message than the library if the file is not JSON.
  model_files.read_object(path)
  with _library_errors(f"{path} is not a tokenizer"):
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
  _add_tokens(tokenizer, directory)
  settings = model_files.read_optional(directory / model_files.TOKENIZER_CONFIG)
  if settings.get("split_special_tokens"):
    raise ValueError(
      f"{directory / model_files.TOKENIZER_CONFIG}: split_special_tokens would"
      " make text of the marks of a chat; remove it"
    )
  if _is_llama(tokenizer, directory):
    _mark_spaces(tokenizer, directory)
  elif _family(directory) & _PREFIX_SPACE:
    _prefix_space(tokenizer.pre_tokenizer, bool(settings.get(_ADD_SPACE)))
  named = model_files.special_tokens(directory)
  ends = model_files.end_tokens(directory)
  special = [
    token.content
    for token in tokenizer.get_added_tokens_decoder().values()
    if token.special
  ]
  texts = {i: tokenizer.id_to_token(i) for i in ends}
  if ends and not {*special, *named.values()}.intersection(texts.values()):
    # This also detects a tokenizer that belongs to another model.
    raise ValueError(
      f"{model_files.end_tokens_file(directory)}: eos_token_id names"
      f" {sections.shown(texts)}, which are not special"
      f" tokens of {model_files.TOKENIZER}; use the tokenizer of this model"
    )
  eos_token = named.get("eos_token") or next(filter(None, texts.values()), None)
  if eos_token is None:
    if len(special) != 1:
      raise ValueError(
        f"{directory / model_files.TOKENIZER_CONFIG}: needs an eos_token, one"
        f" of {sections.shown(special or 'none')}"
      )
    (eos_token,) = special
  try:
    return Tokenizer(
      tokenizer,
      eos_token=eos_token,
      pad_token=named.get("pad_token") or eos_token,
      special_tokens=named,
      end_tokens=ends,
    )
  except ValueError as error:
    raise ValueError(f"{path}: {error}") from error


def _is_llama(tokenizer: tokenizers.Tokenizer, directory: pathlib.Path) -> bool:
  """Return whether transformers 5 overrides the file's treatment of spaces."""
  if not _has_byte_fallback(tokenizer):
    return False
  family = _family(directory)
  return "LlamaTokenizer" in family and "qwen2" not in family


def _family(directory: pathlib.Path) -> set[Any]:
  """Return the tokenizer's class in transformers, and the kind of its model."""
  config = model_files.read_optional(directory / model_files.CONFIG)
  return {model_files.tokenizer_class(directory), str(config.get("model_type"))}


def _prefix_space(step: Any, has_space: bool) -> None:
  """Set whether a text begins with a space, in a pre-tokenizer of bytes."""
  if isinstance(step, tokenizers.pre_tokenizers.ByteLevel):
    step.add_prefix_space = has_space
  elif isinstance(step, tokenizers.pre_tokenizers.Sequence):
    for part in step:
      _prefix_space(part, has_space)


def _mark_spaces(
  tokenizer: tokenizers.Tokenizer, directory: pathlib.Path
) -> None:
  """Treat spaces as transformers' LlamaTokenizer does.

  What tokenizer.json says about them has no effect there.
  """
  path = directory / model_files.TOKENIZER_CONFIG
  settings = model_files.read_object(path)
  has_prefix = settings.get(_ADD_SPACE) in (None, True)
  scheme = "never"
  if has_prefix:
    scheme = "always" if settings.get("legacy") else "first"
  decoders = tokenizers.decoders
  steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
  if has_prefix:
    steps.append(decoders.Strip(" ", 1, 0))
  tokenizer.normalizer = None  # pyright: ignore[reportAttributeAccessIssue]
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(  # pyright: ignore[reportAttributeAccessIssue]
    prepend_scheme=scheme, split=False
  )
  tokenizer.decoder = decoders.Sequence(steps)  # pyright: ignore[reportAttributeAccessIssue]


def _write_json(path: pathlib.Path, value: Any) -> None:
  path.write_text(json.dumps(value, indent=2) + "\n")


@contextlib.contextmanager
def _library_errors(what: str) -> Iterator[None]:
  """Turn the library's errors, which have no class, into a ValueError."""
  try:
    yield
  except Exception as error:
    if type(error) is not Exception:
      raise
    raise ValueError(f"{what}: {' '.join(str(error).split())}") from error


def _has_byte_fallback(tokenizer: tokenizers.Tokenizer) -> bool:
  return _has_part(tokenizer.decoder, "ByteFallback")


def _has_part(step: Any, name: str) -> bool:
  """Return whether a step of a tokenizer, or a part of it, is of that kind."""
  return step is not None and name.encode() in step.__getstate__()


def _add_tokens(
  tokenizer: tokenizers.Tokenizer, directory: pathlib.Path
) -> None:
  """Add the tokens that the files beside tokenizer.json name.

  As in transformers, one that tokenizer.json does not have like this is special
  if it has a name. One that is only listed is special unless a file says that
  it is not.

  Raises:
    ValueError: a file is damaged, or gives a token another id.
  """
  present = set(map(repr, tokenizer.get_added_tokens_decoder().values()))
  listed = model_files.unnamed_special_tokens(directory)
  named = model_files.special_tokens(directory).values()
  for token_id, settings in model_files.added_tokens(directory).items():
    token = tokenizers.AddedToken(**settings)
    if "special" not in settings and token.content in listed:
      token.special = True
    if repr(token) not in present and token.content in named:
      token.special = True
    tokenizer.add_tokens([token])
    if tokenizer.token_to_id(token.content) != token_id:
      raise ValueError(
        f"{directory}: {sections.shown(token.content)} is the token {token_id}"
        f" of its files, but {tokenizer.token_to_id(token.content)} of"
        f" {model_files.TOKENIZER}"
      )
  added = {t.content for t in tokenizer.get_added_tokens_decoder().values()}
  tokenizer.add_special_tokens([each for each in listed if each not in added])


def _token_id(tokenizer: tokenizers.Tokenizer, token: str) -> int:
  token_id = tokenizer.token_to_id(token)
  if token_id is None:
    raise ValueError(f"token {sections.shown(token)} is not in the vocabulary")
  return token_id
