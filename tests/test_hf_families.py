"""Settings of the families in `families`: what is read, and what is refused."""

import dataclasses
import math

import pytest
import test_hf_weights

from jaxrl_async.models import configs
from jaxrl_async.models import families
from jaxrl_async.models import hf_config
from jaxrl_async.models import hf_tensors
from jaxrl_async.models import peft_files

_NAMES = (
  "vocab_size",
  "hidden_size",
  "num_hidden_layers",
  "num_attention_heads",
  "num_key_value_heads",
  "intermediate_size",
)


def settings_of(model_type, *sizes, **more):
  return {
    "model_type": model_type,
    **dict(zip(_NAMES, sizes, strict=True)),
    **more,
  }


# Sizes as the files of these models say, and the parameters of their weights.
PRETRAINED = {
  "Gemma 3 1B": (
    settings_of(
      "gemma3_text",
      *(262_144, 1152, 26, 4, 1, 6912),
      head_dim=256,
      hidden_activation="gelu_pytorch_tanh",
      query_pre_attn_scalar=256,
      sliding_window=512,
      sliding_window_pattern=6,
      rope_theta=1_000_000,
      rope_local_base_freq=10_000,
      attn_logit_softcapping=None,
    ),
    999_885_952,
  ),
  "Gemma 2 2B": (
    settings_of("gemma2", 256_000, 2304, 26, 8, 4, 9216, head_dim=256),
    2_614_341_888,
  ),
  "SmolLM3 3B": (
    settings_of("smollm3", 128_256, 2048, 36, 16, 4, 11_008),
    3_075_098_624,
  ),
  "Phi-4-mini": (
    settings_of(
      "phi3",
      *(200_064, 3072, 32, 24, 8, 8192),
      tie_word_embeddings=True,
      partial_rotary_factor=0.75,
      max_position_embeddings=131_072,
      original_max_position_embeddings=4096,
      rope_scaling={
        "type": "longrope",
        "short_factor": [1.0] * 48,
        "long_factor": [1.5] * 48,
      },
      sliding_window=262_144,
    ),
    3_836_021_760,
  ),
  "Qwen3.5 9B": (
    settings_of("qwen3_5_text", 248_320, 4096, 32, 16, 4, 12_288),
    8_953_803_264,
  ),
  "Phi-4": (
    settings_of("phi3", 100_352, 5120, 40, 40, 10, 17_920, sliding_window=None),
    14_659_507_200,
  ),
  "OLMo 3 7B": (
    settings_of("olmo3", 100_278, 4096, 32, 32, 32, 11_008),
    7_298_011_136,
  ),
  "EXAONE 4 32B": (
    settings_of("exaone4", 102_400, 5120, 64, 40, 8, 27_392),
    32_003_216_384,
  ),
}


@pytest.mark.parametrize("name", PRETRAINED)
def test_pretrained_models_have_their_stated_size(tmp_path, name):
  settings, num_params = PRETRAINED[name]
  model = test_hf_weights.described(tmp_path, settings)
  assert model.num_params == num_params
  written = hf_config.config_json(model)
  longest = model.max_positions
  read = test_hf_weights.described(
    tmp_path, written | {"max_position_embeddings": longest}
  )
  assert read == model
  # All rows of all tensors have a place.
  sizes = [
    hf_tensors.whole_shape(parts) for parts in hf_tensors.places(model).values()
  ]
  assert sum(map(math.prod, sizes)) == num_params


def test_layers_are_those_of_the_settings(tmp_path):
  def read(name):
    return test_hf_weights.described(tmp_path, PRETRAINED[name][0])

  gemma = read("Gemma 3 1B")
  assert gemma.sliding_windows[:7] == (*[512] * 5, None, 512)
  local, far = configs.Rope(1e4, None), configs.Rope(1e6, None)
  assert gemma.ropes[:7] == (*[local] * 5, far, local)
  assert (gemma.embedding_scale, gemma.attention_scale) == (1152**0.5, 1 / 16)
  assert gemma.logits_soft_cap is None and gemma.has_tied_head
  gemma2 = read("Gemma 2 2B")
  assert gemma2.sliding_windows[:2] == (4096, None)
  assert (gemma2.attention_soft_cap, gemma2.logits_soft_cap) == (50.0, 30.0)
  smollm = read("SmolLM3 3B")
  assert [rope is None for rope in smollm.ropes[:8]] == [*[0] * 3, 1] * 2
  assert smollm.rope_theta == 2e6
  phi = read("Phi-4-mini")
  assert phi.rotary_dim == 96
  assert phi.rope_scaling.amplitude == pytest.approx(1.1902, abs=1e-4)
  assert read("Phi-4").sliding_windows == ()
  exaone = read("EXAONE 4 32B")
  assert exaone.sliding_windows[:4] == (4096, 4096, 4096, None)
  assert exaone.has_rotary[:4] == (True, True, True, False)


@pytest.mark.parametrize(
  ("name", "change", "message"),
  [
    (
      "Gemma 3 1B",
      {"hidden_activation": "gelu"},
      "hidden_activation is 'gelu'",
    ),
    (
      "Gemma 3 1B",
      {"use_bidirectional_attention": True},
      "use_bidirectional_attention is True",
    ),
    (
      "Gemma 3 1B",
      {"rope_parameters": {"sliding_attention": {"rope_type": "yarn"}}},
      "rope_parameters.sliding_attention is",
    ),
    (
      "Gemma 3 1B",
      {"rope_parameters": {"rope_type": "default"}},
      "with full_attention and sliding_attention",
    ),
    (
      "Gemma 3 1B",
      {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
      "rope_scaling.rope_type is 'dynamic'; use 'default', 'linear'",
    ),
    (
      "OLMo 3 7B",
      {
        "rope_scaling": {
          "rope_type": "yarn",
          "factor": 8.0,
          "truncate": False,
          "original_max_position_embeddings": 8192,
        }
      },
      "rope_scaling.truncate is False",
    ),
    ("Gemma 2 2B", {"sliding_window": None}, "no window; set sliding_window"),
    ("Gemma 2 2B", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0"),
    (
      "Gemma 2 2B",
      {"num_attention_heads": 5, "num_key_value_heads": 1},
      "hidden_size 2304 is not a multiple of num_attention_heads 5",
    ),
    (
      "Gemma 3 1B",
      {"attn_logit_softcapping": 50.0},
      "attn_logit_softcapping is 50.0, which transformers does not apply",
    ),
    (
      "OLMo 3 7B",
      {"rope_theta": 1e4},
      "rope_theta is 10000.0, but rope_parameters.sliding_attention has none",
    ),
    ("SmolLM3 3B", {"use_sliding_window": True}, "use_sliding_window is True"),
    ("SmolLM3 3B", {"no_rope_layers": [1, 0]}, "no_rope_layers is"),
    ("SmolLM3 3B", {"no_rope_layers": [2] * 36}, "no_rope_layers is"),
    ("Phi-4", {"partial_rotary_factor": 0.01}, "partial_rotary_factor is 0.01"),
    ("Phi-4", {"partial_rotary_factor": 1.5}, "partial_rotary_factor"),
    ("Phi-4-mini", {"head_dim": 64}, "short_factor is"),
    (
      "Phi-4",
      {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
      "rope_scaling.rope_type is 'yarn'; use 'default', 'longrope'",
    ),
    ("EXAONE 4 32B", {"layer_types": ["linear"] * 64}, "layer_types has"),
  ],
)
def test_what_a_family_has_not_is_refused_by_name(
  tmp_path, name, change, message
):
  settings = PRETRAINED[name][0] | change
  with pytest.raises(ValueError, match=message) as caught:
    test_hf_weights.described(tmp_path, settings)
  assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["Gemma 3 1B", "OLMo 3 7B"])
def test_a_scaling_is_where_old_and_new_versions_read_it(tmp_path, name):
  scaling = {"rope_type": "linear", "factor": 8.0}
  settings = PRETRAINED[name][0] | {"rope_scaling": scaling}
  model = test_hf_weights.described(tmp_path, settings)
  written = hf_config.config_json(model)
  assert written["rope_scaling"] == scaling
  assert scaling.items() <= written["rope_parameters"]["full_attention"].items()
  del written["rope_parameters"], written["rope_local_base_freq"]
  assert model == test_hf_weights.described(
    tmp_path, settings | {"rope_scaling": written["rope_scaling"]}
  )


def test_the_longrope_of_a_phi_is_written_as_old_versions_demand(tmp_path):
  settings = PRETRAINED["Phi-4-mini"][0]
  model = test_hf_weights.described(tmp_path, settings)
  written = hf_config.config_json(model)
  assert written["rope_scaling"] == settings["rope_scaling"]
  assert written["max_position_embeddings"] == 131_072
  scaling = settings["rope_scaling"] | {"attention_factor": 1.5}
  other = test_hf_weights.described(
    tmp_path, settings | {"rope_scaling": scaling}
  )
  written = hf_config.config_json(other)
  assert written["rope_scaling"]["attention_factor"] == 1.5
  assert other == test_hf_weights.described(
    tmp_path, written | {"max_position_embeddings": 131_072}
  )


def test_a_part_of_a_head_comes_back_as_it_was(tmp_path):
  settings = settings_of(
    *("phi3", 50, 88 * 4, 2, 4, 4, 40), partial_rotary_factor=0.35
  )
  model = test_hf_weights.described(tmp_path, settings)
  assert model.rotary_dim == 30
  read = test_hf_weights.described(tmp_path, hf_config.config_json(model))
  assert read == model


def test_gemma_means_the_approximation_by_an_old_name(tmp_path):
  settings = PRETRAINED["Gemma 2 2B"][0] | {"model_type": "gemma"}
  old = test_hf_weights.described(tmp_path, settings | {"hidden_act": "gelu"})
  assert old.activation == "gelu_tanh"
  assert old == test_hf_weights.described(tmp_path, settings)


def test_every_family_describes_the_models_that_it_reads(tmp_path):
  for name in families.FAMILIES:
    settings = settings_of(name, 50, 32, 4, 4, 2, 40, head_dim=8)
    model = test_hf_weights.described(tmp_path, settings)
    assert hf_config.family_of(model) == name
    assert hf_config.config_json(model)["architectures"] == [
      families.FAMILIES[name].architecture
    ]


def test_adapters_of_a_fused_matrix_are_refused_by_name(tmp_path):
  model = test_hf_weights.described(tmp_path, PRETRAINED["Phi-4"][0])
  for module, stored in (("key", "qkv_proj"), ("up", "gate_up_proj")):
    lora = configs.Lora(rank=2, alpha=2.0, modules=("output", module))
    adapted = dataclasses.replace(model, lora=lora)
    with pytest.raises(ValueError, match=f"has {module}, which phi3 stores in"):
      peft_files._places(adapted, lora)
    with pytest.raises(ValueError, match=stored):
      peft_files._places(adapted, lora)
  lora = configs.Lora(rank=2, alpha=2.0, modules=("output", "down"))
  assert len(peft_files._places(model, lora)) == 2 * 2 * model.num_layers
