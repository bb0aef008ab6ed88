"""What an update minimises: a loss is a function of what a microbatch offers.

`train_step.update` evaluates the policy on one microbatch at a time and hands
the result to a `Loss`, which returns the microbatch's share of the minibatch's
loss and any sums that it wants reported. A further algorithm is one more such
function; `train_step` need not know it. What is only measured is a
`Diagnostic`, so that every loss is measured alike.
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

# The field of a batch that `train_step.proximal_logprobs` fills in.
PROXIMAL = "proximal_logprobs"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Microbatch:
  """What a loss may look at. Position t of a [B, T] array is about token t.

  The arrays are those of all devices together: a sum over an axis is the sum
  over the devices that split it, `context` included. A loss over sequences
  sums with `segment_sum`.

  Attributes:
    logprobs: of each token under the policy that is being updated; gradients
      flow through them.
    entropy: of the distribution that each token was drawn from; gradients flow
      through it too.
    values: of a critic; None without one.
    batch: the packed arrays, and in `batch.fields` whatever stages before the
      update have added by name.
    totals: of the whole minibatch, taken before its microbatches are visited;
      see `minibatch_totals`.
    policy_version: of the weights before the train step.
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
    """Sum over the loss tokens of each token's trajectory, at every token."""
    num_segments = values.shape[1] + 1  # with padding, whose id is 0

    def of_row(values: Array, segment_ids: Array) -> Array:
      sums = jax.ops.segment_sum(values, segment_ids, num_segments)
      return sums[segment_ids]

    masked = jnp.where(self.batch.loss_mask, values, 0)
    return jax.vmap(of_row)(masked, self.batch.segment_ids)


Sums = dict[str, Float[Array, ""]]
# Returns the microbatch's share of the loss, which simply add up over the
# microbatches of a minibatch, and sums that are added up likewise.
Loss = Callable[[Microbatch], tuple[Float[Array, ""], Sums]]
Diagnostic = Callable[[Microbatch], Sums]


def minibatch_totals(batch: packing.PackedBatch) -> Sums:
  """Count what losses divide by, over a whole minibatch of [K, B, T] arrays.

  Returns:
    num_loss_tokens: tokens that are learned from.
    num_trajectories: trajectories.
  """
  starts = (batch.positions == 0) & (batch.segment_ids != 0)
  return {
    "num_loss_tokens": jnp.sum(batch.loss_mask, dtype=jnp.float32),
    "num_trajectories": jnp.sum(starts, dtype=jnp.float32),
  }


def loglinear(micro: Microbatch) -> Float[Array, "B T"]:
  """Logprobs under the weights before the train step, by interpolation."""
  return losses.loglinear_proximal_logprobs(
    micro.logprobs,
    micro.batch.behavior_logprobs,
    micro.batch.policy_versions,
    micro.policy_version,
  )


def reused(micro: Microbatch) -> Float[Array, "B T"]:
  """Logprobs of the update itself; exact in a step's first minibatch."""
  return jax.lax.stop_gradient(micro.logprobs)


def recomputed(micro: Microbatch) -> Float[Array, "B T"]:
  """Logprobs of the forward pass that was made before the first update."""
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
  """The loss of AReaL, arXiv:2505.24298 eq. 5.

  Args:
    proximal: where the logprobs of the centre of the trust region come from.
    clip_low: as of `losses.decoupled_ppo_loss`, like all that follow.
    clip_high: see there.
    behavior_weight_cap: see there.
    cap_mode: see there.
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
  """Cross-entropy of the loss tokens, for supervised training."""
  loss = losses.next_token_loss(
    micro.logprobs,
    micro.batch.loss_mask,
    num_loss_tokens=micro.totals["num_loss_tokens"],
  )
  return loss, {}


def no_diagnostic(micro: Microbatch) -> Sums:
  """Measures nothing."""
  del micro
  return {}


def rollout_diagnostic(micro: Microbatch) -> Sums:
  """Measure entropy, and the divergence from the policies that wrote the batch.

  The divergences are those of the weights before the train step. Without a
  forward pass of these weights they are taken from the update's own logprobs,
  which are the same in the first minibatch: only there do tokens count as
  mismatch, and behavior_kl_sum includes the step's own motion in later ones.
  With it, the other ways to come by the proximal logprobs are compared to it.
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
