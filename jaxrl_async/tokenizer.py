"""Text to token ids and back, in Hugging Face's file format.

`character_level` builds the tokenizer of the small tasks: one token a
character, so that a policy of a few hundred thousand parameters can learn it in
minutes. `load` reads it back, or any `tokenizer.json` with its
`tokenizer_config.json`.
"""

from collections.abc import Sequence
import hashlib
import json
import pathlib

from jaxtyping import Int, Int32
import numpy as np
import tokenizers

# Printable ASCII lacks these brackets, so no text spells a special token.
PAD_TOKEN = "⟨pad⟩"
EOS_TOKEN = "⟨eos⟩"
ALPHABET = "\n" + "".join(chr(code) for code in range(32, 127))


class Tokenizer:
  """A `tokenizers.Tokenizer` that knows its pad and end-of-sequence ids.

  Immutable once built, so any thread may use it.
  """

  def __init__(
    self, tokenizer: tokenizers.Tokenizer, *, eos_token: str, pad_token: str
  ):
    self._tokenizer = tokenizer
    self._eos_token = eos_token
    self._pad_token = pad_token
    self.eos_id = _token_id(tokenizer, eos_token)
    self.pad_id = _token_id(tokenizer, pad_token)
    self.vocab_size = tokenizer.get_vocab_size(with_added_tokens=True)
    ordinary = tokenizer.get_vocab(with_added_tokens=True).keys() - {
      token.content
      for token in tokenizer.get_added_tokens_decoder().values()
      if token.special
    }
    is_character_level = all(len(token) == 1 for token in ordinary)
    self._alphabet = frozenset(ordinary) if is_character_level else None

  def encode(self, text: str) -> Int32[np.ndarray, "T"]:
    """Token ids of the text alone: nothing is put before or after it.

    Raises:
      ValueError: a character is not in the alphabet; it is never dropped.
    """
    if self._alphabet is not None and not self._alphabet.issuperset(text):
      foreign = next(c for c in text if c not in self._alphabet)
      raise ValueError(
        f"character {foreign!r} (U+{ord(foreign):04X}) is not in the "
        f"tokenizer's alphabet of {len(self._alphabet)} characters"
      )
    ids = self._tokenizer.encode(text, add_special_tokens=False).ids
    return np.asarray(ids, np.int32)

  def decode(self, tokens: Int[np.ndarray, "T"] | Sequence[int]) -> str:
    """Text of the tokens; special tokens (end, padding) are left out."""
    return self._tokenizer.decode(
      [int(token) for token in tokens], skip_special_tokens=True
    )

  def digest(self) -> str:
    """The same for two tokenizers only if they encode all texts alike."""
    text = self._tokenizer.to_str()
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

  def save(self, directory: str | pathlib.Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`."""
    directory = pathlib.Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    self._tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
      "tokenizer_class": "PreTrainedTokenizerFast",
      "eos_token": self._eos_token,
      "pad_token": self._pad_token,
      "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(
      json.dumps(settings, indent=2) + "\n"
    )


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

  Where the configuration names no end of sequence, as GPT-2's does not, the
  only special token is meant; where it names no padding, the end pads.

  Raises:
    FileNotFoundError: the directory has no `tokenizer.json`.
    ValueError: which token ends a sequence cannot be told.
  """
  directory = pathlib.Path(directory)
  path = directory / "tokenizer.json"
  if not path.is_file():
    raise FileNotFoundError(f"{path} does not exist")
  tokenizer = tokenizers.Tokenizer.from_file(str(path))
  settings_path = directory / "tokenizer_config.json"
  settings = (
    json.loads(settings_path.read_text()) if settings_path.is_file() else {}
  )
  eos_token = _content(settings.get("eos_token"))
  if eos_token is None:
    special = [
      token.content
      for token in tokenizer.get_added_tokens_decoder().values()
      if token.special
    ]
    if len(special) != 1:
      raise ValueError(
        f"{settings_path}: needs an eos_token, one of {special or 'none'}"
      )
    (eos_token,) = special
  pad_token = _content(settings.get("pad_token")) or eos_token
  return Tokenizer(tokenizer, eos_token=eos_token, pad_token=pad_token)


def _content(token: str | dict | None) -> str | None:
  """A special token as text; the format allows a string or an object."""
  return token["content"] if isinstance(token, dict) else token


def _token_id(tokenizer: tokenizers.Tokenizer, token: str) -> int:
  token_id = tokenizer.token_to_id(token)
  if token_id is None:
    raise ValueError(f"token {token!r} is not in the vocabulary")
  return token_id
