"""The reference of a KL penalty: what it is, and that it stays."""

import dataclasses
import functools
import re

import jax
import metrics_page
import numpy as np
import pytest
import test_run
import test_train_step
import tiny

from jaxrl_async.assembly import algorithm as algorithm_lib
from jaxrl_async.assembly import assembly
from jaxrl_async.assembly import continued_settings
from jaxrl_async.assembly import dry_run
from jaxrl_async.assembly import frozen_base
from jaxrl_async.assembly import setup as setup_lib
from jaxrl_async.config import sections
from jaxrl_async.models import configs
from jaxrl_async.models import lora as lora_lib
from jaxrl_async.models import transformer
from jaxrl_async.reporting import metrics as metrics_lib
from jaxrl_async.storage import checkpoint
from jaxrl_async.training import objectives
from jaxrl_async.training import stages as stages_lib
from jaxrl_async.training import train_state
from jaxrl_async.training import train_step

POLICY, REFERENCE = train_state.POLICY, train_state.REFERENCE


def make_config(kl_coef, **more):
  return test_run.make_config(
    "sync", algorithm={"kl_coef": kl_coef, "entropy_coef": 1e-3}, **more
  )


def resolved(config):
  return setup_lib.resolve(config, jax.devices())


def stage_names(setup):
  return [stage.name for stage in algorithm_lib.stages(setup)]


def test_there_is_a_reference_only_for_a_penalty():
  setup = resolved(make_config(0.0))
  assert setup.models.keys() == {POLICY}
  assert stage_names(setup) == ["proximal"]
  setup = resolved(make_config(0.1))
  assert setup.models.keys() == {POLICY, REFERENCE}
  assert setup.models[REFERENCE].optimizer is None
  assert stage_names(setup) == ["proximal", "reference"]
  params = tiny.params()
  assert all(x is params for x in setup.first_params(params).values())
  config = make_config(0.1)
  config.model.compute_dtype = "bfloat16"
  config.algorithm.second_moment_bound = 0.04
  setup = resolved(config)
  assert setup.models[REFERENCE].frozen_dtype == "bfloat16"
  names = ["proximal", "reference", "second_moment"]
  assert stage_names(setup) == names
  trainer = assembly.make_trainer(setup, metrics_lib.BusyClock())
  programs = {program.name: program for program in trainer.programs()}
  assert [*programs] == [*names, "update", "publish"]
  (_, batch, _) = programs["update"].arguments
  assert batch.fields.keys() == {
    objectives.PROXIMAL,
    objectives.REFERENCE,
    objectives.WITHIN_SECOND_MOMENT,
  }
  assert re.search("    reference .*weights", dry_run.describe(setup))
  config.model.lora.rank = 2
  assert resolved(config).models.keys() == {POLICY}
  assert stage_names(resolved(config)) == names


def test_the_reference_of_adapters_is_the_model_without_them():
  model = dataclasses.replace(
    test_train_step.MODEL,
    lora=configs.Lora(rank=2, alpha=4.0, modules=("query", "down")),
  )
  base = tiny.params(model=test_train_step.MODEL)
  adapters = jax.jit(
    lambda key: lora_lib.adapters(transformer.init_params(model, key))
  )(jax.random.key(0))
  params = lora_lib.joined(
    base, jax.tree.map(lambda x: x + np.float32(0.1), adapters)
  )
  forward = dataclasses.replace(test_train_step.FORWARD, model=model)
  batch = test_train_step.packed(rows=16)
  made = jax.jit(
    functools.partial(
      stages_lib.base_as_reference_stage().run, {POLICY: forward}
    )
  )({POLICY: params}, batch, 0)
  expected = test_train_step.proximal_program()(base, batch)
  np.testing.assert_allclose(made[objectives.REFERENCE], expected, atol=1e-5)
  adapted = jax.jit(functools.partial(train_step.batch_logprobs, forward))(
    params, batch
  )
  assert np.abs(adapted - expected).max() > 1e-2


@pytest.mark.parametrize(
  ("before", "after", "rank", "is_allowed"),
  [
    (0.0, 0.1, 0, False),
    (0.1, 0.0, 0, False),
    (0.1, 0.2, 0, True),
    (0.0, 0.1, 4, True),
  ],
)
def test_a_run_goes_on_with_a_reference_that_it_has(
  before, after, rank, is_allowed, tmp_path
):
  stored, wanted = make_config(before), make_config(after)
  stored.model.lora.rank = wanted.model.lora.rank = rank
  check = functools.partial(
    continued_settings.check, stored, wanted, tmp_path, has_outstanding=True
  )
  if is_allowed:
    (difference,) = check()
    assert difference.startswith("algorithm.kl_coef: ")
  else:
    with pytest.raises(sections.ConfigError, match="algorithm.kl_coef"):
      check()


def test_the_type_of_a_stored_reference_stays(tmp_path):
  """Except for a moving average, which is stored in float32."""
  for kl_coef, decay in ((0.0, 0.0), (0.1, 0.0), (0.1, 0.9)):
    stored, wanted = make_config(kl_coef), make_config(kl_coef)
    for config in (stored, wanted):
      config.algorithm.reference_decay = decay
    wanted.model.compute_dtype = "bfloat16"
    check = functools.partial(
      continued_settings.check, stored, wanted, tmp_path, has_outstanding=False
    )
    if kl_coef and not decay:
      with pytest.raises(sections.ConfigError, match="holds a reference of"):
        check()
    else:
      assert len(check()) == 1


def test_the_divergence_is_in_the_reward_or_in_the_loss():
  config = make_config(0.1)
  section = config.algorithm
  section.kl_estimator = sections.KlEstimator.K1
  losses = []
  rng = np.random.default_rng(0)
  batch = test_train_step.packed(rows=16)
  reference = rng.normal(-4, 1, batch.tokens.shape).astype(np.float32)
  one = jax.tree.map(
    lambda x: jax.numpy.asarray(x[0, 0]),
    batch.with_arrays(
      {objectives.REFERENCE: reference, objectives.PROXIMAL: reference}
    ),
  )
  totals = objectives.minibatch_totals(one)
  micro = objectives.Microbatch(
    logprobs=one.behavior_logprobs,
    entropy=jax.numpy.zeros_like(one.behavior_logprobs),
    values=None,
    batch=one,
    totals=totals,
    policy_version=jax.numpy.int32(test_train_step.VERSION),
    minibatch=jax.numpy.int32(0),
  )
  for in_reward in (False, True):
    section.kl_in_reward = in_reward
    names = stage_names(resolved(config))
    assert names == ["proximal", "reference"] + ["advantages"] * in_reward
    losses.append(algorithm_lib.policy_loss(config)(micro))
  (penalised, sums), (alone, measured) = losses
  np.testing.assert_allclose(
    penalised - alone,
    0.1 * sums["reference_kl_sum"] / totals["num_loss_tokens"],
    rtol=1e-4,
  )
  assert sums["reference_kl_sum"] == measured["reference_kl_sum"] != 0


@pytest.mark.slow
@pytest.mark.nightly
def test_a_run_is_held_to_the_policy_it_began_with(tmp_path):
  """Over two starts; the metrics are those of the page."""
  params = jax.tree.map(
    np.array, tiny.params(model=resolved(make_config(0.1)).model)
  )
  for num_steps in (2, 4):
    config = make_config(0.1, num_steps=num_steps)
    test_run.start(config, tmp_path, initial_params=params)
  _, *steps = test_run.lines(tmp_path, "metrics")
  kl = [line["policy/reference_kl"] for line in steps]
  assert 0 <= kl[0] < kl[-1]
  assert all(line["time/reference_s"] > 0 for line in steps)
  assert not metrics_page.unexplained(set().union(*steps))
  setup = resolved(config)
  trainer = assembly.make_trainer(setup, metrics_lib.BusyClock())
  for step in (2, 4):
    state, _, _ = checkpoint.restore(
      tmp_path / "checkpoints", step, trainer.abstract_state()
    )
    jax.tree.map(
      np.testing.assert_array_equal, state.models[REFERENCE].params, params
    )
    restored = frozen_base.restore_params(setup, tmp_path, step)
    jax.tree.map(np.testing.assert_array_equal, restored, state.policy.params)
    moved = jax.tree.map(
      lambda x, y: np.abs(x - y).max(), state.policy.params, params
    )
    assert max(jax.tree.leaves(moved)) > 1e-4


def reference_in(workdir, setup, step):
  trainer = assembly.make_trainer(setup, metrics_lib.BusyClock())
  state, _, _ = checkpoint.restore(
    workdir / "checkpoints", step, trainer.abstract_state()
  )
  kinds = {x.sharding.memory_kind for x in jax.tree.leaves(state.params)}
  return jax.tree.map(np.array, state.params), kinds


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize(
  ("every", "decay", "is_offloaded"),
  [
    (2, 0.0, False),
    (1, 0.75, True),
  ],
)
def test_a_reference_moves_when_it_is_due(every, decay, is_offloaded, tmp_path):
  """Over four starts, each of which ends with a checkpoint; in float64."""
  settings = {
    "kl_coef": 0.1,
    "reference_every": every,
    "reference_decay": decay,
    "reference_offload": is_offloaded,
  }
  for num_steps in range(1, 5):
    config = test_run.make_config(
      "sync", algorithm=settings, num_steps=num_steps
    )
    # The second start has it where the first had not, and estimates otherwise.
    settings["reference_offload"] = not is_offloaded
    settings["kl_estimator"] = sections.KlEstimator.K2
    config.run.checkpoint_every, config.run.keep_checkpoints = 1, 10
    test_run.start(config, tmp_path)
  setup = resolved(config)
  expected = None
  for step in range(5):
    params, kinds = reference_in(tmp_path, setup, step)
    assert ("pinned_host" in kinds) != is_offloaded
    policy = jax.tree.map(np.float64, params[POLICY])
    if expected is None:
      expected = policy
    elif step % every == 0:
      expected = jax.tree.map(
        lambda old, new: decay * old + (1 - decay) * new, expected, policy
      )
    jax.tree.map(
      functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7),
      params[REFERENCE],
      expected,
    )
  _, *steps = test_run.lines(tmp_path, "metrics")
  assert not metrics_page.unexplained(set().union(*steps))


def test_a_moving_average_is_held_in_full_precision():
  config = make_config(0.1)
  config.model.compute_dtype = "bfloat16"
  config.algorithm.reference_every = 1
  assert resolved(config).models[REFERENCE].frozen_dtype == "bfloat16"
  config.algorithm.reference_decay = 0.99
  assert resolved(config).models[REFERENCE].frozen_dtype == "float32"
