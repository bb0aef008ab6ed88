"""Runs with a critic: what a config makes of it, and whole runs."""

import dataclasses
import functools
import json
import re

import jax
import metrics_page
from ml_collections import config_dict
import numpy as np
import pytest
import test_run

from jaxrl_async.assembly import algorithm as algorithm_lib
from jaxrl_async.assembly import assembly
from jaxrl_async.assembly import continued_settings
from jaxrl_async.assembly import device_checks
from jaxrl_async.assembly import dry_run
from jaxrl_async.assembly import frozen_base
from jaxrl_async.assembly import setup as setup_lib
from jaxrl_async.config import sections
from jaxrl_async.models import hf_weights
from jaxrl_async.policies import export
from jaxrl_async.policies import stored_policy
from jaxrl_async.reporting import metrics as metrics_lib
from jaxrl_async.training import critic as critic_lib
from jaxrl_async.training import episodes
from jaxrl_async.training import train_state

POLICY, CRITIC = train_state.POLICY, train_state.CRITIC
OWN, SHARED = sections.CriticTrunk
GAE = {
  "advantage": "gae",
  "advantage_scale": sections.AdvantageScale.BATCH_STD,
  "kl_coef": 0.1,
  "kl_estimator": sections.KlEstimator.K1,
  "kl_in_reward": True,
}
# What a run with a critic is continued with.
CHANGES = {
  "algorithm": {
    "gamma": 0.9,
    "gae_lambda": 0.8,
    "kl_in_reward": False,
    "kl_reward_clip": 0.0,
  },
  "critic": {"value_clip": 0.0, "value_coef": 0.1},
  "critic.optimizer": {
    "learning_rate": 1e-4,
    "warmup_steps": 0,
    "rate_schedule": config_dict.ConfigDict(
      {"schedule": "cosine_decay_schedule", "decay_steps": 8}
    ),
    "eps": 1e-6,
    "weight_decay": 0.1,
    "max_grad_norm": 0.5,
    "offload": True,
  },
}


def make_config(trunk=OWN, *, num_steps=4, **critic):
  config = test_run.make_config(
    "sync",
    num_steps=num_steps,
    algorithm={**GAE, "kl_reward_clip": 1.0},
    critic={"trunk": trunk, "warmup_steps": 1, **critic},
  )
  config.critic.optimizer.warmup_steps = 2
  return config


def resolved(config):
  return setup_lib.resolve(config, jax.devices())


def changed(config):
  for path, values in CHANGES.items():
    section = functools.reduce(getattr, path.split("."), config)
    for name, value in values.items():
      setattr(section, name, value)
  return config


@pytest.mark.slow
def test_a_critic_is_a_model_of_the_run():
  names = {"proximal", "reference", "values", "advantages"}
  for trunk in (OWN, SHARED):
    setup = resolved(make_config(trunk))
    settings = setup.models[CRITIC]
    assert settings.trunk is trunk and settings.model.has_scalar_head
    assert setup.models[POLICY].model == setup.model
    stages = algorithm_lib.stages(setup)
    assert {stage.name for stage in stages} == names
    trainer = assembly.make_trainer(setup, metrics_lib.BusyClock())
    programs = {program.name: program for program in trainer.programs()}
    (_, batch, _) = programs["update"].arguments
    made = {"proximal_logprobs", "reference_logprobs"}
    own = batch.fields.keys() - made
    assert len(own) == critic_lib.NUM_FIELDS
    assert own > {episodes.REWARDS, episodes.CUT_OFF}
    assert re.search("    critic .*weights", dry_run.describe(setup))
    compiled, _ = dry_run.programs(setup)
    assert names | {"update"} <= {x.name for x in compiled["training"]}


def test_memory_counts_a_critic_and_its_layers():
  plain = device_checks.training_memory(
    resolved(test_run.make_config("sync", algorithm={"kl_coef": 0.1}))
  )
  own, shared = (
    device_checks.training_memory(resolved(make_config(trunk)))
    for trunk in (OWN, SHARED)
  )
  assert own.activations == 2 * plain.activations == 2 * shared.activations
  params = plain.optimizer // 2
  # A reference beside the policy, and the critic.
  assert own.weights - plain.weights == pytest.approx(params, rel=0.01)
  assert own.optimizer == pytest.approx(2 * plain.optimizer, rel=0.01)
  assert 0 < shared.weights - plain.weights < params / 100
  assert own.batch == shared.batch > plain.batch


def test_a_run_has_a_critic_for_as_long_as_it_is_continued(tmp_path):
  check = functools.partial(continued_settings.check, has_outstanding=True)
  plain = make_config()
  plain.algorithm = dataclasses.replace(plain.algorithm, advantage="batch")
  plain.critic = sections.CriticSection()
  for pair in ((plain, make_config()), (make_config(), plain)):
    with pytest.raises(
      sections.ConfigError, match="algorithm.advantage: .*cri"
    ):
      check(*pair, tmp_path)
  with pytest.raises(sections.ConfigError, match="critic.trunk: own and shar"):
    check(make_config(), make_config(SHARED), tmp_path)
  differences = check(make_config(), changed(make_config()), tmp_path)
  assert len(differences) == sum(map(len, CHANGES.values()))


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
  path = tmp_path_factory.mktemp("critic")
  test_run.start(make_config(), path)
  return path


def stored_state(config, workdir, step):
  setup = resolved(config)
  trainer = assembly.make_trainer(setup, metrics_lib.BusyClock())
  return frozen_base.restore(setup, workdir, step, trainer.abstract_state())[0]


@pytest.mark.slow
@pytest.mark.nightly
def test_a_continued_run_is_an_uninterrupted_one(workdir, tmp_path):
  test_run.start(make_config(num_steps=2), tmp_path)
  test_run.start(make_config(), tmp_path)
  found, expected = (
    stored_state(make_config(), path, 4) for path in (tmp_path, workdir)
  )
  # Groups of the third step may have tokens when the first run ends. Their
  # caches are built by prefill then, which on some processors rounds otherwise.
  jax.tree.map(
    functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6),
    found,
    expected,
  )
  np.testing.assert_allclose(
    test_run.losses(tmp_path), test_run.losses(workdir), rtol=1e-4, atol=1e-6
  )


@pytest.mark.slow
@pytest.mark.nightly  # test_replayed_kinds.py has a run with a critic
def test_a_run_measures_its_critic_and_waits_for_it(workdir, tmp_path):
  _, *steps = test_run.lines(workdir, "metrics")
  assert not metrics_page.unexplained(set().union(*steps))
  for line in steps:
    assert line["critic/loss"] > 0 and line["critic/grad_norm"] > 0
    assert line["time/values_s"] > 0 and line["time/advantages_s"] > 0
  # The first version after the warm-up is the first policy once more.
  config = make_config(num_steps=2, warmup_steps=1)
  config.run.checkpoint_every = 1
  test_run.start(config, tmp_path)
  first, second = (stored_state(config, tmp_path, step) for step in (1, 2))
  reference = first.models[train_state.REFERENCE].params
  jax.tree.map(np.testing.assert_array_equal, first.policy.params, reference)
  moved = jax.tree.map(
    lambda x, y: float(np.abs(x - y).max()), second.policy.params, reference
  )
  assert max(jax.tree.leaves(moved)) > 1e-5
  statistics = second.models[CRITIC].frozen[train_state.RETURN_STATISTICS]
  assert statistics["weight"] == pytest.approx(1 - 0.999**2, rel=1e-3)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(400)
@pytest.mark.parametrize("rank", [0, 4])
def test_a_shared_trunk_trains_and_is_exported_without_its_head(rank, tmp_path):
  config = make_config(SHARED, num_steps=2, warmup_steps=0)
  config.model.lora.rank = rank
  test_run.start(config, tmp_path / "run")
  test_run.start(config_of_more_steps(config), tmp_path / "run")
  names = checkpoint_names(tmp_path / "run", 3)
  head = "models.critic.trainable.scalar_head"
  assert head in names and not any(
    "policy" in x and "scalar" in x for x in names
  )
  restored = frozen_base.restore_params(resolved(config), tmp_path / "run", 3)
  assert "scalar_head" not in restored
  # An export has the tensors of the model alone.
  export.export(
    stored_policy.find(tmp_path / "run"), tmp_path / "out", dtype="float32"
  )
  found, _ = hf_weights.load(tmp_path / "out", "float32")
  assert found == resolved(config).model.base


def config_of_more_steps(config):
  return dataclasses.replace(
    config, train=dataclasses.replace(config.train, num_steps=3)
  )


def checkpoint_names(workdir, step):
  path = workdir / "checkpoints" / str(step) / "manifest.json"
  return json.loads(path.read_text().splitlines()[0])["about"]["layout"]
