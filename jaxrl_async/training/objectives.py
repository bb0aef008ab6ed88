"""Losses and diagnostics: functions of one evaluated microbatch.

`train_step.update` evaluates the policy on one microbatch at a time and passes
the result to a `Loss`. The loss returns the microbatch's share of the
minibatch's loss, and sums to report. A new algorithm is another function of
this kind; `train_step` does not change. A `Diagnostic` returns sums that are
only measured, so that they are the same for every loss.
"""

from collections.abc import Callable, Mapping
import dataclasses
import functools

import jax
from jax import numpy as jnp
from jaxtyping import Array, Bool, Float, Int, ScalarLike

from jaxrl_async.algorithms import corrections
from jaxrl_async.algorithms import divergences
from jaxrl_async.algorithms import losses
from jaxrl_async.config import sections
from jaxrl_async.training import packing

# The fields of a batch that `train_step.PROXIMAL_STAGE` and those of `stages`
# add.
PROXIMAL = "proximal_logprobs"
REFERENCE = "reference_logprobs"
TEACHER = "teacher_logprobs"
WITHIN_SECOND_MOMENT = "within_second_moment"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Microbatch:
  """The inputs of a loss. Position t of a [B, T] array is about token t.

  It has all rows of a microbatch, or the part of them that data-parallel mesh
  axes leave here; see `gradients.accumulate`. Rows are whole: a sum over tokens
  includes all devices that split them, those of the `context` mesh axis. A loss
  over whole sequences sums with `segment_sum`.

  Attributes:
    logprobs: the logprob of each token under the policy that is being updated.
      Gradients flow through it.
    entropy: the entropy of that policy's distribution of each token. Gradients
      flow through it too.
    values: what a critic predicts for the state before each token, see
      `critic`. Gradients flow through it. None without a critic. If a model
      with a scalar head is trained in the policy's place, what the head makes
      of the state after each token; logprobs and entropies are then 0.
    batch: the packed arrays. `batch.fields` holds what the stages before the
      update added.
    minibatch: how many updates the train step has made before: the index of the
      minibatch, plus the number of minibatches for each earlier epoch.
  """

  logprobs: Float[Array, "B T"]
  entropy: Float[Array, "B T"]
  values: Float[Array, "B T"] | None
  batch: packing.PackedBatch
  totals: Mapping[str, Float[Array, ""]]
  policy_version: Int[Array, ""]
  minibatch: Int[Array, ""]

  def segment_sum(self, values: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """Return for each token the sum over the loss tokens of its trajectory."""
    masked = jnp.where(self.batch.loss_mask, values, 0)
    return row_sum(masked, self.batch.segment_ids)


def row_sum(
  values: Float[Array, "B T"], ids: Int[Array, "B T"]
) -> Float[Array, "B T"]:
  """Return for each token the sum over the tokens of its row with its id."""
  num_ids = values.shape[1] + 1

  def of_row(values: Array, ids: Array) -> Array:
    return jax.ops.segment_sum(values, ids, num_ids)[ids]

  return jax.vmap(of_row)(values, ids)


Sums = dict[str, Float[Array, ""]]
# Returns the share of the loss that these rows have, and sums by name. Both are
# added up over all rows of a minibatch.
Loss = Callable[[Microbatch], tuple[Float[Array, ""], Sums]]
Diagnostic = Callable[[Microbatch], Sums]


def minibatch_totals(batch: packing.PackedBatch) -> Sums:
  """Count the loss tokens of a minibatch, and the trajectories that have some.

  Losses divide by these counts.
  """
  mask = batch.loss_mask
  # A trajectory counts at its first loss token: the last one before it in the
  # row, if there is any, lies before its segment.
  columns = jax.lax.broadcasted_iota(jnp.int32, mask.shape, mask.ndim - 1)
  last = jax.lax.cummax(jnp.where(mask, columns, -1), axis=mask.ndim - 1)
  before = jnp.roll(last, 1, axis=-1)
  before = jnp.where(columns == 0, -1, before)
  is_first = mask & (before < batch.segment_start)
  return {
    "num_loss_tokens": jnp.sum(mask, dtype=jnp.float32),
    "num_trajectories": jnp.sum(is_first, dtype=jnp.float32),
  }


def loglinear(micro: Microbatch) -> Float[Array, "B T"]:
  """Return proximal logprobs by log-linear interpolation."""
  return losses.loglinear_proximal_logprobs(
    micro.logprobs,
    micro.batch.behavior_logprobs,
    micro.batch.policy_versions,
    micro.policy_version,
  )


def reused(micro: Microbatch) -> Float[Array, "B T"]:
  """Return the update's own logprobs, without gradients.

  They are the exact proximal logprobs only in the first minibatch of a step.
  """
  return jax.lax.stop_gradient(micro.logprobs)


def recomputed(micro: Microbatch) -> Float[Array, "B T"]:
  """Return the logprobs of the forward pass before the step's first update."""
  return micro.batch.fields[PROXIMAL]


PROXIMAL_MODES: Mapping[
  sections.ProximalMode, Callable[[Microbatch], Float[Array, "B T"]]
] = {
  sections.ProximalMode.RECOMPUTE: recomputed,
  sections.ProximalMode.LOGLINEAR: loglinear,
  sections.ProximalMode.REUSE: reused,
}


# Returns a number for each token, 0 outside the mask, and which are clipped.
TokenObjective = Callable[[Microbatch, Float[Array, "B T"]], losses.Objective]
# Returns a weight for each token, and which weights were out of bounds.
Correction = Callable[
  [Microbatch, Float[Array, "B T"]],
  tuple[Float[Array, "B T"], Bool[Array, "B T"]],
]
# Makes a microbatch's share of a loss of what its tokens have.
Aggregate = Callable[[Microbatch, Float[Array, "B T"]], Float[Array, ""]]


def per_token(function: Callable[..., losses.Objective]) -> TokenObjective:
  """Return an objective of `losses` as a function of a microbatch."""

  def objective(
    micro: Microbatch, anchor_logprobs: Float[Array, "B T"]
  ) -> losses.Objective:
    return function(
      micro.logprobs,
      anchor_logprobs,
      micro.batch.advantages,
      micro.batch.loss_mask,
    )

  return objective


def gspo(*, clip_low: ScalarLike, clip_high: ScalarLike) -> TokenObjective:
  """Return `losses.gspo_objective` as a function of a microbatch."""

  def objective(
    micro: Microbatch, anchor_logprobs: Float[Array, "B T"]
  ) -> losses.Objective:
    of_tokens = functools.partial(
      losses.gspo_objective,
      clip_low=clip_low,
      clip_high=clip_high,
      sequence_sum=micro.segment_sum,
    )
    return per_token(of_tokens)(micro, anchor_logprobs)

  return objective


def behavior_correction(
  *,
  level: sections.BehaviorWeightLevel,
  floor: ScalarLike,
  cap: ScalarLike,
  cap_mode: sections.BehaviorWeightCapMode,
  has_second_moment: bool,
  sequence_kl_bound: ScalarLike,
) -> Correction:
  """Return the weights of `corrections`, 0 for tokens that are left out.

  Args:
    has_second_moment: leave out the tokens that `stages.second_moment_stage`
      has found.
    sequence_kl_bound: as in `corrections.within_sequence_kl`; 0 keeps all.
  """

  def correction(
    micro: Microbatch, proximal_logprobs: Float[Array, "B T"]
  ) -> tuple[Float[Array, "B T"], Bool[Array, "B T"]]:
    batch = micro.batch
    weights, is_outside = corrections.behavior_weights(
      proximal_logprobs,
      batch.behavior_logprobs,
      batch.loss_mask,
      level=level,
      floor=floor,
      cap=cap,
      cap_mode=cap_mode,
      sequence_sum=micro.segment_sum,
    )
    if has_second_moment:
      weights = jnp.where(batch.fields[WITHIN_SECOND_MOMENT] > 0, weights, 0)
    if sequence_kl_bound != 0:
      is_kept = corrections.within_sequence_kl(
        micro.logprobs,
        batch.behavior_logprobs,
        batch.advantages,
        batch.loss_mask,
        bound=sequence_kl_bound,
        sequence_sum=micro.segment_sum,
      )
      weights = jnp.where(is_kept, weights, 0)
    return weights, is_outside

  return correction


def aggregate(aggregation: sections.Aggregation, constant: int) -> Aggregate:
  """Return `losses.aggregated` as a function of a microbatch."""

  def share(micro: Microbatch, values: Float[Array, "B T"]) -> Float[Array, ""]:
    return losses.aggregated(
      values,
      aggregation,
      num_loss_tokens=micro.totals["num_loss_tokens"],
      num_trajectories=micro.totals["num_trajectories"],
      constant=constant,
      sequence_sum=micro.segment_sum,
    )

  return share


def policy_loss(
  objective: TokenObjective,
  correction: Correction,
  average: Aggregate,
  *,
  proximal: Callable[[Microbatch], Float[Array, "B T"]],
  is_coupled: bool = False,
) -> Loss:
  r"""Return the loss of an objective, a correction and an aggregation.

  L = -average(w O)

  With PPO's objective, weights of tokens and the mean over tokens this is the
  decoupled PPO of AReaL, arXiv:2505.24298 eq. 5.

  Args:
    proximal: returns the proximal logprobs of a microbatch. It is one of
      `PROXIMAL_MODES`.
    is_coupled: whether the anchor is the behavior policy. It is the proximal
      policy otherwise.
  """

  def loss(micro: Microbatch) -> tuple[Float[Array, ""], Sums]:
    mask = micro.batch.loss_mask
    centre = proximal(micro)
    anchor = micro.batch.behavior_logprobs if is_coupled else centre
    weights, is_outside = correction(micro, centre)
    objectives, is_clipped = objective(micro, anchor)
    kl = divergences.k3(anchor, jax.lax.stop_gradient(micro.logprobs))
    return -average(micro, weights * objectives), {
      "clip_count": is_clipped.sum(dtype=jnp.float32),
      "approx_kl_sum": divergences.masked_sum(kl, mask),
      "behavior_weight_sum": weights.sum(),
      "behavior_weight_square_sum": (weights**2).sum(),
      "behavior_weight_capped_count": is_outside.sum(dtype=jnp.float32),
      "left_out_count": (mask & (weights == 0)).sum(dtype=jnp.float32),
    }

  return loss


def with_penalties(
  loss: Loss,
  average: Aggregate,
  *,
  kl_coef: ScalarLike,
  kl_estimator: sections.KlEstimator,
  entropy_coef: ScalarLike,
  kl_in_reward: bool = False,
) -> Loss:
  r"""Return a loss with a penalty for divergence and a bonus for entropy.

  L + kl_coef average(KL(theta || reference)) - entropy_coef average(H)

  Both are of all loss tokens, without weights. A term whose coefficient is 0 is
  left out.

  Args:
    kl_coef: coefficient of the divergence from the reference, whose logprobs
      `stages.reference_stage` adds to the batch.
    kl_in_reward: the divergence is a part of the advantages already, and is
      only measured here.
  """
  has_kl = kl_coef != 0
  has_entropy = entropy_coef != 0
  if not has_kl and not has_entropy:
    return loss

  def penalised(micro: Microbatch) -> tuple[Float[Array, ""], Sums]:
    mask = micro.batch.loss_mask
    value, sums = loss(micro)
    if has_kl:
      kl = divergences.kl_penalty(
        micro.logprobs,
        micro.batch.fields[REFERENCE],
        mask,
        estimator=kl_estimator,
      )
      if not kl_in_reward:
        value += kl_coef * average(micro, kl)
      sums = {**sums, "reference_kl_sum": kl.sum()}
    if has_entropy:
      entropy = jnp.where(mask, micro.entropy, 0)
      value -= entropy_coef * average(micro, entropy)
    return value, sums

  return penalised


def no_diagnostic(micro: Microbatch) -> Sums:
  """Return no sums."""
  del micro
  return {}


def rollout_diagnostic(micro: Microbatch) -> Sums:
  """Measure entropy and the divergence from the policies that wrote the batch.

  The divergences are between the behavior policies and the weights before the
  train step. If a stage computed the logprobs of these weights
  (`recomputed`), they are used, and the other proximal modes are compared with
  them.

  Otherwise the update's own logprobs are used, which are the same in the first
  minibatch. Later minibatches then count no tokens as mismatch, and their
  `behavior_kl_sum` includes the change that the step itself has made.
  """
  batch, mask = micro.batch, micro.batch.loss_mask
  is_current = batch.policy_versions == micro.policy_version
  has_forward = PROXIMAL in batch.fields
  before = recomputed(micro) if has_forward else reused(micro)
  if not has_forward:
    is_current &= micro.minibatch == 0
  sums = divergences.behavior_kl_sums(
    before, batch.behavior_logprobs, mask, is_current
  )
  sums["entropy_sum"] = divergences.masked_sum(micro.entropy, mask)
  if TEACHER in batch.fields:
    sums["teacher_kl_sum"] = divergences.masked_sum(
      batch.behavior_logprobs - batch.fields[TEACHER], mask
    )
  if has_forward:
    guess = loglinear(micro)
    for name, other in (("loglinear", guess), ("reuse", micro.logprobs)):
      sums[f"{name}_gap_sum"] = divergences.masked_sum(
        jnp.abs(other - before), mask
      )
    sums["loglinear_kl_sum"] = divergences.masked_sum(
      divergences.k3(before, guess), mask
    )
  return sums
