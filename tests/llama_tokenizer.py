"""Tokenizers of Llama's kinds, small enough to be made in a test."""

import functools
import json

import tokenizers
from tokenizers import decoders
from tokenizers import normalizers
from tokenizers import pre_tokenizers
from tokenizers import processors

from jaxrl_async.text import tokenizer as tokenizer_lib

SPECIAL = ("<unk>", "<s>", "</s>")
_WORDS = "the they then stop stops a an and naïve 1 2 + = é ▁the ▁a ▁1 ▁▁ ▁▁▁▁"


def byte_fallback(*, strips=True, has_metaspace=False):
  """Llama 2's kind: what no word spells is written byte by byte.

  Args:
    strips: its decoder takes the first space away; Gemma's does not.
    has_metaspace: spaces are marked by a pre-tokenizer, as newer files do it.
  """
  vocabulary = {token: i for i, token in enumerate(SPECIAL)}
  for byte in range(256):
    vocabulary[f"<0x{byte:02X}>"] = len(vocabulary)
  letters = sorted(set("▁abcdefghijklmnopqrstuvwxyz0123456789+-=.,é<>/"))
  for letter in letters:
    vocabulary[letter] = len(vocabulary)
  merges = []
  for word in _WORDS.split():
    for end in range(2, len(word) + 1):
      pair = word[: end - 1], word[end - 1]
      if all(part in vocabulary for part in pair) and pair not in merges:
        merges.append(pair)
        vocabulary.setdefault(word[:end], len(vocabulary))
  made = tokenizers.Tokenizer(
    tokenizers.models.BPE(
      vocabulary,
      merges,
      unk_token="<unk>",
      fuse_unk=True,
      byte_fallback=True,
    )
  )
  if has_metaspace:
    made.pre_tokenizer = pre_tokenizers.Metaspace(
      prepend_scheme="first", split=False
    )
  else:
    made.normalizer = normalizers.Sequence(
      [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
  steps = [
    decoders.Replace("▁", " "),
    decoders.ByteFallback(),
    decoders.Fuse(),
  ]
  made.decoder = decoders.Sequence(steps + [decoders.Strip(" ", 1, 0)] * strips)
  made.add_special_tokens(list(SPECIAL))
  put_first(made, "<s>")
  return made


def put_first(made, token):
  """Has a text begin with that token."""
  made.post_processor = processors.TemplateProcessing(
    single=f"{token} $A",
    pair=f"{token} $A {token} $B",
    special_tokens=[(token, made.token_to_id(token))],
  )


def save(directory, made, **settings):
  """As transformers writes it."""
  directory.mkdir(parents=True, exist_ok=True)
  made.save(str(directory / "tokenizer.json"))
  settings = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    **settings,
  }
  path = directory / "tokenizer_config.json"
  path.write_text(json.dumps(settings))
  return directory


@functools.cache
def wrapped(**options):
  """As our own tokenizer, without a directory."""
  return tokenizer_lib.Tokenizer(
    byte_fallback(**options), eos_token="</s>", pad_token="</s>"
  )
