"""Losses and diagnostics: functions of one evaluated microbatch.

`train_step.update` evaluates the policy on one microbatch at a time and passes
the result to a `Loss`. The loss returns the microbatch's share of the
minibatch's loss, and sums to report. A new algorithm is another function of
this kind; `train_step` does not change. A `Diagnostic` returns sums that are
only measured, so that they are the same for every loss.
"""

from collections.abc import Callable, Mapping
import dataclasses

import jax
from jax import numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl_async.algorithms import divergences
from jaxrl_async.algorithms import losses
from jaxrl_async.config import sections
from jaxrl_async.training import packing

# The field of a batch that `train_step.PROXIMAL_STAGE` adds.
PROXIMAL = "proximal_logprobs"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Microbatch:
  """The inputs of a loss. Position t of a [B, T] array is about token t.

  The arrays are global: a sum over an axis includes all devices that split the
  axis, those of the `context` mesh axis too. A loss over whole sequences sums
  with `segment_sum`.

  Attributes:
    logprobs: the logprob of each token under the policy that is being updated.
      Gradients flow through it.
    entropy: the entropy of that policy's distribution of each token. Gradients
      flow through it too.
    values: the values of a critic, or None without one.
    batch: the packed arrays. `batch.fields` holds what the stages before the
      update added.
    totals: the `minibatch_totals` of the whole minibatch.
    policy_version: the version of the weights before the train step.
    minibatch: index of the minibatch within the train step.
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
    num_segments = values.shape[1] + 1  # padding included, whose id is 0

    def of_row(values: Array, segment_ids: Array) -> Array:
      sums = jax.ops.segment_sum(values, segment_ids, num_segments)
      return sums[segment_ids]

    masked = jnp.where(self.batch.loss_mask, values, 0)
    return jax.vmap(of_row)(masked, self.batch.segment_ids)


Sums = dict[str, Float[Array, ""]]
# Returns the microbatch's share of the loss, and sums by name. Both are added
# up over the microbatches of a minibatch.
Loss = Callable[[Microbatch], tuple[Float[Array, ""], Sums]]
Diagnostic = Callable[[Microbatch], Sums]


def minibatch_totals(batch: packing.PackedBatch) -> Sums:
  """Count the loss tokens and the trajectories of a minibatch.

  Losses divide by these counts.

  Args:
    batch: one minibatch, [K, B, T] arrays.

  Returns:
    `num_loss_tokens`, the number of tokens in `loss_mask`, and
    `num_trajectories`.
  """
  starts = (batch.positions == 0) & (batch.segment_ids != 0)
  return {
    "num_loss_tokens": jnp.sum(batch.loss_mask, dtype=jnp.float32),
    "num_trajectories": jnp.sum(starts, dtype=jnp.float32),
  }


def loglinear(micro: Microbatch) -> Float[Array, "B T"]:
  """Return proximal logprobs by log-linear interpolation.

  See `losses.loglinear_proximal_logprobs`.
  """
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


def decoupled_ppo(
  *,
  proximal: Callable[[Microbatch], Float[Array, "B T"]],
  clip_low: float,
  clip_high: float,
  behavior_weight_cap: float,
  cap_mode: sections.BehaviorWeightCapMode,
) -> Loss:
  """Return the decoupled PPO loss of AReaL, arXiv:2505.24298 eq. 5.

  Args:
    proximal: returns the proximal logprobs of a microbatch, the centre of the
      trust region. It is one of `PROXIMAL_MODES`.
    clip_low: as in `losses.decoupled_ppo_loss`.
    clip_high: as in `losses.decoupled_ppo_loss`.
    behavior_weight_cap: as in `losses.decoupled_ppo_loss`.
    cap_mode: as in `losses.decoupled_ppo_loss`.
  """

  def loss(micro: Microbatch) -> tuple[Float[Array, ""], Sums]:
    return losses.decoupled_ppo_loss(
      micro.logprobs,
      proximal(micro),
      micro.batch.behavior_logprobs,
      micro.batch.advantages,
      micro.batch.loss_mask,
      clip_low=clip_low,
      clip_high=clip_high,
      behavior_weight_cap=behavior_weight_cap,
      cap_mode=cap_mode,
      num_loss_tokens=micro.totals["num_loss_tokens"],
    )

  return loss


def next_token(micro: Microbatch) -> tuple[Float[Array, ""], Sums]:
  """Return the cross-entropy of the loss tokens, for supervised training."""
  loss = losses.next_token_loss(
    micro.logprobs,
    micro.batch.loss_mask,
    num_loss_tokens=micro.totals["num_loss_tokens"],
  )
  return loss, {}


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
