"""A run's workdir with a checkpoint, without training."""

import dataclasses
import json

import numpy as np
import optax
import tiny

from configs import tiny as tiny_config
from jaxrl_async.storage import checkpoint
from jaxrl_async.storage import config_json
from jaxrl_async.text import tokenizer as tokenizer_lib

KINDS = ("even", "odd")
MODEL = dataclasses.replace(tiny.MODEL, vocab_size=98)
STEPS = (2, 5)


def params(step, model=MODEL):
  """The parameters of the checkpoint of a step."""
  return tiny.params(step, model)


def get_config():
  config = tiny_config.get_config()
  config.eval.num_items = 4
  return config


def write(workdir, config=None, model=MODEL, tokenizer=None):
  """Writes what a run leaves in its workdir, with the checkpoints of STEPS."""
  config = config or get_config()
  config_json.write(config, workdir)
  tokenizer = tokenizer or tokenizer_lib.character_level()
  tokenizer.save(workdir / "tokenizer")
  for step in STEPS:
    state = tiny.policy_state(params(step, model), optax.adam(1e-3))
    host_state = {"config": config_json.to_stored(config)}
    checkpoint.save(workdir / "checkpoints", step, state, host_state, [])
  return workdir


def write_rows(path, rows):
  """Writes rows as JSON Lines, and returns the dataset."""
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  return f"jsonl:{path}"


def random_rows(count):
  rng = np.random.default_rng(count)
  numbers = rng.integers(10, size=(count, 2)).tolist()
  return [
    {
      "question": f"{a}+{b}",
      "answer": str(a + b),
      "kind": KINDS[a % 2],
    }
    for a, b in numbers
  ]


def config_for_rows():
  config = get_config()
  config.task.template = "{question}\n"
  config.task.reward = "exact"
  config.rollout.max_completion_tokens = 6
  return config
