"""Text to token ids and back, in Hugging Face's file format.

`character_level` builds the tokenizer of the small tasks: one token a
character, so that a policy of a few hundred thousand parameters can learn it in
minutes. `load` reads it back, or any `tokenizer.json` with the files beside it.
"""

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import hashlib
import json
import pathlib
import re
from typing import Any

from jaxtyping import Int, Int32
import numpy as np
import tokenizers

from jaxrl_async.storage import model_files

# Printable ASCII lacks these brackets, so no text spells a special token.
PAD_TOKEN = "⟨pad⟩"
EOS_TOKEN = "⟨eos⟩"
ALPHABET = "\n" + "".join(chr(code) for code in range(32, 127))
_MAX_VOCABULARY = 2**24
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Tokenizer:
  """A `tokenizers.Tokenizer` that knows which tokens end a sequence.

  Immutable once built, so any thread may use it.

  Attributes:
    eos_id: what a worked solution ends with.
    pad_id: fills what nobody reads.
    end_tokens: each of them ends a sequence; `eos_id` comes first.
    vocab_size: one more than the largest id.
    byte_tokens: each stands for a byte, as in Llama 2; successive ones become
      characters together, or none of them does. Empty for the tokenizers whose
      every token is made of bytes.
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
    """Takes over a tokenizer.

    Args:
      tokenizer: changed: it neither cuts nor pads, and its special tokens are
        marked as such.
      eos_token: the one that `eos_id` is of.
      pad_token: the one that `pad_id` is of.
      special_tokens: all that have a name, by name.
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
    # As transformers does it: what has a name is special, even where
    # tokenizer.json has it among the ordinary tokens.
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
      raise ValueError(f"a token has the id {self.vocab_size - 1}")
    if unknown := [i for i in self.end_tokens if i >= self.vocab_size]:
      raise ValueError(
        f"end token {unknown[0]} is not in the vocabulary of"
        f" {self.vocab_size} tokens"
      )
    ordinary = vocabulary.keys() - special
    is_character_level = all(len(token) == 1 for token in ordinary)
    self._alphabet = frozenset(ordinary) if is_character_level else None
    self._is_shown = bytearray(self.vocab_size)
    for token in ordinary:
      self._is_shown[vocabulary[token]] = True
    for token_id in self.end_tokens:
      self._is_shown[token_id] = False
    has_byte_tokens = _has_byte_fallback(tokenizer)
    self.byte_tokens = frozenset(
      vocabulary[token]
      for token in ordinary
      if has_byte_tokens and _BYTE_TOKEN.fullmatch(token)
    )

  def encode(self, text: str) -> Int32[np.ndarray, "T"]:
    """Token ids of the text alone: nothing is put before or after it.

    For what stands inside of a sequence, or brings its special tokens along as
    a rendered chat does; a text that begins one is for `encode_prompt`.

    Raises:
      ValueError: a character is not in the alphabet; it is never dropped.
    """
    return self._encode(text, add_special_tokens=False)

  def encode_prompt(self, text: str) -> Int32[np.ndarray, "T"]:
    """Token ids of a text that begins a sequence.

    The special tokens that the tokenizer puts around a text, such as Llama's
    at the beginning, are there: transformers' `tokenizer(text).input_ids`.

    Raises:
      ValueError: as of `encode`.
    """
    return self._encode(text, add_special_tokens=True)

  def _encode(self, text: str, *, add_special_tokens: bool) -> np.ndarray:
    if self._alphabet is not None and not self._alphabet.issuperset(text):
      foreign = next(c for c in text if c not in self._alphabet)
      raise ValueError(
        f"character {foreign!r} (U+{ord(foreign):04X}) is not in the "
        f"tokenizer's alphabet of {len(self._alphabet)} characters"
      )
    with _library_errors("the tokenizer says"):
      # A batch of one, because `encode` would hold Python's lock meanwhile.
      (encoding,) = self._tokenizer.encode_batch_fast(
        [text], add_special_tokens=add_special_tokens
      )
    return np.asarray(encoding.ids, np.int32)

  def decode(self, tokens: Int[np.ndarray, "T"] | Sequence[int]) -> str:
    """Text of the tokens; special tokens (end, padding) are left out.

    So is what ends a sequence without being special, and ids that only the
    model has.
    """
    return self._tokenizer.decode(
      [int(token) for token in tokens if self.is_shown(int(token))],
      skip_special_tokens=True,
    )

  def is_shown(self, token: int) -> bool:
    """Whether it can add to a text: it is neither special nor unknown."""
    return token < self.vocab_size and bool(self._is_shown[token])

  def digest(self) -> str:
    """The same for two tokenizers only if they encode all texts alike."""
    text = self._tokenizer.to_str()
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

  def save(self, directory: str | pathlib.Path) -> None:
    """Write `tokenizer.json`, `tokenizer_config.json`, and all end tokens.

    The latter go to `generation_config.json`, where `load` and transformers
    find them.
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
    path = directory / model_files.GENERATION_CONFIG
    ends = {"eos_token_id": list(self.end_tokens)}
    _write_json(path, model_files.read_optional(path) | ends)


def character_level() -> Tokenizer:
  """Pad, end of sequence, newline and printable ASCII: 98 tokens."""
  vocabulary = {PAD_TOKEN: 0, EOS_TOKEN: 1}
  vocabulary |= {c: 2 + i for i, c in enumerate(ALPHABET)}
  tokenizer = tokenizers.Tokenizer(
    # No such token exists, so that an unknown character is an error.
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

  Where no file names the end of sequence, the first of the model's own end
  tokens is taken, else the only special token; where none names padding, the
  end pads.

  Raises:
    FileNotFoundError: the directory has no `tokenizer.json`.
    ValueError: a file is damaged, or which token ends a sequence cannot be
      told, or the model's end tokens are not those of this tokenizer.
  """
  directory = pathlib.Path(directory)
  path = directory / model_files.TOKENIZER
  # Only to say it better than the library where this is no JSON at all.
  model_files.read_object(path)
  with _library_errors(f"{path} holds no tokenizer"):
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
  if _is_llama(tokenizer, directory):
    _mark_spaces(tokenizer, directory)
  named = model_files.special_tokens(directory)
  ends = model_files.end_tokens(directory)
  special = [
    token.content
    for token in tokenizer.get_added_tokens_decoder().values()
    if token.special
  ]
  texts = {i: tokenizer.id_to_token(i) for i in ends}
  if ends and not {*special, *named.values()}.intersection(texts.values()):
    # Also of a tokenizer that has nothing to do with the model.
    raise ValueError(
      f"{model_files.end_tokens_file(directory)}: eos_token_id names"
      f" {model_files.shown(texts)}, no special token of"
      f" {model_files.TOKENIZER}; use the tokenizer of this model"
    )
  eos_token = named.get("eos_token") or next(filter(None, texts.values()), None)
  if eos_token is None:
    if len(special) != 1:
      raise ValueError(
        f"{directory / model_files.TOKENIZER_CONFIG}: needs an eos_token, one"
        f" of {model_files.shown(special or 'none')}"
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
  """Whether transformers 5 overrides how tokenizer.json treats spaces."""
  if not _has_byte_fallback(tokenizer):
    return False
  family = model_files.read_optional(directory / model_files.CONFIG)
  return (
    model_files.tokenizer_class(directory) == "LlamaTokenizer"
    and family.get("model_type") != "qwen2"
  )


def _mark_spaces(
  tokenizer: tokenizers.Tokenizer, directory: pathlib.Path
) -> None:
  """As transformers' LlamaTokenizer does, whatever tokenizer.json says."""
  path = directory / model_files.TOKENIZER_CONFIG
  settings = model_files.read_object(path)
  has_prefix = settings.get("add_prefix_space") in (None, True)
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
  """Turns the errors of tokenizers, which have no type, into a ValueError."""
  try:
    yield
  except Exception as error:
    if type(error) is not Exception:
      raise
    raise ValueError(f"{what}: {' '.join(str(error).split())}") from error


def _has_byte_fallback(tokenizer: tokenizers.Tokenizer) -> bool:
  decoder = tokenizer.decoder
  return decoder is not None and b"ByteFallback" in decoder.__getstate__()


def _token_id(tokenizer: tokenizers.Tokenizer, token: str) -> int:
  token_id = tokenizer.token_to_id(token)
  if token_id is None:
    raise ValueError(
      f"token {model_files.shown(token)} is not in the vocabulary"
    )
  return token_id
