"""Adapters in PEFT's format: what is written is read, nothing is guessed."""

import dataclasses
import json

import jax
import lora_world
import numpy as np
import pytest
from safetensors import numpy as safetensors_numpy
import tiny

from jaxrl_async.models import peft_files

PREFIX = "base_model.model.model.layers."


@pytest.fixture
def written(tmp_path):
  peft_files.write(tmp_path, lora_world.MODEL, lora_world.params())
  return tmp_path


def change(directory, **settings):
  path = directory / peft_files.CONFIG_FILE
  path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def change_tensors(directory, edit):
  path = directory / peft_files.WEIGHTS_FILE
  tensors = safetensors_numpy.load_file(path)
  edit(tensors)
  safetensors_numpy.save_file(tensors, path)


@pytest.mark.parametrize("model", [tiny.MODEL, lora_world.MODEL])
def test_an_adapter_comes_back_as_it_was_written(written, model):
  lora, found = peft_files.read(written, model)
  assert lora == lora_world.LORA
  expected = lora_world.adapter(lora)
  jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_the_files_are_those_of_peft(tmp_path):
  model = dataclasses.replace(tiny.MODEL, lora=lora_world.OTHER)
  adapter = lora_world.adapter(lora_world.OTHER)
  peft_files.write(tmp_path, model, adapter, base_model="a/base")
  settings = json.loads((tmp_path / peft_files.CONFIG_FILE).read_text())
  assert settings["base_model_name_or_path"] == "a/base"
  assert settings["target_modules"] == ["k_proj", "o_proj", "down_proj"]
  assert (settings["r"], settings["lora_alpha"]) == (2, 5)
  path = tmp_path / peft_files.WEIGHTS_FILE
  tensors = safetensors_numpy.load_file(path)
  assert len(tensors) == 2 * 2 * 3
  # [r, in] and [out, r]; ours are [in, r] and [r, out].
  layers = adapter["layers"]
  found = tensors[f"{PREFIX}1.self_attn.o_proj.lora_A.weight"]
  np.testing.assert_array_equal(
    found, layers["output_lora_a"][1].reshape(32, 2).T
  )
  found = tensors[f"{PREFIX}0.self_attn.k_proj.lora_B.weight"]
  np.testing.assert_array_equal(found, layers["key_lora_b"][0].reshape(2, 16).T)
  with pytest.raises(FileExistsError, match="holds an adapter"):
    peft_files.write(tmp_path, model, adapter)


def test_the_scale_of_rslora_becomes_an_alpha(written):
  change(written, use_rslora=True)
  lora, _ = peft_files.read(written, tiny.MODEL)
  assert lora.scale == pytest.approx(6.0 / 3**0.5)


def test_half_precision_is_read(written):
  def halve(tensors):
    for name, x in tensors.items():
      tensors[name] = x.astype(np.float16)

  change_tensors(written, halve)
  _, found = peft_files.read(written, tiny.MODEL)
  leaf = found["layers"]["up_lora_a"]
  assert leaf.dtype == np.float32
  expected = lora_world.adapter(lora_world.LORA)["layers"]["up_lora_a"]
  np.testing.assert_array_equal(leaf, expected.astype("f2").astype("f4"))


@pytest.mark.parametrize(
  ("settings", "message"),
  [
    ({"use_dora": True}, "use_dora is True; only plain LoRA"),
    ({"bias": "all"}, "bias is 'all'; use none"),
    ({"modules_to_save": ["lm_head"]}, r"modules_to_save is \['lm_head'\]"),
    ({"rank_pattern": {"q_proj": 8}}, "rank_pattern is"),
    ({"layers_to_transform": [0]}, "layers_to_transform is"),
    ({"something_new": 1}, "something_new is 1"),
    ({"peft_type": "IA3"}, "peft_type is 'IA3'; use LORA"),
    (
      {"init_lora_weights": "pissa"},
      "init_lora_weights is 'pissa'; it changes",
    ),
    ({"target_modules": ["q_proj", "embed_tokens"]}, "has 'embed_tokens'"),
    ({"target_modules": "all-linear"}, "target_modules is 'all-linear'"),
    ({"r": 0}, "r is 0; use a positive integer"),
    ({"r": 4}, r"shape \(3, 64\), expected \(4, 64\)"),
    ({"lora_alpha": None}, "lora_alpha is None"),
    ({"target_modules": ["q_proj"]}, "is not a tensor of an adapter for this"),
  ],
)
def test_what_is_not_plain_lora_is_refused_by_name(written, settings, message):
  change(written, **settings)
  with pytest.raises(ValueError, match=message) as error:
    peft_files.read(written, tiny.MODEL)
  assert "\n" not in str(error.value)


@pytest.mark.parametrize(
  ("lora", "message"),
  [
    (
      {"rank": 4},
      "has rank 3, but model.lora.rank is 4; use model.lora.rank=3",
    ),
    ({"alpha": 16.0}, "has alpha 6.0, but model.lora.alpha is 16.0"),
    ({"modules": ("query",)}, "has modules"),
  ],
)
def test_an_adapter_has_to_be_the_one_of_the_config(written, lora, message):
  own = dataclasses.replace(lora_world.LORA, **lora)
  model = dataclasses.replace(tiny.MODEL, lora=own)
  with pytest.raises(ValueError, match=message):
    peft_files.check(written, model)


def test_an_adapter_for_other_shapes_is_refused(written):
  wider = dataclasses.replace(tiny.MODEL, mlp_dim=80)
  message = r"down_proj.lora_A.weight has shape \(3, 64\), expected \(3, 80\)"
  with pytest.raises(ValueError, match=message):
    peft_files.check(written, wider)
  deeper = dataclasses.replace(tiny.MODEL, num_layers=3)
  with pytest.raises(ValueError, match=f"{PREFIX}2.* is missing"):
    peft_files.check(written, deeper)


def test_damaged_files_are_named(written):
  name = f"{PREFIX}0.mlp.up_proj.lora_B.weight"

  def spoil(tensors):
    tensors[name][0, 0] = np.nan

  change_tensors(written, spoil)
  with pytest.raises(ValueError, match=f"{name} has values that are not"):
    peft_files.read(written, tiny.MODEL)
  path = written / peft_files.WEIGHTS_FILE
  path.write_bytes(path.read_bytes()[:100])
  with pytest.raises(ValueError, match=peft_files.WEIGHTS_FILE):
    peft_files.check(written, tiny.MODEL)
  path.unlink()
  with pytest.raises(FileNotFoundError, match="does not exist"):
    peft_files.check(written, tiny.MODEL)


def test_only_an_adapter_of_ones_own_is_written(tmp_path):
  model, leaves = lora_world.stack()
  for refused, params in ((tiny.MODEL, tiny.params()), (model, leaves)):
    with pytest.raises(ValueError, match="no adapters of its own"):
      peft_files.write(tmp_path, refused, params)
  assert not any(tmp_path.iterdir())
