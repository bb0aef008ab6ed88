"""Architectures as described by the config.json of Hugging Face format.

Settings are read as transformers reads them, including its defaults. A setting
that this decoder does not implement is an error of one line that names it. What
differs between families is in `families`.
"""

from collections.abc import Mapping
import dataclasses
import math
import pathlib
from typing import Any

from jaxrl_async.config import sections
from jaxrl_async.models import configs
from jaxrl_async.models import families
from jaxrl_async.models import hf_experts
from jaxrl_async.models import hf_layers
from jaxrl_async.models import hf_values
from jaxrl_async.storage import model_files

CONFIG_FILE = model_files.CONFIG
_MAX_POSITIONS = "max_position_embeddings"
_CONTEXT = "original_max_position_embeddings"
_FULL, _SLIDING = hf_layers.FULL, hf_layers.SLIDING
# Far beyond any model. The bounds refuse a file before anything of its size is
# built or counted.
_MAX_LAYERS = 2**12
_MAX_PARAMS = 2**44
# Of each kind of scaling: its settings that are numbers, by the field that they
# set. Those without a default are required.
_SCALING_NUMBERS = {
  "linear": {"factor": "factor"},
  "dynamic": {"factor": "factor"},
  "llama3": {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
  },
  "yarn": {
    "factor": "factor",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
  },
  "longrope": {},
}
# They tell apart the positions of images, which are equal in a text.
_OF_IMAGES = ("mrope_section", "mrope_interleaved")
_SCALING_DEFAULTS = {"beta_fast": 32.0, "beta_slow": 1.0}
_FACTORS = {"short_factor": "short_factors", "long_factor": "long_factors"}
_ROPE_KEYS = {
  *("rope_type", "type", "rope_theta", "partial_rotary_factor", _CONTEXT),
  *(name for numbers in _SCALING_NUMBERS.values() for name in numbers),
  *("attention_factor", "mscale", "mscale_all_dim", "truncate", *_FACTORS),
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
    return _max_positions(_of_text(model_files.read_optional(path)))
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
    num_tokens: the rows that the tokenizer needs (`Tokenizer.num_needed`).

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
  settings = _of_text(settings)
  name = settings.get("model_type")
  if not isinstance(name, str) or name not in families.FAMILIES:
    raise ValueError(
      f"model_type is {sections.shown(name)}; use one of"
      f" {', '.join(families.FAMILIES)}"
    )
  family = families.FAMILIES[name]
  settings = _with_defaults(settings, family)
  _refuse_the_unknown(settings, family)
  model_dim = hf_values.number(settings, "hidden_size", int)
  num_layers = hf_values.number(
    settings, "num_hidden_layers", int, most=_MAX_LAYERS
  )
  num_heads = hf_values.number(settings, "num_attention_heads", int)
  head_dim = hf_values.number(settings, "head_dim", int, model_dim // num_heads)
  num_kv_heads = hf_values.number(settings, "num_key_value_heads", int)
  if num_heads % num_kv_heads:
    raise ValueError(
      f"num_attention_heads {num_heads} is not a multiple of"
      f" num_key_value_heads {num_kv_heads}"
    )
  if head_dim % 2:
    raise ValueError(
      f"head_dim is {head_dim}, which is odd; rotary embeddings need pairs"
    )
  if family.divides_heads and model_dim % num_heads:
    raise ValueError(
      f"hidden_size {model_dim} is not a multiple of num_attention_heads"
      f" {num_heads}, as transformers requires of this family"
    )
  delta_fields = hf_layers.delta_fields(settings, family, num_layers)
  windows = _sliding_windows(settings, name, family, num_layers)
  fields: dict[str, Any] = {
    field: None
    if settings[entry.name] is None
    else entry.read(hf_values.number(settings, entry.name, float))
    for field, entry in family.reads.items()
  }
  if family.scales_embedding:
    fields["embedding_scale"] = math.sqrt(model_dim)
    fields["has_rounded_embedding_scale"] = True
  model = configs.ModelConfig(
    vocab_size=hf_values.number(settings, "vocab_size", int),
    model_dim=model_dim,
    num_layers=num_layers,
    num_heads=num_heads,
    num_kv_heads=num_kv_heads,
    head_dim=head_dim,
    mlp_dim=hf_values.number(settings, hf_experts.mlp_dim(family), int),
    experts=hf_experts.experts(settings, family, num_layers),
    norm_eps=hf_values.number(settings, "rms_norm_eps", float, 1e-6),
    activation=_activation(settings, family),
    has_tied_head=hf_values.flag(settings, "tie_word_embeddings"),
    sliding_windows=windows,
    has_rotary=_has_rotary(settings, family, windows, num_layers),
    max_positions=_max_positions(settings),
    family=name,
    **_rope_fields(settings, family, head_dim, windows),
    **family.has,
    **fields,
    **delta_fields,
  )
  if model.num_params > _MAX_PARAMS:
    raise ValueError(
      f"hidden_size {model_dim} and the other sizes give {model.num_params:.1e}"
      " parameters"
    )
  return model


def _of_text(settings: Mapping[str, Any]) -> Mapping[str, Any]:
  """Return the settings of the text part, if it is a model with images."""
  for name, family in families.FAMILIES.items():
    if family.text_of and family.text_of == settings.get("model_type"):
      text = settings.get("text_config")
      if not isinstance(text, Mapping):
        raise ValueError(
          f"text_config is {sections.shown(text)}, not an object"
        )
      # transformers reads the outer one.
      is_tied = settings.get("tie_word_embeddings", False)
      return {**text, "model_type": name, "tie_word_embeddings": is_tied}
  return settings


def _with_defaults(
  settings: Mapping[str, Any], family: families.Family
) -> dict[str, Any]:
  """Return the settings with the family's defaults.

  A default takes the place of null, too, except for settings that may be null.
  """
  optional = {x.name for x in family.reads.values() if x.is_optional}
  optional.add("sliding_window")
  found = dict(settings)
  if family.has_experts and found.get("num_experts") is None:
    found["num_experts"] = found.get("num_local_experts")  # of transformers 5
  for name, value in family.defaults.items():
    if found.get(name) is None and not (name in optional and name in found):
      is_other = isinstance(value, families.Same)
      found[name] = found.get(value.name) if is_other else value
  return found


def _activation(settings: Mapping[str, Any], family: families.Family) -> str:
  stored = settings.get(family.activation)
  if isinstance(stored, str):
    stored = family.old_activations.get(stored, stored)
  for name, known in configs.ACTIVATIONS.items():
    if stored == known or (stored is None and name == "silu"):
      return name
  raise ValueError(
    f"{family.activation} is {sections.shown(stored)}; use one of"
    f" {', '.join(map(repr, configs.ACTIVATIONS.values()))}"
  )


def _max_positions(settings: Mapping[str, Any]) -> int | None:
  if settings.get(_MAX_POSITIONS) is None:
    return None
  return hf_values.number(settings, _MAX_POSITIONS, int)


def _refuse_the_unknown(
  settings: Mapping[str, Any], family: families.Family
) -> None:
  for name in family.must_be_null:
    if settings.get(name) is not None:
      raise ValueError(
        f"{name} is {sections.shown(settings[name])}, which transformers does"
        " not apply in this family; leave it out"
      )
  for name in family.must_be_false:
    if hf_values.flag(settings, name):
      raise ValueError(f"{name} is True; only False is supported")
  if settings.get("quantization_config") is not None:
    raise ValueError("quantization_config: quantized weights are not supported")


def _sliding_windows(
  settings: Mapping[str, Any],
  name: str,
  family: families.Family,
  num_layers: int,
) -> tuple[int | None, ...]:
  """Return the sliding window of each layer; empty if no layer has one.

  As in transformers, a Mistral has its window in all layers, or in none if
  sliding_window is null. Qwen2 and Qwen3 need use_sliding_window, and have the
  window in the layers that layer_types names. Without layer_types, these are
  the layers from max_window_layers on. A Llama has no windows. A Gemma has its
  window in the layers that layer_types names, or in all but every n-th.
  """
  chosen, most = families.Windows.CHOSEN, families.Windows.MOST
  is_used = hf_values.flag(settings, "use_sliding_window")
  if family.windows is not chosen:
    is_used = family.windows is not families.Windows.NONE
  first = hf_values.number(settings, "max_window_layers", int, 28, least=0)
  window = None
  if is_used and settings.get("sliding_window") is not None:
    window = hf_values.number(settings, "sliding_window", int)
  types = (
    None if family.has_delta else hf_layers.layer_types(settings, num_layers)
  )
  has_window = [window is not None] * num_layers
  if family.windows in (chosen, most):
    if types is not None:
      has_window = [kind == _SLIDING for kind in types]
    elif family.windows is chosen:
      has_window = [has and i >= first for i, has in enumerate(has_window)]
    else:
      every = family.full_every
      if family.reads_full_every:
        every = hf_values.number(settings, "sliding_window_pattern", int, every)
      # An EXAONE may do without, and then rotates all layers.
      may_have = window or family.rotated is not families.Rotated.WINDOWED
      has_window = [
        bool(may_have) and (i + 1) % every > 0 for i in range(num_layers)
      ]
    if any(has_window) and window is None:
      needed = "sliding_window"
      if family.windows is chosen:
        needed = f"use_sliding_window and {needed}"
      raise ValueError(
        f"layer_types has {_SLIDING!r}, but there is no window; set {needed}"
      )
  elif types not in (
    None,
    [_SLIDING if has else _FULL for has in has_window],
  ):
    which = "no layer" if not any(has_window) else "every layer"
    raise ValueError(
      f"layer_types: {which} of this {name} has a window; leave it out"
    )
  if not any(has_window):
    return ()
  return tuple(window if has else None for has in has_window)


def _has_rotary(
  settings: Mapping[str, Any],
  family: families.Family,
  windows: tuple[int | None, ...],
  num_layers: int,
) -> tuple[bool, ...]:
  """Return for each layer whether it has a rotary embedding; empty if all."""
  found = [True] * num_layers
  if family.rotated is families.Rotated.WINDOWED:
    # transformers looks at the size of the window, even if no layer has one.
    if settings.get("sliding_window") is not None:
      found = [size is not None for size in windows] or [False] * num_layers
  elif family.rotated is families.Rotated.LISTED:
    every = hf_values.number(settings, "no_rope_layer_interval", int)
    listed = settings.get("no_rope_layers")
    if listed is None:
      listed = [int((i + 1) % every > 0) for i in range(num_layers)]
    if (
      not isinstance(listed, list)
      or len(listed) < num_layers
      or any(type(x) is not int or x not in (0, 1) for x in listed)
    ):
      raise ValueError(
        f"no_rope_layers is {sections.shown(listed)}, not a list of 0 or 1 for"
        " each layer"
      )
    found = [x == 1 for x in listed[:num_layers]]
  return () if all(found) else tuple(found)


def _rope_fields(
  settings: Mapping[str, Any],
  family: families.Family,
  head_dim: int,
  windows: tuple[int | None, ...],
) -> dict[str, Any]:
  """Return the fields of the rotary embeddings.

  transformers 5 stores them in rope_parameters. Older versions used rope_theta
  and rope_scaling.
  """
  for where in ("rope_parameters", "rope_scaling"):
    if not isinstance(settings.get(where), Mapping | None):
      raise ValueError(
        f"{where} is {sections.shown(settings[where])}, not an object"
      )
  scaled = settings.get("rope_scaling") or {}
  given = settings.get("rope_parameters") or {}
  where, rope = (
    ("rope_scaling", scaled) if scaled else ("rope_parameters", given)
  )
  fields: dict[str, Any] = {}
  if family.has_local_rope:
    where = "rope_scaling" if scaled else f"rope_parameters.{_FULL}"
    rope = {**_kind_of_layer(given, _FULL), **scaled}
    local = _kind_of_layer(given, _SLIDING)
    if local.get("rope_type", "default") != "default" or (
      local.keys() - {"rope_type", "rope_theta"}
    ):
      raise ValueError(
        f"rope_parameters.{_SLIDING} is {sections.shown(dict(local))}; only"
        " rope_theta is supported"
      )
    own, usual = settings.get("rope_theta"), family.defaults["rope_theta"]
    follows = isinstance(family.defaults["rope_local_base_freq"], families.Same)
    if follows and own not in (None, usual) and not local.get("rope_theta"):
      raise ValueError(
        f"rope_theta is {sections.shown(own)}, but rope_parameters.{_SLIDING}"
        " has none; transformers 5 then takes"
        f" {usual:g} for layers with a window, and older versions"
        f" do not, so set rope_parameters.{_SLIDING}.rope_theta"
      )
    theta = hf_values.number(settings, "rope_local_base_freq", float)
    theta = hf_values.number(local, "rope_theta", float, theta)
    if windows:
      fields["window_rope_theta"] = theta
  kind = rope.get("rope_type", rope.get("type", "default"))
  if kind != "default" and kind not in family.scalings:
    raise ValueError(
      f"{where}.rope_type is {sections.shown(kind)}; use"
      f" {', '.join(map(repr, ('default', *family.scalings)))}"
    )
  if family.has_local_rope and rope.get("truncate") is False:
    raise ValueError(
      f"{where}.truncate is False, which transformers does not read in this"
      " family; leave it out"
    )
  known = _ROPE_KEYS | ({*_OF_IMAGES} if family.text_of else set())
  if unknown := sorted(rope.keys() - known):
    name = sections.shown(unknown[0]).strip("'")
    raise ValueError(f"{where}.{name} is not supported")
  part = 1.0
  for place in (settings, rope):
    part = hf_values.number(place, "partial_rotary_factor", float, part)
  if part != 1.0:
    if not family.has_partial_rotary or not part < 1.0:
      raise ValueError("partial_rotary_factor: only whole heads are rotated")
    fields["rotary_dim"] = int(head_dim * part)
    if fields["rotary_dim"] < 2 or fields["rotary_dim"] % 2:
      raise ValueError(
        f"partial_rotary_factor is {part}: of heads of {head_dim} that is"
        f" {fields['rotary_dim']}, which is not a number of pairs"
      )
  theta = hf_values.number(settings, "rope_theta", float, 10_000.0)
  fields["rope_theta"] = hf_values.number(rope, "rope_theta", float, theta)
  if kind != "default":
    pairs = fields.get("rotary_dim", head_dim) // 2
    try:
      fields["rope_scaling"] = _scaling(settings, rope, kind, pairs)
    except ValueError as error:
      raise ValueError(f"{where}: {error}") from error
  return fields


def _kind_of_layer(
  parameters: Mapping[str, Any], kind: str
) -> Mapping[str, Any]:
  """Return the rotary parameters of a kind of layer."""
  found = parameters.get(kind) or {}
  if not isinstance(found, Mapping) or parameters.keys() - {
    _FULL,
    _SLIDING,
  }:
    raise ValueError(
      f"rope_parameters is {sections.shown(dict(parameters))}, not an object"
      f" with {_FULL} and {_SLIDING}"
    )
  return found


def _scaling(
  settings: Mapping[str, Any], rope: Mapping[str, Any], kind: str, pairs: int
) -> configs.RopeScaling:
  """Return the scaling of a rotary embedding.

  Args:
    settings: of the model.
    rope: of the embedding.
    kind: of the scaling.
    pairs: number of rotated pairs of a head.
  """
  fields: dict[str, Any] = {
    field: hf_values.number(rope, name, float, _SCALING_DEFAULTS.get(name))
    for name, field in _SCALING_NUMBERS[kind].items()
  }
  # As in transformers, the outer value takes precedence.
  source = next(
    (place for place in (settings, rope) if place.get(_CONTEXT) is not None),
    None,
  )
  if kind == "linear":
    context = 1  # which says nothing
  elif source is None or kind == "dynamic":
    context = hf_values.number(settings, _MAX_POSITIONS, int)
  else:
    context = hf_values.number(source, _CONTEXT, int)
  if kind == "longrope":
    for name, field in _FACTORS.items():
      values = rope.get(name)
      if not isinstance(values, list) or len(values) != pairs:
        raise ValueError(
          f"{name} is {sections.shown(values)}, not a list of {pairs} numbers"
        )
      numbers = [
        hf_values.number({name: value}, name, float) for value in values
      ]
      fields[field] = tuple(numbers)
    factor = hf_values.number(settings, _MAX_POSITIONS, int, context) / context
    fields["amplitude"] = hf_values.number(
      rope,
      "attention_factor",
      float,
      _longrope_amplitude(
        hf_values.number(rope, "factor", float, factor), context
      ),
    )
  if kind == "yarn":
    fields["has_whole_bounds"] = rope.get("truncate", True) is not False
    fields["amplitude"] = hf_values.number(
      rope, "attention_factor", float, _yarn_amplitude(rope, fields["factor"])
    )
  return configs.RopeScaling(kind=kind, original_max_tokens=context, **fields)


def _longrope_amplitude(factor: float, context: int) -> float:
  """Return sqrt(1 + log(factor) / log(context)) (arXiv:2402.13753)."""
  if not factor > 1.0:
    return 1.0
  return math.sqrt(1 + math.log(factor) / math.log(context))


def _yarn_amplitude(rope: Mapping[str, Any], factor: float) -> float:
  """Return 0.1 log(factor) + 1, or a quotient of two (arXiv:2309.00071)."""

  def of(weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

  if rope.get("mscale") and rope.get("mscale_all_dim"):
    over, under = (
      of(hf_values.number(rope, name, float))
      for name in ("mscale", "mscale_all_dim")
    )
    return over / under
  return of(1.0)


def config_json(config: configs.ModelConfig) -> dict[str, Any]:
  """Return the settings of a model, which `model_config` can read.

  The rotary base and scaling are stored where every version of transformers
  reads them. There is one exception: older versions than 5 refuse a longrope of
  Phi-3 whose amplitude does not follow from its lengths.

  Raises:
    ValueError: the format cannot describe this architecture.
  """
  return _described(config, family_of(config))


def family_of(config: configs.ModelConfig) -> str:
  """Return the family of a model: its own, or the first that can describe it.

  A family describes a model if reading what is written gives the same model.

  Raises:
    ValueError: no family does, or not the model's own one. The message says
      what differs.
  """
  config = dataclasses.replace(config.base, has_scalar_head=False)
  refusals: dict[str, list[str]] = {}
  for name in [config.family] if config.family else families.FAMILIES:
    try:
      described = _described(config, name)
      read = _model_config({_MAX_POSITIONS: config.max_positions} | described)
      read = read.within(config.longest)
    except ValueError as error:
      refusals[name] = [str(error)]
      continue
    refusals[name] = [
      f"{field.name} {getattr(config, field.name)}"
      for field in dataclasses.fields(config)
      if field.compare
      and getattr(read, field.name) != getattr(config, field.name)
    ]
    if not refusals[name]:
      return name
  name = min(refusals, key=lambda name: len(refusals[name]))
  raise ValueError(
    f"a model of the family {name!r} cannot have {', '.join(refusals[name])}"
  )


def _described(config: configs.ModelConfig, name: str) -> dict[str, Any]:
  """Return the settings of a model as one of a family."""
  family = families.FAMILIES[name]
  return {
    "architectures": [family.architecture],
    "model_type": name,
    "vocab_size": config.vocab_size,
    "hidden_size": config.model_dim,
    "intermediate_size": config.mlp_dim,
    "num_hidden_layers": config.num_layers,
    "num_attention_heads": config.num_heads,
    "num_key_value_heads": config.num_kv_heads,
    "head_dim": config.head_dim,
    family.activation: configs.ACTIVATIONS[config.activation],
    "rms_norm_eps": config.norm_eps,
    "rope_theta": config.rope_theta,
    "tie_word_embeddings": config.has_tied_head,
    **_rope_settings(config, family),
    **_window_settings(config, family),
    **hf_layers.delta_settings(config, family),
    **hf_experts.settings_of(config, family),
    **{
      entry.name: None
      if getattr(config, field) is None
      else entry.write(getattr(config, field))
      for field, entry in family.reads.items()
    },
  }


def _rope_settings(
  config: configs.ModelConfig, family: families.Family
) -> dict[str, Any]:
  """Return the settings of the rotary embeddings except for the base."""
  described, found = _scaling_settings(config, family)
  if family.has_partial_rotary:
    rotated, whole = config.rotary_dim or config.head_dim, config.head_dim
    part = rotated / whole
    # What is read is rounded down.
    found["partial_rotary_factor"] = (
      part if int(whole * part) == rotated else (rotated + 0.5) / whole
    )
  if family.rotated is families.Rotated.LISTED:
    rotates = config.has_rotary or (True,) * config.num_layers
    found["no_rope_layers"] = [int(x) for x in rotates]
  found["rope_scaling"] = described
  if not family.has_local_rope:
    return found
  local = config.window_rope_theta or config.rope_theta
  theta = {"rope_theta": config.rope_theta}
  return found | {
    "rope_local_base_freq": local,
    "rope_parameters": {
      _FULL: {"rope_type": "default"} | (described or {}) | theta,
      _SLIDING: {"rope_type": "default", "rope_theta": local},
    },
  }


def _scaling_settings(
  config: configs.ModelConfig, family: families.Family
) -> tuple[dict[str, Any] | None, dict[str, Any]]:
  """Return rope_scaling, and the settings outside of it that belong to it."""
  scaling = config.rope_scaling
  if scaling is None:
    return None, {}
  described: dict[str, Any] = {"rope_type": scaling.kind}
  found: dict[str, Any] = {}
  for name, field in _SCALING_NUMBERS[scaling.kind].items():
    described[name] = getattr(scaling, field)
  if scaling.kind == "longrope":
    lists = {name: list(getattr(scaling, x)) for name, x in _FACTORS.items()}
    described |= lists
    context, longest = scaling.original_max_tokens, config.max_positions
    found[_CONTEXT] = context
    if family.has_short_longrope and longest is not None:
      # The amplitude then follows from the two lengths.
      if scaling.amplitude == _longrope_amplitude(longest / context, context):
        return {"type": "longrope", **lists}, found | {_MAX_POSITIONS: longest}
  if scaling.kind in ("yarn", "longrope"):
    described["attention_factor"] = scaling.amplitude
  if not scaling.has_whole_bounds:
    described["truncate"] = False
  if scaling.kind == "dynamic":
    found[_MAX_POSITIONS] = scaling.original_max_tokens
  elif scaling.kind != "linear":
    described[_CONTEXT] = scaling.original_max_tokens
  return described, found


def _window_settings(
  config: configs.ModelConfig, family: families.Family
) -> dict[str, Any]:
  """Return the settings of the windows, for old and new transformers."""
  windows = config.sliding_windows
  window = next((size for size in windows if size is not None), None)
  kinds = [_SLIDING if size else _FULL for size in windows]
  match family.windows:
    case families.Windows.NONE:
      return {}
    case families.Windows.EVERY:
      return {"sliding_window": window}
    case families.Windows.MOST:
      return {
        "sliding_window": window,
        "layer_types": kinds or [_FULL] * config.num_layers,
      }
  if window is None:
    return {}
  return {
    "use_sliding_window": True,
    "sliding_window": window,
    "max_window_layers": windows.index(window),
    "layer_types": kinds,
  }
