"""The warm start: supervised training on worked solutions.

All examples are packed into rows once. Each step trains on the next rows of a
random order, which is drawn anew for each pass.
"""

from collections.abc import Callable, Iterable
import dataclasses
import functools
from typing import Any

import jax
from jax.sharding import Mesh
import numpy as np

from jaxrl_async import types
from jaxrl_async.config import sections
from jaxrl_async.data import prompts
from jaxrl_async.devices import mesh as mesh_lib
from jaxrl_async.models import transformer
from jaxrl_async.training import objectives
from jaxrl_async.training import packing
from jaxrl_async.training import train_state
from jaxrl_async.training import train_step


class WarmStartError(RuntimeError):
  """Too many updates in a row had a loss or gradient that is not finite."""


def pack_examples(
  examples: Iterable[prompts.WorkedExample], *, tokens_per_row: int
) -> packing.PackedBatch:
  """Return the worked solutions packed into rows, as [R, T] arrays."""
  trajectories = []
  for member, example in enumerate(examples):
    p, c = len(example.prompt_tokens), len(example.completion_tokens)
    trajectories.append(
      types.Trajectory(
        member=member,
        tokens=np.concatenate(
          [example.prompt_tokens, example.completion_tokens]
        ),
        loss_mask=np.arange(p + c) >= p,
        behavior_logprobs=np.zeros((p + c,), np.float32),
        policy_versions=np.full((p + c,), -1, np.int32),
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


def warm_start(
  section: sections.WarmStartSection,
  rows: packing.PackedBatch | None,
  *,
  params: transformer.Params | None,
  mesh: Mesh,
  rules: sections.ShardingRules = mesh_lib.TRAIN_RULES,
  forward: train_step.ForwardSettings,
  rows_per_microbatch: int,
  max_bad_updates: int,
  seed: int,
  on_step: Callable[[int, float], None] = lambda step, loss: None,
) -> transformer.Params:
  """Train on the rows and return the parameters of policy version 0.

  Args:
    section: number of steps, rows per step, and optimizer.
    rows: the result of `pack_examples`. None if there are no steps.
    params: initial parameters. None draws them at random.
    mesh: the mesh of the training slice.
    rules: which mesh axes split which logical axes.
    forward: settings of the forward pass.
    rows_per_microbatch: rows of one forward and backward pass. It must divide
      the rows of a step.
    max_bad_updates: number of skipped updates in a row that is an error.
    seed: seed of the initialisation and of the order of rows.
    on_step: called with the step and its loss after each step.

  Raises:
    WarmStartError: `max_bad_updates` updates in a row had a loss or gradient
      that is not finite.
  """
  layout = mesh_lib.Layout(mesh=mesh, rules=rules)
  forward = dataclasses.replace(forward, layout=layout)
  state, update = _state_and_update(section, forward, layout, params, seed)
  batch_sharding = mesh_lib.sharding(mesh, rules, None, None, "batch", "tokens")
  rng = np.random.default_rng(seed)
  order = np.zeros((0,), np.int64)
  bad_updates = 0
  for step in range(section.num_steps):
    assert rows is not None
    while len(order) < section.rows_per_batch:
      order = np.append(order, rng.permutation(len(rows.tokens)))
    chosen, order = np.split(order, [section.rows_per_batch])
    shape = (1, -1, rows_per_microbatch, rows.tokens.shape[1])
    batch = jax.tree.map(
      lambda x, chosen=chosen, shape=shape: x[chosen].reshape(shape), rows
    )
    state, metrics = update(
      state, mesh_lib.put(batch, batch_sharding), np.int32(0)
    )
    on_step(step + 1, float(metrics["loss"][0]))
    bad_updates = bad_updates + 1 if metrics["bad_updates"][0] else 0
    if bad_updates >= max_bad_updates:
      raise WarmStartError(
        f"warm start, step {step + 1}: {bad_updates} updates in a row had a"
        " loss or gradient that is not finite (train.max_bad_updates)"
      )
  return state.policy.params


def _state_and_update(
  section: sections.WarmStartSection,
  forward: train_step.ForwardSettings,
  layout: mesh_lib.Layout,
  params: transformer.Params | None,
  seed: int,
) -> tuple[train_state.TrainState, Callable[..., Any]]:
  """Return the state before the first step, and the compiled update."""
  policy = train_state.ModelSettings(
    model=forward.model, optimizer=section.optimizer
  )
  models = {train_state.POLICY: policy}
  optimizers = train_step.make_optimizers(
    models, total_steps=section.num_steps, decay=section.decay
  )
  sharding = train_state.shardings(
    layout.mesh, layout.rules, models, optimizers
  )
  if params is None:
    init = jax.jit(
      functools.partial(transformer.init_params, forward.model),
      out_shardings=sharding.policy.params,
    )
    params = init(jax.random.key(seed))
  assert params is not None
  state = train_state.TrainState(
    models={
      train_state.POLICY: train_state.start(
        policy, optimizers[train_state.POLICY], params, sharding.policy
      )
    }
  )
  update = jax.jit(
    functools.partial(
      train_step.update,
      forward,
      objectives.next_token,
      objectives.no_diagnostic,
      optimizers,
    ),
    donate_argnums=0,
    out_shardings=(sharding, mesh_lib.replicated(layout.mesh)),
  )
  return state, update
