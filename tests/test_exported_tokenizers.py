"""The tokenizer of an exported policy, as transformers reads it.

Without the dependency group `reference` all of it is skipped.
"""

import dataclasses
import json

import llama_tokenizer
import pytest
import stored_run
import test_tokenizer_parity

from jaxrl_async.models import configs
from jaxrl_async.models import hf_weights
from jaxrl_async.policies import export
from jaxrl_async.policies import stored_policy
from jaxrl_async.text import tokenizer as tokenizer_lib

pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

TEXTS = ["1+2=3\n", "\n", "a\n\nb\n", " two  spaces \n ", "Q: 1?\nA: {2}~"]


def model_of(family, vocab_size):
  return dataclasses.replace(
    stored_run.MODEL,
    vocab_size=vocab_size,
    has_qkv_bias=family == "qwen2",
    has_qk_norm=family == "qwen3",
    family=family,
  )


def exported(directory, family, tokenizer, monkeypatch):
  """A policy of this family that was trained with this tokenizer."""
  model = model_of(family, tokenizer.vocab_size)
  monkeypatch.setitem(configs.MODELS, "small", model)
  config = stored_run.get_config()
  config.model.name = "small"
  stored_run.write(directory / "run", config, model, tokenizer)
  out = directory / "out"
  export.export(stored_policy.find(directory / "run"), out, dtype="float32")
  return out


def check_same(ours, theirs, texts):
  assert len(theirs) == ours.vocab_size
  for text in texts:
    ids = ours.encode_prompt(text).tolist()
    assert theirs(text).input_ids == ids, text
    assert theirs.decode(ids, skip_special_tokens=True) == ours.decode(ids)
  for i in range(ours.vocab_size):
    assert theirs.decode([i], skip_special_tokens=True) == ours.decode([i])


@pytest.mark.parametrize(
  "family",
  [
    # Those with the other kinds of tokenizers take minutes.
    pytest.param(family, marks=pytest.mark.nightly)
    if family in ("qwen2", "llama")
    else family
    for family in ("qwen2", "qwen3", "llama", "mistral")
  ],
)
def test_no_character_is_lost(family, tmp_path, monkeypatch):
  characters = tokenizer_lib.character_level()
  texts = [*tokenizer_lib.ALPHABET, tokenizer_lib.ALPHABET, *TEXTS]
  out = exported(tmp_path / "characters", family, characters, monkeypatch)
  theirs = transformers.AutoTokenizer.from_pretrained(out)
  check_same(characters, theirs, texts)
  for text in texts:
    assert theirs.decode(theirs(text).input_ids) == text
  if family not in ("qwen2", "llama"):
    return
  # Of a directory, through model.tokenizer: other kinds than Qwen2's.
  for name, made in (
    ("bytes", llama_tokenizer.byte_fallback()),
    ("llama3", test_tokenizer_parity.llama3()),
  ):
    llama_tokenizer.save(tmp_path / name / "model", made)
    ours = tokenizer_lib.load(tmp_path / name / "model")
    out = exported(tmp_path / name, family, ours, monkeypatch)
    theirs = transformers.AutoTokenizer.from_pretrained(out)
    check_same(ours, theirs, [*texts, *test_tokenizer_parity.TEXTS])


def test_who_trusts_the_directory_reads_the_same(tmp_path, monkeypatch):
  modules = transformers.dynamic_module_utils
  monkeypatch.setattr(modules, "HF_MODULES_CACHE", str(tmp_path / "modules"))
  characters = tokenizer_lib.character_level()
  out = exported(tmp_path, "qwen2", characters, monkeypatch)
  theirs = transformers.AutoTokenizer.from_pretrained(
    out, trust_remote_code=True
  )
  assert type(theirs).__name__ == "AsWritten"
  check_same(characters, theirs, [*tokenizer_lib.ALPHABET, *TEXTS])


@pytest.mark.nightly
def test_a_model_keeps_its_own_tokenizer(tmp_path):
  alphabet = sorted(test_tokenizer_parity.pre_tokenizers.ByteLevel.alphabet())
  model = tmp_path / "model"
  tokens = [*alphabet, "th", "the", "<|endoftext|>"]
  transformers.Qwen2Tokenizer(
    vocab={token: i for i, token in enumerate(tokens)},
    merges=[("t", "h"), ("th", "e")],
  ).save_pretrained(model)
  before = {path.name: path.read_text() for path in model.glob("*token*.json")}
  ours = tokenizer_lib.load(model)
  described = model_of("qwen2", ours.vocab_size)
  hf_weights.save(model, described, stored_run.params(0, described))
  config = stored_run.get_config()
  config.model.name = str(model)
  stored_run.write(tmp_path / "run", config, described, ours)
  out = tmp_path / "out"
  export.export(stored_policy.find(tmp_path / "run"), out, dtype="float32")
  for name, text in before.items():
    assert (out / name).read_text() == text
  assert "auto_map" not in json.loads(before["tokenizer_config.json"])
  theirs = transformers.AutoTokenizer.from_pretrained(out)
  assert type(theirs) is transformers.Qwen2Tokenizer
  check_same(ours, theirs, [*TEXTS, *map(chr, range(1, 256)), "the\r\nthe \n"])
