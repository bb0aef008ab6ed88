"""The Qwen2 model of transformers, with the sizes of one of our models."""

from typing import Any

import transformers


def settings(
  model: dict[str, Any], max_tokens: int, **options: Any
) -> transformers.Qwen2Config:
  """Return its configuration; end the process if the architecture is not Qwen2.

  Args:
    model: the fields of `configs.ModelConfig`.
    max_tokens: number of positions.
    options: further fields of the configuration.
  """
  m = model
  if m["has_qk_norm"] or m["rope_scaling"] or not m["has_qkv_bias"]:
    raise SystemExit("error: the model is not of Qwen2's architecture")
  # A field that its attention reads, but that the class does not declare.
  options["head_dim"] = m["head_dim"]
  return transformers.Qwen2Config(
    vocab_size=m["vocab_size"],
    hidden_size=m["model_dim"],
    intermediate_size=m["mlp_dim"],
    num_hidden_layers=m["num_layers"],
    num_attention_heads=m["num_heads"],
    num_key_value_heads=m["num_kv_heads"],
    rms_norm_eps=m["norm_eps"],
    rope_parameters={"rope_type": "default", "rope_theta": m["rope_theta"]},
    max_position_embeddings=max_tokens,
    tie_word_embeddings=m["has_tied_head"],
    **options,
  )
