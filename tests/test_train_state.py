"""Several models in one train state, and a frozen part of one."""

import functools
import math

import jax
from jax import numpy as jnp
import numpy as np
import pytest
import test_train_step
import tiny

from jaxrl_async.algorithms import divergences
from jaxrl_async.assembly import device_checks
from jaxrl_async.devices import mesh as mesh_lib
from jaxrl_async.planning import aot
from jaxrl_async.storage import checkpoint
from jaxrl_async.training import train_state
from jaxrl_async.training import train_step

MODEL, ADAMW = test_train_step.MODEL, test_train_step.ADAMW
VERSION = test_train_step.VERSION
POLICY, REFERENCE = train_state.POLICY, "reference"


def settings(**more):
  return train_state.ModelSettings(model=MODEL, **more)


def without_embedding(path):
  return path != ("embedding",)


WITH_FROZEN_EMBEDDING = {
  POLICY: settings(optimizer=ADAMW, is_trainable=without_embedding)
}
WITH_REFERENCE = {
  POLICY: settings(optimizer=ADAMW),
  REFERENCE: settings(optimizer=None, frozen_dtype="bfloat16"),
}
REFERENCE_STAGE = train_step.logprobs_stage(
  "reference", model=REFERENCE, field="reference_logprobs"
)


def kl_to_reference(micro):
  """Mean divergence from the reference: a loss that nothing here knows."""
  kl = divergences.k3(micro.logprobs, micro.batch.fields["reference_logprobs"])
  total = divergences.masked_sum(kl, micro.batch.loss_mask)
  return total / micro.totals["num_loss_tokens"], {"kl_sum": total}


@functools.cache
def names(model):
  params = tiny.params(model=model)
  return {
    jax.tree_util.keystr(path, simple=True, separator=".")
    for path, _ in jax.tree_util.tree_leaves_with_path(params)
  }


def leaf_names(tree):
  return {
    jax.tree_util.keystr(path, simple=True, separator=".")
    for path, _ in jax.tree_util.tree_leaves_with_path(tree)
  }


@pytest.mark.parametrize(
  "is_trainable",
  [
    train_state.everything,
    without_embedding,
    lambda path: path[-1] == "query",
    lambda path: path[0] != "layers",
  ],
)
def test_what_is_split_is_merged_again(is_trainable):
  params = tiny.params(model=MODEL)
  own = settings(optimizer=ADAMW, is_trainable=is_trainable)
  trainable, frozen = own.split(params)
  chosen = {name for name in names(MODEL) if is_trainable((*name.split("."),))}
  assert leaf_names(trainable) == chosen
  assert leaf_names(frozen) == names(MODEL) - chosen
  whole = train_state.merged(trainable, frozen)
  assert jax.tree.structure(whole) == jax.tree.structure(params)
  assert all(map(np.array_equal, *map(jax.tree.leaves, (whole, params))))


def test_a_model_without_an_optimizer_is_frozen_as_a_whole():
  trainable, frozen = settings(optimizer=None).split(tiny.params(model=MODEL))
  assert not trainable and leaf_names(frozen) == names(MODEL)


@pytest.mark.parametrize(
  ("models", "message"),
  [
    ({}, "the policy has to be"),
    ({POLICY: settings(optimizer=None)}, "the policy has to be"),
    (
      {POLICY: settings(optimizer=ADAMW), "critic": settings(optimizer=ADAMW)},
      "critic: only the policy",
    ),
    (
      {POLICY: settings(optimizer=ADAMW, is_trainable=lambda path: False)},
      "policy: no parameter is trainable",
    ),
  ],
)
def test_models_that_nothing_could_train_are_refused(models, message):
  with pytest.raises(ValueError, match=f"^{message}"):
    test_train_step.make_trainer(
      models=models or {REFERENCE: settings(optimizer=None)}
    )


@pytest.mark.slow
@pytest.mark.nightly
def test_a_frozen_embedding_stays_and_the_rest_is_trained():
  trainer = test_train_step.make_trainer(
    models=WITH_FROZEN_EMBEDDING, minibatches=2
  )
  before = jax.tree.map(np.array, trainer.state.policy)
  assert leaf_names(before.frozen) == {"embedding"}
  moments = {
    name.partition(f"{moment}.")[2]
    for name in leaf_names(before.opt_state)
    for moment in ("mu", "nu")
    if f"{moment}." in name
  }
  assert moments == names(MODEL) - {"embedding"}
  batch = trainer.prepare(test_train_step.groups())
  sums = trainer.step(VERSION, batch).sums
  assert not np.any(sums["bad_updates"]) and np.all(sums["grad_norm"] > 0)
  after = jax.tree.map(np.array, trainer.state.policy)
  assert before.frozen["embedding"].tobytes() == (
    after.frozen["embedding"].tobytes()
  )
  for old, new in zip(
    *map(jax.tree.leaves, (before.trainable, after.trainable)), strict=True
  ):
    assert (old != new).any()
  # What is published has both parts.
  published = trainer.published()
  np.testing.assert_array_equal(
    published["embedding"], after.frozen["embedding"]
  )
  np.testing.assert_array_equal(
    published["final_norm"], after.trainable["final_norm"]
  )
  assert trainer.published_shapes().keys() == published.keys()


def test_a_frozen_part_costs_its_weights_alone():
  whole, part = (
    test_train_step.make_trainer(models=models).abstract_state().policy
    for models in (None, WITH_FROZEN_EMBEDDING)
  )
  embedding = 4 * math.prod(part.frozen["embedding"].shape)
  all_of_it = device_checks.bytes_of(whole)
  needs = device_checks.bytes_of(part)
  assert needs.frozen == embedding and needs.weights == all_of_it.weights
  assert needs.gradients == all_of_it.gradients - 2 * embedding
  assert needs.optimizer == all_of_it.optimizer - 2 * embedding


def reference_params():
  return jax.tree.map(np.array, tiny.params(seed=1, model=MODEL))


def make_trainer_with_reference(shape=mesh_lib.ONE, **more):
  trainer = test_train_step.make_trainer(
    shape,
    models=WITH_REFERENCE,
    mode=test_train_step.REUSE,
    loss=kl_to_reference,
    stages=[REFERENCE_STAGE],
    **more,
  )
  policy = jax.tree.map(np.array, tiny.params(model=MODEL))
  trainer.start({POLICY: policy, REFERENCE: reference_params()})
  return trainer


@pytest.mark.slow
def test_a_frozen_model_is_sharded_saved_and_restored(tmp_path):
  trainer = make_trainer_with_reference(mesh_lib.MeshShape(fsdp=2))
  state = trainer.state
  reference = state.models[REFERENCE]
  assert reference.opt_state is None and not reference.trainable
  for x, own in zip(
    *map(jax.tree.leaves, (reference.frozen, state.policy.trainable)),
    strict=True,
  ):
    assert x.dtype == jnp.bfloat16 and x.sharding == own.sharding
  assert any(not x.is_fully_replicated for x in jax.tree.leaves(reference))

  checkpoint.save(tmp_path, 1, state, {}, [])
  restored, _, _ = checkpoint.restore(tmp_path, 1, trainer.abstract_state())
  assert jax.tree.structure(restored) == jax.tree.structure(state)
  for x, own in zip(*map(jax.tree.leaves, (restored, state)), strict=True):
    assert x.sharding == own.sharding and x.dtype == own.dtype
    assert np.array_equal(x, own)
  plain = test_train_step.make_trainer().abstract_state()
  with pytest.raises(checkpoint.CheckpointError, match="models.reference"):
    checkpoint.restore(tmp_path, 1, plain)

  needs = device_checks.bytes_of(trainer.abstract_state().models[REFERENCE])
  held = aot.bytes_a_device(reference.frozen)
  assert needs.parts == {"weights": held}
  policy = device_checks.bytes_of(trainer.abstract_state().policy)
  assert policy.weights == 2 * held  # of four bytes a number, not of two


def test_each_program_knows_of_the_models_beside_the_policy():
  with_reference = {x.name: x for x in make_trainer_with_reference().programs()}
  alone = test_train_step.make_trainer(mode=test_train_step.REUSE)
  assert list(with_reference) == ["proximal", "reference", "update", "publish"]
  more = 2 * MODEL.num_params
  for program in alone.programs():
    assert needed(with_reference[program.name]) == needed(
      program
    ) + more + with_field(program)


def needed(program):
  arrays = jax.tree.leaves((program.arguments, program.resident))
  arrays = [x for x in arrays if isinstance(x, jax.ShapeDtypeStruct)]
  return aot.bytes_a_device(arrays)


def with_field(program):
  """The reference's logprobs are in the batch of the update."""
  if program.name != "update":
    return 0
  return 4 * math.prod(program.arguments[1].tokens.shape)


@pytest.mark.slow
def test_a_loss_uses_what_a_stage_computed_under_another_model():
  trainer = make_trainer_with_reference()
  groups = test_train_step.groups()
  trajectories = [t for g in groups for t in g.trajectories]
  held = jax.tree.map(
    lambda x: jnp.asarray(x, jnp.bfloat16).astype(jnp.float32),
    reference_params(),
  )

  def logprobs(params):
    return [
      tiny.trainer_logprobs(
        params,
        [t.tokens],
        model=MODEL,
        temperature=test_train_step.FORWARD.temperature,
      )[0][t.loss_mask].astype(np.float64)
      for t in trajectories
    ]

  expected, count = 0.0, 0
  for policy, reference in zip(
    logprobs(tiny.params(model=MODEL)), logprobs(held), strict=True
  ):
    log_ratio = reference - policy
    expected += (np.exp(log_ratio) - 1 - log_ratio).sum()
    count += len(log_ratio)
  frozen = jax.tree.map(np.array, trainer.state.models[REFERENCE])
  steps = [trainer.step(VERSION + i, trainer.prepare(groups)) for i in range(4)]
  losses = [float(step.sums["loss"][0]) for step in steps]
  np.testing.assert_allclose(losses[0], expected / count, rtol=1e-4)
  np.testing.assert_allclose(steps[0].sums["kl_sum"], [expected], rtol=1e-4)
  assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0] / 2
  assert all("reference_s" in step.times_s for step in steps)
  jax.tree.map(
    np.testing.assert_array_equal, trainer.state.models[REFERENCE], frozen
  )
