"""Runs with adapters, a critic or several epochs are replayed, bit for bit."""

import dataclasses
from typing import Any

from jax import numpy as jnp
import pytest
import reward_scorers
import test_replay
import test_run

import jaxrl_async
from jaxrl_async.config import sections

pytestmark = pytest.mark.slow


def test_a_critic_a_reference_and_several_epochs_are_replayed(tmp_path):
  config = test_replay.make_config(
    4,
    algorithm={
      "max_staleness": 2,
      "advantage": "gae",
      "advantage_scale": sections.AdvantageScale.BATCH_STD,
      "kl_coef": 0.1,
      "kl_estimator": sections.KlEstimator.K1,
      "kl_in_reward": True,
      "reference_every": 2,
      "num_epochs": 2,
    },
    critic={"warmup_steps": 1},
  )
  test_run.start(config, tmp_path)
  found = test_replay.play(tmp_path)
  assert found.last_step == 4 and found.has_state
  step = test_replay.a_checkpoint_between(tmp_path, 1, 3)
  assert test_replay.play(tmp_path, from_step=step).has_state


CRITIC: Any = {
  "advantage": "gae",
  "advantage_scale": sections.AdvantageScale.BATCH_STD,
}
SHARED = sections.CriticTrunk.SHARED


@pytest.mark.nightly
@pytest.mark.parametrize(
  ("rank", "algorithm", "critic"),
  [
    (4, {}, {}),
    (0, CRITIC, {}),
    (0, CRITIC, {"trunk": SHARED, "warmup_steps": 1}),
    (4, CRITIC, {"trunk": SHARED}),
    (0, {"num_epochs": 2}, {}),
  ],
  ids=["lora", "critic", "shared_trunk", "lora_and_critic", "epochs"],
)
def test_each_kind_of_run_is_replayed(rank, algorithm, critic, tmp_path):
  config = test_replay.make_config(
    6,
    algorithm={"max_staleness": 4, **algorithm},
    # The fewest slots: generation is slow enough for trajectories of several
    # versions, also where a train step takes long.
    rollout={"num_slots": 1, "decode_steps_per_call": 1},
  )
  config.model.lora.rank = rank
  config.critic = dataclasses.replace(config.critic, **critic)
  test_run.start(config, tmp_path)
  ledger = test_run.lines(tmp_path, "ledger")
  assert max(x["num_policy_versions"] for x in ledger) > 1
  wanted = test_replay.num_tokens(tmp_path, last=6)
  found = test_replay.play(tmp_path)
  assert found.last_step == 6 and found.has_state
  assert found.generated == wanted > 0
  step = test_replay.a_checkpoint_between(tmp_path, 2, 5)
  later = test_replay.play(tmp_path, from_step=step)
  assert later.has_state and later.generated > 0


def own_loss(microbatch):
  """The likelihood of what had an advantage, without any ratio."""
  batch = microbatch.batch
  gains = jnp.where(batch.loss_mask, batch.advantages * microbatch.logprobs, 0)
  return -jnp.sum(gains) / microbatch.totals["num_loss_tokens"], {}


@pytest.mark.nightly
def test_adapters_and_a_loss_of_ones_own_are_replayed(tmp_path):
  config = test_replay.make_config(4)
  config.model.lora.rank = 4
  given = {"loss": own_loss, "episode": test_replay.two_turns}
  jaxrl_async.train(config, tmp_path, reward=reward_scorers.length, **given)
  found = jaxrl_async.replay(tmp_path, **given)
  assert found["bit_exact"] and found["state_bit_exact"]
  assert found["generated"] == test_replay.num_tokens(tmp_path) > 0
  with pytest.raises(sections.ConfigError, match="^loss: .*:own_loss"):
    jaxrl_async.replay(tmp_path, episode=test_replay.two_turns)
