"""Experts as described by the config.json of Hugging Face format."""

from collections.abc import Mapping
from typing import Any

from jaxrl_async.config import sections
from jaxrl_async.models import configs
from jaxrl_async.models import families
from jaxrl_async.models import hf_values


def mlp_dim(family: families.Family) -> str:
  """Return the setting with the hidden size of a feed-forward."""
  return "moe_intermediate_size" if family.has_experts else "intermediate_size"


def experts(
  settings: Mapping[str, Any], family: families.Family, num_layers: int
) -> configs.Experts | None:
  """Return the experts of every layer."""
  if not family.has_experts:
    return None
  step = hf_values.number(settings, "decoder_sparse_step", int)
  if step != 1:
    raise ValueError(
      f"decoder_sparse_step is {step}; only 1 is supported, with experts in all"
      f" {num_layers} layers"
    )
  if dense := settings.get("mlp_only_layers"):
    raise ValueError(
      f"mlp_only_layers is {sections.shown(dense)}; only layers of experts are"
      " supported"
    )
  return configs.Experts(
    num_experts=hf_values.number(settings, "num_experts", int),
    num_per_token=hf_values.number(settings, "num_experts_per_tok", int),
    has_normed_weights=hf_values.flag(settings, "norm_topk_prob"),
  )


def settings_of(
  config: configs.ModelConfig, family: families.Family
) -> dict[str, Any]:
  """Return the settings of a model's experts."""
  experts = config.experts
  if not family.has_experts or experts is None:
    return {}
  return {
    "num_experts": experts.num_experts,
    "num_experts_per_tok": experts.num_per_token,
    "norm_topk_prob": experts.has_normed_weights,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    mlp_dim(family): config.mlp_dim,
  }
