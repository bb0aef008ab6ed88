"""Architectures as Hugging Face's config.json describes them, in and out.

Settings are read as transformers reads them, its defaults included; one that
this decoder does not compute is an error of one line that names it.
"""

from collections.abc import Mapping
import json
import pathlib
from typing import Any

from jaxrl_async.models import configs

CONFIG_FILE = "config.json"
ARCHITECTURES = {
  "qwen2": "Qwen2ForCausalLM",
  "qwen3": "Qwen3ForCausalLM",
  "llama": "LlamaForCausalLM",
}
_ROPE_KEYS = {
  "rope_type",
  "type",
  "rope_theta",
  "partial_rotary_factor",
  "factor",
  "low_freq_factor",
  "high_freq_factor",
  "original_max_position_embeddings",
}


def model_config(directory: str | pathlib.Path) -> configs.ModelConfig:
  """The architecture that a directory's config.json describes.

  Raises:
    FileNotFoundError: there is none.
    ValueError: it asks for what this decoder does not compute.
  """
  path = pathlib.Path(directory) / CONFIG_FILE
  settings = read_json(path)
  try:
    return _model_config(settings)
  except ValueError as error:
    raise ValueError(f"{path}: {error}") from error


def _model_config(settings: Mapping[str, Any]) -> configs.ModelConfig:
  family = settings.get("model_type")
  if family not in ARCHITECTURES:
    raise ValueError(
      f"model_type is {family!r}; use one of {', '.join(ARCHITECTURES)}"
    )
  _refuse_the_unknown(settings, family)
  model_dim = _number(settings, "hidden_size", int)
  num_heads = _number(settings, "num_attention_heads", int)
  # What transformers takes where the file says nothing.
  num_kv_heads = num_heads if family == "llama" else None
  head_dim = 128 if family == "qwen3" else model_dim // num_heads
  theta, scaling = _rope(settings)
  return configs.ModelConfig(
    vocab_size=_number(settings, "vocab_size", int),
    model_dim=model_dim,
    num_layers=_number(settings, "num_hidden_layers", int),
    num_heads=num_heads,
    num_kv_heads=_number(settings, "num_key_value_heads", int, num_kv_heads),
    head_dim=_number(settings, "head_dim", int, head_dim),
    mlp_dim=_number(settings, "intermediate_size", int),
    rope_theta=theta,
    rope_scaling=scaling,
    norm_eps=_number(settings, "rms_norm_eps", float, 1e-6),
    has_qkv_bias=family == "qwen2",
    has_qk_norm=family == "qwen3",
    has_tied_head=bool(settings.get("tie_word_embeddings", False)),
  )


def _refuse_the_unknown(settings: Mapping[str, Any], family: str) -> None:
  computed = {"hidden_act": "silu", "mlp_bias": False}
  if family != "qwen2":
    # Adds one to the output projection too; Qwen2 never reads the setting.
    computed["attention_bias"] = False
  for name, value in computed.items():
    if settings.get(name) not in (None, value):
      raise ValueError(
        f"{name} is {settings[name]!r}; only {value!r} is supported"
      )
  if settings.get("quantization_config") is not None:
    raise ValueError("quantization_config: quantized weights are not read")
  num_layers = _number(settings, "num_hidden_layers", int)
  layer_types = settings.get("layer_types") or []
  for layer_type in layer_types:
    if layer_type != "full_attention":
      raise ValueError(f"layer_types has {layer_type!r}; only full attention")
  if (
    not layer_types
    and settings.get("use_sliding_window")
    and settings.get("sliding_window", 4096) is not None
    and settings.get("max_window_layers", 28) < num_layers
  ):
    raise ValueError("use_sliding_window: only full attention is supported")


def _rope(
  settings: Mapping[str, Any],
) -> tuple[float, configs.RopeScaling | None]:
  """Base and scaling, from transformers 5's place or from the older two."""
  where = "rope_scaling" if settings.get("rope_scaling") else "rope_parameters"
  rope = settings.get(where) or {}
  kind = rope.get("rope_type", rope.get("type", "default"))
  if kind not in ("default", "llama3"):
    raise ValueError(
      f"{where}.rope_type is {kind!r}; use 'default' or 'llama3'"
    )
  if unknown := sorted(rope.keys() - _ROPE_KEYS):
    raise ValueError(f"{where}.{unknown[0]} is not supported")
  for place in (rope, settings):
    if place.get("partial_rotary_factor") not in (None, 1):
      raise ValueError("partial_rotary_factor: only whole heads are rotated")
  theta = _number(settings, "rope_theta", float, 10_000.0)
  theta = _number(rope, "rope_theta", float, theta)
  if kind == "default":
    return theta, None
  context = "original_max_position_embeddings"
  # transformers prefers the outer one.
  source = next(
    (place for place in (settings, rope) if place.get(context)), None
  )
  return theta, configs.RopeScaling(
    factor=_number(rope, "factor", float),
    low_freq_factor=_number(rope, "low_freq_factor", float),
    high_freq_factor=_number(rope, "high_freq_factor", float),
    original_max_tokens=_number(settings, "max_position_embeddings", int)
    if source is None
    else _number(source, context, int),
  )


def read_json(path: pathlib.Path) -> dict[str, Any]:
  """A file's object; what is wrong with it is said in one line."""
  if not path.is_file():
    raise FileNotFoundError(f"{path} does not exist")
  try:
    value = json.loads(path.read_text())
  except ValueError as error:
    raise ValueError(f"{path}: {error}") from error
  if not isinstance(value, dict):
    raise ValueError(f"{path} holds no JSON object")
  return value


def _number(
  settings: Mapping[str, Any], name: str, kind: type, default: Any = None
) -> Any:
  """A positive number; null is as good as absent."""
  value = settings.get(name)
  value = default if value is None else value
  if value is None:
    raise ValueError(f"{name} is missing")
  is_number = isinstance(value, int if kind is int else int | float)
  if isinstance(value, bool) or not is_number or value <= 0:
    raise ValueError(f"{name} is {value!r}, not a positive {kind.__name__}")
  return kind(value)


def config_json(config: configs.ModelConfig) -> dict[str, Any]:
  """The settings of a model: what `_model_config` reads.

  The rotary base and scaling stand where every version of transformers reads
  them.
  """
  if config.has_qkv_bias and config.has_qk_norm:
    raise ValueError(
      "has_qkv_bias and has_qk_norm: the format knows no model with both"
    )
  if config.has_qk_norm:
    family = "qwen3"
  else:
    family = "qwen2" if config.has_qkv_bias else "llama"
  if family == "llama" and config.model_dim % config.num_heads:
    raise ValueError(
      f"model_dim {config.model_dim} is not a multiple of num_heads"
      f" {config.num_heads}, which transformers asks of a Llama"
    )
  scaling = config.rope_scaling
  return {
    "architectures": [ARCHITECTURES[family]],
    "model_type": family,
    "vocab_size": config.vocab_size,
    "hidden_size": config.model_dim,
    "intermediate_size": config.mlp_dim,
    "num_hidden_layers": config.num_layers,
    "num_attention_heads": config.num_heads,
    "num_key_value_heads": config.num_kv_heads,
    "head_dim": config.head_dim,
    "hidden_act": "silu",
    "rms_norm_eps": config.norm_eps,
    "rope_theta": config.rope_theta,
    "rope_scaling": scaling
    and {
      "rope_type": "llama3",
      "factor": scaling.factor,
      "low_freq_factor": scaling.low_freq_factor,
      "high_freq_factor": scaling.high_freq_factor,
      "original_max_position_embeddings": scaling.original_max_tokens,
    },
    "tie_word_embeddings": config.has_tied_head,
  }
