"""What generate.py writes: model, lengths and slots of each case.

Lengths have a long tail, as completions of a reasoning model do: they are
lognormal and cut at what the cache holds. The CPU's cases are Qwen2 shapes of
1.04, 9.99 and 135 million parameters; the last has the sizes of SmolLM2-135M,
and 32 completions of 128 tokens.
"""

import dataclasses
import math

import numpy as np

from jaxrl_async.engine import decode_state as decode_state_lib
from jaxrl_async.models import configs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
  """One row of the benchmark.

  Attributes:
    prompt_tokens: shortest and longest prompt; lengths between are uniform.
    completion_median: median of the lognormal lengths of completions.
    completion_sigma: their deviation, in logarithms.
    completion_max: where lengths are cut.
    num_groups: number of prompts; each is written group_size times.
  """

  model: configs.ModelConfig
  dtype: str
  sizes: decode_state_lib.EngineSizes
  num_groups: int
  group_size: int
  prompt_tokens: tuple[int, int]
  completion_median: float
  completion_max: int
  completion_sigma: float = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
  """A drawn case: a prompt and a length for each sequence, in order."""

  prompts: list[np.ndarray]
  completion_tokens: np.ndarray
  groups: np.ndarray


def draw(case: Case, seed: int) -> Workload:
  """Draw sequences, which are the same for the same seed."""
  rng = np.random.default_rng(seed)
  low, high = case.prompt_tokens
  prompts = [
    rng.integers(0, case.model.vocab_size, length, np.int32)
    for length in rng.integers(low, high + 1, case.num_groups)
  ]
  groups = np.repeat(np.arange(case.num_groups), case.group_size)
  lengths = rng.lognormal(
    math.log(case.completion_median), case.completion_sigma, len(groups)
  )
  return Workload(
    prompts=[prompts[group] for group in groups],
    completion_tokens=np.clip(
      np.rint(lengths).astype(np.int32), 1, case.completion_max
    ),
    groups=groups,
  )


def _cpu_case(model: configs.ModelConfig, num_groups: int) -> Case:
  return Case(
    model=model,
    dtype="float32",
    sizes=decode_state_lib.EngineSizes(
      num_slots=32,
      cache_tokens=512,
      decode_steps_per_call=8,
      prefill_rows=8,
      prefill_buckets=(64, 128, 256, 512),
      window_buckets=(128, 192, 256, 384, 512),
    ),
    num_groups=num_groups,
    group_size=8,
    prompt_tokens=(16, 64),
    completion_median=64,
    completion_max=448,
  )


def _gpu_case(name: str, num_slots: int, cache_tokens: int) -> Case:
  is_long = cache_tokens > 1_024
  return Case(
    model=configs.MODELS[name],
    dtype="bfloat16",
    sizes=decode_state_lib.EngineSizes(
      num_slots=num_slots,
      cache_tokens=cache_tokens,
      decode_steps_per_call=8,
      prefill_rows=1 if is_long else 8,
      prefill_buckets=(4_096, 8_192) if is_long else (256, 512, 1_024),
      window_buckets=(5_120, 6_144, 8_192) if is_long else (512, 1_024),
    ),
    num_groups=num_slots // 2,
    group_size=8,
    prompt_tokens=(2_048, 4_096) if is_long else (64, 256),
    completion_median=512 if is_long else 128,
    completion_max=4_096 if is_long else 768,
  )


CPU_CASES = {
  "cpu-1m": _cpu_case(
    configs.ModelConfig(
      vocab_size=4_096,
      model_dim=128,
      num_layers=3,
      num_heads=4,
      num_kv_heads=2,
      head_dim=32,
      mlp_dim=320,
      has_qkv_bias=True,
    ),
    num_groups=40,
  ),
  "cpu-10m": _cpu_case(
    configs.ModelConfig(
      vocab_size=8_192,
      model_dim=320,
      num_layers=6,
      num_heads=10,
      num_kv_heads=2,
      head_dim=32,
      mlp_dim=1_024,
      has_qkv_bias=True,
    ),
    num_groups=20,
  ),
  "cpu-135m": dataclasses.replace(
    _cpu_case(
      configs.ModelConfig(
        vocab_size=49_152,
        model_dim=576,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        mlp_dim=1_536,
        rope_theta=100_000.0,
        has_qkv_bias=True,  # Llama has none, and the peers build a Qwen2
      ),
      num_groups=32,
    ),
    group_size=1,
    completion_sigma=0.0,
    completion_median=128,
  ),
}
GPU_CASES = {
  f"{name.removeprefix('qwen2-')}-{num_slots}x{cache_tokens // 1024}k": (
    _gpu_case(name, num_slots, cache_tokens)
  )
  for name in ("qwen2-0.5b", "qwen2-1.5b")
  for num_slots in (32, 128, 256)
  for cache_tokens in (1_024, 8_192)
}

# About 10M parameters, to compare other mixers and feed-forwards with.
DENSE_10M = configs.ModelConfig(
  vocab_size=1024,
  model_dim=320,
  num_layers=8,
  num_heads=10,
  num_kv_heads=5,
  head_dim=32,
  mlp_dim=896,
  has_qk_norm=True,
)
