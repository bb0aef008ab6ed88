"""Pretrained weights: settings, files, errors; test_parity.py has the rest."""

import dataclasses
import json

import jax
from jax import numpy as jnp
import numpy as np
import pytest
from safetensors import numpy as safetensors_numpy
import tiny

from jaxrl_async.models import configs
from jaxrl_async.models import hf_config
from jaxrl_async.models import hf_weights
from jaxrl_async.models import transformer

QWEN2 = dataclasses.replace(
  tiny.MODEL, has_qk_norm=False, has_qkv_bias=True, num_heads=3, num_kv_heads=1
)
LLAMA = dataclasses.replace(
  tiny.MODEL,
  has_qk_norm=False,
  has_tied_head=False,
  rope_theta=500.0,
  norm_eps=1e-5,
  rope_scaling=configs.RopeScaling(
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_tokens=32,
  ),
)
MISTRAL = dataclasses.replace(
  tiny.MODEL,
  has_qk_norm=False,
  has_tied_head=False,
  sliding_windows=(7, 7),
  family="mistral",
)
MODELS = {
  "qwen3": tiny.MODEL,
  "qwen2": QWEN2,
  "llama": LLAMA,
  "mistral": MISTRAL,
  "mistral without a window": dataclasses.replace(MISTRAL, sliding_windows=()),
  "qwen2 with windows": dataclasses.replace(QWEN2, sliding_windows=(None, 5)),
  "qwen3 with windows": dataclasses.replace(
    tiny.MODEL, sliding_windows=(5, None)
  ),
}

# As their files say, but for what no reader of the architecture looks at.
PRETRAINED = {
  "Qwen2.5-0.5B": {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 24,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
  },
  "Qwen3-0.6B": {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
  },
  "Llama-3.2-1B": {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
      "factor": 32.0,
      "high_freq_factor": 4.0,
      "low_freq_factor": 1.0,
      "original_max_position_embeddings": 8192,
      "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "vocab_size": 128256,
  },
}


def described(directory, settings):
  """The architecture of these settings."""
  directory.mkdir(exist_ok=True)
  (directory / hf_config.CONFIG_FILE).write_text(json.dumps(settings))
  return hf_config.model_config(directory)


def numpy_params(model):
  """Parameters without a compilation, no two values the same."""
  rng = np.random.default_rng(0)
  shapes = jax.eval_shape(
    lambda key: transformer.init_params(model, key), jax.random.key(0)
  )
  return jax.tree.map(lambda x: rng.normal(size=x.shape).astype("f4"), shapes)


def written(directory, model, **more):
  """Parameters of a model, and a directory that holds them."""
  params = numpy_params(model)
  hf_weights.save(directory, model, params, **more)
  return params


def change_tensors(directory, change):
  path = directory / hf_weights.WEIGHTS_FILE
  tensors = safetensors_numpy.load_file(path)
  change(tensors)
  safetensors_numpy.save_file(tensors, path)


# -- settings ----------------------------------------------------------------


@pytest.mark.parametrize(
  ("name", "num_params"),
  [
    ("Qwen2.5-0.5B", 494_032_768),
    ("Qwen3-0.6B", 596_049_920),
    ("Llama-3.2-1B", 1_235_814_400),
  ],
)
def test_pretrained_models_have_their_stated_size(tmp_path, name, num_params):
  assert described(tmp_path, PRETRAINED[name]).num_params == num_params


def test_a_pretrained_model_is_the_one_of_that_name(tmp_path):
  model = described(tmp_path, PRETRAINED["Qwen2.5-0.5B"])
  assert model == configs.MODELS["qwen2-0.5b"]


@pytest.mark.parametrize("name", MODELS)
def test_settings_come_back_as_they_were_written(tmp_path, name):
  model = MODELS[name]
  settings = hf_config.config_json(model)
  read = described(tmp_path, settings)
  assert read == model
  assert read.family == settings["model_type"] == name.split()[0]
  assert hf_config.config_json(read) == settings


def test_the_rotary_settings_may_stand_in_any_of_their_places(tmp_path):
  settings = hf_config.config_json(LLAMA)
  theta = settings.pop("rope_theta")
  scaling = settings.pop("rope_scaling")
  old_name = {"type": scaling["rope_type"], **scaling}
  del old_name["rope_type"]
  context = scaling["original_max_position_embeddings"]
  outside = {k: v for k, v in scaling.items() if not k.startswith("original")}
  for rope in (
    {"rope_theta": theta, "rope_scaling": old_name},
    {"rope_parameters": {"rope_theta": theta, **scaling}},
    {"rope_theta": theta, "rope_parameters": scaling},
    {
      "rope_theta": theta,
      "rope_scaling": outside,
      "original_max_position_embeddings": context,
    },
    {
      "rope_theta": theta,
      "rope_scaling": outside,
      "max_position_embeddings": context,
    },
  ):
    assert described(tmp_path, settings | rope) == LLAMA
  plain = described(
    tmp_path,
    settings | {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}},
  )
  assert (plain.rope_theta, plain.rope_scaling) == (7.0, None)
  assert described(tmp_path, settings).rope_theta == 10_000.0


def test_what_a_file_leaves_out_is_what_transformers_takes(tmp_path):
  for name, head_dim in (("llama", 10), ("qwen2", 10), ("qwen3", 128)):
    settings = hf_config.config_json(MODELS[name]) | {
      "hidden_size": 40,
      "num_attention_heads": 4,
      "num_key_value_heads": None if name == "llama" else 2,
    }
    for key in ("head_dim", "rms_norm_eps", "tie_word_embeddings"):
      del settings[key]
    model = described(tmp_path, settings)
    assert (model.head_dim, model.norm_eps) == (head_dim, 1e-6)
    assert model.num_kv_heads == (4 if name == "llama" else 2)
    assert not model.has_tied_head


def test_a_window_that_is_not_used_is_not_refused(tmp_path):
  settings = hf_config.config_json(QWEN2) | {"sliding_window": 16}
  for unused in (
    {"use_sliding_window": False},
    {"use_sliding_window": True, "max_window_layers": 2},
    {"use_sliding_window": True, "layer_types": ["full_attention"] * 2},
  ):
    assert described(tmp_path, settings | unused) == QWEN2


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"model_type": "gemma3"}, "model_type is 'gemma3'; use one of qwen2"),
    ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ({"mlp_bias": True}, "mlp_bias is True"),
    ({"attention_bias": True}, "attention_bias is True"),
    ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ({"model_type": "mixtral"}, "model_type is 'mixtral'; use one of qwen2"),
    ({"model_type": "qwen3_next"}, "model_type is 'qwen3_next'; use one of"),
    (
      {"layer_types": ["sliding_attention"] * 2},
      "layer_types has 'sliding_attention', but there is no window",
    ),
    (
      {"layer_types": ["chunked_attention"] * 2},
      "layer_types has 'chunked_attention'; use 'full_attention' or",
    ),
    (
      {
        "use_sliding_window": True,
        "sliding_window": None,
        "layer_types": ["sliding_attention"] * 2,
      },
      "there is no window; set use_sliding_window and sliding_window",
    ),
    (
      {"use_sliding_window": True, "sliding_window": 0},
      "sliding_window is 0, not a positive int",
    ),
    (
      {"model_type": "llama", "layer_types": ["sliding_attention"] * 2},
      "layer_types: no layer of this llama has a window",
    ),
    (
      {
        "model_type": "mistral",
        "sliding_window": 4,
        "layer_types": ["full_attention", "sliding_attention"],
      },
      "layer_types: every layer of this mistral has a window",
    ),
    (
      {"rope_scaling": {"rope_type": "ntk", "factor": 4.0}},
      "rope_scaling.rope_type is 'ntk'",
    ),
    (
      {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}},
      "rope_parameters.full_attention",
    ),
    ({"rope_scaling": {"rope_type": "llama3"}}, "factor is missing"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ({"hidden_size": None}, "hidden_size is missing"),
    ({"hidden_size": "32"}, "hidden_size is '32', not a positive int"),
    ({"num_hidden_layers": True}, "num_hidden_layers is True"),
    ({"rms_norm_eps": -1.0}, "rms_norm_eps is -1.0"),
    ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple"),
  ],
)
def test_what_the_decoder_does_not_compute_is_refused_in_one_line(
  tmp_path, change, message
):
  settings = hf_config.config_json(tiny.MODEL) | change
  with pytest.raises(ValueError, match=message) as caught:
    described(tmp_path, settings)
  assert "\n" not in str(caught.value)
  assert str(tmp_path) in str(caught.value)


def test_qwen2_never_reads_the_setting_of_biases(tmp_path):
  for has_bias in (True, False):
    settings = hf_config.config_json(QWEN2) | {"attention_bias": has_bias}
    assert described(tmp_path, settings) == QWEN2


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_torn_file_of_settings_is_refused(tmp_path, text):
  (tmp_path / hf_config.CONFIG_FILE).write_text(text)
  with pytest.raises(ValueError, match=hf_config.CONFIG_FILE):
    hf_config.model_config(tmp_path)


# -- tensors -----------------------------------------------------------------


@pytest.mark.parametrize("max_shard_bytes", [1_000_000_000, 20_000, 1])
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_parameters_come_back_as_they_were_written(
  tmp_path, model, max_shard_bytes
):
  params = written(tmp_path, model, max_shard_bytes=max_shard_bytes)
  loaded_model, loaded = hf_weights.load(tmp_path)
  assert loaded_model == model
  jax.tree.map(np.testing.assert_array_equal, loaded, params)
  num_files = len(list(tmp_path.glob("*.safetensors")))
  has_index = (tmp_path / hf_weights.INDEX_FILE).is_file()
  assert has_index == (num_files > 1) == (max_shard_bytes < 1_000_000)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_rounded_once(tmp_path, dtype):
  params = written(tmp_path / "halves", LLAMA, dtype=dtype)
  rounded = jax.tree.map(lambda x: x.astype(jnp.dtype(dtype)), params)
  _, wide = hf_weights.load(tmp_path / "halves")
  _, same = hf_weights.load(tmp_path / "halves", dtype)
  for a, b, expected in zip(
    *map(jax.tree.leaves, (wide, same, rounded)), strict=True
  ):
    assert (a.dtype, b.dtype) == (np.float32, expected.dtype)
    np.testing.assert_array_equal(b, expected)
    np.testing.assert_array_equal(a, expected.astype(np.float32))


def test_weights_of_a_device_are_written(tmp_path):
  params = jax.tree.map(jnp.asarray, numpy_params(tiny.MODEL))
  hf_weights.save(tmp_path, tiny.MODEL, params)
  _, loaded = hf_weights.load(tmp_path)
  jax.tree.map(np.testing.assert_array_equal, loaded, params)


def test_more_settings_are_written_but_none_twice(tmp_path):
  written(tmp_path / "a", QWEN2, settings={"eos_token_id": 3})
  text = (tmp_path / "a" / hf_config.CONFIG_FILE).read_text()
  assert json.loads(text)["eos_token_id"] == 3
  with pytest.raises(ValueError, match="hidden_size"):
    written(tmp_path / "b", QWEN2, settings={"hidden_size": 3})


def test_weights_are_never_written_over_others(tmp_path):
  written(tmp_path, QWEN2, max_shard_bytes=20_000)
  with pytest.raises(FileExistsError):
    written(tmp_path, QWEN2)
  (tmp_path / hf_config.CONFIG_FILE).unlink()
  with pytest.raises(FileExistsError):
    written(tmp_path, QWEN2)


def test_what_the_format_cannot_say_is_refused(tmp_path):
  both = dataclasses.replace(QWEN2, has_qk_norm=True)
  with pytest.raises(ValueError, match="'qwen2' cannot have has_qk_norm True"):
    written(tmp_path, both)
  some = dataclasses.replace(MISTRAL, sliding_windows=(None, 7))
  with pytest.raises(ValueError, match="cannot have sliding_windows"):
    written(tmp_path, some)
  two = dataclasses.replace(QWEN2, sliding_windows=(3, 7))
  with pytest.raises(ValueError, match=r"cannot have sliding_windows \(3, 7\)"):
    written(tmp_path, two)
  with pytest.raises(ValueError, match="'llama' cannot have sliding_windows"):
    written(tmp_path, dataclasses.replace(MISTRAL, family="llama"))
  uneven = dataclasses.replace(
    LLAMA, num_heads=5, num_kv_heads=5, family="llama"
  )
  with pytest.raises(ValueError, match="not a multiple of num_attention_heads"):
    written(tmp_path, uneven)
  params = numpy_params(QWEN2)
  with pytest.raises(ValueError, match="layers.query_bias has shape None"):
    del params["layers"]["query_bias"]
    hf_weights.save(tmp_path, QWEN2, params)
  assert not list(tmp_path.iterdir())


NORM = "model.layers.1.self_attn.k_norm.weight"


@pytest.mark.parametrize(
  ("change", "message"),
  [
    (lambda t: t.pop(NORM), f"{NORM} is missing"),
    (
      lambda t: [t.pop(name) for name in list(t) if "layers.1" in name],
      r"model.layers.1.input_layernorm.weight and 10 more are missing",
    ),
    (
      lambda t: t.update({"model.layers.2.mlp.up_proj.weight": t[NORM]}),
      "model.layers.2.mlp.up_proj.weight is not a tensor of this model",
    ),
    (
      lambda t: t.update({NORM: np.ones(9, np.float32)}),
      rf"{NORM} has shape \(9,\), expected \(8,\)",
    ),
    (lambda t: t.update({NORM: np.ones(8, np.int8)}), f"{NORM} is I8"),
    (
      lambda t: t.update(
        {"lm_head.weight": t["model.embed_tokens.weight"] + 1}
      ),
      "lm_head.weight is not the embedding",
    ),
  ],
)
def test_every_tensor_is_accounted_for(tmp_path, change, message):
  written(tmp_path, tiny.MODEL)
  change_tensors(tmp_path, change)
  with pytest.raises(ValueError, match=message) as caught:
    hf_weights.load(tmp_path)
  assert "\n" not in str(caught.value)


def test_an_untied_head_has_to_be_there(tmp_path):
  written(tmp_path, LLAMA)
  change_tensors(tmp_path, lambda t: t.pop("lm_head.weight"))
  with pytest.raises(ValueError, match="lm_head.weight is missing"):
    hf_weights.load(tmp_path)


def test_copies_of_what_is_known_already_are_allowed(tmp_path):
  params = written(tmp_path, tiny.MODEL)
  frequencies = "model.layers.0.self_attn.rotary_emb.inv_freq"
  change_tensors(
    tmp_path,
    lambda t: t.update(
      {
        "lm_head.weight": t["model.embed_tokens.weight"],
        frequencies: np.ones(4, np.float32),
      }
    ),
  )
  _, loaded = hf_weights.load(tmp_path)
  jax.tree.map(np.testing.assert_array_equal, loaded, params)


@pytest.mark.parametrize(
  ("model", "of_weights", "message"),
  [
    (QWEN2, LLAMA, "has shape .* use the one that came with the weights"),
    (LLAMA, QWEN2, "_proj.bias is not a tensor of this model"),
  ],
)
def test_weights_of_another_architecture_are_refused_in_one_line(
  tmp_path, model, of_weights, message
):
  written(tmp_path, of_weights)
  described(tmp_path, hf_config.config_json(model))
  with pytest.raises(ValueError, match=message) as caught:
    hf_weights.load(tmp_path)
  assert "\n" not in str(caught.value)


def test_a_download_that_has_not_ended_is_named(tmp_path):
  written(tmp_path, QWEN2, max_shard_bytes=20_000)
  last = sorted(tmp_path.glob("*.safetensors"))[-1]
  last.rename(tmp_path / f"{last.name}.1a2b.incomplete")
  with pytest.raises(
    FileNotFoundError, match=f"{last.name}.*its download has not ended"
  ) as caught:
    hf_weights.load(tmp_path)
  assert "\n" not in str(caught.value)


def test_files_that_are_not_there_or_torn_are_named(tmp_path):
  with pytest.raises(FileNotFoundError, match="config.json"):
    hf_weights.load(tmp_path)
  written(tmp_path, QWEN2, max_shard_bytes=20_000)
  first, second = sorted(tmp_path.glob("*.safetensors"))[:2]
  whole = second.read_bytes()
  second.write_bytes(first.read_bytes())
  with pytest.raises(ValueError, match=f"{second.name}.* is in {first.name}"):
    hf_weights.load(tmp_path)
  second.write_bytes(whole[: len(whole) // 2])
  with pytest.raises(ValueError, match=second.name):
    hf_weights.load(tmp_path)
  second.unlink()
  with pytest.raises(FileNotFoundError, match=second.name):
    hf_weights.load(tmp_path)
  index = tmp_path / hf_weights.INDEX_FILE
  index.write_text(json.dumps({"weight_map": {"a": "../a.safetensors"}}))
  with pytest.raises(
    ValueError, match="'../a.safetensors', not the name of a file"
  ):
    hf_weights.load(tmp_path)
  index.unlink()
  with pytest.raises(FileNotFoundError, match="neither"):
    hf_weights.load(tmp_path)
