"""Makes the policy that all systems of head_to_head.py begin with.

    python benchmarks/peers/warm_start.py CASE DIRECTORY

A small Qwen2 with one token per character is fine-tuned on the examples of the
case (shared_work.py) and written to DIRECTORY/policy in Hugging Face's format,
float32. This decides how long its completions become. The shapes are written to
DIRECTORY/model.json.
"""

import dataclasses
import json
import os
import pathlib
import sys

if __name__ == "__main__":
  os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
from ml_collections import config_dict
import shared_work

from jaxrl_async.config import sections
from jaxrl_async.models import configs
from jaxrl_async.models import hf_weights
from jaxrl_async.models import transformer
from jaxrl_async.policies import export
from jaxrl_async.policies import stored_policy
from jaxrl_async.supervised import fine_tune
from jaxrl_async.text import tokenizer as tokenizer_lib

MODEL = configs.ModelConfig(  # 0.53 million parameters
  vocab_size=98,
  model_dim=128,
  num_layers=3,
  num_heads=4,
  num_kv_heads=2,
  head_dim=32,
  mlp_dim=320,
  has_qkv_bias=True,
)
_TOKENS_PER_BATCH = 4_096
# Enough for the lengths to be right; the sums need more.
_STEPS = {"fixed": 150, "long_tail": 120, "reward": 600}


def _write_random(directory: pathlib.Path) -> None:
  """Write random weights, from which fine-tuning starts."""
  tokenizer = tokenizer_lib.character_level()
  assert tokenizer.vocab_size == MODEL.vocab_size
  tokenizer.save(directory)
  params = transformer.init_params(MODEL, jax.random.key(0))
  hf_weights.save(directory, MODEL, params)


def _config(case: str, first: pathlib.Path) -> sections.Config:
  shape = shared_work.CASES[case]
  row = shape.max_prompt_tokens + 3 * shape.max_completion_tokens + 1
  if shape.median_tokens or shape.target:
    row = shape.max_prompt_tokens + shape.max_completion_tokens + 1
  return sections.Config(
    model=sections.ModelSection(name=str(first), remat=sections.Remat.NONE),
    task=sections.TaskSection(
      params=config_dict.ConfigDict(), template="{question}", eval_percent=1
    ),
    warm_start=sections.WarmStartSection(
      num_steps=_STEPS[case],
      rows_per_batch=_TOKENS_PER_BATCH // row // 4 * 4,
      solver="field:solution",
      num_examples=6_000,
      optimizer=sections.OptimizerSection(
        name=sections.OptimizerName.MUON, learning_rate=3e-3, warmup_steps=20
      ),
    ),
    eval=sections.EvalSection(num_items=8),
    rollout=sections.RolloutSection(
      max_prompt_tokens=shape.max_prompt_tokens,
      max_completion_tokens=row - shape.max_prompt_tokens,
      cache_tokens=row,
      prefill_buckets=(row,),
      window_buckets=(row,),
    ),
    train=sections.TrainSection(tokens_per_row=row, rows_per_microbatch=4),
  )


def make(case: str, directory: pathlib.Path) -> None:
  """Write DIRECTORY/policy, if it is not there already."""
  directory.mkdir(parents=True, exist_ok=True)
  model = json.dumps(dataclasses.asdict(MODEL))
  (directory / "model.json").write_text(model)
  policy = directory / "policy"
  if (policy / "config.json").exists():  # written last
    return
  first = directory / "random"
  if not (first / "config.json").exists():
    _write_random(first)
  config = _config(case, first)
  rows = shared_work.examples(case, config.warm_start.num_examples)
  data = directory / "examples.jsonl"
  data.write_text("".join(json.dumps(row) + "\n" for row in rows))
  config.task.dataset = f"jsonl:{data}"
  fine_tune.fine_tune(config, directory / "fine_tuning")
  stored = stored_policy.find(directory / "fine_tuning" / "params", None)
  export.export(stored, policy, dtype="float32")


if __name__ == "__main__":
  make(sys.argv[1], pathlib.Path(sys.argv[2]).absolute())
