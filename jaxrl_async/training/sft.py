"""Supervised training on packed examples, one update for each step.

All examples are packed into rows once. Each step trains on the next rows of a
random order, which is drawn anew for each pass. `warm_start` is the first stage
of a run. `run.fine_tune` trains in the same way, with checkpoints and a
validation loss.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
import dataclasses
import functools
import itertools

import jax
from jax import numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int
import numpy as np

from jaxrl_async import types
from jaxrl_async.config import sections
from jaxrl_async.coordination import supervisor as supervisor_lib
from jaxrl_async.data import worked_examples as worked_examples_lib
from jaxrl_async.devices import mesh as mesh_lib
from jaxrl_async.models import transformer
from jaxrl_async.planning import aot
from jaxrl_async.training import objectives
from jaxrl_async.training import packing
from jaxrl_async.training import train_state
from jaxrl_async.training import train_step


class WarmStartError(supervisor_lib.RunError):
  """Too many updates in a row had a loss or gradient that is not finite."""


def pack_examples(
  examples: Iterable[worked_examples_lib.WorkedExample], *, tokens_per_row: int
) -> packing.PackedBatch:
  """Return the examples packed into rows, as [R, T] arrays."""
  trajectories = []
  for member, example in enumerate(examples):
    length = len(example.tokens)
    trajectories.append(
      types.Trajectory(
        member=member,
        tokens=example.tokens,
        loss_mask=example.loss_mask,
        behavior_logprobs=np.zeros((length,), np.float32),
        policy_versions=np.full((length,), -1, np.int32),
      )
    )
  packed, _ = packing.pack(
    [packing.without_prompt(trajectories)],
    np.zeros((len(trajectories),), np.float32),
    tokens_per_row=tokens_per_row,
    rows_per_microbatch=1,
    num_minibatches=1,
  )
  rows = jax.tree.map(lambda x: x.reshape(-1, tokens_per_row), packed)
  used = rows.segment_ids.any(axis=1)
  return jax.tree.map(lambda x: x[used], rows)


def row_order(
  num_rows: int, rows_per_batch: int, seed: int
) -> Iterator[Int[np.ndarray, "rows_per_batch"]]:
  """Yield the rows of each step, endlessly; every pass has its own order.

  A batch may hold the end of one pass and the beginning of the next.
  """
  rng = np.random.default_rng(seed)
  order = np.zeros((0,), np.int64)
  while True:
    while len(order) < rows_per_batch:
      order = np.append(order, rng.permutation(num_rows))
    chosen, order = np.split(order, [rows_per_batch])
    yield chosen


class SupervisedTrainer:
  """The train state of supervised training, and the programs that change it.

  Threads: belongs to the main thread.

  Attributes:
    num_steps_done: steps that were made, including skipped updates.
  """

  state: train_state.TrainState  # unset before `start` or `restore`

  def __init__(
    self,
    section: sections.WarmStartSection,
    rows: packing.PackedBatch,
    *,
    mesh: Mesh,
    rules: sections.ShardingRules = mesh_lib.TRAIN_RULES,
    policy: train_state.ModelSettings,
    forward: train_step.ForwardSettings,
    rows_per_microbatch: int,
    max_bad_updates: int,
    seed: int,
  ):
    """Set up the programs without allocating or compiling anything.

    Args:
      section: number of steps, rows per step, and the learning rate's decay.
      rows: the result of `pack_examples`, in host memory.
      mesh: the mesh of the training slice.
      rules: which mesh axes split which logical axes.
      policy: what is trained, and with which optimizer.
      forward: settings of the forward pass.
      rows_per_microbatch: rows of one forward and backward pass. It must divide
        the rows of a step.
      max_bad_updates: number of skipped updates in a row that is an error.
      seed: seed of the order of rows.
    """
    layout = mesh_lib.Layout(mesh=mesh, rules=rules)
    self._section = section
    self._rows = rows
    self._rows_per_microbatch = rows_per_microbatch
    self._max_bad_updates = max_bad_updates
    self._seed = seed
    self._models = {train_state.POLICY: policy}
    self._forward = dataclasses.replace(forward, layout=layout)
    self._optimizers = train_step.make_optimizers(
      self._models, total_steps=section.num_steps, decay=section.decay
    )
    self._schedule = train_step.learning_rate_schedule(
      section.optimizer, total_steps=section.num_steps, decay=section.decay
    )
    self._sharding = train_state.shardings(
      mesh, rules, self._models, self._optimizers
    )
    self._batch_sharding = mesh_lib.sharding(
      mesh, rules, None, None, "batch", "tokens"
    )
    replicated = mesh_lib.replicated(mesh)
    self._update = jax.jit(
      functools.partial(
        train_step.update,
        self._forward,
        objectives.next_token,
        objectives.no_diagnostic,
        self._optimizers,
      ),
      donate_argnums=0,
      out_shardings=(self._sharding, replicated),
    )
    self._sums = jax.jit(
      functools.partial(_loss_sums, self._forward), out_shardings=replicated
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
    """Make the next step and return its metrics.

    Returns:
      "loss" is the mean cross-entropy of the step's loss tokens in nats, before
      the update. The others are "grad_norm", "learning_rate", and "epoch", the
      passes over the rows after the step.

    Raises:
      WarmStartError: `max_bad_updates` updates in a row had a loss or gradient
        that is not finite.
    """
    chosen = next(self._order)
    batch = jax.tree.map(lambda x: x[chosen], self._rows)
    self.state, metrics = self._update(
      self.state, self._on_device(batch), np.int32(0)
    )
    learning_rate = float(self._schedule(self.num_steps_done))
    self.num_steps_done += 1
    is_bad = bool(metrics["bad_updates"][0])
    self._bad_updates = self._bad_updates + 1 if is_bad else 0
    if self._bad_updates >= self._max_bad_updates:
      raise WarmStartError(
        f"warm start, step {self.num_steps_done}: {self._bad_updates} updates"
        " in a row had a loss or gradient that is not finite"
        " (train.max_bad_updates)"
      )
    rows_seen = self.num_steps_done * self._section.rows_per_batch
    return {
      "loss": float(metrics["loss"][0]),
      "grad_norm": float(metrics["grad_norm"][0]),
      "learning_rate": learning_rate,
      "epoch": rows_seen / len(self._rows.tokens),
    }

  def loss_of(self, rows: packing.PackedBatch) -> float:
    """Return the mean cross-entropy of the loss tokens of other rows, in nats.

    Args:
      rows: result of `pack_examples`, with rows of the same length.
    """
    per_call = self._section.rows_per_batch
    loss_sum = num_tokens = 0.0
    for first in range(0, len(rows.tokens), per_call):
      # All calls have one shape. Rows of zeros are padding.
      batch = jax.tree.map(
        lambda x, first=first: np.pad(
          x[first : first + per_call],
          ((0, max(0, first + per_call - len(x))), (0, 0)),
        ),
        rows,
      )
      sums = self._sums(self.state.policy.params, self._on_device(batch))
      loss_sum += float(sums["loss"])
      num_tokens += float(sums["tokens"])
    return loss_sum / num_tokens

  def _on_device(self, rows: packing.PackedBatch) -> packing.PackedBatch:
    """Move [R, T] rows to the device as one minibatch of microbatches."""
    shape = (1, -1, self._rows_per_microbatch, rows.tokens.shape[1])
    batch = jax.tree.map(lambda x: x.reshape(shape), rows)
    return mesh_lib.put(batch, self._batch_sharding)

  def _go_to(self, step: int, bad_updates: int) -> None:
    self.num_steps_done = step
    self._bad_updates = bad_updates
    order = row_order(
      len(self._rows.tokens), self._section.rows_per_batch, self._seed
    )
    self._order = itertools.islice(order, step, None)


def _loss_sums(
  forward: train_step.ForwardSettings,
  params: transformer.Params,
  batch: packing.PackedBatch,
) -> dict[str, Float[Array, ""]]:
  """Return the summed cross-entropy of the loss tokens, and their number."""
  logprobs = train_step.batch_logprobs(forward, params, batch)
  mask = batch.loss_mask
  return {
    "loss": -jnp.sum(jnp.where(mask, logprobs, 0.0)),
    "tokens": jnp.sum(mask, dtype=jnp.float32),
  }


def warm_start(
  trainer: SupervisedTrainer,
  num_steps: int,
  on_step: Callable[[int, float], None] = lambda step, loss: None,
) -> transformer.Params:
  """Train for a number of steps, and return the parameters.

  Args:
    trainer: it has been started.
    num_steps: number of steps.
    on_step: called with the step and its loss after each step.

  Raises:
    WarmStartError: `max_bad_updates` updates in a row had a loss or gradient
      that is not finite.
  """
  for step in range(num_steps):
    on_step(step + 1, trainer.step()["loss"])
  return trainer.state.policy.params
