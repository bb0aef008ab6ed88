"""Texts and bytes of the tokens that a client gets with their logprobs."""

import json

import byte_level
import chat_templates
import llama_tokenizer
import numpy as np
import pytest
import tokenizers
from tokenizers import decoders
from tokenizers import pre_tokenizers

from jaxrl_async import types
from jaxrl_async.engine import sampling
from jaxrl_async.serving import answers
from jaxrl_async.serving import client_request
from jaxrl_async.serving import generation
from jaxrl_async.text import tokenizer as tokenizer_lib

TOKENIZERS = {
  "llama 2": lambda: llama_tokenizer.wrapped(),
  "gemma": lambda: llama_tokenizer.wrapped(strips=False),
  "bytes": lambda: chat_templates.load(chat_templates.QWEN)[0],
  "gpt2": byte_level.load,
}
# Words with spaces before them, characters of several bytes, a tag.
TEXT = "the stops a\n é 😀界 = 3 <think>x"


def written(tokenizer, tokens, *, sizes, stop=(), reason="eos"):
  """What a client gets of a completion in updates of some sizes."""
  request = client_request.Request(
    prompts=(np.zeros(1, np.int32),),
    max_tokens=len(tokens),
    settings=sampling.SamplingSettings(),
    seed=0,
    num_choices=1,
    stop_strings=stop,
    deadline_s=0.0,
  )
  choice = generation._Choice(0, tokenizer, request, True, None)
  whole = generation.Piece(choice=0)
  ends = [*np.cumsum(sizes), len(tokens)]
  for begin, end in zip([0, *ends], ends, strict=False):
    part = np.asarray(tokens[begin:end], np.int32)
    update = client_request.Update(
      choice=0,
      tokens=part,
      logprobs=np.zeros(len(part), np.float32),
      policy_versions=np.zeros(len(part), np.int32),
      finish_reason=types.FinishReason(reason) if end == ends[-1] else None,
    )
    whole.extend(choice.piece(update))
  return whole


@pytest.mark.parametrize("sizes", [(), (1,) * 8, (3, 2)])
@pytest.mark.parametrize("name", TOKENIZERS)
def test_texts_and_bytes_of_tokens_join_to_the_answer(name, sizes):
  tokenizer = TOKENIZERS[name]()
  tokens = [*tokenizer.encode(TEXT).tolist(), tokenizer.eos_id]
  found = written(tokenizer, tokens, sizes=sizes)
  assert found.text == tokenizer.decode(tokens)
  assert found.text.lstrip() == TEXT  # Gemma's has its space
  *texts, end = found.token_texts
  assert "".join(texts) == found.text
  assert end == tokenizer.name_of(tokenizer.eos_id) != ""
  *parts, last = found.token_bytes
  assert b"".join(parts) == found.text.encode()
  assert last == end.encode()
  assert found.offsets == [len("".join(texts[:i])) for i in range(len(tokens))]
  # By themselves a space is lost, or a character that two tokens make up.
  assert "".join(tokenizer.decode([t]) for t in tokens) != found.text


@pytest.mark.parametrize("name", TOKENIZERS)
def test_texts_of_any_tokens_join_to_the_answer(name):
  tokenizer, rng = TOKENIZERS[name](), np.random.default_rng(0)
  for length in rng.integers(1, 30, 60):
    tokens = rng.integers(0, min(tokenizer.vocab_size, 300), length).tolist()
    tokens.append(tokenizer.encode("a").tolist()[-1])
    found = written(tokenizer, tokens, sizes=(1,) * 3, reason="length")
    texts = [
      text
      for token, text in zip(tokens, found.token_texts, strict=True)
      if tokenizer.is_shown(token)
    ]
    assert "".join(texts) == found.text == tokenizer.decode(tokens)


def test_a_character_of_several_tokens_has_the_bytes_of_each():
  tokenizer = TOKENIZERS["bytes"]()
  tokens = tokenizer.encode("€!").tolist()
  found = written(tokenizer, tokens, sizes=(1,), reason="length")
  assert found.token_texts == ["", "", "€", "!"]
  assert found.token_bytes == [b"\xe2", b"\x82", b"\xac", b"!"]
  half = written(tokenizer, tokens[:2], sizes=(1,), reason="length")
  assert "".join(half.token_texts) == half.text == "\ufffd"
  assert half.token_bytes == [b"\xe2", b"\x82"]
  shape = answers.Shape(
    model="m",
    is_chat=True,
    prompt_tokens=[[0]],
    num_choices=1,
    has_logprobs=True,
    has_token_ids=False,
    has_id_texts=False,
    has_usage=False,
  )
  (choice,) = json.loads(json.dumps(shape.whole([found])))["choices"]
  assert [x["bytes"] for x in choice["logprobs"]["content"]] == [
    [0xE2],
    [0x82],
    [0xAC],
    [0x21],
  ]


def test_a_token_that_is_no_run_of_bytes_stands_for_its_text():
  alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
  vocabulary = {token: i for i, token in enumerate([*alphabet, "界", "a b"])}
  made = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
  made.decoder = decoders.ByteLevel()
  made.add_special_tokens(["<end>"])
  tokenizer = tokenizer_lib.Tokenizer(
    made, eos_token="<end>", pad_token="<end>"
  )
  found = written(tokenizer, [256, 257], sizes=(1,), reason="length")
  assert found.token_texts == ["界", "a b"] and found.text == "界a b"
  assert found.token_bytes == ["界".encode(), b"a b"]


def test_tokens_of_a_stop_string_keep_their_texts():
  tokenizer = TOKENIZERS["llama 2"]()
  tokens = tokenizer.encode("the stops = 3").tolist()
  found = written(tokenizer, tokens, sizes=(2,), stop=(" =",), reason="stop")
  assert found.text == "the stops"
  assert "".join(found.token_texts) == "the stops = 3"
