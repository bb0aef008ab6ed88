"""The critic in a train step: values, both updates, warm-up, devices."""

import dataclasses
import functools

import critic_world
from critic_world import CRITIC
from critic_world import OWN
from critic_world import POLICY
from critic_world import SHARED
import jax
from jax import numpy as jnp
import metrics_page
import numpy as np
import pytest
import test_gae
import test_train_step
import tiny

from jaxrl_async import types
from jaxrl_async.algorithms import value_functions
from jaxrl_async.devices import mesh as mesh_lib
from jaxrl_async.models import transformer
from jaxrl_async.training import critic as critic_lib
from jaxrl_async.training import packing
from jaxrl_async.training import train_state

VERSION = test_train_step.VERSION
BOTH = pytest.mark.parametrize(
  "trunk", [OWN, pytest.param(SHARED, marks=pytest.mark.slow)]
)
SHARED_NIGHTLY = pytest.mark.parametrize(
  "trunk", [OWN, pytest.param(SHARED, marks=pytest.mark.nightly)]
)


def fields_of(trainer, groups):
  """What the stages make of a batch, and where its trajectories are."""
  prepared = trainer.prepare(groups)
  arrays = prepared.arrays
  for stage in trainer._stages:
    made = trainer._stage_programs[stage.name](
      trainer.state.params, arrays, np.int32(VERSION)
    )
    arrays = arrays.with_arrays(made)
  return arrays, prepared.segments


@functools.cache
def hidden_program():
  return jax.jit(functools.partial(tiny.hidden_states, critic_world.MODEL))


def states_after(params, tokens):
  """The last hidden state of each token of one trajectory, in float64."""
  batch = tiny.packed([tokens], 16)
  hidden = hidden_program()(params[POLICY], batch)
  return np.asarray(hidden[0, : len(tokens)], np.float64)


def values_after(params, tokens, statistics):
  """Of the state after each token of one trajectory."""
  head = np.asarray(params[CRITIC][train_state.VALUE_HEAD], np.float64)
  mean, deviation = map(float, value_functions.moments(statistics))
  return mean + deviation * (states_after(params, tokens) @ head)


@SHARED_NIGHTLY
def test_advantages_and_returns_are_those_of_each_trajectory_alone(trunk):
  trainer = critic_world.make_trainer(trunk)
  statistics = {
    "mean": jnp.float32(0.2),
    "square": jnp.float32(0.5),
    "weight": jnp.float32(0.5),
  }
  critic = dataclasses.replace(
    trainer.state.models[CRITIC],
    frozen={train_state.RETURN_STATISTICS: statistics},
  )
  trainer.state = train_state.TrainState(
    models={**trainer.state.models, CRITIC: critic}
  )
  groups = test_train_step.groups()
  for group in groups:
    group.trajectories[0].finish_reason = types.FinishReason.EOS
  arrays, placement = fields_of(trainer, groups)
  trajectories = [t for g in groups for t in g.trajectories]
  params = critic_world.first_params(trunk)
  advantages, returns = [], []
  for trajectory in trajectories:
    after = values_after(params, trajectory.tokens, statistics)
    mask = trajectory.loss_mask
    values = np.roll(after, 1)[mask]
    rewards = np.zeros(mask.sum())
    rewards[-1] = trajectory.score
    cut_off = trajectory.finish_reason is types.FinishReason.LENGTH
    advantages.append(
      test_gae.trajectory_advantages(
        rewards,
        values,
        after[mask][-1] if cut_off else 0.0,
        gamma=critic_world.GAMMA,
        lam=critic_world.LAMBDA,
      )
    )
    returns.append(advantages[-1] + values)
  found = packing.unpack(arrays.fields[critic_lib.RETURNS], placement)
  for trajectory, mine, own in zip(trajectories, found, returns, strict=True):
    np.testing.assert_allclose(mine[trajectory.loss_mask], own, atol=1e-4)
  flat = np.concatenate(advantages)
  found = packing.unpack(arrays.advantages, placement)
  masked = [x[t.loss_mask] for x, t in zip(found, trajectories, strict=True)]
  np.testing.assert_allclose(
    np.concatenate(masked), (flat - flat.mean()) / flat.std(), atol=1e-3
  )
  # Targets are in the unit that the statistics have after the step.
  pending = trainer.step(VERSION, trainer.prepare(groups))
  assert pending.sums["num_loss_tokens"].sum() == len(flat)
  after = trainer.state.models[CRITIC].frozen[train_state.RETURN_STATISTICS]
  decay = critic_world.DECAY
  flat = np.concatenate(returns)
  wanted = decay * 0.2 + (1 - decay) * flat.mean()
  np.testing.assert_allclose(after["mean"], wanted, rtol=1e-4)
  unit = (flat - float(after["mean"] / after["weight"])) / float(
    value_functions.moments(after)[1]
  )
  found = packing.unpack(
    arrays.fields[critic_lib.NORMALIZED_RETURNS], placement
  )
  masked = [x[t.loss_mask] for x, t in zip(found, trajectories, strict=True)]
  np.testing.assert_allclose(np.concatenate(masked), unit, atol=1e-3)


def run_one_update(trunk, **settings):
  """The state before and after a train step of one update, and its sums."""
  trainer = critic_world.make_trainer(trunk, minibatches=1, **settings)
  before = jax.tree.map(np.array, trainer.state)
  (pending,) = critic_world.train(trainer, 1)
  sums = {name: np.asarray(x) for name, x in pending.sums.items()}
  return before, jax.tree.map(np.array, trainer.state), sums


@pytest.mark.slow
def test_with_a_trunk_of_its_own_the_critic_changes_nothing_of_the_policy():
  """The update of the policy is that of the same advantages without one."""
  before, after, sums = run_one_update(OWN)
  trainer = critic_world.make_trainer(OWN, minibatches=1)
  arrays, _ = fields_of(trainer, test_train_step.groups())
  alone = test_train_step.trainer_lib.Trainer(
    mesh=mesh_lib.make_mesh(jax.devices()[:1]),
    models={POLICY: critic_world.settings(OWN)[POLICY]},
    forward=dataclasses.replace(
      test_train_step.FORWARD, model=critic_world.MODEL
    ),
    loss=test_train_step.LOSS,
    stages=test_train_step.STAGES,
    batch=dataclasses.replace(
      trainer.batch_settings, fields=packing.BatchSettings.fields
    ),
    num_steps=1,
    decay=1.0,
    rollout_dtype="float32",
    busy=test_train_step.metrics_lib.BusyClock(),
  )
  alone.start({POLICY: jax.tree.map(np.array, before.policy.params)})
  found, _ = alone.run_programs(VERSION, arrays._replace(fields={}))
  test_train_step.assert_close(
    alone.state.policy.params, after.policy.params, rtol=1e-4
  )
  np.testing.assert_allclose(found["grad_norm"], sums["grad_norm"], rtol=1e-4)
  # The head moves, and so do the layers under it.
  for leaf in ("embedding", train_state.VALUE_HEAD):
    moved = (
      after.models[CRITIC].trainable[leaf]
      - before.models[CRITIC].trainable[leaf]
    )
    assert np.abs(moved).max() > 1e-4


@pytest.mark.slow
@pytest.mark.nightly
def test_a_shared_trunk_learns_from_both_losses():
  _, own, _ = run_one_update(OWN)
  before, shared, sums = run_one_update(SHARED)
  assert shared.models[CRITIC].trainable.keys() == {train_state.VALUE_HEAD}
  gap = np.abs(
    own.policy.params["embedding"] - shared.policy.params["embedding"]
  )
  assert gap.max() > 1e-4 and sums["critic_grad_norm"][0] > 0
  moved = jax.tree.map(
    lambda x, y: np.abs(x - y).max(), before.policy.params, shared.policy.params
  )
  assert max(jax.tree.leaves(moved)) > 1e-4


@pytest.mark.slow
@BOTH
def test_the_gradient_of_the_head_is_that_of_finite_differences(trunk):
  """Of the value loss, whose terms are computed here from hidden states."""
  trainer = critic_world.make_trainer(trunk, minibatches=1)
  arrays, placement = fields_of(trainer, test_train_step.groups())
  _, after, sums = run_one_update(trunk)
  groups = test_train_step.groups()
  trajectories = [t for g in groups for t in g.trajectories]
  targets = packing.unpack(
    arrays.fields[critic_lib.NORMALIZED_RETURNS], placement
  )
  params = critic_world.first_params(trunk)
  states, wanted = [], []
  for trajectory, target in zip(trajectories, targets, strict=True):
    before_tokens = states_after(params, trajectory.tokens)[:-1]
    states.append(before_tokens[trajectory.loss_mask[1:]])
    wanted.append(target[trajectory.loss_mask])
  states, wanted = np.concatenate(states), np.concatenate(wanted)
  head = np.asarray(params[CRITIC][train_state.VALUE_HEAD], np.float64)
  now = states @ head

  def loss(head):
    values = states @ head
    near = now + np.clip(values - now, -critic_world.CLIP, critic_world.CLIP)
    worst = np.maximum((values - wanted) ** 2, (near - wanted) ** 2)
    return critic_world.COEF * worst.mean() / 2

  gradient = np.array(
    [
      (loss(head + step) - loss(head - step)) / 2e-5
      for step in 1e-5 * np.eye(len(head))
    ]
  )
  # The first moment of AdamW after clipping by the norm of all gradients.
  norm = sums["critic_grad_norm"][0]
  if trunk is SHARED:
    np.testing.assert_allclose(norm, np.linalg.norm(gradient), rtol=1e-3)
  moments = jax.tree_util.tree_leaves_with_path(after.models[CRITIC].opt_state)
  (first,) = (
    x
    for path, x in moments
    if "mu" in str(path) and train_state.VALUE_HEAD in str(path)
  )
  scale = (1 - critic_world.OPTIMIZER.b1) * min(1.0, 1.0 / norm)
  np.testing.assert_allclose(first, scale * gradient, rtol=1e-2, atol=1e-5)
  np.testing.assert_allclose(
    sums["value_loss_sum"].sum() / len(wanted),
    loss(head) / critic_world.COEF,
    rtol=1e-4,
  )


@pytest.mark.slow
@SHARED_NIGHTLY
def test_the_policy_waits_bit_by_bit_while_the_critic_warms_up(trunk):
  trainer = critic_world.make_trainer(trunk, warmup_steps=VERSION + 1)
  before = jax.tree.map(np.array, trainer.state)
  first = critic_world.train(trainer, 1)[0]
  during = jax.tree.map(np.array, trainer.state)
  jax.tree.map(np.testing.assert_array_equal, before.policy, during.policy)
  head = [x.models[CRITIC].trainable["scalar_head"] for x in (before, during)]
  assert not np.array_equal(*head)
  groups = test_train_step.groups(seed=1)
  pending = trainer.step(VERSION + 1, trainer.prepare(groups))
  moved = jax.tree.map(
    lambda x, y: np.abs(x - y).max(),
    trainer.state.policy.trainable,
    during.policy.trainable,
  )
  assert max(jax.tree.leaves(moved)) > 1e-4
  assert (first.sums["bad_updates"] == 0).all()
  # The policy's rate begins where the warm-up ends.
  rate = critic_world.OPTIMIZER.learning_rate
  assert (
    float(first.learning_rate())
    == float(pending.learning_rate())
    == (pytest.approx(rate))
  )
  counts = [
    int(x)
    for path, x in jax.tree_util.tree_leaves_with_path(
      trainer.state.policy.opt_state
    )
    if "count" in str(path)
  ]
  assert counts and set(counts) == {2}


@pytest.mark.slow
@pytest.mark.nightly
def test_in_several_epochs_the_returns_of_a_batch_count_once():
  found = {}
  for epochs in (1, 2):
    trainer = critic_world.make_trainer(OWN, epochs=epochs)
    (pending,) = critic_world.train(trainer, 1)
    found[epochs] = jax.tree.map(np.array, trainer.state)
    assert len(pending.sums["value_loss_sum"]) == 2 * epochs
  once, twice = (found[epochs].models[CRITIC] for epochs in (1, 2))
  jax.tree.map(np.testing.assert_array_equal, once.frozen, twice.frozen)
  moved = jax.tree.map(
    lambda x, y: np.abs(x - y).max(), once.trainable, twice.trainable
  )
  assert max(jax.tree.leaves(moved)) > 1e-4


@pytest.mark.slow
def test_the_metrics_of_a_critic_are_those_of_the_page():
  trainer = critic_world.make_trainer(OWN)
  arrays, _ = fields_of(trainer, test_train_step.groups())
  (pending,) = critic_world.train(trainer, 1)
  metrics, _ = pending.metrics()
  own = {name for name in metrics if name.startswith("critic/")}
  assert own == {
    f"critic/{x}"
    for x in "loss clip_frac value_mean return_mean explained_variance"
    " grad_norm".split()
  }
  assert not metrics_page.unexplained(metrics)
  mask = np.asarray(arrays.loss_mask)
  returns, values = (
    np.asarray(arrays.fields[name], np.float64)[mask]
    for name in (critic_lib.RETURNS, critic_lib.VALUES)
  )
  for name, expected in (
    ("return_mean", returns.mean()),
    ("value_mean", values.mean()),
    ("explained_variance", 1 - (returns - values).var() / returns.var()),
  ):
    np.testing.assert_allclose(metrics[f"critic/{name}"], expected, rtol=1e-4)
  assert 0 < metrics["critic/clip_frac"] < 1
  assert metrics["train/mfu"] > 0


@pytest.mark.slow
@SHARED_NIGHTLY
@pytest.mark.parametrize(
  "shape",
  [
    pytest.param(mesh_lib.MeshShape(fsdp=2), marks=pytest.mark.nightly),
    mesh_lib.MeshShape(data=2, fsdp=2, tensor=2),
    pytest.param(
      mesh_lib.MeshShape(context=4, tensor=2), marks=pytest.mark.nightly
    ),
  ],
  ids=str,
)
def test_many_devices_train_what_one_trains(shape, trunk):
  one = critic_world.make_trainer(trunk)
  wanted = critic_world.train(one)
  many = critic_world.make_trainer(trunk, shape)
  found = critic_world.train(many)
  for step, other in zip(wanted, found, strict=True):
    for name, value in step.sums.items():
      np.testing.assert_allclose(
        other.sums[name], value, rtol=2e-3, atol=2e-3, err_msg=name
      )
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, atol=2e-3),
    jax.tree.map(np.asarray, one.state.params),
    jax.tree.map(np.asarray, many.state.params),
  )
  if shape.fsdp > 1 and trunk is OWN:
    embedding = many.state.models[CRITIC].trainable["embedding"]
    assert not embedding.is_fully_replicated


@BOTH
def test_engines_get_the_same_tree_with_and_without_a_critic(trunk):
  trainer = critic_world.make_trainer(trunk)
  plain = jax.eval_shape(
    lambda: transformer.unstack(
      transformer.init_params(critic_world.MODEL, jax.random.key(0)),
      critic_world.MODEL.num_layers,
    )
  )
  shapes = trainer.published_shapes()
  assert jax.tree.structure(shapes) == jax.tree.structure(plain)
  jax.tree.map(
    lambda x, y: np.testing.assert_array_equal(x.shape, y.shape), shapes, plain
  )
  jax.tree.map(
    np.testing.assert_array_equal,
    trainer.published(),
    transformer.unstack(
      trainer.state.policy.params, critic_world.MODEL.num_layers
    ),
  )


def test_a_model_that_is_no_critic_cannot_be_trained():
  models = critic_world.settings(OWN)
  models["judge"] = models.pop(CRITIC)
  with pytest.raises(ValueError, match="judge: only the policy and a critic"):
    train_state.check_models(models)
