"""The kinds of layers of config.json, and the sizes of the gated delta rule."""

from collections.abc import Mapping
from typing import Any

from jaxrl_async.config import sections
from jaxrl_async.models import configs
from jaxrl_async.models import families
from jaxrl_async.models import hf_values

FULL, SLIDING = "full_attention", "sliding_attention"
LINEAR = "linear_attention"
# Of the gated delta rule: its settings by the field that they set.
_DELTA_NUMBERS = {
  "linear_num_key_heads": "num_key_heads",
  "linear_num_value_heads": "num_value_heads",
  "linear_key_head_dim": "key_dim",
  "linear_value_head_dim": "value_dim",
  "linear_conv_kernel_dim": "conv_tokens",
}


def layer_types(
  settings: Mapping[str, Any],
  num_layers: int,
  kinds: tuple[str, str] = (FULL, SLIDING),
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
    if layer_type not in kinds:
      raise ValueError(
        f"layer_types has {sections.shown(layer_type)}; use {kinds[0]!r} or"
        f" {kinds[1]!r}"
      )
  if len(layer_types) != num_layers:
    raise ValueError(
      f"layer_types has {len(layer_types)} entries for num_hidden_layers"
      f" {num_layers}"
    )
  return layer_types


def delta_fields(
  settings: Mapping[str, Any], family: families.Family, num_layers: int
) -> dict[str, Any]:
  """Return the fields of the gated delta rule, if a layer has it."""
  if not family.has_delta:
    return {}
  types = layer_types(settings, num_layers, (FULL, LINEAR))
  if types is None:
    every = hf_values.number(settings, "full_attention_interval", int)
    types = [
      FULL if (i + 1) % every == 0 else LINEAR for i in range(num_layers)
    ]
  if LINEAR not in types:
    return {}
  sizes = {
    field: hf_values.number(settings, name, int)
    for name, field in _DELTA_NUMBERS.items()
  }
  if sizes["num_value_heads"] % sizes["num_key_heads"]:
    raise ValueError(
      f"linear_num_value_heads {sizes['num_value_heads']} is not a multiple of"
      f" linear_num_key_heads {sizes['num_key_heads']}"
    )
  if sizes["conv_tokens"] < 2:
    raise ValueError("linear_conv_kernel_dim is 1; use at least 2")
  return {
    "delta": configs.GatedDelta(**sizes),
    "is_delta": tuple(kind == LINEAR for kind in types),
  }


def delta_settings(
  config: configs.ModelConfig, family: families.Family
) -> dict[str, Any]:
  """Return the settings of the gated delta rule."""
  if not family.has_delta:
    return {}
  is_delta = config.is_delta or (False,) * config.num_layers
  found: dict[str, Any] = {
    "layer_types": [LINEAR if x else FULL for x in is_delta]
  }
  if config.delta is not None:
    for name, field in _DELTA_NUMBERS.items():
      found[name] = getattr(config.delta, field)
  return found
