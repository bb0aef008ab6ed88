"""What a loss is offered, and that a further one is a function and no more."""

import dataclasses
import functools

import jax
from jax import numpy as jnp
import numpy as np
import pytest
import test_run
import test_train_step
import tiny

from jaxrl_async.config import sections
from jaxrl_async.devices import mesh as mesh_lib
from jaxrl_async.training import objectives
from jaxrl_async.training import packing
from jaxrl_async.training import train_state
from jaxrl_async.training import train_step

VERSION = test_train_step.VERSION


def packed(fields=None):
  made = test_train_step.groups()
  lengths = [len(t.tokens) for g in made for t in g.trajectories]
  batch, placement = packing.pack(
    made,
    np.linspace(-1, 1, len(lengths)).astype(np.float32),
    tokens_per_row=16,
    rows_per_microbatch=4,
    num_minibatches=2,
    fields=fields and fields(lengths),
  )
  return batch, placement, lengths


def offered(batch, **more):
  """A microbatch of the first one's arrays, with logprobs of no model."""
  one = jax.tree.map(lambda x: jnp.asarray(x[0, 0]), batch)
  values = {
    "logprobs": jnp.where(one.loss_mask, -1.5, 0.0),
    "entropy": jnp.zeros(one.tokens.shape),
    "values": None,
    "batch": one,
    "totals": objectives.minibatch_totals(
      jax.tree.map(lambda x: jnp.asarray(x[0]), batch)
    ),
    "policy_version": jnp.int32(VERSION),
    "minibatch": jnp.int32(0),
  }
  return objectives.Microbatch(**{**values, **more})


def test_totals_are_of_the_whole_minibatch():
  batch, placement, lengths = packed()
  first = placement.starts < batch.tokens[0].size
  totals = offered(batch).totals
  assert float(totals["num_trajectories"]) == first.sum() == len(lengths) / 2
  expected = (np.array(lengths) - 3)[first].sum()
  assert float(totals["num_loss_tokens"]) == expected


def test_a_segment_sum_is_over_the_loss_tokens_of_each_trajectory():
  batch, _, _ = packed()
  micro = offered(batch)
  values = np.random.default_rng(0).normal(size=micro.logprobs.shape)
  ids, mask = np.asarray(micro.batch.segment_ids), micro.batch.loss_mask
  poisoned = np.where(mask, values, np.nan).astype(np.float32)
  found = micro.segment_sum(jnp.asarray(poisoned))
  for b, t in np.ndindex(*values.shape):
    same = (ids[b] == ids[b, t]) & np.asarray(mask[b])
    np.testing.assert_allclose(
      found[b, t], values[b][same].sum(), rtol=1e-5, atol=1e-6
    )


def test_a_segment_sum_is_the_same_where_devices_share_a_row():
  batch, _, _ = packed()
  shape = mesh_lib.MeshShape(data=2, context=4)
  mesh = mesh_lib.make_mesh(jax.devices()[:8], shape)
  sharding = mesh_lib.sharding(mesh, mesh_lib.TRAIN_RULES, "batch", "tokens")
  micro = offered(batch)
  values = jnp.arange(micro.logprobs.size, dtype=jnp.float32)
  values = values.reshape(micro.logprobs.shape)

  def total(values, batch):
    return dataclasses.replace(micro, batch=batch).segment_sum(values)

  split = mesh_lib.put(jax.tree.map(np.asarray, micro.batch), sharding)
  found = jax.jit(total, out_shardings=sharding)(
    jax.device_put(values, sharding), split
  )
  assert len(found.sharding.device_set) == 8
  np.testing.assert_array_equal(found, total(values, micro.batch))


def test_fields_are_packed_beside_their_tokens_and_stages_may_replace_arrays():
  def fields(lengths):
    return {"reward": [np.arange(n, dtype=np.float32) for n in lengths]}

  batch, placement, lengths = packed(fields)
  for found, n in zip(
    packing.unpack(batch.fields["reward"], placement), lengths, strict=True
  ):
    np.testing.assert_array_equal(found, np.arange(n))
  zeros = np.zeros(batch.tokens.shape, np.float32)
  changed = batch.with_arrays({"advantages": zeros, "values": zeros})
  assert changed.advantages is zeros and changed.fields["values"] is zeros
  assert changed.fields["reward"] is batch.fields["reward"]
  assert "values" not in batch.fields


def sequence_mean(micro):
  """REINFORCE over sequences: a loss that nothing here knows."""
  count = micro.segment_sum(jnp.ones(micro.logprobs.shape))
  mean = jnp.where(micro.batch.loss_mask, micro.logprobs, 0) / jnp.maximum(
    count, 1
  )
  loss = -(micro.batch.advantages * mean).sum()
  return loss / micro.totals["num_trajectories"], {"seen": count.max()}


@pytest.mark.slow
def test_a_loss_of_ones_own_is_a_function():
  batch, placement, lengths = packed()
  params = tiny.params(model=test_train_step.MODEL)
  optimizer = test_train_step.keep_gradients()
  update = jax.jit(
    functools.partial(
      train_step.update,
      test_train_step.FORWARD,
      sequence_mean,
      objectives.no_diagnostic,
      {train_state.POLICY: optimizer},
    )
  )
  state = tiny.policy_state(params, optimizer)
  _, sums = update(state, batch, jnp.int32(VERSION))
  logprobs = jax.jit(
    functools.partial(train_step.batch_logprobs, test_train_step.FORWARD)
  )(params, batch)
  expected = np.zeros(2)
  advantages = np.linspace(-1, 1, len(lengths))
  for i, values in enumerate(packing.unpack(logprobs, placement)):
    minibatch = placement.starts[i] // batch.tokens[0].size
    share = advantages[i] / (len(lengths) / 2)
    expected[minibatch] -= share * values[3:].astype(np.float64).mean()
  np.testing.assert_allclose(sums["loss"], expected, rtol=1e-5)
  assert (sums["seen"] > 0).all() and (sums["grad_norm"] > 0).all()


@pytest.mark.slow
def test_a_stage_may_make_advantages_of_what_another_has_added():
  def values(given):
    return {"values": jnp.ones(given.batch.tokens.shape)}

  def advantages(given):
    zero = (given.version - VERSION).astype(jnp.float32)
    return {"advantages": given.batch.fields["values"] * zero}

  made = test_train_step.groups()
  trainer = test_train_step.make_trainer(
    stages=[
      train_step.PROXIMAL_STAGE,
      train_step.Stage(name="values", fields=values),
      train_step.Stage(name="advantages", fields=advantages),
    ]
  )
  names = [program.name for program in trainer.programs()]
  assert names == ["proximal", "values", "advantages", "update", "publish"]
  done = trainer.step(VERSION, trainer.prepare(made))
  assert done.sums["loss"] == 0 and done.sums["grad_norm"] == 0
  assert {"values_s", "advantages_s"} <= done.times_s.keys()


def test_each_way_to_the_proximal_logprobs_is_a_function():
  assert objectives.PROXIMAL_MODES.keys() == set(sections.ProximalMode)


def constant_loss(micro):
  """A loss of a half for each loss token, and no gradient."""
  count = micro.batch.loss_mask.sum(dtype="float32")
  nothing = 0 * micro.logprobs.sum()
  loss = nothing + 0.5 * count / micro.totals["num_loss_tokens"]
  # A turn begins where the loss mask rises.
  turns = (jnp.diff(micro.batch.loss_mask.astype("int32")) == 1).sum()
  return loss, {"thirds_sum": count / 3, "turns_sum": turns}


def twice(prompt):
  """A completion of the prompt, and one after a further token."""
  yield prompt.tokens
  yield prompt.tokens[-1:]


@pytest.mark.slow
@pytest.mark.nightly
def test_a_run_takes_a_loss_and_an_episode_of_its_own(tmp_path):
  config = test_run.make_config(
    num_steps=1, eval={"num_items": 4}, rollout={"decode_steps_per_call": 1}
  )
  config.rollout.max_completion_tokens = 8
  # An eighth of the vocabulary ends a turn.
  config.rollout.stop_token_ids = tuple(range(10, 18))
  given = {"loss": constant_loss, "episode": twice}
  summary = test_run.start(config, tmp_path, **given)
  assert summary["train_steps"] == 1
  _, step = test_run.lines(tmp_path, "metrics")
  assert step["policy/loss"] == pytest.approx(0.5)
  assert step["policy/grad_norm"] == 0
  assert step["loss/thirds"] == pytest.approx(1 / 3)
  assert "policy/clip_frac" not in step and "offpolicy/ess" not in step
  turns = step["loss/turns"] * step["ledger/trained_tokens"]
  assert turns > 1.2 * sum(step["staleness/versions_histogram"])
