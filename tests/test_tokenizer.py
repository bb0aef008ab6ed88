"""Text to token ids and back."""

import json

import byte_level
import chat_templates
import llama_tokenizer
import numpy as np
import pytest

from jaxrl_async.text import tokenizer as tokenizer_lib


def test_pad_and_eos_come_first_then_newline_and_printable_ascii():
  tokenizer = tokenizer_lib.character_level()
  assert (tokenizer.pad_id, tokenizer.eos_id) == (0, 1)
  assert tokenizer.vocab_size == 2 + 1 + 95
  np.testing.assert_array_equal(tokenizer.encode("\n ~"), [2, 3, 97])
  assert tokenizer.encode("\n ~").dtype == np.int32


def test_each_character_is_a_token_and_comes_back():
  tokenizer = tokenizer_lib.character_level()
  text = tokenizer_lib.ALPHABET + "  two  spaces\n\n<eos></s>" + "4 - 1 = 3"
  tokens = tokenizer.encode(text)
  assert len(tokens) == len(text)
  assert tokenizer.decode(tokens) == text
  assert tokenizer.encode("").shape == (0,)


def test_decode_leaves_special_tokens_out():
  tokenizer = tokenizer_lib.character_level()
  tokens = np.concatenate([tokenizer.encode("a b"), [1, 0, 0]])
  assert tokenizer.decode(tokens) == "a b"
  assert tokenizer.decode([]) == ""


@pytest.mark.parametrize("character", ["é", "\t", "\r", "⟨", "²"])
def test_a_character_outside_the_alphabet_is_named(character):
  tokenizer = tokenizer_lib.character_level()
  with pytest.raises(ValueError, match=f"U\\+{ord(character):04X}"):
    tokenizer.encode(f"ab{character}c")


def test_half_of_a_surrogate_pair_is_no_text():
  tokenizer, _ = chat_templates.load(chat_templates.QWEN)
  with pytest.raises(ValueError, match="not valid Unicode"):
    tokenizer.encode("a\ud800")


def test_no_text_spells_a_special_token():
  tokenizer = tokenizer_lib.character_level()
  for token in (tokenizer_lib.PAD_TOKEN, tokenizer_lib.EOS_TOKEN):
    with pytest.raises(ValueError, match="alphabet"):
      tokenizer.encode(token)


def test_a_saved_tokenizer_loads_as_it_was(tmp_path):
  tokenizer = tokenizer_lib.character_level()
  tokenizer.save(tmp_path / "deep" / "tokenizer")
  loaded = tokenizer_lib.load(tmp_path / "deep" / "tokenizer")
  text = "(1 + 2)*3 = 9\n"
  np.testing.assert_array_equal(loaded.encode(text), tokenizer.encode(text))
  assert loaded.decode(loaded.encode(text)) == text
  assert (loaded.pad_id, loaded.eos_id, loaded.vocab_size) == (0, 1, 98)
  with pytest.raises(ValueError, match="alphabet"):
    loaded.encode("é")


def test_a_directory_without_a_tokenizer_is_named(tmp_path):
  with pytest.raises(FileNotFoundError, match="tokenizer.json does not exist"):
    tokenizer_lib.load(tmp_path)


def test_an_unknown_end_of_sequence_is_an_error(tmp_path):
  tokenizer_lib.character_level().save(tmp_path)
  (tmp_path / "tokenizer_config.json").write_text("{}")
  (tmp_path / "generation_config.json").unlink()
  with pytest.raises(ValueError, match="needs an eos_token"):
    tokenizer_lib.load(tmp_path)
  (tmp_path / "tokenizer_config.json").write_text(
    json.dumps({"eos_token": {"content": "~"}})
  )
  loaded = tokenizer_lib.load(tmp_path)
  assert loaded.eos_id == loaded.pad_id == 97


@pytest.mark.parametrize("name", byte_level.NAMES)
def test_a_byte_level_tokenizer_loads(name):
  tokenizer = byte_level.load(name)
  assert tokenizer.vocab_size == byte_level.VOCAB_SIZE == 50_257
  assert tokenizer.eos_id == tokenizer.pad_id == 50_256
  text = "Café costs 3² €\n\tand more 1234  naïve 😀界!  "
  tokens = tokenizer.encode(text)
  assert tokenizer.decode(tokens) == text
  assert len(tokens) < len(text.encode())
  np.testing.assert_array_equal(tokenizer.encode("!~"), [0, 93])
  hello = tokenizer.encode("Hello world").tolist()
  assert [tokenizer.decode([token]) for token in hello] == ["Hello", " world"]
  if name == "gpt2":
    assert hello == [15496, 995]


# -- what the other files of a directory say ---------------------------------


def write(directory, name, value):
  (directory / name).write_text(json.dumps(value))


@pytest.mark.parametrize(
  ("generation_config", "config", "ends"),
  [
    ({"eos_token_id": [3, 2]}, {"eos_token_id": 4}, (1, 3, 2)),
    ({"eos_token_id": 1}, {"eos_token_id": [1, 4]}, (1,)),
    ({"temperature": 0.6}, {"eos_token_id": [1, 4]}, (1,)),
    (None, {"eos_token_id": [1, 4]}, (1, 4)),
    (None, {"eos_token_id": 3}, (1, 3)),
    (None, {"eos_token_id": None}, (1,)),
    (None, None, (1,)),
  ],
)
def test_all_end_tokens_of_a_model_are_known(
  tmp_path, generation_config, config, ends
):
  more = {"unk_token": "!", "sep_token": " "}  # special tokens: 4 and 3
  tokenizer_lib.character_level().save(tmp_path)
  path = tmp_path / "tokenizer_config.json"
  write(tmp_path, path.name, json.loads(path.read_text()) | more)
  (tmp_path / "generation_config.json").unlink()
  if generation_config is not None:
    write(tmp_path, "generation_config.json", generation_config)
  if config is not None:
    write(tmp_path, "config.json", config)
  loaded = tokenizer_lib.load(tmp_path)
  assert loaded.end_tokens == ends
  # None of them is text: nothing that is scored, or shown, has it.
  a = loaded.encode("a").tolist()
  for end in ends:
    assert loaded.decode([*a, end]) == "a"
  # What is saved has them too, and keeps what else is there.
  write(tmp_path, "generation_config.json", {"top_k": 7})
  loaded.save(tmp_path)
  assert tokenizer_lib.load(tmp_path).end_tokens == ends
  kept = json.loads((tmp_path / "generation_config.json").read_text())
  assert kept == {"top_k": 7, "eos_token_id": list(ends)}


def test_without_a_name_the_models_own_end_is_the_end(tmp_path):
  tokenizer_lib.character_level().save(tmp_path)
  write(tmp_path, "tokenizer_config.json", {})
  write(tmp_path, "generation_config.json", {"eos_token_id": 1})
  loaded = tokenizer_lib.load(tmp_path)
  assert (loaded.eos_id, loaded.pad_id, loaded.end_tokens) == (1, 1, (1,))


@pytest.mark.parametrize(
  ("settings", "special_map", "eos", "pad"),
  [
    ({}, {"eos_token": "a", "pad_token": {"content": "b"}}, "a", "b"),
    ({"eos_token": "c"}, {"eos_token": "a"}, "a", "a"),
    ({"eos_token": "c", "pad_token": "b"}, {"pad_token": None}, "c", "c"),
    ({"eos_token": "c"}, {}, "c", "c"),
    (
      {"eos_token": "c", "added_tokens_decoder": {}},
      {"eos_token": "a"},
      "c",
      "c",
    ),
  ],
)
def test_the_map_of_special_tokens_is_read(
  tmp_path, settings, special_map, eos, pad
):
  tokenizer = tokenizer_lib.character_level()
  tokenizer.save(tmp_path)
  (tmp_path / "generation_config.json").unlink()
  write(tmp_path, "tokenizer_config.json", settings)
  write(tmp_path, "special_tokens_map.json", special_map)
  loaded = tokenizer_lib.load(tmp_path)
  ids = tokenizer.encode(eos + pad).tolist()
  assert [loaded.eos_id, loaded.pad_id] == ids
  assert loaded.decode(tokenizer.encode("x" + eos + pad)) == "x"


def test_a_text_that_begins_a_sequence_has_what_its_tokenizer_puts_there(
  tmp_path,
):
  made = llama_tokenizer.byte_fallback()
  loaded = tokenizer_lib.load(llama_tokenizer.save(tmp_path, made))
  inside = loaded.encode("the\n")
  np.testing.assert_array_equal(loaded.encode_prompt("the\n"), [1, *inside])
  np.testing.assert_array_equal(loaded.encode_prompt(""), [1])
  assert 1 not in inside
  # It comes once, and what all prompts begin with begins each of them.
  whole = loaded.encode_prompt("the\n12").tolist()
  assert whole.count(1) == 1
  assert whole[: 1 + len(inside)] == loaded.encode_prompt("the\n").tolist()
  plain = tokenizer_lib.character_level()
  np.testing.assert_array_equal(plain.encode_prompt("1+"), plain.encode("1+"))


def test_a_tokenizer_never_cuts_or_pads(tmp_path):
  made = llama_tokenizer.byte_fallback()
  made.enable_truncation(3)
  made.enable_padding(length=8)
  loaded = tokenizer_lib.load(llama_tokenizer.save(tmp_path, made))
  assert loaded.encode("12").tolist() == loaded.encode("12=")[:-1].tolist()
  assert len(loaded.encode_prompt("1234567890" * 3)) > 30


def test_ids_that_only_the_model_has_add_no_text():
  tokenizer = tokenizer_lib.character_level()
  a = tokenizer.encode("a").tolist()
  assert tokenizer.decode([*a, 98, 150_000, *a]) == "aa"
  assert not tokenizer.is_shown(98)


def bytes_alone(directory, *, added=None, special_map=None, **settings):
  """256 bytes without merges, an end of sequence, and what files add."""
  chat_templates.save(
    directory,
    "",
    **{
      "added_tokens_decoder": {},
      "eos_token": "<|endoftext|>",
      "pad_token": None,
      **settings,
    },
  )
  path = directory / "tokenizer_config.json"
  values = json.loads(path.read_text())
  if values["added_tokens_decoder"] == {}:
    del values["added_tokens_decoder"]
  path.write_text(json.dumps(values))
  if added is not None:
    (directory / "added_tokens.json").write_text(json.dumps(added))
  if special_map is not None:
    path = directory / "special_tokens_map.json"
    path.write_text(json.dumps(special_map))
  return directory


def an_added_token(content, *, special=True, **flags):
  return {"content": content, "special": special, **flags}


# The files, the tokens of a text with tags, and what is shown of it.
TAGS = "x <|a|>é <|b|> y"
FILES = {
  "nothing added": ({}, 17, TAGS),
  "in tokenizer_config.json": (
    {
      "added_tokens_decoder": {
        "257": an_added_token("<|a|>"),
        "258": an_added_token("<|b|>", special=False),
      }
    },
    9,
    "x é <|b|> y",
  ),
  "with spaces": (
    {
      "added_tokens_decoder": {
        "257": an_added_token("<|a|>", lstrip=True),
        "258": an_added_token("<|b|>", special=False, rstrip=True),
      }
    },
    7,
    "xé <|b|>y",
  ),
  "in added_tokens.json": ({"added": {"<|b|>": 258, "<|a|>": 257}}, 9, TAGS),
  "in added_tokens.json, and special": (
    {
      "added": {"<|b|>": 258, "<|a|>": 257},
      "extra_special_tokens": ["<|a|>"],
    },
    9,
    "x é <|b|> y",
  ),
  "special without a name": (
    {"additional_special_tokens": ["<|a|>", "<|b|>"]},
    9,
    "x é  y",
  ),
  "listed, and yet no special token": (
    {
      "added_tokens_decoder": {
        "257": an_added_token("<|a|>", special=False),
        "258": an_added_token("<|b|>"),
      },
      "additional_special_tokens": ["<|a|>", "<|b|>"],
    },
    9,
    "x <|a|>é  y",
  ),
  "named, and therefore special": (
    {
      "added_tokens_decoder": {
        "257": an_added_token("<|a|>", special=False),
        "258": an_added_token("<|b|>", special=False),
      },
      "extra_special_tokens": {"image_token": "<|a|>"},
      "bos_token": "<|b|>",
    },
    9,
    "x é  y",
  ),
  "special in the map": (
    {"special_map": {"additional_special_tokens": ["<|b|>"]}},
    13,
    "x <|a|>é  y",
  ),
}


@pytest.mark.parametrize("name", FILES)
def test_tokens_of_all_files_are_one_token_and_hidden_if_special(
  tmp_path, name
):
  files, count, shown = FILES[name]
  loaded = tokenizer_lib.load(bytes_alone(tmp_path / "a", **files))
  tokens = loaded.encode(TAGS)
  assert len(tokens) == count
  assert loaded.decode(tokens) == shown
  assert loaded.vocab_size <= 259
  loaded.save(tmp_path / "b")
  again = tokenizer_lib.load(tmp_path / "b")
  assert again.encode(TAGS).tolist() == tokens.tolist()
  assert again.decode(tokens) == shown and again.digest() == loaded.digest()


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_what_is_expected_of_files_is_what_transformers_does(tmp_path, name):
  transformers = pytest.importorskip("transformers")
  files, count, shown = FILES[name]
  reference = transformers.AutoTokenizer.from_pretrained(
    bytes_alone(tmp_path, **files)
  )
  tokens = reference(TAGS).input_ids
  assert tokens == tokenizer_lib.load(tmp_path).encode_prompt(TAGS).tolist()
  assert len(tokens) == count
  assert reference.decode(tokens, skip_special_tokens=True) == shown


@pytest.mark.parametrize(
  ("files", "words"),
  [
    (
      {"added_tokens_decoder": {"300": an_added_token("<|a|>")}},
      "'<|a|>' is the token 300 of its files, but 257",
    ),
    ({"added": {"<|a|>": "x"}}, "added_tokens.json: its added tokens are not"),
    ({"added_tokens_decoder": {"257": "<|a|>"}}, "its added tokens are not"),
    ({"added_tokens_decoder": [1]}, "its added tokens are not"),
    ({"added_tokens_decoder": {"257": {}}}, "its added tokens are not"),
    (
      {"added_tokens_decoder": {"257": an_added_token("a", lstrip=1)}},
      "its added tokens are not",
    ),
    ({"extra_special_tokens": [3]}, "extra_special_tokens has 3"),
  ],
)
def test_wrong_added_tokens_are_named(tmp_path, files, words):
  with pytest.raises(ValueError, match=f"^{tmp_path}") as refused:
    tokenizer_lib.load(bytes_alone(tmp_path, **files))
  assert words in str(refused.value) and "\n" not in str(refused.value)


def test_bytes_without_merges_make_up_any_text(tmp_path):
  loaded = tokenizer_lib.load(bytes_alone(tmp_path))
  text = "a é\t界 😀\n"
  tokens = loaded.encode(text)
  assert len(tokens) == len(text.encode())
  assert loaded.decode(tokens) == text
  assert b"".join(loaded.bytes_of(t) for t in tokens.tolist()) == text.encode()


def test_special_tokens_that_would_be_split_are_refused(tmp_path):
  tokenizer_lib.character_level().save(tmp_path)
  path = tmp_path / "tokenizer_config.json"
  settings = json.loads(path.read_text())
  for splits in (False, True):
    write(tmp_path, path.name, settings | {"split_special_tokens": splits})
    if not splits:
      tokenizer_lib.load(tmp_path)
  with pytest.raises(ValueError, match="split_special_tokens would"):
    tokenizer_lib.load(tmp_path)
