"""Architectures as described by the config.json of Hugging Face format.

Settings are read as transformers reads them, including its defaults. A setting
that this decoder does not implement is an error of one line that names it.
"""

from collections.abc import Mapping
import pathlib
from typing import Any

from jaxrl_async.config import sections
from jaxrl_async.models import configs
from jaxrl_async.storage import model_files

CONFIG_FILE = model_files.CONFIG
ARCHITECTURES = {
  "qwen2": "Qwen2ForCausalLM",
  "qwen3": "Qwen3ForCausalLM",
  "llama": "LlamaForCausalLM",
  "mistral": "MistralForCausalLM",
}
_MAX_POSITIONS = "max_position_embeddings"
_FULL, _SLIDING = "full_attention", "sliding_attention"
# Far beyond any model. The bounds refuse a file before anything of its size is
# built or counted.
_MAX_SIZE = 2**24
_MAX_LAYERS = 2**12
_MAX_PARAMS = 2**44
# The range that float32 can compute with.
_SMALLEST, _LARGEST = 1e-30, 1e30
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
  """Return the architecture that a directory's config.json describes.

  Raises:
    FileNotFoundError: there is no config.json.
    ValueError: it describes a model that this decoder does not implement.
  """
  path = pathlib.Path(directory) / CONFIG_FILE
  settings = model_files.read_object(path)
  try:
    return _model_config(settings)
  except ValueError as error:
    raise ValueError(f"{path}: {error}") from error


def max_positions(directory: str | pathlib.Path) -> int | None:
  """Return the longest sequence of a directory's model, if it is known.

  Raises:
    ValueError: config.json is damaged.
  """
  path = pathlib.Path(directory) / CONFIG_FILE
  try:
    return _max_positions(model_files.read_optional(path))
  except ValueError as error:
    raise ValueError(f"{path}: {error}") from error


def check_vocabulary(
  directory: str | pathlib.Path, model: configs.ModelConfig, num_tokens: int
) -> None:
  """Refuse a tokenizer that cannot belong to the model.

  Pretrained models pad their vocabularies by less than a tenth. The bound here
  is generous: twice the tokenizer's vocabulary, and a thousand more for small
  ones.

  Args:
    directory: of both.
    model: its architecture.
    num_tokens: size of the tokenizer's vocabulary.

  Raises:
    ValueError: the tokenizer has more tokens than the model, or far fewer.
  """
  if num_tokens > model.vocab_size or model.vocab_size > 2 * num_tokens + 1024:
    raise ValueError(
      f"{pathlib.Path(directory) / CONFIG_FILE}: vocab_size is"
      f" {model.vocab_size}, but its tokenizer has {num_tokens} tokens; use the"
      " tokenizer that came with the model"
    )


def _model_config(settings: Mapping[str, Any]) -> configs.ModelConfig:
  family = settings.get("model_type")
  if not isinstance(family, str) or family not in ARCHITECTURES:
    raise ValueError(
      f"model_type is {sections.shown(family)}; use one of"
      f" {', '.join(ARCHITECTURES)}"
    )
  _refuse_the_unknown(settings, family)
  model_dim = _number(settings, "hidden_size", int)
  num_layers = _number(settings, "num_hidden_layers", int, most=_MAX_LAYERS)
  num_heads = _number(settings, "num_attention_heads", int)
  # Defaults of transformers.
  num_kv_heads = num_heads if family == "llama" else None
  head_dim = 128 if family == "qwen3" else model_dim // num_heads
  head_dim = _number(settings, "head_dim", int, head_dim)
  num_kv_heads = _number(settings, "num_key_value_heads", int, num_kv_heads)
  if num_heads % num_kv_heads:
    raise ValueError(
      f"num_attention_heads {num_heads} is not a multiple of"
      f" num_key_value_heads {num_kv_heads}"
    )
  if head_dim % 2:
    raise ValueError(
      f"head_dim is {head_dim}, which is odd; rotary embeddings need pairs"
    )
  theta, scaling = _rope(settings)
  model = configs.ModelConfig(
    vocab_size=_number(settings, "vocab_size", int),
    model_dim=model_dim,
    num_layers=num_layers,
    num_heads=num_heads,
    num_kv_heads=num_kv_heads,
    head_dim=head_dim,
    mlp_dim=_number(settings, "intermediate_size", int),
    rope_theta=theta,
    rope_scaling=scaling,
    norm_eps=_number(settings, "rms_norm_eps", float, 1e-6),
    has_qkv_bias=family == "qwen2",
    has_qk_norm=family == "qwen3",
    has_tied_head=_flag(settings, "tie_word_embeddings"),
    sliding_windows=_sliding_windows(settings, family, num_layers),
    max_positions=_max_positions(settings),
    family=family,
  )
  if model.num_params > _MAX_PARAMS:
    raise ValueError(
      f"hidden_size {model_dim} and the other sizes give {model.num_params:.1e}"
      " parameters"
    )
  return model


def _max_positions(settings: Mapping[str, Any]) -> int | None:
  if settings.get(_MAX_POSITIONS) is None:
    return None
  return _number(settings, _MAX_POSITIONS, int)


def _refuse_the_unknown(settings: Mapping[str, Any], family: str) -> None:
  hidden_act = settings.get("hidden_act")
  if hidden_act not in (None, "silu"):
    raise ValueError(
      f"hidden_act is {sections.shown(hidden_act)}; only 'silu' is supported"
    )
  # Qwen2 never reads attention_bias. In the other families it also adds a bias
  # to the output projection.
  for name in ("mlp_bias", "attention_bias"):
    is_read = name == "mlp_bias" or family != "qwen2"
    if is_read and _flag(settings, name):
      raise ValueError(f"{name} is True; only False is supported")
  if settings.get("quantization_config") is not None:
    raise ValueError("quantization_config: quantized weights are not supported")


def _sliding_windows(
  settings: Mapping[str, Any], family: str, num_layers: int
) -> tuple[int | None, ...]:
  """Return the sliding window of each layer; empty if no layer has one.

  As in transformers, a Mistral has its window in all layers, or in none if
  sliding_window is null. Qwen2 and Qwen3 need use_sliding_window, and have the
  window in the layers that layer_types names. Without layer_types, these are
  the layers from max_window_layers on. A Llama has no windows.
  """
  is_used = _flag(settings, "use_sliding_window")
  is_used = {"llama": False, "mistral": True}.get(family, is_used)
  first = _number(settings, "max_window_layers", int, 28, least=0)
  window = None
  if is_used and settings.get("sliding_window", 4096) is not None:
    window = _number(settings, "sliding_window", int, 4096)
  has_window = [window is not None] * num_layers
  types = _layer_types(settings, num_layers)
  if family in ("qwen2", "qwen3"):
    if types is not None:
      has_window = [name == _SLIDING for name in types]
    else:
      has_window = [has and i >= first for i, has in enumerate(has_window)]
    if any(has_window) and window is None:
      raise ValueError(
        f"layer_types has {_SLIDING!r}, but there is no window; set"
        " use_sliding_window and sliding_window"
      )
  elif types not in (None, [_SLIDING if has else _FULL for has in has_window]):
    which = "no layer" if not any(has_window) else "every layer"
    raise ValueError(
      f"layer_types: {which} of this {family} has a window; leave it out"
    )
  if not any(has_window):
    return ()
  return tuple(window if has else None for has in has_window)


def _layer_types(
  settings: Mapping[str, Any], num_layers: int
) -> list[str] | None:
  """Return the kind of each layer's attention; None if there is no list."""
  layer_types = settings.get("layer_types")
  if layer_types is None:
    return None
  if not isinstance(layer_types, list):
    raise ValueError(
      f"layer_types is {sections.shown(layer_types)}, not a list"
    )
  for layer_type in layer_types:
    if layer_type not in (_FULL, _SLIDING):
      raise ValueError(
        f"layer_types has {sections.shown(layer_type)}; use {_FULL!r} or"
        f" {_SLIDING!r}"
      )
  if len(layer_types) != num_layers:
    raise ValueError(
      f"layer_types has {len(layer_types)} entries for num_hidden_layers"
      f" {num_layers}"
    )
  return layer_types


def _rope(
  settings: Mapping[str, Any],
) -> tuple[float, configs.RopeScaling | None]:
  """Return base and scaling of the rotary embedding.

  transformers 5 stores them in rope_parameters. Older versions used rope_theta
  and rope_scaling.
  """
  for where in ("rope_parameters", "rope_scaling"):
    if not isinstance(settings.get(where), Mapping | None):
      raise ValueError(
        f"{where} is {sections.shown(settings[where])}, not an object"
      )
  where = "rope_scaling" if settings.get("rope_scaling") else "rope_parameters"
  rope = settings.get(where) or {}
  kind = rope.get("rope_type", rope.get("type", "default"))
  if kind not in ("default", "llama3"):
    raise ValueError(
      f"{where}.rope_type is {sections.shown(kind)}; use 'default' or 'llama3'"
    )
  if unknown := sorted(rope.keys() - _ROPE_KEYS):
    name = sections.shown(unknown[0]).strip("'")
    raise ValueError(f"{where}.{name} is not supported")
  for place in (rope, settings):
    if _number(place, "partial_rotary_factor", float, 1.0) != 1:
      raise ValueError("partial_rotary_factor: only whole heads are rotated")
  theta = _number(settings, "rope_theta", float, 10_000.0)
  theta = _number(rope, "rope_theta", float, theta)
  if kind == "default":
    return theta, None
  context = "original_max_position_embeddings"
  # As in transformers, the outer value takes precedence.
  source = next(
    (place for place in (settings, rope) if place.get(context) is not None),
    None,
  )
  factors = {
    name: _number(rope, name, float)
    for name in ("factor", "low_freq_factor", "high_freq_factor")
  }
  try:
    scaling = configs.RopeScaling(
      **factors,
      original_max_tokens=_number(settings, _MAX_POSITIONS, int)
      if source is None
      else _number(source, context, int),
    )
  except ValueError as error:
    raise ValueError(f"{where}: {error}") from error
  return theta, scaling


def _flag(settings: Mapping[str, Any], name: str) -> bool:
  """Return a boolean setting; null and absent mean False."""
  value = settings.get(name)
  if not isinstance(value, bool | None):
    raise ValueError(f"{name} is {sections.shown(value)}, not true or false")
  return bool(value)


def _number(
  settings: Mapping[str, Any],
  name: str,
  kind: type,
  default: Any = None,
  *,
  least: int = 1,
  most: int = _MAX_SIZE,
) -> Any:
  """Return a positive number; null means absent.

  Args:
    settings: object that holds the number.
    name: of the entry.
    kind: int or float.
    default: used if the entry is absent; None makes absence an error.
    least: smallest allowed int.
    most: largest allowed int.
  """
  value = settings.get(name)
  value = default if value is None else value
  if value is None:
    raise ValueError(f"{name} is missing")
  is_number = isinstance(value, int if kind is int else int | float)
  smallest = least if kind is int else 0
  # The comparison is False for NaN too.
  if isinstance(value, bool) or not is_number or not value >= smallest:
    raise ValueError(
      f"{name} is {sections.shown(value)}, not a positive {kind.__name__}"
    )
  if kind is int:
    if value > most:
      raise ValueError(
        f"{name} is {sections.shown(value)}; at most {most} is supported"
      )
  elif not _SMALLEST <= value <= _LARGEST:
    raise ValueError(
      f"{name} is {sections.shown(value)}, not a positive {kind.__name__}"
      " that can be computed with"
    )
  return kind(value)


def config_json(config: configs.ModelConfig) -> dict[str, Any]:
  """Return the settings of a model, which `model_config` can read.

  The rotary base and scaling are stored where every version of transformers
  reads them.

  Raises:
    ValueError: the format cannot describe this architecture.
  """
  family = _family(config)
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
    **_window_settings(config, family),
  }


def _family(config: configs.ModelConfig) -> str:
  """Return the family that has a model's biases, norms and windows."""
  if config.has_qkv_bias and config.has_qk_norm:
    raise ValueError(
      "has_qkv_bias and has_qk_norm: no model of this format has both"
    )
  if config.has_qk_norm or config.has_qkv_bias:
    possible = ("qwen3",) if config.has_qk_norm else ("qwen2",)
  else:
    possible = ("mistral",) if config.sliding_windows else ("llama", "mistral")
  family = config.family or possible[0]
  if family not in possible:
    raise ValueError(
      f"family {family!r} has no such biases, norms or windows; use"
      f" {possible[0]!r}, or leave it empty"
    )
  if family == "llama" and config.model_dim % config.num_heads:
    raise ValueError(
      f"model_dim {config.model_dim} is not a multiple of num_heads"
      f" {config.num_heads}, as transformers requires of a Llama"
    )
  return family


def _window_settings(
  config: configs.ModelConfig, family: str
) -> dict[str, Any]:
  """Return the settings of the windows, for old and new transformers."""
  windows = config.sliding_windows
  sizes = {size for size in windows if size is not None}
  if len(sizes) > 1:
    raise ValueError(
      f"sliding_windows {sorted(sizes)}: this format has one size for all"
      " layers"
    )
  window = next(iter(sizes), None)
  if family == "mistral":
    if window is not None and None in windows:
      raise ValueError(
        "sliding_windows: a Mistral has a window in every layer or in none"
      )
    return {"sliding_window": window}
  if window is None:
    return {}
  return {
    "use_sliding_window": True,
    "sliding_window": window,
    "max_window_layers": windows.index(window),
    "layer_types": [_SLIDING if size else _FULL for size in windows],
  }
