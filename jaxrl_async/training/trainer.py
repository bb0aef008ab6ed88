"""The training side: groups in, a new policy version out.

`Trainer.prepare` turns groups into a batch on the device. It needs no weights,
so another thread does it ahead of time. `Trainer.step` runs the stages and the
updates on the batch, and waits for nothing but its device. What a step has
measured stays on the device until `step_metrics.Pending.metrics` fetches it.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import functools
import time
from typing import Any

import jax
from jax.sharding import Mesh
import numpy as np

from jaxrl_async import types
from jaxrl_async.algorithms import advantages as advantages_lib
from jaxrl_async.config import sections
from jaxrl_async.devices import mesh as mesh_lib
from jaxrl_async.models import transformer
from jaxrl_async.planning import aot
from jaxrl_async.planning import matmul_rate
from jaxrl_async.reporting import metrics as metrics_lib
from jaxrl_async.training import objectives
from jaxrl_async.training import packing
from jaxrl_async.training import step_metrics
from jaxrl_async.training import train_state
from jaxrl_async.training import train_step


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchSettings:
  """How groups become arrays."""

  tokens_per_row: int
  rows_per_microbatch: int
  num_minibatches: int
  min_microbatches: int
  advantage_scale: sections.AdvantageScale


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreparedBatch:
  """The groups of one train step, packed and on the device."""

  groups: list[types.RolloutGroup]
  placement: packing.Placement
  arrays: packing.PackedBatch


class Trainer:
  """Train state and the compiled programs that change it.

  Threads: belongs to the thread that trains, except for `prepare`, which reads
  nothing that changes and may run in another one.
  """

  state: train_state.TrainState  # there is none before `start` or a restore

  def __init__(
    self,
    *,
    mesh: Mesh,
    rules: sections.ShardingRules = mesh_lib.TRAIN_RULES,
    models: Mapping[str, train_state.ModelSettings],
    forward: train_step.ForwardSettings,
    loss: objectives.Loss,
    stages: Sequence[train_step.Stage],
    batch: BatchSettings,
    num_steps: int,
    decay: float,
    rollout_dtype: str,
    rollout_weights: sections.WeightFormat = sections.WeightFormat.FLOAT,
    busy: metrics_lib.BusyClock,
  ):
    """Prepares the programs; nothing is allocated or compiled yet.

    Args:
      mesh: of the training slice.
      rules: which mesh axes split which logical axes.
      models: what is held, by name. The policy is the one of that name
        (`train_state.POLICY`), and the only one that can be trained so far.
      forward: how the policy's logprobs are computed. Those of the other models
        are computed in the same way, with their own architecture.
      loss: what is minimised.
      stages: what is computed before the updates of a step, in this order.
      batch: how groups become arrays.
      num_steps: train steps of the run, the end of a decaying learning rate.
      decay: final learning rate over the peak.
      rollout_dtype: of what `published` returns.
      rollout_weights: whether its matrices are quantised.
      busy: told when the devices are at work.

    Raises:
      ValueError: the policy is missing or has nothing to train, or another
        model is to be trained.
    """
    _check_models(models)
    layout = mesh_lib.Layout(mesh=mesh, rules=rules)
    self._forwards = {
      name: dataclasses.replace(forward, layout=layout, model=settings.model)
      for name, settings in models.items()
    }
    self.forward = self._forwards[train_state.POLICY]
    self.batch_settings = batch
    self._busy = busy
    self._models = models
    total_steps = num_steps * batch.num_minibatches
    self._schedule = train_step.learning_rate_schedule(
      _optimizer_of_policy(models), total_steps=total_steps, decay=decay
    )
    self._optimizers = train_step.make_optimizers(
      models, total_steps=total_steps, decay=decay
    )
    self._params_sharding = {
      name: train_state.params_sharding(mesh, rules, settings.model)
      for name, settings in models.items()
    }
    self._state_sharding = train_state.shardings(
      mesh, rules, models, self._optimizers
    )
    self._replicated = replicated = mesh_lib.replicated(mesh)
    self._peak_flops = matmul_rate.peak_flops(mesh, forward.compute_dtype)
    self._batch_sharding = mesh_lib.sharding(
      mesh, rules, None, None, "batch", "tokens"
    )
    rows = batch.rows_per_microbatch
    shape = 1, 1, rows, batch.tokens_per_row
    rows_per_shard = self._batch_sharding.shard_shape(shape)[2]
    self._num_shards = rows // rows_per_shard
    self._stages = list(stages)
    # Evaluation asks for logprobs, whatever the stages are.
    self._stage_programs = {
      stage.name: jax.jit(
        functools.partial(stage.run, self._forwards),
        out_shardings=self._batch_sharding,
      )
      for stage in [train_step.PROXIMAL_STAGE, *self._stages]
    }
    self._update = jax.jit(
      functools.partial(
        train_step.update,
        self.forward,
        loss,
        objectives.rollout_diagnostic,
        self._optimizers,
      ),
      donate_argnums=0,
      out_shardings=(self._state_sharding, replicated),
    )
    self._publish = train_step.make_publish(
      self.forward.model, layout, dtype=rollout_dtype, weights=rollout_weights
    )

  def start(self, params: Mapping[str, transformer.Params]) -> None:
    """Takes parameters as version 0, of each model by its name."""
    models = {}
    for name, settings in self._models.items():
      # A copy: the first update donates it, and the caller may go on to use
      # what was passed in.
      own = jax.device_put(
        params[name], self._params_sharding[name], may_alias=False
      )
      models[name] = train_state.start(
        settings,
        self._optimizers.get(name),
        own,
        self._state_sharding.models[name],
      )
    self.state = train_state.TrainState(models=models)

  def abstract_state(self) -> train_state.TrainState:
    """Shapes and shardings of the state, to restore into."""
    shapes = train_state.shapes(self._models, self._optimizers)
    return aot.placed(shapes, self._state_sharding)

  def published_shapes(self) -> transformer.Params:
    """Shapes, types and shardings of `published`."""
    return self._publish.eval_shape(self.abstract_state().policy.params)

  def programs(self) -> list[aot.Program]:
    """What a train step runs, on the largest batch that a run expects."""
    state = self.abstract_state()
    trajectory = types.Trajectory(
      member=0,
      tokens=np.zeros(1, np.int32),
      loss_mask=np.zeros(1, np.bool_),
      behavior_logprobs=np.zeros(1, np.float32),
      policy_versions=np.zeros(1, np.int32),
    )
    packed, _ = self._pack(
      [packing.without_prompt([trajectory])], np.zeros(1, np.float32)
    )
    max_trips = self.batch_settings.min_microbatches
    params = state.params
    opt_states = {name: x.opt_state for name, x in state.models.items()}
    others = {k: v for k, v in params.items() if k != train_state.POLICY}
    batch = trained = self._abstract(packed)
    # The next batch is there, and what was published may not be taken yet.
    beside = batch, self.published_shapes()
    programs = []
    for name, program in self._stage_programs.items():
      arguments = (params, trained)
      made = self._abstract(jax.eval_shape(program, *arguments))
      programs.append(
        aot.Program(
          name=name,
          function=program,
          arguments=arguments,
          resident=(opt_states, beside),
          max_trips=max_trips,
        )
      )
      if name in [stage.name for stage in self._stages]:
        trained = trained.with_arrays(made)
    return [
      *programs,
      aot.Program(
        name="update",
        function=self._update,
        arguments=(state, trained, np.int32(0)),
        resident=beside,
        max_trips=max_trips,
      ),
      aot.Program(
        name="publish",
        function=self._publish,
        arguments=(params[train_state.POLICY],),
        resident=(opt_states, others),
      ),
    ]

  def _abstract(self, arrays: Any) -> Any:
    """Shapes of a batch's arrays, split as batches are."""
    return jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(
        x.shape, x.dtype, sharding=self._batch_sharding
      ),
      arrays,
    )

  def published(self) -> transformer.Params:
    """The current weights as engines want them, in buffers of their own."""
    with self._busy.record("publish"):
      return jax.block_until_ready(self._publish(self.state.policy.params))

  def prepare(self, groups: list[types.RolloutGroup]) -> PreparedBatch:
    """Advantages, packing and the transfer to the device."""
    rewards = np.array([t.score for g in groups for t in g.trajectories])
    group_ids = np.repeat(
      np.arange(len(groups)), [len(g.trajectories) for g in groups]
    )
    packed, placement = self._pack(
      groups,
      advantages_lib.group_relative_advantages(
        rewards.astype(np.float64),
        group_ids,
        len(groups),
        scale=self.batch_settings.advantage_scale,
      ),
      packing.reward_fields([t for g in groups for t in g.trajectories]),
    )
    arrays = mesh_lib.put(packed, self._batch_sharding)
    return PreparedBatch(
      groups=groups,
      placement=placement,
      arrays=jax.block_until_ready(arrays),
    )

  def _pack(
    self,
    groups: list[types.RolloutGroup],
    advantages: np.ndarray,
    fields: Mapping[str, list[np.ndarray]] | None = None,
  ) -> tuple[packing.PackedBatch, packing.Placement]:
    settings = self.batch_settings
    return packing.pack(
      groups,
      advantages,
      tokens_per_row=settings.tokens_per_row,
      rows_per_microbatch=settings.rows_per_microbatch,
      num_minibatches=settings.num_minibatches,
      min_microbatches=settings.min_microbatches,
      num_shards=self._num_shards,
      fields=fields,
    )

  def step(self, step: int, batch: PreparedBatch) -> step_metrics.Pending:
    """Trains on one batch.

    Args:
      step: completed train steps, which is the version of the weights.
      batch: of `prepare`.
    """
    times, arrays = {"proximal_s": 0.0}, batch.arrays
    for stage in self._stages:
      start_s = time.perf_counter()
      with self._busy.record(stage.name):
        made = self._stage_programs[stage.name](self.state.params, arrays)
        arrays = arrays.with_arrays(jax.block_until_ready(made))
      times[f"{stage.name}_s"] = time.perf_counter() - start_s
    start_s = time.perf_counter()
    with self._busy.record("update"):
      self.state, sums = self._update(self.state, arrays, np.int32(step))
      jax.block_until_ready(sums)
    times["update_s"] = time.perf_counter() - start_s
    minibatches = self.batch_settings.num_minibatches
    return step_metrics.Pending(
      step=step,
      groups=batch.groups,
      placement=batch.placement,
      sums=sums,
      learning_rate=functools.partial(self._schedule, step * minibatches),
      times_s=times,
      programs_s=sum(times.values()),
      model=self.forward.model,
      peak_flops=self._peak_flops,
    )

  def logprobs(
    self, trajectories: Sequence[types.Trajectory]
  ) -> list[np.ndarray]:
    """Each trajectory's logprobs under the current weights, [T] each."""
    packed, placement = self._pack(
      [packing.without_prompt(trajectories)],
      np.zeros((len(trajectories),), np.float32),
    )
    batch = mesh_lib.put(packed, self._batch_sharding)
    program = self._stage_programs[train_step.PROXIMAL_STAGE.name]
    logprobs = program(self.state.params, batch)[objectives.PROXIMAL]
    # Of several processes none could read another's part.
    whole = jax.device_put(logprobs, self._replicated)
    return packing.unpack(np.asarray(whole), placement)


def _optimizer_of_policy(
  models: Mapping[str, train_state.ModelSettings],
) -> sections.OptimizerSection:
  policy = models.get(train_state.POLICY)
  if policy is None or policy.optimizer is None:
    raise ValueError("the policy has to be one of the models, and be trained")
  return policy.optimizer


def _check_models(models: Mapping[str, train_state.ModelSettings]) -> None:
  """Refuses models that no program here could train.

  Raises:
    ValueError: says which.
  """
  _optimizer_of_policy(models)
  policy = models[train_state.POLICY]
  trainable, _ = policy.split(
    transformer.logical_axes(policy.model, is_stacked=True)
  )
  if not trainable:
    raise ValueError("policy: no parameter is trainable")
  for name, settings in models.items():
    if name != train_state.POLICY and settings.optimizer is not None:
      raise ValueError(f"{name}: only the policy can be trained")
