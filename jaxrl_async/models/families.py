"""The families of models, as tables: what config.json calls what, and defaults.

A new dense family whose layers have what other families have is one entry here
and a case in tests/test_families.py.
"""

from collections.abc import Callable, Mapping
import dataclasses
import enum
from typing import Any, NamedTuple

from jaxrl_async.models import configs


class Windows(enum.Enum):
  """Which layers of a family have a sliding window.

  NONE: none. EVERY: all, or none if there is no size. CHOSEN: those that
  config.json names if use_sliding_window is set, as in Qwen2. MOST: all but
  every n-th, or those that config.json names.
  """

  NONE = "none"
  EVERY = "every"
  CHOSEN = "chosen"
  MOST = "most"


class Rotated(enum.Enum):
  """Which layers of a family have a rotary embedding.

  ALL: all. LISTED: those that no_rope_layers has as 1, as in SmolLM3. WINDOWED:
  if some layers have windows, these, as in EXAONE 4.
  """

  ALL = "all"
  LISTED = "listed"
  WINDOWED = "windowed"


class Setting(NamedTuple):
  """An entry of config.json that sets a number of the architecture.

  Attributes:
    name: of the entry.
    read: makes the field of it.
    write: makes the entry of the field.
    is_optional: whether null means None instead of the default.
  """

  name: str
  read: Callable[[Any], Any] = float
  write: Callable[[Any], Any] = float
  is_optional: bool = False


ALL_SCALINGS = ("linear", "dynamic", "llama3", "yarn", "longrope")
# Of families whose layers have different rotary embeddings: those that
# transformers computes without looking at the length of a batch.
FIXED_SCALINGS = ("linear", "llama3", "yarn")


class Same(NamedTuple):
  """A default that is the value of another entry of config.json."""

  name: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
  """What the models of a family have in common.

  Attributes:
    architecture: the class of transformers.
    has: fields of the architecture that all of its models have.
    reads: entries of config.json by the field that they set.
    defaults: what an entry is if config.json leaves it out.
    windows: which layers have a sliding window.
    full_every: of MOST: the layers n - 1, 2n - 1, ... have none.
    reads_full_every: whether sliding_window_pattern may be another n.
    rotated: which layers have a rotary embedding.
    has_local_rope: layers with a window have a rotary base of their own, and
      rope_parameters is an object for each kind of layer.
    has_partial_rotary: partial_rotary_factor is read.
    scalings: of the rotary embedding that transformers knows of it.
    scales_embedding: embeddings are multiplied by the root of their size.
    divides_heads: hidden_size has to be a multiple of the number of heads.
    activation: the entry with the activation of the gate.
    old_activations: names of it in old files, and what they mean.
    has_short_longrope: longrope is written as older transformers require, with
      its name as `type` and the two lists alone, wherever that says it all.
    has_experts: the feed-forward of every layer is one of experts.
    must_be_null: entries that transformers has, but does not apply.
    must_be_false: entries that this decoder does not implement.
    fused: matrices of a layer that are stored as one, by its name.
    has_delta: layers mix by the gated delta rule, except for those that
      layer_types names, or every n-th of full_attention_interval.
    text_of: the model_type of models with images whose text part this is. Their
      settings of it are an object of their own.
    left_out: beginnings of the names of tensors that are not read.
  """

  architecture: str
  has: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  reads: Mapping[str, Setting] = dataclasses.field(default_factory=dict)
  defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  windows: Windows = Windows.NONE
  full_every: int = 0
  reads_full_every: bool = False
  rotated: Rotated = Rotated.ALL
  has_local_rope: bool = False
  has_partial_rotary: bool = False
  scalings: tuple[str, ...] = ALL_SCALINGS
  scales_embedding: bool = False
  divides_heads: bool = False
  activation: str = "hidden_act"
  old_activations: Mapping[str, str] = dataclasses.field(default_factory=dict)
  has_short_longrope: bool = False
  has_experts: bool = False
  must_be_null: tuple[str, ...] = ()
  must_be_false: tuple[str, ...] = ("mlp_bias", "attention_bias")
  fused: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
  has_delta: bool = False
  text_of: str = ""
  left_out: tuple[str, ...] = ()


_ALL_HEADS = {"num_key_value_heads": Same("num_attention_heads")}
_AFTER = {"norms": configs.Norms.AFTER}
# A score is divided by the root of query_pre_attn_scalar.
_QUERY_SCALE = Setting(
  "query_pre_attn_scalar", lambda x: x**-0.5, lambda x: round(x**-2)
)
_GEMMA = Family(
  architecture="GemmaForCausalLM",
  has={"has_centred_norms": True},
  defaults={
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
  },
  scales_embedding=True,
  must_be_false=("attention_bias", "use_bidirectional_attention"),
)
_GEMMA2 = dataclasses.replace(
  _GEMMA,
  architecture="Gemma2ForCausalLM",
  has={**_GEMMA.has, "norms": configs.Norms.AROUND},
  reads={
    "attention_scale": _QUERY_SCALE,
    "attention_soft_cap": Setting("attn_logit_softcapping", is_optional=True),
    "logits_soft_cap": Setting("final_logit_softcapping", is_optional=True),
  },
  defaults={
    **_GEMMA.defaults,
    "query_pre_attn_scalar": 256,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "sliding_window": 4096,
  },
  windows=Windows.MOST,
  full_every=2,
  divides_heads=True,
  activation="hidden_activation",
)
_OLMO2 = Family(
  architecture="Olmo2ForCausalLM",
  has={**_AFTER, "has_wide_qk_norm": True},
  defaults={**_ALL_HEADS, "rms_norm_eps": 1e-5},
  must_be_false=("attention_bias",),
)

FAMILIES = {
  "qwen2": Family(
    architecture="Qwen2ForCausalLM",
    has={"has_qkv_bias": True},
    defaults={"sliding_window": 4096, "max_window_layers": 28},
    windows=Windows.CHOSEN,
    must_be_false=("mlp_bias",),
  ),
  "qwen3": Family(
    architecture="Qwen3ForCausalLM",
    has={"has_qk_norm": True},
    defaults={"head_dim": 128, "sliding_window": 4096, "max_window_layers": 28},
    windows=Windows.CHOSEN,
  ),
  "qwen3_moe": Family(
    architecture="Qwen3MoeForCausalLM",
    has={"has_qk_norm": True},
    defaults={
      "num_experts": 128,
      "num_experts_per_tok": 8,
      "moe_intermediate_size": 768,
      "decoder_sparse_step": 1,
    },
    has_experts=True,
    must_be_false=("mlp_bias", "attention_bias", "use_sliding_window"),
  ),
  "llama": Family(
    architecture="LlamaForCausalLM", defaults=_ALL_HEADS, divides_heads=True
  ),
  "mistral": Family(
    architecture="MistralForCausalLM",
    defaults={"sliding_window": 4096},
    windows=Windows.EVERY,
  ),
  "gemma": dataclasses.replace(
    _GEMMA, old_activations={"gelu": "gelu_pytorch_tanh"}
  ),
  "gemma2": _GEMMA2,
  "gemma3_text": dataclasses.replace(
    _GEMMA2,
    architecture="Gemma3ForCausalLM",
    has={**_GEMMA2.has, "has_qk_norm": True},
    reads={
      "attention_scale": _QUERY_SCALE,
      "logits_soft_cap": Setting("final_logit_softcapping", is_optional=True),
    },
    must_be_null=("attn_logit_softcapping",),
    defaults={
      **_GEMMA2.defaults,
      "attn_logit_softcapping": None,
      "final_logit_softcapping": None,
      "rope_theta": 1e6,
      "rope_local_base_freq": 1e4,
    },
    full_every=6,
    reads_full_every=True,
    has_local_rope=True,
    scalings=FIXED_SCALINGS,
  ),
  "smollm3": Family(
    architecture="SmolLM3ForCausalLM",
    defaults={
      "no_rope_layer_interval": 4,
      "rope_theta": 2e6,
      "tie_word_embeddings": True,
    },
    rotated=Rotated.LISTED,
    must_be_false=("mlp_bias", "attention_bias", "use_sliding_window"),
  ),
  "olmo2": _OLMO2,
  "olmo3": dataclasses.replace(
    _OLMO2,
    architecture="Olmo3ForCausalLM",
    defaults={
      **_OLMO2.defaults,
      "sliding_window": 4096,
      "rope_theta": 5e5,
      "rope_local_base_freq": Same("rope_theta"),
    },
    windows=Windows.MOST,
    full_every=4,
    has_local_rope=True,
    scalings=FIXED_SCALINGS,
  ),
  "phi3": Family(
    architecture="Phi3ForCausalLM",
    defaults={
      **_ALL_HEADS,
      "rms_norm_eps": 1e-5,
      "original_max_position_embeddings": 4096,
    },
    windows=Windows.EVERY,
    has_partial_rotary=True,
    scalings=("longrope",),
    has_short_longrope=True,
    must_be_false=(),
    fused={
      "self_attn.qkv_proj": ("query", "key", "value"),
      "mlp.gate_up_proj": ("gate", "up"),
    },
  ),
  "granite": Family(
    architecture="GraniteForCausalLM",
    reads={
      "embedding_scale": Setting("embedding_multiplier"),
      "residual_scale": Setting("residual_multiplier"),
      "attention_scale": Setting("attention_multiplier"),
      "logits_divisor": Setting("logits_scaling"),
    },
    defaults={
      **_ALL_HEADS,
      "embedding_multiplier": 1.0,
      "residual_multiplier": 1.0,
      "attention_multiplier": 1.0,
      "logits_scaling": 1.0,
    },
  ),
  "exaone4": Family(
    architecture="Exaone4ForCausalLM",
    has={**_AFTER, "has_qk_norm": True},
    defaults={
      "rms_norm_eps": 1e-5,
      "sliding_window": 4096,
    },
    windows=Windows.MOST,
    full_every=4,
    reads_full_every=True,
    rotated=Rotated.WINDOWED,
    must_be_false=(),
  ),
  "qwen3_5_text": Family(
    architecture="Qwen3_5ForCausalLM",
    has={
      "has_qk_norm": True,
      "has_centred_norms": True,
      "has_gated_attention": True,
    },
    defaults={
      "head_dim": 256,
      "partial_rotary_factor": 0.25,
      "full_attention_interval": 4,
      "linear_conv_kernel_dim": 4,
      "linear_key_head_dim": 128,
      "linear_value_head_dim": 128,
      "linear_num_key_heads": 16,
      "linear_num_value_heads": 32,
    },
    has_partial_rotary=True,
    scalings=FIXED_SCALINGS,
    fused={
      "linear_attn.in_proj_qkv": ("delta_query", "delta_key", "delta_value")
    },
    has_delta=True,
    text_of="qwen3_5",
    left_out=("mtp.", "model.visual."),
  ),
}
