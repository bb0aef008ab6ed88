"""Several passes over the minibatches of a train step."""

import dataclasses
import functools

import critic_world
import jax
from jax import numpy as jnp
import numpy as np
import pytest
import test_critic
import test_train_step
import tiny

from jaxrl_async.config import sections
from jaxrl_async.training import objectives
from jaxrl_async.training import train_state
from jaxrl_async.training import train_step

VERSION = test_train_step.VERSION
MODEL = test_train_step.MODEL
# eps is so large that the rounding of small gradients does not count.
SECTION = sections.OptimizerSection(learning_rate=1e-2, eps=1e-2)


def made_update(mode=test_train_step.RECOMPUTE, **settings):
  """An update program, and the optimizer that it uses."""
  optimizer = train_step.make_optimizer(
    SECTION, train_step.learning_rate_schedule(SECTION)
  )
  return optimizer, jax.jit(
    functools.partial(
      train_step.update,
      test_train_step.FORWARD,
      test_train_step.make_loss(mode),
      objectives.rollout_diagnostic,
      {train_state.POLICY: optimizer},
      **settings,
    )
  )


def batch_of_two():
  """Two minibatches, with the logprobs before the first update."""
  batch = test_train_step.packed(minibatches=2)
  proximal = test_train_step.proximal_program()(tiny.params(model=MODEL), batch)
  return batch.with_arrays({objectives.PROXIMAL: proximal})


@pytest.mark.slow
def test_two_epochs_are_twice_the_updates_written_out():
  batch = batch_of_two()
  params = tiny.params(model=MODEL)
  optimizer, update = made_update(num_epochs=2)
  state, metrics = update(
    tiny.policy_state(params, optimizer), batch, jnp.int32(VERSION)
  )
  keeper, one_update = test_train_step.gradient_program(
    test_train_step.RECOMPUTE
  )
  wanted, found = test_train_step.float64(params), []
  moments = [(np.zeros(p.shape),) * 2 for p in jax.tree.leaves(params)]
  for count, i in enumerate((0, 1, 0, 1), start=1):
    minibatch = jax.tree.map(lambda x, i=i: x[i : i + 1], batch)
    current = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), wanted)
    after, arrays = one_update(
      tiny.policy_state(current, keeper), minibatch, jnp.int32(VERSION)
    )
    found.append(arrays)
    gradients = test_train_step.float64(after.policy.opt_state)
    wanted, moments = test_train_step.adamw(
      wanted, gradients, moments, count, SECTION
    )
  test_train_step.assert_close(state.policy.params, wanted, 1e-4, 1e-5)
  for name, values in metrics.items():
    by_hand = [arrays[name][0] for arrays in found]
    np.testing.assert_allclose(
      values, by_hand, rtol=1e-3, atol=1e-4, err_msg=name
    )
  # The second pass is at other weights, around the same centre.
  assert (metrics["reuse_gap_sum"][2:] > metrics["reuse_gap_sum"][0]).all()


@pytest.mark.slow
def test_without_a_forward_only_the_very_first_update_counts_as_mismatch():
  optimizer, update = made_update(test_train_step.LOGLINEAR, num_epochs=3)
  _, metrics = update(
    tiny.policy_state(tiny.params(model=MODEL), optimizer),
    test_train_step.packed(minibatches=2),
    jnp.int32(VERSION),
  )
  first, *others = metrics["mismatch_count"].tolist()
  assert first > 0 and others == [0] * 5


@pytest.mark.slow
@pytest.mark.nightly
def test_the_metrics_of_a_step_are_those_of_all_epochs():
  pending = {}
  for num_epochs in (1, 2):
    trainer = test_train_step.make_trainer(minibatches=2)
    trainer = type(trainer)(
      mesh=jax.tree.leaves(trainer.state)[0].sharding.mesh,
      models=tiny.policy_settings(
        MODEL,
        sections.OptimizerSection(learning_rate=1.0, warmup_steps=99),
      ),
      forward=test_train_step.FORWARD,
      loss=test_train_step.LOSS,
      stages=test_train_step.STAGES,
      batch=dataclasses.replace(trainer.batch_settings, num_epochs=num_epochs),
      num_steps=9,
      decay=1.0,
      rollout_dtype="float32",
      busy=trainer._busy,
    )
    params = jax.tree.map(np.array, tiny.params(model=MODEL))
    trainer.start({train_state.POLICY: params})
    batch = trainer.prepare(test_train_step.groups())
    pending[num_epochs] = trainer.step(VERSION, batch)
  once, twice = pending[1], pending[2]
  # The rate of the step's first update, whose number is VERSION times as many.
  assert once.metrics()[0]["policy/lr"] == pytest.approx(
    (1 + 2 * VERSION) / 100
  )
  values, is_bad = twice.metrics()
  assert values["policy/lr"] == pytest.approx((1 + 4 * VERSION) / 100)
  assert is_bad == [False] * 4
  assert values["policy/loss"] == np.mean(np.float64(twice.sums["loss"]))
  clipped, tokens = (
    np.float64(twice.sums[name]).sum()
    for name in ("clip_count", "num_loss_tokens")
  )
  assert tokens == 2 * np.float64(once.sums["num_loss_tokens"]).sum()
  assert values["policy/clip_frac"] == clipped / tokens
  once.programs_s, once.peak_flops = twice.programs_s, twice.peak_flops
  assert twice._mfu() == pytest.approx(2 * once._mfu())


@pytest.mark.slow
@pytest.mark.nightly
def test_the_returns_of_a_batch_count_once_in_the_statistics_of_a_critic():
  trainer = critic_world.make_trainer(critic_world.SHARED, minibatches=1)
  arrays, _ = test_critic.fields_of(trainer, test_train_step.groups())
  before = jax.tree.map(np.array, trainer.state)
  after = [
    jax.jit(
      functools.partial(trainer._update.__wrapped__, num_epochs=num_epochs)
    )(before, arrays, jnp.int32(VERSION))[0].models[critic_world.CRITIC]
    for num_epochs in (1, 2)
  ]
  statistics, twice = (
    x.frozen[train_state.RETURN_STATISTICS]["mean"] for x in after
  )
  assert statistics == twice != 0
  heads = [np.asarray(x.trainable[train_state.VALUE_HEAD]) for x in after]
  assert not np.allclose(heads[0], heads[1])
