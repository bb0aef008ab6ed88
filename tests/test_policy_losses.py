"""Each loss with its corrections, against its equation in float64."""

import functools
import math

import jax
from jax import numpy as jnp
import numpy as np
import policy_world
from policy_world import CASES
import pytest

from jaxrl_async.algorithms import corrections
from jaxrl_async.algorithms import divergences
from jaxrl_async.algorithms import losses
from jaxrl_async.config import sections
from jaxrl_async.devices import mesh as mesh_lib
from jaxrl_async.training import objectives
from jaxrl_async.training import stages as stages_lib

Level, Mode = sections.BehaviorWeightLevel, sections.BehaviorWeightCapMode
# A program is compiled for each.
each_case = pytest.mark.parametrize(
  "case",
  [
    case
    if case in policy_world.QUICK
    else pytest.param(case, marks=pytest.mark.slow)
    for case in CASES
  ],
)


def clip(x, low, high):
  return min(max(x, low), high)


def sigmoid(x):
  return 1 / (1 + math.exp(-x))


def objective_of(section, member, now, then, anchor):
  """O of each loss token of a trajectory, from the papers' formulas.

  `now` are logprobs that are differentiated and `then` the same without
  gradient.
  """
  a, n = member.advantage, len(now)
  low, high = 1 - section.clip_low, 1 + section.clip_high
  ratios = [math.exp(x - y) for x, y in zip(now, anchor, strict=True)]
  if section.loss in ("ppo", "coupled_ppo"):
    found = [min(r * a, clip(r, low, high) * a) for r in ratios]
    if section.dual_clip and a < 0:
      found = [max(x, section.dual_clip * a) for x in found]
    return found
  if section.loss == "gspo":
    if section.behavior_weight_level is Level.NONE:  # eq. 5
      s = math.exp(sum(now[t] - anchor[t] for t in range(n)) / n)
      return [min(s * a, clip(s, low, high) * a)] * n
    held = math.exp(sum(then[t] - anchor[t] for t in range(n)) / n)
    each = [held * math.exp(now[t] - then[t]) for t in range(n)]  # eq. 13
    return [min(s * a, clip(s, low, high) * a) for s in each]
  if section.loss == "cispo":
    held = [math.exp(x - y) for x, y in zip(then, anchor, strict=True)]
    return [clip(r, low, high) * a * x for r, x in zip(held, now, strict=True)]
  if section.loss == "sapo":
    tau = section.sapo_positive if a > 0 else section.sapo_negative
    return [4 / tau * sigmoid(tau * (r - 1)) * a for r in ratios]
  assert section.loss == "reinforce"
  return [a * x for x in now]


def weights_of(section, log_weights):
  """The behavior weights of the loss tokens of a trajectory."""
  n, level = len(log_weights), section.behavior_weight_level
  if level is Level.NONE:
    return [1.0] * n
  if level is Level.SEQUENCE_MEAN:
    log_weights = [sum(log_weights) / n] * n
  elif level is Level.SEQUENCE_PRODUCT:
    log_weights = [sum(log_weights)] * n
  found = []
  for w in map(math.exp, log_weights):
    low, high = section.behavior_weight_floor, section.behavior_weight_cap
    if section.behavior_weight_cap_mode is Mode.TRUNCATE:
      found.append(clip(w, low, high))
    else:
      found.append(w if low <= w <= high else 0.0)
  return found


def kept_by_second_moment(made, bound):
  """M2PO, one token after the other; positions of the tokens that stay."""
  outward, others = [], []
  for b, t in np.argwhere(made["mask"]).tolist():
    log_ratio = made["proximal"][b, t] - made["behavior"][b, t]
    harmful = made["advantages"][b, t] * log_ratio > 0
    (outward if harmful else others).append((log_ratio**2, (b, t)))
  outward.sort()
  while outward and sum(x for x, _ in outward) / len(outward) > bound:
    outward.pop()
  return {place for _, place in (*outward, *others)}


def estimated_kl(estimator, now, reference):
  log_ratio = reference - now
  return {
    sections.KlEstimator.K1: -log_ratio,
    sections.KlEstimator.K2: log_ratio**2 / 2,
    sections.KlEstimator.K3: math.exp(log_ratio) - 1 - log_ratio,
  }[estimator]


def transcribed(section, made, logprobs=None, entropy=None):
  """The loss of a minibatch of these arrays, and sums, in float64.

  Args:
    section: the settings.
    made: as of `policy_world.arrays`.
    logprobs: differentiated; those of `made` are the same without gradient.
    entropy: differentiated.
  """
  logprobs = made["logprobs"] if logprobs is None else logprobs
  entropy = made["entropy"] if entropy is None else entropy
  members = [m for m in policy_world.MEMBERS if m.tokens]
  num_tokens = sum(len(m.tokens) for m in members)
  kept = kept_by_second_moment(made, section.second_moment_bound)
  loss = 0.0
  sums = dict.fromkeys(("weight", "square", "left_out", "kl"), 0.0)
  for member in members:
    own = (member.row, member.columns)
    now, then = logprobs[own].tolist(), made["logprobs"][own].tolist()
    behavior = made["behavior"][own].tolist()
    is_reused = section.proximal is sections.ProximalMode.REUSE
    proximal = then if is_reused else made["proximal"][own].tolist()
    is_coupled = section.loss == "coupled_ppo"
    anchor = behavior if is_coupled else proximal
    objective = objective_of(section, member, now, then, anchor)
    weights = weights_of(
      section, [x - y for x, y in zip(proximal, behavior, strict=True)]
    )
    far = sum(x - y for x, y in zip(behavior, then, strict=True)) / len(then)
    for i, column in enumerate(member.columns):
      w = weights[i]
      if section.second_moment_bound and (member.row, column) not in kept:
        w = 0.0
      bound = section.sequence_kl_bound
      if bound and member.advantage < 0 and far > bound:
        w = 0.0
      divisor = {
        sections.Aggregation.TOKEN_MEAN: num_tokens,
        sections.Aggregation.SEQUENCE_MEAN: len(members) * len(now),
        sections.Aggregation.SEQUENCE_SUM: len(members) * policy_world.CONSTANT,
      }[section.aggregation]
      kl = estimated_kl(
        section.kl_estimator, now[i], made["reference"][member.row, column]
      )
      loss += section.kl_coef * kl / divisor
      loss -= section.entropy_coef * entropy[member.row, column] / divisor
      loss -= w * objective[i] / divisor
      sums["kl"] += kl
      sums["weight"] += w
      sums["square"] += w**2
      sums["left_out"] += w == 0
  return loss, sums


def differences(section, made, name):
  """Central differences of the transcription by one array's loss tokens."""
  gradient, step = np.zeros((policy_world.B, policy_world.T)), 1e-6
  for place in np.argwhere(made["mask"]):
    ends = []
    for sign in (1, -1):
      moved = made[name].copy()
      moved[*place] += sign * step
      ends.append(transcribed(section, made, **{name: moved})[0])
    gradient[*place] = (ends[0] - ends[1]) / (2 * step)
  return gradient


@each_case
def test_loss_and_gradients_are_those_of_the_equations(case):
  made, section = policy_world.arrays(), policy_world.section(case)
  found, sums, gradients = policy_world.evaluated(
    case, policy_world.microbatch(made, policy_world.totals(made))
  )
  expected, expected_sums = transcribed(section, made)
  np.testing.assert_allclose(found, expected, rtol=1e-5)
  for name, key in (
    ("behavior_weight_sum", "weight"),
    ("behavior_weight_square_sum", "square"),
    ("left_out_count", "left_out"),
  ):
    np.testing.assert_allclose(sums[name], expected_sums[key], rtol=1e-5)
  if section.kl_coef:
    np.testing.assert_allclose(
      sums["reference_kl_sum"], expected_sums["kl"], rtol=1e-5
    )
  for name, gradient in zip(("logprobs", "entropy"), gradients, strict=True):
    np.testing.assert_allclose(
      gradient, differences(section, made, name), rtol=1e-4, atol=2e-6
    )


def test_the_trajectories_are_on_both_sides_of_every_bound():
  made = policy_world.arrays()
  losses_found = {
    case: float(transcribed(policy_world.section(case), made)[0])
    for case in CASES
  }
  assert len(set(losses_found.values())) == len(CASES)
  low = 1 - policy_world.CLIP_LOW
  high = 1 + policy_world.CLIP_HIGH
  sides, dual = set(), set()
  for member in policy_world.MEMBERS:
    for r in member.ratios:
      is_positive = member.advantage > 0
      side = "above" if r > high else "below" if r < low else "inside"
      sides.add((is_positive, side))
      dual.add(not is_positive and r > policy_world.DUAL)
  assert {(True, "above"), (True, "below"), (True, "inside")} <= sides
  assert {(False, "above"), (False, "below")} <= sides
  assert dual == {True, False}
  left_out = {
    case: transcribed(policy_world.section(case), made)[1]["left_out"]
    for case in CASES
  }
  assert left_out["decoupled ppo"] == 6 and left_out["icepop"] == 9
  assert left_out["two-sided truncation"] == 0
  assert left_out["means of sequences"] == 8
  assert left_out["sequences far off"] == 9
  assert 0 < left_out["m2po"] < 18


@each_case
def test_poison_under_the_mask_changes_no_bit(case):
  made = policy_world.arrays()
  mask, totals = made["mask"], policy_world.totals(made)
  clean = policy_world.evaluated(case, policy_world.microbatch(made, totals))
  assert not any(np.asarray(x)[~mask].any() for x in clean[2])
  for poison in (np.nan, np.inf):
    poisoned = {
      name: np.where(mask, x, poison) if x.dtype.kind == "f" else x
      for name, x in made.items()
    }
    found = policy_world.evaluated(
      case, policy_world.microbatch(poisoned, totals)
    )
    jax.tree.map(np.testing.assert_array_equal, found, clean)


@each_case
def test_microbatches_add_up(case):
  made = policy_world.arrays()
  totals = policy_world.totals(made)
  whole = policy_world.microbatch(made, totals)
  within = whole.batch.fields[objectives.WITHIN_SECOND_MOMENT]
  parts = []
  for row in range(policy_world.B):
    is_here = np.arange(policy_world.B)[:, None] == row
    own = {
      "mask": made["mask"] & is_here,
      "segment_ids": np.where(is_here, made["segment_ids"], 0),
    }
    micro = policy_world.microbatch(made | own, totals, within)
    parts.append(policy_world.evaluated(case, micro))
  added = jax.tree.map(lambda x, y: x + y, *parts)
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-7),
    added,
    policy_world.evaluated(case, whole),
  )


@pytest.mark.parametrize(
  "case",
  [
    "everything",  # every sum over a trajectory
    *("gspo", "means of sequences", "products of sequences"),
    "sequences far off",
  ],
)
def test_devices_that_share_a_row_find_the_same(case):
  made = policy_world.arrays()
  micro = policy_world.microbatch(made, policy_world.totals(made))
  shape = mesh_lib.MeshShape(data=2, context=4)
  mesh = mesh_lib.make_mesh(jax.devices()[:8], shape)
  sharding = mesh_lib.sharding(mesh, mesh_lib.TRAIN_RULES, "batch", "tokens")
  split = jax.device_put((micro.logprobs, micro.entropy, micro.batch), sharding)
  assert len(split[0].sharding.device_set) == 8
  (loss, sums), gradients = policy_world.program(case)(
    split[:2], split[2], micro.totals
  )
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6),
    (loss, sums, gradients),
    policy_world.evaluated(case, micro),
  )


def test_tokens_of_a_minibatch_are_left_out_as_one():
  """More tokens, over two axes, with ties and with an empty choice."""
  rng = np.random.default_rng(1)
  shape = (3, 4, 16)
  made = {
    "proximal": np.zeros(shape),
    "behavior": np.round(rng.normal(0, 0.5, shape), 1),
    "advantages": rng.choice([-1.0, 0.0, 1.0], shape),
    "mask": rng.random(shape) < 0.8,
  }

  def within(bound):
    names = ("proximal", "behavior", "advantages")
    given = [jnp.asarray(made[name], jnp.float32) for name in names]
    mask = jnp.asarray(made["mask"])
    return corrections.within_second_moment(*given, mask, bound=bound)

  flat = {name: x.reshape(1, -1) for name, x in made.items()}
  log_ratio = flat["proximal"] - flat["behavior"]
  outward = flat["advantages"] * log_ratio > 0
  for bound in (0.15, 0.05, 100.0):
    found = np.argwhere(np.asarray(within(bound)).reshape(1, -1))
    greedy = kept_by_second_moment(flat, bound)
    places = set(map(tuple, found.tolist()))
    # Of equal squares the loop leaves out some, and the program all.
    edge = {abs(log_ratio[p]) for p in greedy - places}
    assert places <= greedy and len(edge) <= 1
    assert not any(outward[p] and abs(log_ratio[p]) in edge for p in places)
    assert all(outward[p] for p in greedy - places)
  assert np.array_equal(within(100.0), made["mask"])
  none = np.asarray(within(0.0)).reshape(1, -1)
  assert np.array_equal(none, flat["mask"] & ~outward) and outward.any()


def test_devices_choose_the_same_tokens_of_each_minibatch():
  made = policy_world.arrays()
  micro = policy_world.microbatch(made, {}, np.zeros(made["mask"].shape))
  # Two minibatches of one microbatch; the second has other advantages.
  batch = jax.tree.map(lambda x: jnp.stack([x, x])[:, None], micro.batch)
  batch = batch._replace(advantages=batch.advantages.at[1].multiply(-1))
  run = stages_lib.second_moment_stage(policy_world.SECOND_MOMENT).run
  found = jax.jit(functools.partial(run, {}, {}))(batch, 0)
  kept = np.asarray(found[objectives.WITHIN_SECOND_MOMENT])[:, 0]
  for sign, of_minibatch in zip((1, -1), kept, strict=True):
    own = made | {"advantages": sign * made["advantages"]}
    places = kept_by_second_moment(own, policy_world.SECOND_MOMENT)
    assert set(map(tuple, np.argwhere(of_minibatch).tolist())) == places
  assert not np.array_equal(*kept)
  shape = mesh_lib.MeshShape(data=2, context=4)
  mesh = mesh_lib.make_mesh(jax.devices()[:8], shape)
  sharding = mesh_lib.sharding(
    mesh, mesh_lib.TRAIN_RULES, None, None, "batch", "tokens"
  )
  split = jax.jit(functools.partial(run, {}, {}), out_shardings=sharding)(
    jax.device_put(batch, sharding), 0
  )
  jax.tree.map(np.testing.assert_array_equal, split, found)


def test_a_minibatch_without_loss_tokens_has_loss_and_gradient_zero():
  made = policy_world.arrays()
  made["mask"] = np.zeros_like(made["mask"])
  totals = policy_world.totals(made)
  assert totals["num_loss_tokens"] == totals["num_trajectories"] == 0
  for case in ("decoupled ppo", "gspo"):
    loss, _, gradients = policy_world.evaluated(
      case, policy_world.microbatch(made, totals)
    )
    assert loss == 0 and not any(np.any(x) for x in gradients)


@pytest.mark.parametrize("estimator", sections.KlEstimator)
def test_a_penalty_is_its_estimator_and_ignores_the_rest(estimator):
  made = policy_world.arrays()
  mask = made["mask"]
  given = [
    jnp.asarray(np.where(mask, made[name], np.nan), jnp.float32)
    for name in ("logprobs", "reference")
  ]

  def total(logprobs, reference):
    found = divergences.kl_penalty(
      logprobs, reference, jnp.asarray(mask), estimator=estimator
    )
    return found.sum(), found

  gradients, found = jax.grad(total, (0, 1), has_aux=True)(*given)
  expected, slopes = np.zeros(mask.shape), np.zeros(mask.shape)
  for place in map(tuple, np.argwhere(mask)):
    now, reference = made["logprobs"][place], made["reference"][place]
    expected[place] = estimated_kl(estimator, now, reference)
    ends = [estimated_kl(estimator, now + x, reference) for x in (1e-6, -1e-6)]
    slopes[place] = (ends[0] - ends[1]) / 2e-6
  np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(gradients[0], slopes, rtol=1e-4, atol=1e-6)
  assert not np.any(gradients[1])


def test_no_gradient_flows_to_other_policies_or_advantages():
  made = policy_world.arrays()
  micro = policy_world.microbatch(made, policy_world.totals(made))
  batch = micro.batch
  for function in (
    losses.sapo_objective,
    losses.cispo_objective,
    losses.ppo_objective,
  ):
    settings = {"clip_low": 0.2, "clip_high": 0.2}
    if function is losses.sapo_objective:
      settings = {"positive": 1.0, "negative": 1.05}

    def total(anchor, advantages, function=function, settings=settings):
      return function(
        micro.logprobs, anchor, advantages, batch.loss_mask, **settings
      )[0].sum()

    gradients = jax.grad(total, (0, 1))(
      batch.behavior_logprobs, batch.advantages
    )
    assert not any(np.any(x) for x in gradients)


def test_on_policy_all_token_losses_have_the_gradient_of_reinforce():
  made = policy_world.arrays()
  on_policy = dict.fromkeys(("proximal", "behavior"), made["logprobs"])
  micro = policy_world.microbatch(made | on_policy, policy_world.totals(made))
  wanted = np.where(made["mask"], -made["advantages"], 0) / 18
  for case in ("decoupled ppo", "icepop", "cispo"):
    _, sums, (gradient, _) = policy_world.evaluated(case, micro)
    np.testing.assert_allclose(gradient, wanted, rtol=1e-6)
    assert sums["clip_count"] == sums["approx_kl_sum"] == 0
    assert sums["behavior_weight_sum"] == 18
