"""Broken model directories: one line each, with the file and the field."""

import json
import math
import shutil
import time

import jax
import numpy as np
import pytest
from safetensors import numpy as safetensors_numpy

from jaxrl_async.models import configs
from jaxrl_async.models import hf_config
from jaxrl_async.models import hf_weights
from jaxrl_async.models import transformer
from jaxrl_async.text import chat_template as chat_template_lib
from jaxrl_async.text import tokenizer as tokenizer_lib

MODEL = configs.ModelConfig(
  vocab_size=100,
  model_dim=8,
  num_layers=2,
  num_heads=2,
  num_kv_heads=1,
  head_dim=4,
  mlp_dim=8,
  rope_scaling=configs.RopeScaling(
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_tokens=32,
  ),
)
SHARDS = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
NOT_NUMBERS = (True, "7", "", [7], {"a": 1}, [])
NOT_POSITIVE = (0, -7, -math.inf, math.nan)
NOT_INTS = (*NOT_NUMBERS, *NOT_POSITIVE, 7.5, 10**400, 2**40)
NOT_FLOATS = (*NOT_NUMBERS, *NOT_POSITIVE, math.inf, 10**400, 1e300, 1e-300)
NOT_FLAGS = (0, 1, 2.5, "true", [], {})
NOT_OBJECTS = ("linear", 3, True, [], ["default"])
NOT_LISTS = (3, True, {"a": 1}, "full_attention", "")
# What the format allows and no test of ours has is not here: null.
FIELDS = {
  "model_type": (3, True, [], ["llama"], {}, "", "gemma3", None, "x" * 5000),
  "vocab_size": NOT_INTS,
  "hidden_size": NOT_INTS,
  "intermediate_size": NOT_INTS,
  "num_hidden_layers": (*NOT_INTS, 3_000_000),
  "num_attention_heads": NOT_INTS,
  "num_key_value_heads": (*NOT_INTS, 3, 4),
  "head_dim": (*NOT_INTS, 3),
  "max_position_embeddings": NOT_INTS,
  "hidden_act": (3, True, ["silu"], {}, "gelu"),
  "rms_norm_eps": NOT_FLOATS,
  "rope_theta": NOT_FLOATS,
  "tie_word_embeddings": NOT_FLAGS,
  "mlp_bias": NOT_FLAGS,
  "attention_bias": NOT_FLAGS,
  "use_sliding_window": NOT_FLAGS,
  "max_window_layers": (*NOT_NUMBERS, -7, math.nan, 7.5),
  "layer_types": (
    *NOT_LISTS,
    [],
    [None, None],
    [3, 3],
    ["full_attention"],
    ["full_attention"] * 3,
    ["full_attention", "sliding_attention"],
  ),
  "partial_rotary_factor": (*NOT_NUMBERS, *NOT_POSITIVE, 0.5, math.inf),
  "quantization_config": (3, {}, [], {"bits": 4}, "awq", False),
  "rope_scaling": NOT_OBJECTS,
  "rope_parameters": NOT_OBJECTS,
  "rope_scaling.rope_type": (3, [], {}, "ntk", "", ["llama3"]),
  "rope_scaling.factor": (*NOT_FLOATS, None),
  "rope_scaling.low_freq_factor": (*NOT_FLOATS, None, 4.0),
  "rope_scaling.high_freq_factor": (*NOT_FLOATS, None, 1.0),
  "rope_scaling.rope_theta": NOT_FLOATS,
  "rope_scaling.original_max_position_embeddings": NOT_INTS,
  "rope_scaling.partial_rotary_factor": (0.5, "1", True),
  "rope_scaling.unknown": (1, None),
}
REQUIRED = (
  "vocab_size",
  "hidden_size",
  "intermediate_size",
  "num_hidden_layers",
  "num_attention_heads",
)
FILES = {
  "config.json": True,
  "generation_config.json": False,
  "tokenizer.json": True,
  "tokenizer_config.json": False,
  "special_tokens_map.json": False,
  "chat_template.jinja": False,
  "additional_chat_templates/tool_use.jinja": False,
  hf_weights.INDEX_FILE: True,
  SHARDS[0]: True,
  SHARDS[1]: True,
}  # and whether it has to be there


def damages(content):
  """By name, what may have happened to a file."""
  return {
    "missing": None,
    "empty": b"",
    "truncated": content[: len(content) // 2],
    "a pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
    "binary": bytes(range(256)) * 4,
    "not UTF-8": b'{"a": "\xff\xfe"}',
    "no object": b"[1, 2]",
    "nested": b"[" * 100_000,
    "a directory": "directory",
  }


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
  """A directory with one of every file, none of them damaged."""
  directory = tmp_path_factory.mktemp("model")
  rng = np.random.default_rng(0)
  shapes = jax.eval_shape(
    lambda key: transformer.init_params(MODEL, key), jax.random.key(0)
  )
  params = jax.tree.map(lambda x: rng.normal(size=x.shape).astype("f4"), shapes)
  hf_weights.save(directory, MODEL, params, max_shard_bytes=4_500)
  assert all((directory / name).is_file() for name in SHARDS)
  tokenizer_lib.character_level().save(directory)
  (directory / "special_tokens_map.json").write_text('{"bos_token": null}')
  (directory / "chat_template.jinja").write_text("{{ messages[0].content }}")
  (directory / "additional_chat_templates").mkdir()
  path = directory / "additional_chat_templates" / "tool_use.jinja"
  path.write_text("{{ tools }}")
  read(directory)
  return directory


@pytest.fixture
def copied(whole, tmp_path):
  return shutil.copytree(whole, tmp_path / "copy")


def read(directory):
  """Everything that is read of a directory."""
  tokenizer = tokenizer_lib.load(directory)
  model, _ = hf_weights.load(directory)
  hf_config.check_vocabulary(directory, model, tokenizer.vocab_size)
  chat_template_lib.sources(directory)


def check_refusal(read, directory, *words):
  """One line, soon, that begins with the file, or has it, and the words."""
  start_s = time.monotonic()
  with pytest.raises((ValueError, FileNotFoundError)) as caught:
    read(directory)
  assert time.monotonic() - start_s < 10.0  # of a busy machine
  line = str(caught.value)
  assert type(caught.value) in (
    ValueError,
    FileNotFoundError,
    chat_template_lib.ChatTemplateError,
  )
  assert "\n" not in line and len(line) < 600
  assert str(directory) in line
  for word in words:
    assert word in line, line


def settings_of(field, value):
  settings = hf_config.config_json(MODEL)
  *outer, name = field.split(".")
  place = settings
  for key in outer:
    place = place[key]
  place[name] = value
  return settings


@pytest.mark.parametrize("field", FIELDS)
def test_every_wrong_value_of_a_setting_is_named(tmp_path, field):
  path = tmp_path / "config.json"
  for value in FIELDS[field]:
    path.write_text(json.dumps(settings_of(field, value)))
    name = field.rpartition(".")[2]
    check_refusal(hf_config.model_config, tmp_path, "config.json", name)


@pytest.mark.parametrize("field", REQUIRED)
def test_a_setting_that_has_to_be_there_is_named(tmp_path, field):
  settings = hf_config.config_json(MODEL)
  for change in ({field: None}, {}):
    del settings[field]
    settings |= change
    (tmp_path / "config.json").write_text(json.dumps(settings))
    check_refusal(
      hf_config.model_config, tmp_path, f"config.json: {field} is missing"
    )


@pytest.mark.parametrize("name", FILES)
def test_every_damaged_file_is_named(copied, name):
  path = copied / name
  content = path.read_bytes()
  for what, bytes_ in damages(content).items():
    path.unlink()
    if bytes_ == "directory":
      path.mkdir()
    elif bytes_ is not None:
      path.write_bytes(bytes_)
    is_template = name.endswith(".jinja")
    # A template may be any text, and half of one is one.
    is_text = what in ("truncated", "no object", "nested")
    if (what == "missing" and not FILES[name]) or (is_template and is_text):
      read(copied)
    else:
      check_refusal(read, copied, path.name)
    if path.is_dir():
      path.rmdir()
    path.write_bytes(content)
  read(copied)


@pytest.mark.parametrize(
  ("change", "words"),
  [
    ({"weight_map": None}, "weight_map is None"),
    ({"weight_map": []}, "weight_map is []"),
    ({"weight_map": {}}, "weight_map is {}"),
    ({"weight_map": "model.safetensors"}, "weight_map is 'model"),
    *(
      ({"model.norm.weight": name}, "weight_map.model.norm.weight is")
      for name in (
        3,
        None,
        True,
        [],
        ["a.safetensors"],
        {},
        "",
        "..",
        "../model.safetensors",
        "/etc/passwd",
        "a\0.safetensors",
        "x" * 5000 + ".safetensors",
        "config.json",
      )
    ),
    ({"model.norm.weight": "absent.safetensors"}, "absent.safetensors"),
    ({"model.norm.weight": SHARDS[0]}, f"not in {SHARDS[0]}"),
    ({"absent.weight": SHARDS[0]}, "absent.weight is not in"),
  ],
)
def test_every_wrong_entry_of_the_index_is_named(copied, change, words):
  path = copied / hf_weights.INDEX_FILE
  index = json.loads(path.read_text())
  if "weight_map" in change:
    index |= change
  else:
    index["weight_map"] |= change
  path.write_text(json.dumps(index))
  check_refusal(hf_weights.load, copied, words)


def rename(name):
  return lambda path: path.rename(path.with_name(name))


def truncate(path):
  path.write_bytes(path.read_bytes()[:-7])


def of_gpt2(path):
  tensor = np.zeros((8, 24), np.float32)
  safetensors_numpy.save_file(
    {"transformer.h.0.attn.c_attn.weight": tensor}, path
  )


def widen(path):
  tensors = safetensors_numpy.load_file(path)
  wide = {name: np.pad(x, (0, 8)) for name, x in tensors.items()}
  safetensors_numpy.save_file(wide, path)


@pytest.mark.parametrize(
  ("change", "words"),
  [
    (lambda path: path.unlink(), ("a part of the weights", "download")),
    (rename("else"), ("a part of the weights", "download")),
    (rename(SHARDS[1] + ".3f2a.incomplete"), ("not ended", "download")),
    (truncate, ("not whole", "download it again")),
    (of_gpt2, ("transformer.h.0", "not a tensor", "config.json describes")),
    (widen, ("has shape", "expected", "came with the weights")),
  ],
)
def test_what_to_do_about_unusable_weights_is_said(copied, change, words):
  change(copied / SHARDS[1])
  check_refusal(hf_weights.check, copied, SHARDS[1], *words)


def test_weights_of_another_kind_of_file_are_asked_for_as_safetensors(copied):
  for name in (*SHARDS, hf_weights.INDEX_FILE):
    (copied / name).unlink()
  (copied / "pytorch_model.bin").write_bytes(b"x")
  check_refusal(hf_weights.check, copied, "as safetensors")


def test_a_tensor_in_two_files_is_named(copied):
  first, second = (copied / name for name in SHARDS)
  tensors = safetensors_numpy.load_file(second)
  name, tensor = next(iter(safetensors_numpy.load_file(first).items()))
  safetensors_numpy.save_file(tensors | {name: tensor}, second)
  check_refusal(
    hf_weights.load, copied, second.name, f"{name} is in {SHARDS[0]}"
  )


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite_are_named(copied, value):
  path = copied / SHARDS[1]
  tensors = safetensors_numpy.load_file(path)
  tensors["model.norm.weight"][3] = value
  safetensors_numpy.save_file(tensors, path)
  check_refusal(hf_weights.load, copied, path.name, "model.norm.weight has")


@pytest.mark.parametrize(
  ("change", "words"),
  [
    *(
      ({name: value}, f"tokenizer_config.json: {name} is")
      for name in ("eos_token", "pad_token", "bos_token", "unk_token")
      for value in (3, True, [], ["a"], {}, {"content": 3}, {"content": None})
    ),
    ({"eos_token": "nowhere"}, "'nowhere' is not in the vocabulary"),
    ({"pad_token": "nowhere"}, "'nowhere' is not in the vocabulary"),
    *(
      ({"chat_template": value}, "tokenizer_config.json: chat_template is")
      for value in (3, True, [3], [{}], [{"name": "default"}], {"default": 3})
    ),
  ],
)
def test_every_wrong_setting_of_the_tokenizer_is_named(copied, change, words):
  (copied / "chat_template.jinja").unlink()
  shutil.rmtree(copied / "additional_chat_templates")
  (copied / "special_tokens_map.json").unlink()
  path = copied / "tokenizer_config.json"
  path.write_text(json.dumps(json.loads(path.read_text()) | change))
  check_refusal(read, copied, words)


@pytest.mark.parametrize(
  "text",
  [
    "{}",
    '{"model": 3}',
    '{"model": {"type": "BPE", "vocab": {}, "merges": []}}',
    '{"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}}',
    '{"model": {"type": "BPE", "vocab": {"a": 4294967295}, "merges": []}}',
    '{"model": {"type": "Nothing"}}',
    '{"added_tokens": 3, "model": {"type": "WordLevel", "vocab": {"a": 0},'
    ' "unk_token": "a"}}',
  ],
)
def test_every_wrong_tokenizer_is_named(copied, text):
  (copied / "tokenizer.json").write_text(text)
  check_refusal(read, copied, "tokenizer.json")


@pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
def test_every_wrong_list_of_end_tokens_is_named(copied, name):
  path = copied / name
  settings = json.loads(path.read_text())
  if name == "config.json":
    (copied / "generation_config.json").unlink()
  for value in (True, "1", -1, 1.0, {}, [True], [None], [[1]], ["1"], 10**400):
    path.write_text(json.dumps(settings | {"eos_token_id": value}))
    check_refusal(read, copied, f"{name}: eos_token_id is")
  path.write_text(json.dumps(settings | {"eos_token_id": [1, 99]}))
  check_refusal(read, copied, "end token 99 is not in the vocabulary of 98")


def test_a_tokenizer_of_another_model_is_refused(copied):
  # A newline of ours; of the model that it was taken from, its end.
  path = copied / "generation_config.json"
  path.write_text('{"eos_token_id": 2}')
  check_refusal(
    read,
    copied,
    "generation_config.json: eos_token_id names",
    "special tokens of",
  )
  path.unlink()
  config = copied / "config.json"
  settings = json.loads(config.read_text())
  config.write_text(json.dumps(settings | {"eos_token_id": 32_000}))
  check_refusal(read, copied, "config.json: eos_token_id names {32000: None}")


@pytest.mark.parametrize(
  ("num_tokens", "vocab_size", "is_right"),
  [
    (151_665, 151_936, True),  # Qwen2
    (151_665, 152_064, True),  # Qwen2.5, from 7B
    (128_256, 128_256, True),  # Llama 3
    (50_257, 50_304, True),  # GPT-2, padded
    (98, 104, True),
    (259, 512, True),
    (98, 151_936, False),
    (32_000, 128_256, False),
    (151_936, 151_665, False),
  ],
)
def test_padding_is_told_from_an_unrelated_tokenizer(
  tmp_path, num_tokens, vocab_size, is_right
):
  settings = hf_config.config_json(MODEL) | {"vocab_size": vocab_size}
  (tmp_path / "config.json").write_text(json.dumps(settings))
  model = hf_config.model_config(tmp_path)
  if is_right:
    hf_config.check_vocabulary(tmp_path, model, num_tokens)
  else:
    with pytest.raises(ValueError, match="config.json: vocab_size is"):
      hf_config.check_vocabulary(tmp_path, model, num_tokens)
