"""The configuration of a small run that has an environment of verifiers.

Its tasks are mixed with sums that another agent asks.
"""

import dataclasses
import os

from ml_collections import config_dict

from configs import tiny
from jaxrl_async.config import sections
from jaxrl_async.sessions import adder
from jaxrl_async.sessions import verifiers


async def solve(access, item):
  """Run the environment that an item is of, or ask for a sum."""
  assert "NO_AGENTS" not in os.environ
  if "verifiers" in item["metadata"]:
    return await verifiers.rollout(access, item)
  return await adder.solve(access, item)


def get_config():
  config = tiny.get_config()
  config.warm_start.num_steps = 0
  sums = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
  config.task = sections.TaskSection(
    dataset="",
    sources=config_dict.ConfigDict(
      {
        "tasks": {
          "dataset": "verifiers:verifiers_sums?num=100",
          "template": "{question}\n",
          "weight": 1.0,
        },
        "sums": {
          "dataset": "reasoning_gym:chain_sum",
          "params": sums,
          "template": "{expression}\n",
          "weight": 1.0,
        },
      }
    ),
    answer_prefix="",
    episode="agent",
    episode_params=config_dict.ConfigDict({"agent": "verifiers_run:solve"}),
    reward="episode",
  )
  config.algorithm = dataclasses.replace(
    config.algorithm, group_size=2, groups_per_step=2, num_minibatches=1
  )
  config.train.num_steps = 12
  config.eval.num_items = 2
  config.run = dataclasses.replace(
    config.run,
    checkpoint_every=2,
    keep_checkpoints=99,
    exact_resume=True,
    stall_timeout_s=600.0,
  )
  return config
