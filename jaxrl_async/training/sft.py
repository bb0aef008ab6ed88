"""Supervised training on packed examples, one update for each step.

`warm_start` is the first stage of a run, and begins when the first examples are
packed. `run.fine_tune` packs all of them first, and has checkpoints and a
validation loss. `example_rows` has the rows and their order.
"""

from collections.abc import (
  Callable,
  Iterator,
  Mapping,
)
import dataclasses
import functools
import itertools

import jax
from jax import numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float
import numpy as np

from jaxrl_async.algorithms import losses
from jaxrl_async.config import sections
from jaxrl_async.devices import mesh as mesh_lib
from jaxrl_async.models import transformer
from jaxrl_async.planning import aot
from jaxrl_async.processes import supervisor as supervisor_lib
from jaxrl_async.training import example_rows
from jaxrl_async.training import objectives
from jaxrl_async.training import packing
from jaxrl_async.training import row_passes
from jaxrl_async.training import train_state
from jaxrl_async.training import train_step


class WarmStartError(supervisor_lib.RunError):
  """Too many updates in a row had a loss or gradient that is not finite."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Objective:
  """What supervised training minimises: a mean, whose terms it counts.

  Attributes:
    sums: the sums of a microbatch over these terms, by name. "loss" is
      minimised, and the others are measured beside it.
    count: the number of terms, from `objectives.minibatch_totals`.
    measured: the names of the other sums.
  """

  sums: Callable[[objectives.Microbatch], objectives.Sums]
  count: Callable[[Mapping[str, Float[Array, ""]]], Float[Array, ""]]
  measured: tuple[str, ...] = ()

  def loss(
    self, micro: objectives.Microbatch
  ) -> tuple[Float[Array, ""], objectives.Sums]:
    """Return a microbatch's share of the mean, as an `objectives.Loss`."""
    sums = dict(self.sums(micro))
    return sums.pop("loss") / jnp.maximum(self.count(micro.totals), 1), sums


def _cross_entropy(micro: objectives.Microbatch) -> objectives.Sums:
  loss = losses.next_token_loss(
    micro.logprobs, micro.batch.loss_mask, num_loss_tokens=1
  )
  return {"loss": loss}


# The mean cross-entropy of the loss tokens, in nats.
NEXT_TOKEN = Objective(
  sums=_cross_entropy, count=lambda totals: totals["num_loss_tokens"]
)


class SupervisedTrainer:
  """The train state of supervised training, and the programs that change it.

  `use` gives it rows, and `start` or `restore` a state; then it can make steps.

  Threads: belongs to the main thread.

  Attributes:
    num_steps_done: steps that were made, including skipped updates.
  """

  state: train_state.TrainState  # unset before `start` or `restore`

  def __init__(
    self,
    section: sections.WarmStartSection | sections.PreferenceSection,
    *,
    objective: Objective = NEXT_TOKEN,
    mesh: Mesh,
    rules: sections.ShardingRules = mesh_lib.TRAIN_RULES,
    policy: train_state.ModelSettings,
    forward: train_step.ForwardSettings,
    rows_per_microbatch: int,
    max_bad_updates: int,
    seed: int,
  ):
    """Set up the programs without allocating or compiling anything."""
    layout = mesh_lib.Layout(mesh=mesh, rules=rules)
    self._section = section
    self._rows: packing.PackedBatch | None = None
    self._objective = objective
    self._max_bad_updates = max_bad_updates
    self._seed = seed
    self._models = {train_state.POLICY: policy}
    self._forward = dataclasses.replace(forward, layout=layout)
    self._optimizers = train_step.make_optimizers(
      self._models, total_steps=section.num_steps, decay=section.decay
    )
    # Jitted, because a schedule of Optax makes a dozen small calls.
    self._schedule = jax.jit(
      train_step.learning_rate_schedule(
        section.optimizer, total_steps=section.num_steps, decay=section.decay
      )
    )
    self._sharding = train_state.shardings(
      mesh, rules, self._models, self._optimizers
    )
    self._passes = row_passes.RowPasses(
      mesh,
      rules,
      rows_per_microbatch=rows_per_microbatch,
      rows_per_batch=section.rows_per_batch,
    )
    replicated = mesh_lib.replicated(mesh)
    self._update = jax.jit(
      functools.partial(
        train_step.update,
        self._forward,
        objective.loss,
        objectives.no_diagnostic,
        self._optimizers,
      ),
      donate_argnums=0,
      out_shardings=(self._sharding, replicated),
    )
    self._sums = jax.jit(
      functools.partial(_sums, self._forward, objective),
      out_shardings=replicated,
    )
    self._logprob_sums = jax.jit(
      functools.partial(_logprob_sums, self._forward), out_shardings=replicated
    )
    self._go_to(0, 0)

  def start(self, params: transformer.Params) -> None:
    """Start with these parameters.

    Args:
      params: all parameters of the policy, on the training slice. The first
        step donates their memory, so the caller must not use them afterwards.
    """
    state = train_state.start(
      self._models[train_state.POLICY],
      self._optimizers[train_state.POLICY],
      params,
      self._sharding.policy,
    )
    self.state = train_state.TrainState(models={train_state.POLICY: state})
    self._go_to(0, 0)

  def abstract_state(self) -> train_state.TrainState:
    """Return the shapes and shardings of the state, for a restore."""
    shapes = train_state.shapes(self._models, self._optimizers)
    return aot.placed(shapes, self._sharding)

  def position(self) -> dict[str, int]:
    """Return what a checkpoint stores beside the state."""
    return {"step": self.num_steps_done, "bad_updates": self._bad_updates}

  def restore(
    self, state: train_state.TrainState, position: Mapping[str, int]
  ) -> None:
    """Continue with the same updates from a stored state and `position`."""
    self.state = state
    self._go_to(position["step"], position["bad_updates"])

  def step(self) -> dict[str, float]:
    """Make the next step, on rows of `use`, and return its metrics.

    Returns:
      Those of `update`, and "epoch", the passes over the rows after the step.
    """
    assert self._rows is not None
    chosen = next(self._order)
    metrics = self.update(jax.tree.map(lambda x: x[chosen], self._rows))
    rows_seen = self.num_steps_done * self._section.rows_per_batch
    return {**metrics, "epoch": rows_seen / len(self._rows.tokens)}

  def update(self, batch: packing.PackedBatch) -> dict[str, float]:
    """Make a step on these rows and return its metrics.

    Returns:
      "loss" and what the objective measures beside it are means over the rows
      before the update. The others are "grad_norm" and "learning_rate".

    Raises:
      WarmStartError: `max_bad_updates` updates in a row had a loss or gradient
        that is not finite.
    """
    self.state, metrics = self._update(
      self.state, self._passes.on_device(batch), np.int32(0)
    )
    learning_rate = float(self._schedule(self.num_steps_done))
    self.num_steps_done += 1
    is_bad = bool(metrics["bad_updates"][0])
    self._bad_updates = self._bad_updates + 1 if is_bad else 0
    if self._bad_updates >= self._max_bad_updates:
      raise WarmStartError(
        f"training, step {self.num_steps_done}: {self._bad_updates} updates"
        " in a row had a loss or gradient that is not finite"
        " (train.max_bad_updates)"
      )
    totals = {name: values[0] for name, values in metrics.items()}
    count = max(float(self._objective.count(totals)), 1.0)
    return {
      "loss": float(metrics["loss"][0]),
      **{
        name: float(metrics[name][0]) / count
        for name in self._objective.measured
      },
      "grad_norm": float(metrics["grad_norm"][0]),
      "learning_rate": learning_rate,
    }

  def measure(self, rows: packing.PackedBatch) -> dict[str, float]:
    """Return the loss of other rows, and what is measured beside it."""
    totals: dict[str, float] = {}
    params = self.state.policy.params
    for sums in self._passes.each(self._sums, params, rows):
      for name, value in sums.items():
        totals[name] = totals.get(name, 0.0) + float(value)
    count = totals.pop("count")
    return {name: value / count for name, value in totals.items()}

  def logprob_sums(
    self, rows: packing.PackedBatch
  ) -> Float[np.ndarray, "rows T"]:
    """Return for each token the sum of the logprobs of its trajectory.

    The sum is over the loss tokens, under the parameters as they are now.
    """
    params = self.state.policy.params
    return self._passes.of_tokens(self._logprob_sums, params, rows)

  def use(self, rows: packing.PackedBatch) -> None:
    """Train on these rows.

    Args:
      rows: in host memory, packed by `example_rows`. If they replace others,
        they are the same with further fields.
    """
    assert self._rows is None or len(rows.tokens) == len(self._rows.tokens)
    self._rows = rows
    self._go_to(self.num_steps_done, self._bad_updates)

  def _go_to(self, step: int, bad_updates: int) -> None:
    self.num_steps_done = step
    self._bad_updates = bad_updates
    if self._rows is not None:
      order = example_rows.row_order(
        [len(self._rows.tokens)], self._section.rows_per_batch, self._seed
      )
      self._order = itertools.islice(order, step, None)


def _evaluated(
  forward: train_step.ForwardSettings,
  params: transformer.Params,
  batch: packing.PackedBatch,
) -> objectives.Microbatch:
  """Return all rows of a batch as one microbatch, without gradients."""
  values = None
  if forward.model.has_scalar_head:
    values = train_step.of_batch(
      lambda micro: train_step.token_scalars(forward, params, micro), batch
    )
    logprobs = jnp.zeros_like(values)
  else:
    logprobs = train_step.batch_logprobs(forward, params, batch)
  length = batch.tokens.shape[-1]
  logprobs, values, batch = jax.tree.map(
    lambda x: x.reshape(-1, length), (logprobs, values, batch)
  )
  return objectives.Microbatch(
    logprobs=logprobs,
    entropy=jnp.zeros_like(logprobs),
    values=values,
    batch=batch,
    totals=objectives.minibatch_totals(batch),
    policy_version=jnp.int32(0),
    minibatch=jnp.int32(0),
  )


def _sums(
  forward: train_step.ForwardSettings,
  objective: Objective,
  params: transformer.Params,
  batch: packing.PackedBatch,
) -> objectives.Sums:
  """Return the sums of an objective over a batch, and their "count"."""
  micro = _evaluated(forward, params, batch)
  return {**objective.sums(micro), "count": objective.count(micro.totals)}


def _logprob_sums(
  forward: train_step.ForwardSettings,
  params: transformer.Params,
  batch: packing.PackedBatch,
) -> Float[Array, "R T"]:
  """Return for each token the sum of the logprobs of its trajectory."""
  micro = _evaluated(forward, params, batch)
  return micro.segment_sum(micro.logprobs)


def warm_start(
  trainer: SupervisedTrainer,
  rows: Iterator[packing.PackedBatch],
  num_steps: int,
  on_step: Callable[[int, float], None] = lambda step, loss: None,
) -> transformer.Params:
  """Train for a number of steps, and return the parameters."""
  for step in range(num_steps):
    on_step(step + 1, trainer.update(next(rows))["loss"])
  return trainer.state.policy.params
