"""The train step: proximal logprobs, values, advantages, then the updates.

The equations and the optimizer step are those of language models: a frame is
what a token is there, and a row holds the frames of one environment.
"""

from collections.abc import Callable
import dataclasses
from typing import Any

import jax
from jax import numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray
import numpy as np
import optax

from jaxrl_async.algorithms import corrections
from jaxrl_async.algorithms import divergences
from jaxrl_async.algorithms import gae
from jaxrl_async.algorithms import losses
from jaxrl_async.algorithms import value_functions
from jaxrl_async.config import sections
from jaxrl_async.control import inference as inference_lib
from jaxrl_async.control import policies
from jaxrl_async.control import settings as settings_lib
from jaxrl_async.training import gradients as gradients_lib
from jaxrl_async.training import train_state
from jaxrl_async.training import train_step

State = train_state.TrainState
Metrics = gradients_lib.Metrics
# The arrays of a batch by name, [B, T, ...]: the fields of rows, and what
# `with_advantages` adds.
Rows = dict[str, Any]


def rows_of(segments: list[inference_lib.Segment]) -> Rows:
  """Return the fields of the rows of segments."""
  rows = np.concatenate([segment.row for segment in segments])
  names = rows.dtype.names or ()
  return {name: np.ascontiguousarray(rows[name]) for name in names}


def make_optimizer(
  config: settings_lib.ControlConfig,
) -> optax.GradientTransformation:
  """Return the optimizer of a run."""
  updates = config.ppo.num_epochs * config.ppo.num_minibatches
  schedule = train_step.learning_rate_schedule(
    config.optimizer,
    total_steps=config.num_steps * updates,
    decay=config.rate_decay,
  )
  return train_step.make_optimizer(config.optimizer, schedule)


def first_state(
  params: policies.Params, optimizer: optax.GradientTransformation
) -> State:
  """Return the train state before the first update.

  The critic predicts normalised returns. Their statistics are the part of the
  policy that no gradient changes.
  """
  policy = train_state.ModelState(
    trainable=params,
    frozen=dict.fromkeys(value_functions.STATISTICS, jnp.zeros(())),
    opt_state=optimizer.init(params),
  )
  return State(models={train_state.POLICY: policy})


def with_advantages(
  section: settings_lib.PpoSection,
  rows: Rows,
  logprobs: Float[Array, "B T"],
  predictions: Float[Array, "B T"],
  statistics: value_functions.Statistics,
) -> tuple[Rows, value_functions.Statistics, Float[Array, ""]]:
  """Return rows with what an update needs besides, and how good values were.

  Args:
    section: gamma, lambda, and how returns are normalised.
    rows: of the train step.
    logprobs: of its actions, under the policy before the step.
    predictions: of its observations, by the critic before the step.
    statistics: of the returns before the step.

  Returns:
    The rows, the statistics with the returns of the step, and the share of the
    returns' variance that the critic explained.
  """
  mask = rows["loss_mask"]
  values = value_functions.denormalized(predictions, statistics)
  # The value after an action is that of the next column's observation.
  values_after = rows["cut_off"] * jnp.roll(values, -1, axis=-1)
  advantages = gae.generalized_advantages(
    rows["rewards"],
    values,
    values_after,
    mask,
    rows["episodes"],
    gamma=section.gamma,
    gae_lambda=section.gae_lambda,
  )
  returns = jnp.where(mask, advantages + values, 0)
  after = statistics
  if section.normalize_decay:
    after = value_functions.updated_statistics(
      statistics, returns, mask, decay=section.normalize_decay
    )
  weights, _ = corrections.behavior_weights(
    logprobs,
    rows["behavior_logprobs"],
    mask,
    level=sections.BehaviorWeightLevel.TOKEN,
    floor=0.0,
    cap=section.behavior_weight_cap,
    cap_mode=sections.BehaviorWeightCapMode.TRUNCATE,
    sequence_sum=lambda x: x,  # unused: the weights are of single frames
  )
  unexplained = _variance(advantages, mask) / _variance(returns, mask)
  found = {
    "advantages": gae.whitened(advantages, mask),
    "proximal_logprobs": logprobs,
    "weights": weights,
    "predictions": predictions,
    "targets": value_functions.normalized(returns, after),
  }
  return {**rows, **found}, after, 1 - unexplained


def _mean(x: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> Array:
  return divergences.masked_sum(x, mask) / losses.at_least_one(mask.sum())


def _variance(x: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> Array:
  return jnp.maximum(_mean(x**2, mask) - _mean(x, mask) ** 2, 1e-8)


def make_loss(
  network: policies.Network, section: settings_lib.PpoSection
) -> Callable[[policies.Params, Rows], tuple[Float[Array, ""], Metrics]]:
  """Return decoupled PPO with the critic's loss and a bonus for entropy.

  L = mean(-w O + value_coef L_value - entropy_coef H)
  """

  def loss(params: policies.Params, frames: Rows) -> tuple[Array, Metrics]:
    logprobs, entropy, values = evaluated(network, params, frames)
    mask, centre = frames["loss_mask"], frames["proximal_logprobs"]
    objective, is_clipped = losses.ppo_objective(
      logprobs,
      centre,
      frames["advantages"],
      mask,
      clip_low=section.clip,
      clip_high=section.clip,
    )
    value_loss, _ = value_functions.value_loss(
      values,
      frames["predictions"],
      frames["targets"],
      mask,
      clip=section.value_clip,
    )
    means = {
      "objective": _mean(frames["weights"] * objective, mask),
      "value_loss": _mean(value_loss, mask),
      "entropy": _mean(entropy, mask),
      "clip_frac": _mean(is_clipped.astype(jnp.float32), mask),
      "approx_kl": _mean(divergences.k3(centre, logprobs), mask),
      "behavior_weight": _mean(frames["weights"], mask),
    }
    total = section.value_coef * means["value_loss"] - means.pop("objective")
    return total - section.entropy_coef * means["entropy"], means

  return loss


def evaluated(
  network: policies.Network, params: policies.Params, rows: Rows
) -> tuple[Float[Array, "B T"], Float[Array, "B T"], Float[Array, "B T"]]:
  """Return logprobs and entropies of actions, and predictions of the critic."""
  shape = rows["loss_mask"].shape
  observations, actions = (
    rows[name].reshape(-1, *rows[name].shape[2:])
    for name in ("observations", "actions")
  )
  outputs = network.outputs(params, observations)
  found = *network.logprobs(outputs, actions), outputs.values
  logprobs, entropy, values = (x.reshape(shape) for x in found)
  return logprobs, entropy, values


def make_train_step(
  network: policies.Network,
  section: settings_lib.PpoSection,
  optimizer: optax.GradientTransformation,
) -> Callable[[State, Rows, PRNGKeyArray], tuple[State, Metrics]]:
  """Return the compiled train step.

  It takes the train state, the rows of a batch and a key, and returns the state
  after the step and metrics.
  """
  gradient_fn = jax.value_and_grad(make_loss(network, section), has_aux=True)

  def update(state: State, frames: Rows) -> tuple[State, Metrics]:
    (value, means), gradients = gradient_fn(state.policy.trainable, frames)
    state, metrics = gradients_lib.apply(
      {train_state.POLICY: optimizer},
      state,
      {train_state.POLICY: gradients},
      value,
      has_loss=frames["loss_mask"].any(),
    )
    return state, {**metrics, **means}

  @jax.jit
  def run(state: State, rows: Rows, key: PRNGKeyArray) -> tuple[State, Metrics]:
    policy = state.policy
    logprobs, _, predictions = evaluated(network, policy.trainable, rows)
    rows, statistics, explained = with_advantages(
      section, rows, logprobs, predictions, policy.frozen
    )
    policy = dataclasses.replace(policy, frozen=statistics)
    state = State(models={train_state.POLICY: policy})
    # Each minibatch is one column of frames.
    frames = jax.tree.map(lambda x: x.reshape(-1, 1, *x.shape[2:]), rows)

    def epoch(state: State, key: PRNGKeyArray) -> tuple[State, Metrics]:
      order = jax.random.permutation(key, rows["loss_mask"].size)
      order = order.reshape(section.num_minibatches, -1)
      return jax.lax.scan(
        update, state, jax.tree.map(lambda x: x[order], frames)
      )

    keys = jax.random.split(key, section.num_epochs)
    state, metrics = jax.lax.scan(epoch, state, keys)
    bad = metrics["bad_updates"].sum()
    metrics = {name: x.mean() for name, x in metrics.items()}
    found = {"bad_updates": bad, "explained_variance": explained}
    return state, {**metrics, **found}

  return run
