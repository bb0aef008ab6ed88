"""The critic: its forward passes, its stages, and its part of the update.

A critic predicts, for each token that the policy wrote, the return of what
follows: the value of the state before the token. Its predictions are normalised
returns; see `value_functions`. A train step with a critic runs two more stages:

1. `value_stage` evaluates the critic as it was before the step.
2. `gae_stage` makes advantages of these values and of the rewards of tokens,
   and the returns that the critic learns.

`update` then trains both models, in warm-up the critic alone.
"""

from collections.abc import Mapping
import dataclasses

import jax
from jax import numpy as jnp
from jaxtyping import Array, Float, Int, ScalarLike
import numpy as np

from jaxrl_async.algorithms import divergences
from jaxrl_async.algorithms import gae
from jaxrl_async.algorithms import losses
from jaxrl_async.algorithms import value_functions
from jaxrl_async.config import sections
from jaxrl_async.models import transformer
from jaxrl_async.training import episodes
from jaxrl_async.training import objectives
from jaxrl_async.training import packing
from jaxrl_async.training import train_state
from jaxrl_async.training import train_step

# Fields of a batch. The first two are of `value_stage`, in the unit of the
# rewards: values before each token, and after it. The others are of
# `gae_stage`. The last two are in the critic's unit.
VALUES = "values"
VALUES_AFTER = "values_after"
RETURNS = "returns"
NORMALIZED_VALUES = "normalized_values"
NORMALIZED_RETURNS = "normalized_returns"

# Those, and the two of `episodes`.
NUM_FIELDS = 7


def first_params(
  settings: train_state.ModelSettings, policy: transformer.Params
) -> transformer.Params:
  """Return a critic's parameters before training.

  The layers are the policy's. The head is zero, so that the values are too.

  Args:
    policy: the policy's parameters, without adapters if the trunk is its own.
  """
  shapes = jax.eval_shape(settings.init_params, jax.random.key(0))
  return {
    name: policy[name]
    if name in policy
    else jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shape)
    for name, shape in shapes.items()
  }


def _after_tokens(
  trunk: sections.CriticTrunk,
  forward: train_step.ForwardSettings,
  params: transformer.Params,
  hidden: Float[Array, "B T D"] | None,
  batch: packing.PackedBatch,
) -> Float[Array, "B T"]:
  """Return the prediction for the state after each token of a microbatch."""
  if trunk is sections.CriticTrunk.SHARED:
    assert hidden is not None
    return transformer.scalars(hidden, params[train_state.VALUE_HEAD])
  own = {
    name: x
    for name, x in params.items()
    if name != train_state.RETURN_STATISTICS
  }
  model, states = train_step.final_hidden(forward, own, batch)
  return model.scalars(states)


def value_stage(trunk: sections.CriticTrunk) -> train_step.Stage:
  """Return the stage that adds the values under the critic before the step."""

  def run(given: train_step.Given) -> train_step.Fields:
    settings, params, batch, _ = given
    critic = params[train_state.CRITIC]

    def of_microbatch(micro: packing.PackedBatch) -> Float[Array, "B T"]:
      hidden = None
      if trunk is sections.CriticTrunk.SHARED:
        _, hidden = train_step.final_hidden(
          settings[train_state.POLICY], params[train_state.POLICY], micro
        )
      forward = settings[train_state.CRITIC]
      return _after_tokens(trunk, forward, critic, hidden, micro)

    after = value_functions.denormalized(
      train_step.of_batch(of_microbatch, batch),
      critic[train_state.RETURN_STATISTICS],
    )
    return {VALUES: value_functions.before_tokens(after), VALUES_AFTER: after}

  return train_step.Stage(name="values", fields=run)


def gae_stage(
  *,
  gamma: ScalarLike,
  gae_lambda: ScalarLike,
  is_whitened: bool,
  normalize_decay: float,
  kl_coef: ScalarLike,
  kl_clip: ScalarLike,
) -> train_step.Stage:
  """Return the stage that makes advantages and returns of tokens.

  It has to come after `value_stage`, and with a coefficient after the stage of
  the reference.
  """

  def run(given: train_step.Given) -> train_step.Fields:
    params, batch = given.params, given.batch
    mask, fields = batch.loss_mask, batch.fields
    rewards = fields[episodes.REWARDS]
    if kl_coef != 0:
      rewards = rewards + gae.kl_rewards(
        batch.behavior_logprobs,
        fields[objectives.REFERENCE],
        mask,
        coef=kl_coef,
        clip=kl_clip,
      )
    advantages = gae.generalized_advantages(
      rewards,
      fields[VALUES],
      jnp.where(fields[episodes.CUT_OFF] > 0, fields[VALUES_AFTER], 0),
      mask,
      batch.segment_ids,
      gamma=gamma,
      gae_lambda=gae_lambda,
    )
    returns = jnp.where(mask, advantages + fields[VALUES], 0)
    before = params[train_state.CRITIC][train_state.RETURN_STATISTICS]
    after = _with_returns(before, returns, batch, normalize_decay)
    return {
      "advantages": gae.whitened(advantages, mask)
      if is_whitened
      else advantages,
      RETURNS: returns,
      # The predictions are those of the critic; only their unit changes.
      NORMALIZED_VALUES: value_functions.normalized(fields[VALUES], before),
      NORMALIZED_RETURNS: value_functions.normalized(returns, after),
    }

  return train_step.Stage(name="advantages", fields=run)


def _with_returns(
  statistics: value_functions.Statistics,
  returns: Float[Array, "M K B T"],
  batch: packing.PackedBatch,
  decay: float,
) -> value_functions.Statistics:
  """Return the statistics with the returns of a batch, if they are kept."""
  if not decay:
    return statistics
  return value_functions.updated_statistics(
    statistics, returns, batch.loss_mask, decay=decay
  )


def with_value_loss(
  loss: objectives.Loss, *, coef: ScalarLike, clip: ScalarLike
) -> objectives.Loss:
  r"""Return a loss with that of the critic.

  L + coef mean(L_value)

  The mean is over the loss tokens of the minibatch, whatever the aggregation of
  the policy's loss.
  """

  def both(
    micro: objectives.Microbatch,
  ) -> tuple[Float[Array, ""], objectives.Sums]:
    value, sums = loss(micro)
    assert micro.values is not None
    batch, mask = micro.batch, micro.batch.loss_mask
    values, returns = batch.fields[VALUES], batch.fields[RETURNS]
    of_tokens, is_clipped = value_functions.value_loss(
      micro.values,
      batch.fields[NORMALIZED_VALUES],
      batch.fields[NORMALIZED_RETURNS],
      mask,
      clip=clip,
    )
    count = losses.at_least_one(micro.totals["num_loss_tokens"])
    error = returns - values
    return value + coef * of_tokens.sum() / count, {
      **sums,
      "value_loss_sum": of_tokens.sum(),
      "value_clip_count": is_clipped.sum(dtype=jnp.float32),
      "value_sum": divergences.masked_sum(values, mask),
      "return_sum": divergences.masked_sum(returns, mask),
      "return_square_sum": divergences.masked_sum(returns**2, mask),
      "value_error_sum": divergences.masked_sum(error, mask),
      "value_error_square_sum": divergences.masked_sum(error**2, mask),
    }

  return both


def update(
  critic: sections.CriticSection,
  forwards: Mapping[str, train_step.ForwardSettings],
  loss: objectives.Loss,
  diagnostic: objectives.Diagnostic,
  optimizers: train_state.Optimizers,
  state: train_state.TrainState,
  batch: packing.PackedBatch,
  policy_version: Int[Array, ""],
  *,
  num_epochs: int = 1,
) -> tuple[train_state.TrainState, train_step.Metrics]:
  """Do what `train_step.update` does, with a critic.

  The statistics of the returns get those of the batch. During the warm-up the
  policy and its optimizer's state stay as they are, bit for bit.

  Args:
    batch: with the fields of `value_stage` and `gae_stage`.
    num_epochs: as in `train_step.update`. The statistics get the returns of the
      batch once.
  """
  own = state.models[train_state.CRITIC]
  statistics = _with_returns(
    own.frozen[train_state.RETURN_STATISTICS],
    batch.fields[RETURNS],
    batch,
    critic.normalize_decay,
  )
  own = dataclasses.replace(
    own, frozen={train_state.RETURN_STATISTICS: statistics}
  )
  forward = forwards[train_state.CRITIC].in_data_parallel()

  def predictions(
    params: transformer.Params,
    hidden: Float[Array, "B T D"],
    micro: packing.PackedBatch,
  ) -> Float[Array, "B T"]:
    after = _after_tokens(critic.trunk, forward, params, hidden, micro)
    return value_functions.before_tokens(after)

  return train_step.update(
    forwards[train_state.POLICY],
    loss,
    diagnostic,
    optimizers,
    train_state.TrainState(models={**state.models, train_state.CRITIC: own}),
    batch,
    policy_version,
    value_function=predictions,
    learns={train_state.POLICY: policy_version >= critic.warmup_steps},
    num_epochs=num_epochs,
  )
