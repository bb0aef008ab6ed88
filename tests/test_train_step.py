"""The trainer's device programs: gradients, optimizer steps, meshes."""

import dataclasses
import functools

import jax
from jax import numpy as jnp
import numpy as np
import optax
import pytest
import tiny

from jaxrl_async import types
from jaxrl_async.assembly import algorithm as algorithm_lib
from jaxrl_async.config import sections
from jaxrl_async.devices import mesh as mesh_lib
from jaxrl_async.reporting import metrics as metrics_lib
from jaxrl_async.training import gradients as gradients_lib
from jaxrl_async.training import objectives
from jaxrl_async.training import packing
from jaxrl_async.training import train_state
from jaxrl_async.training import train_step
from jaxrl_async.training import trainer as trainer_lib

VERSION = 5
# A vocabulary that two devices can share.
MODEL = dataclasses.replace(tiny.MODEL, vocab_size=98)
FORWARD = train_step.ForwardSettings(
  model=MODEL,
  compute_dtype="float32",
  remat=sections.Remat.NONE,
  attention="xla",
  temperature=0.8,
  vocab_chunk=40,
)


def make_loss(mode=sections.ProximalMode.RECOMPUTE, **settings):
  section = sections.AlgorithmSection(proximal=mode, **settings)
  return algorithm_lib.policy_loss(sections.Config(algorithm=section))


LOSS = make_loss()
ADVANTAGES = algorithm_lib.advantages(sections.AlgorithmSection())
STAGES = [train_step.PROXIMAL_STAGE]
RECOMPUTE, LOGLINEAR, REUSE = sections.ProximalMode
ADAMW = sections.OptimizerSection(learning_rate=1e-2, weight_decay=0.1)
MATRICES = ("query", "key", "value", "output", "gate", "up", "down")


def groups(seed=0, count=4, size=4):
  """Scored groups of random tokens, of several versions."""
  rng = np.random.default_rng(seed)
  made = []
  for index in range(count):
    prompt = tiny.prompt(3, seed=index)
    trajectories = []
    for member in range(size):
      n = 3 + int(rng.integers(1, 12))
      mask = np.arange(n) >= 3
      logprobs = np.where(mask, rng.normal(-4.5, 0.3, n), 0)
      versions = np.where(mask, rng.integers(VERSION - 2, VERSION + 1, n), -1)
      trajectories.append(
        types.Trajectory(
          member=member,
          tokens=np.append(prompt, rng.integers(6, 90, n - 3)).astype("i4"),
          loss_mask=mask,
          behavior_logprobs=logprobs.astype(np.float32),
          policy_versions=versions.astype(np.int32),
          finish_reason=types.FinishReason.LENGTH,
          reward=tiny.reward(rng.random()),
        )
      )
    made.append(
      types.RolloutGroup(
        admission=types.Admission(
          index=index, birth=VERSION - 2, deadline=VERSION
        ),
        prompt=types.Prompt(prompt_id=str(index), tokens=prompt, item={}),
        trajectories=trajectories,
      )
    )
  return made


def make_trainer(
  shape=mesh_lib.ONE,
  *,
  rows=4,
  minibatches=1,
  optimizer=ADAMW,
  models=None,
  mode=RECOMPUTE,
  loss=None,
  stages=None,
  weights=sections.WeightFormat.FLOAT,
):
  mesh = mesh_lib.make_mesh(jax.devices()[: shape.num_devices], shape)
  trainer = trainer_lib.Trainer(
    mesh=mesh,
    models=models or tiny.policy_settings(MODEL, optimizer),
    forward=FORWARD,
    loss=loss or make_loss(mode),
    stages=stages or (STAGES if mode is RECOMPUTE else []),
    batch=packing.BatchSettings(
      tokens_per_row=16,
      rows_per_microbatch=rows,
      num_minibatches=minibatches,
      min_microbatches=1,
      advantages=ADVANTAGES,
    ),
    num_steps=1,
    decay=1.0,
    rollout_dtype="float32",
    rollout_weights=weights,
    busy=metrics_lib.BusyClock(),
  )
  # A copy: the trainer donates its state.
  params = jax.tree.map(np.array, tiny.params(model=MODEL))
  trainer.start(dict.fromkeys(models or [train_state.POLICY], params))
  return trainer


def keep_gradients():
  """An optimizer whose state is the gradients it was given."""

  def update(gradients, state, params=None):
    del state, params
    return jax.tree.map(jnp.zeros_like, gradients), gradients

  return optax.GradientTransformation(
    lambda params: jax.tree.map(jnp.zeros_like, params), update
  )


def packed(rows=4, minibatches=1, made=None):
  made = made or groups()
  rewards = np.array([t.score for g in made for t in g.trajectories])
  batch, _ = packing.pack(
    made,
    (rewards - rewards.mean()).astype(np.float32),
    tokens_per_row=16,
    rows_per_microbatch=rows,
    num_minibatches=minibatches,
  )
  return batch


@functools.cache
def proximal_program():
  return jax.jit(functools.partial(train_step.batch_logprobs, FORWARD))


@functools.cache
def gradient_program(mode):
  optimizer = keep_gradients()
  return optimizer, jax.jit(
    functools.partial(
      train_step.update,
      FORWARD,
      make_loss(mode),
      objectives.rollout_diagnostic,
      {train_state.POLICY: optimizer},
    )
  )


def loss_and_gradients(batch, proximal=None, mode=RECOMPUTE):
  """Of the last minibatch, at the tiny parameters, which stay."""
  params = tiny.params(model=MODEL)
  optimizer, update = gradient_program(mode)
  if proximal is None and mode is RECOMPUTE:
    proximal = proximal_program()(params, batch)
  state = tiny.policy_state(params, optimizer)
  if proximal is not None:
    batch = batch.with_arrays({objectives.PROXIMAL: proximal})
  after, arrays = update(state, batch, jnp.int32(VERSION))
  return arrays, after.policy.opt_state


def assert_close(a, b, rtol=1e-5, atol=1e-6):
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=atol), a, b
  )


@pytest.mark.slow
def test_microbatches_add_up_to_one_big_batch():
  small, big = packed(rows=2), packed(rows=16)
  assert small.tokens.shape[1] > 1 and big.tokens.shape[1] == 1
  arrays, gradients = loss_and_gradients(small)
  whole, whole_gradients = loss_and_gradients(big)
  assert_close(arrays, whole, rtol=1e-5, atol=1e-5)
  assert_close(gradients, whole_gradients)


def test_nothing_under_the_mask_reaches_loss_or_gradient():
  batch = packed(rows=16)
  arrays, gradients = loss_and_gradients(batch)
  mask = batch.loss_mask
  poisoned = batch._replace(
    behavior_logprobs=np.where(mask, batch.behavior_logprobs, np.nan),
    advantages=np.where(mask, batch.advantages, np.nan),
    policy_versions=np.where(mask, batch.policy_versions, VERSION),
  )
  proximal = np.array(proximal_program()(tiny.params(model=MODEL), batch))
  proximal = np.where(mask, proximal, np.nan).astype(np.float32)
  found, found_gradients = loss_and_gradients(poisoned, proximal)
  jax.tree.map(np.testing.assert_array_equal, arrays, found)
  jax.tree.map(np.testing.assert_array_equal, gradients, found_gradients)


def test_proximal_logprobs_are_those_of_each_trajectory_alone():
  made = groups()
  trainer = make_trainer()
  trajectories = [t for g in made for t in g.trajectories]
  found = trainer.logprobs(trajectories)
  for trajectory, logprobs in zip(trajectories, found, strict=True):
    alone = tiny.trainer_logprobs(
      tiny.params(model=MODEL),
      [trajectory.tokens],
      model=MODEL,
      temperature=FORWARD.temperature,
    )[0]
    mask = trajectory.loss_mask
    np.testing.assert_allclose(logprobs[mask], alone[mask], atol=1e-4)


@pytest.mark.slow
def test_at_the_proximal_weights_the_gradient_is_that_of_reinforce():
  batch = packed(rows=16)
  _, gradients = loss_and_gradients(batch)
  one = jax.tree.map(lambda x: jnp.asarray(x[0, 0]), batch)

  def reinforce(params):
    logprobs, _ = train_step.token_logprobs(FORWARD, params, one)
    ratio = jnp.exp(
      jnp.where(one.loss_mask, logprobs - one.behavior_logprobs, 0)
    )
    weights = jax.lax.stop_gradient(jnp.where(ratio > 5.0, 0, ratio))
    terms = -one.advantages * weights * logprobs
    return jnp.where(one.loss_mask, terms, 0).sum() / one.loss_mask.sum(
      dtype=jnp.float32
    )

  assert_close(
    gradients, jax.jit(jax.grad(reinforce))(tiny.params(model=MODEL))
  )


@pytest.mark.slow
def test_with_one_update_reused_logprobs_are_the_recomputed_ones():
  batch = packed(rows=16)
  arrays, gradients = loss_and_gradients(batch)
  found, found_gradients = loss_and_gradients(batch, mode=REUSE)
  assert arrays["mismatch_count"] > 0 and arrays["behavior_kl_sum"] > 0
  for name in found:
    np.testing.assert_allclose(
      found[name], arrays[name], rtol=1e-6, atol=1e-6, err_msg=name
    )
  assert_close(found_gradients, gradients, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_loglinear_is_the_update_around_its_formula():
  batch = packed(rows=16)
  logprobs = np.array(proximal_program()(tiny.params(model=MODEL), batch))
  distance = np.maximum(VERSION + 1 - batch.policy_versions, 1)
  centre = logprobs + (batch.behavior_logprobs - logprobs) / distance
  assert {*np.unique(distance[batch.loss_mask])} == {1, 2, 3}
  arrays, gradients = loss_and_gradients(batch, centre.astype(np.float32))
  found, found_gradients = loss_and_gradients(batch, mode=LOGLINEAR)
  # The divergences from the behavior policy are measured elsewhere.
  elsewhere = "kl_sum", "behavior_k"
  ours = [n for n in found if not any(x in n for x in elsewhere)]
  ours += ["approx_kl_sum"]
  assert_close({n: found[n] for n in ours}, {n: arrays[n] for n in ours})
  assert_close(found_gradients, gradients)
  # What the mode would be off by is known where the exact ones are.
  exact, _ = loss_and_gradients(batch)
  off = np.abs(centre - logprobs)[batch.loss_mask].sum()
  np.testing.assert_allclose(exact["loglinear_gap_sum"], [off], rtol=1e-4)
  assert exact["loglinear_kl_sum"] > 0 and "loglinear_gap_sum" not in found
  np.testing.assert_allclose(exact["reuse_gap_sum"], 0, atol=1e-3)
  # The engine's error is measured against the weights, not against the guess.
  for name in (
    *("mismatch_kl_sum", "mismatch_count"),
    *("behavior_kl_sum", "behavior_k1_sum", "behavior_k2_sum"),
  ):
    np.testing.assert_allclose(found[name], exact[name], rtol=1e-5)
  assert arrays["mismatch_kl_sum"] < exact["mismatch_kl_sum"] / 100


@pytest.mark.slow
@pytest.mark.nightly  # test_epochs.py counts several epochs
def test_without_a_forward_only_the_first_update_counts_as_mismatch():
  batch = packed(minibatches=2)
  exact, _ = loss_and_gradients(batch)
  assert (exact["mismatch_count"] > 0).all()
  found, _ = loss_and_gradients(batch, mode=LOGLINEAR)
  assert found["mismatch_count"].tolist() == [exact["mismatch_count"][0], 0]


def float64(tree):
  return jax.tree.map(lambda x: np.asarray(x, np.float64), tree)


def adamw(params, gradients, moments, count, section):
  """One update with clipping, written out."""
  norm = np.sqrt(sum((g**2).sum() for g in jax.tree.leaves(gradients)))
  scale = min(1.0, section.max_grad_norm / norm)
  after, new_moments = [], []
  for (path, p), g, (m, v) in zip(
    jax.tree_util.tree_leaves_with_path(params),
    jax.tree.leaves(gradients),
    moments,
    strict=True,
  ):
    decay = section.weight_decay if path[-1].key in MATRICES else 0.0
    g = g * scale
    m = section.b1 * m + (1 - section.b1) * g
    v = section.b2 * v + (1 - section.b2) * g**2
    m_hat = m / (1 - section.b1**count)
    v_hat = v / (1 - section.b2**count)
    step = m_hat / (np.sqrt(v_hat) + section.eps) + decay * p
    after.append(p - section.learning_rate * step)
    new_moments.append((m, v))
  return jax.tree.unflatten(jax.tree.structure(params), after), new_moments


def apply_program(section):
  optimizer = train_step.make_optimizer(
    section, train_step.learning_rate_schedule(section)
  )
  optimizers = {train_state.POLICY: optimizer}

  @jax.jit
  def apply(state, gradients, loss):
    return gradients_lib.apply(
      optimizers, state, {train_state.POLICY: gradients}, loss
    )

  return optimizer, apply


@pytest.mark.parametrize("scale", [1e-3, 10.0])
def test_adamw_with_clipping_is_its_formula(scale):
  # eps is large enough to count.
  section = sections.OptimizerSection(
    learning_rate=1e-2, weight_decay=0.1, eps=1e-3, max_grad_norm=0.5
  )
  optimizer, apply = apply_program(section)
  params = tiny.params(model=MODEL)
  rng = np.random.default_rng(0)
  state = tiny.policy_state(params, optimizer)
  wanted = float64(params)
  moments = [(np.zeros(p.shape),) * 2 for p in jax.tree.leaves(params)]
  for count in (1, 2):
    gradients = jax.tree.map(
      lambda p: (scale * rng.normal(size=p.shape)).astype(np.float32), params
    )
    state, arrays = apply(state, gradients, jnp.float32(1.0))
    wanted, moments = adamw(wanted, float64(gradients), moments, count, section)
    norm = np.sqrt(sum((g**2).sum() for g in jax.tree.leaves(gradients)))
    np.testing.assert_allclose(arrays["grad_norm"], norm, rtol=1e-5)
  assert_close(state.policy.params, wanted)


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_what_is_not_finite_changes_no_bit_of_the_state(where):
  optimizer, apply = apply_program(ADAMW)
  params = tiny.params(model=MODEL)
  ones = jax.tree.map(jnp.ones_like, params)
  state, arrays = apply(
    tiny.policy_state(params, optimizer),
    ones,
    jnp.float32(1.0),
  )
  assert arrays["bad_updates"] == 0
  loss = jnp.float32(np.inf if where == "loss" else 1.0)
  if where == "gradient":
    ones["final_norm"] = ones["final_norm"].at[3].set(np.nan)
  after, arrays = apply(state, ones, loss)
  assert arrays["bad_updates"] == 1
  jax.tree.map(np.testing.assert_array_equal, state, after)


def test_heads_adapters_and_vectors_decay_as_their_kind():
  params = {
    "embedding": 0,
    "output_head": 0,
    "scalar_head": 0,
    "final_norm": 0,
    "layers": {"up": 0, "up_lora_a": 0, "mlp_norm": 0, "key_bias": 0},
  }
  found = train_step.decayed(params)
  layers = found.pop("layers")
  assert {k for k, x in {**found, **layers}.items() if x} == {
    "output_head",
    "up",
    "up_lora_a",
  }


def test_an_update_without_a_loss_token_moves_nothing():
  """Neither momentum nor decay, and the count of updates stays."""
  trainer = make_trainer(mode=REUSE)
  trainer.step(VERSION, trainer.prepare(groups()))
  before = jax.tree.map(np.array, trainer.state)
  silent = [
    dataclasses.replace(
      group,
      trajectories=[
        dataclasses.replace(x, loss_mask=np.zeros_like(x.loss_mask))
        for x in group.trajectories
      ],
    )
    for group in groups()
  ]
  trainer.step(VERSION + 1, trainer.prepare(silent))
  jax.tree.map(np.testing.assert_array_equal, before, trainer.state)
  trainer.step(VERSION + 2, trainer.prepare(groups()))
  after = np.asarray(trainer.state.policy.params["embedding"])
  assert not np.array_equal(after, before.policy.params["embedding"])


def test_muon_takes_the_blocks_matrices_and_nothing_else():
  params = tiny.params(model=MODEL)
  found = {
    jax.tree_util.keystr(path, simple=True, separator="/"): numbers
    for path, numbers in jax.tree_util.tree_leaves_with_path(
      train_step.muon_dimensions(params),
      is_leaf=lambda x: x is None or not isinstance(x, dict),
    )
  }
  taken = {name for name, numbers in found.items() if numbers is not None}
  assert taken == {f"layers/{name}" for name in MATRICES}
  for name in MATRICES:
    numbers, axes = found[f"layers/{name}"], params["layers"][name].ndim
    covered = (*numbers.reduction_axis, *numbers.output_axis)
    # All axes but the layers', each once.
    assert sorted(covered) == list(range(1, axes)), name


@pytest.mark.parametrize("name", [*sections.OptimizerName])
def test_every_optimizer_has_the_same_decay_and_reads_its_epsilon(name):
  params = tiny.params(model=MODEL)

  def updates(gradient, **changes):
    section = dataclasses.replace(ADAMW, name=name, **changes)
    optimizer = train_step.make_optimizer(section, lambda step: 1.0)
    gradients = jax.tree.map(lambda x: jnp.full_like(x, gradient), params)
    with jax.numpy_dtype_promotion("standard"):
      found, _ = optimizer.update(gradients, optimizer.init(params), params)
    return found

  found = updates(0.0)
  for path, x in jax.tree_util.tree_leaves_with_path(params):
    update = found
    for entry in path:
      update = update[entry.key]
    decay = 0.1 if path[-1].key in MATRICES else 0.0
    np.testing.assert_allclose(update, -decay * x, rtol=1e-6)
  small, large = (
    jnp.abs(updates(1e-3, weight_decay=0.0, eps=eps)["embedding"]).max()
    for eps in (1e-8, 1e3)
  )
  assert large < 1e-3 * small


def test_learning_rates():
  section = sections.OptimizerSection(learning_rate=8.0, warmup_steps=3)
  constant = train_step.learning_rate_schedule(section)
  np.testing.assert_allclose(
    [constant(i) for i in (0, 1, 2, 3, 4, 1000)], [2, 4, 6, 8, 8, 8]
  )
  cosine = train_step.learning_rate_schedule(
    section, total_steps=13, decay=0.25
  )
  np.testing.assert_allclose(
    [cosine(i) for i in (0, 3, 8, 13, 99)], [2, 8, 5, 2, 2], rtol=1e-6
  )


@pytest.mark.parametrize(
  "weights", [sections.WeightFormat.FLOAT, sections.WeightFormat.INT8], ids=str
)
def test_what_is_published_lies_where_the_weights_do(weights):
  trainer = make_trainer(mesh_lib.MeshShape(fsdp=2), weights=weights)
  published, shapes = trainer.published(), trainer.published_shapes()
  jax.tree.map(
    lambda x, y: (
      np.testing.assert_array_equal(x.shape, y.shape),
      np.testing.assert_(x.sharding.is_equivalent_to(y.sharding, x.ndim)),
    ),
    published,
    shapes,
  )
  matrix = jax.tree.leaves(published["layers"][0]["gate"])[0]
  held = matrix.sharding.shard_shape(matrix.shape)
  assert held == (matrix.shape[0] // 2, matrix.shape[1])


def test_a_step_learns_and_what_it_published_before_stays():
  trainer = make_trainer(minibatches=2)
  before = trainer.published()
  copy = jax.tree.map(np.array, before)
  donated = jax.tree.leaves(trainer.state)
  trainer.step(VERSION, trainer.prepare(groups()))
  assert all(x.is_deleted() for x in donated if x.ndim)
  jax.tree.map(np.testing.assert_array_equal, before, copy)
  after = jax.tree.map(np.asarray, trainer.published())
  assert not np.array_equal(after["embedding"], copy["embedding"])


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("mode", [LOGLINEAR, REUSE])
def test_the_trainer_leaves_the_forward_out_where_the_mode_does_without(mode):
  trainer = make_trainer(mode=mode)
  pending = trainer.step(VERSION, trainer.prepare(groups()))
  values, is_bad = pending.metrics()
  assert not any(is_bad) and values["time/proximal_s"] == 0
  assert values["offpolicy/mismatch_kl"] > 0
  assert trainer._stage_programs["proximal"]._cache_size() == 0
