"""The trainer: makes a new policy version from a batch of groups.

`Trainer.prepare` turns groups into a batch on the device. It needs no weights,
so that another thread can do it ahead of time. `Trainer.step` runs the stages
and the updates on the batch and waits only for the device. The sums that a step
has measured stay on the device until `step_metrics.Pending.metrics` fetches
them.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import functools
import math
import time
from typing import Any

import jax
from jax.sharding import Mesh
import numpy as np

from jaxrl_async import types
from jaxrl_async.config import sections
from jaxrl_async.devices import mesh as mesh_lib
from jaxrl_async.models import lora as lora_lib
from jaxrl_async.models import transformer
from jaxrl_async.planning import aot
from jaxrl_async.planning import matmul_rate
from jaxrl_async.processes import world as world_lib
from jaxrl_async.reporting import metrics as metrics_lib
from jaxrl_async.training import batch_parts
from jaxrl_async.training import critic as critic_lib
from jaxrl_async.training import objectives
from jaxrl_async.training import packing
from jaxrl_async.training import publishing
from jaxrl_async.training import segments as segments_lib
from jaxrl_async.training import step_metrics
from jaxrl_async.training import train_state
from jaxrl_async.training import train_step


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreparedBatch:
  """The groups of one train step, packed and on the device."""

  groups: list[types.RolloutGroup]
  segments: segments_lib.Segments
  arrays: packing.PackedBatch


class Trainer:
  """The train state and the compiled programs that change it.

  With LoRA, the policy has a base that no step changes. It is published once,
  by `published_base`, and each version consists of the adapters.

  With several processes, each has a trainer. That of process 0 tells the others
  which program comes next; `run.follower` then calls the same method there.

  Attributes:
    has_base: whether the policy has such a base.

  Threads: all methods belong to the thread that trains, except `prepare`. That
  method reads nothing that changes and may run on another thread.
  """

  state: train_state.TrainState  # unset before `start` or a restore

  def __init__(
    self,
    *,
    mesh: Mesh,
    rules: sections.ShardingRules = mesh_lib.TRAIN_RULES,
    models: Mapping[str, train_state.ModelSettings],
    forward: train_step.ForwardSettings,
    loss: objectives.Loss,
    stages: Sequence[train_step.Stage],
    batch: packing.BatchSettings,
    critic: sections.CriticSection | None = None,
    reference_every: int = 0,
    reference_decay: float = 0.0,
    num_steps: int,
    decay: float,
    rollout_dtype: str,
    rollout_weights: sections.WeightFormat = sections.WeightFormat.FLOAT,
    busy: metrics_lib.BusyClock,
    world: world_lib.World | None = None,
  ):
    """Set up the programs without allocating or compiling anything.

    Args:
      models: the settings of each model of the train state, by name. The policy
        is `train_state.POLICY`. Only it and a critic, `train_state.CRITIC`,
        can be trained.
      forward: settings of the policy's forward pass. The other models use the
        same settings with their own architecture.
      batch: how groups are packed into arrays.
      reference_every: train steps between two moves of the reference; 0 leaves
        it where it is.
      reference_decay: as in `train_state.with_moved_reference`.
      num_steps: train steps of the run. A decaying learning rate ends there.
      world: the processes that train together; None is this one alone.
    """
    train_state.check_models(models)
    self.world = world or world_lib.alone()
    layout = mesh_lib.Layout(mesh=mesh, rules=rules)
    self._forwards = {
      name: dataclasses.replace(forward, layout=layout, model=settings.model)
      for name, settings in models.items()
    }
    self.forward = self._forwards[train_state.POLICY]
    self.batch_settings = batch
    self._busy = busy
    self._models = models
    self._num_updates = batch.num_minibatches * batch.num_epochs
    total_steps = num_steps * self._num_updates
    # The policy's optimizer does not count the updates of the critic's warm-up.
    self._waits = critic.warmup_steps * self._num_updates if critic else 0
    section = models[train_state.POLICY].optimizer
    assert section is not None
    self._schedule = train_step.learning_rate_schedule(
      section, total_steps=total_steps - self._waits, decay=decay
    )
    self._optimizers = {
      **train_step.make_optimizers(
        models, total_steps=total_steps, decay=decay
      ),
      train_state.POLICY: train_step.make_optimizer(section, self._schedule),
    }
    self._params_sharding = {
      name: mesh_lib.shardings(mesh, rules, settings.logical_axes())
      for name, settings in models.items()
    }
    self._state_sharding = train_state.shardings(
      mesh, rules, models, self._optimizers
    )
    self._replicated = mesh_lib.replicated(mesh)
    self._peak_flops = (
      matmul_rate.peak_flops(mesh, forward.compute_dtype)
      if self.world.leads
      else math.nan
    )
    self._batch_sharding = mesh_lib.sharding(
      mesh, rules, None, None, "batch", "tokens"
    )
    self._num_shards = _num_shards(batch, self._batch_sharding)
    self._stages = list(stages)
    # `logprobs` needs the proximal program whether or not it is a stage.
    self._stage_programs = {
      stage.name: jax.jit(
        functools.partial(stage.run, self._forwards),
        out_shardings=self._batch_sharding,
      )
      for stage in [train_step.PROXIMAL_STAGE, *self._stages]
    }
    self._reference_every = reference_every
    self._move_reference = jax.jit(
      functools.partial(
        train_state.with_moved_reference, decay=reference_decay
      ),
      donate_argnums=0,
      out_shardings=self._state_sharding,
    )
    self._make_update_programs(loss, critic)
    self._make_publish_programs(layout, rollout_dtype, rollout_weights)

  def _make_update_programs(
    self, loss: objectives.Loss, critic: sections.CriticSection | None
  ) -> None:
    """Set up the programs that change the train state."""
    update = (
      functools.partial(train_step.update, self.forward)
      if critic is None
      else functools.partial(critic_lib.update, critic, self._forwards)
    )
    update = functools.partial(
      update, num_epochs=self.batch_settings.num_epochs
    )
    self._update = jax.jit(
      functools.partial(
        update, loss, objectives.rollout_diagnostic, self._optimizers
      ),
      donate_argnums=0,
      out_shardings=(self._state_sharding, self._replicated),
    )

  def _make_publish_programs(
    self,
    layout: mesh_lib.Layout,
    dtype: str,
    weights: sections.WeightFormat,
  ) -> None:
    """Set up the programs that make weights for engines."""
    make_publish = functools.partial(
      publishing.make_publish,
      self.forward.model,
      layout,
      dtype=dtype,
      weights=weights,
    )
    self.has_base = self.forward.model.lora is not None
    if self.has_base:
      self._publish_base = make_publish(part=lora_lib.base)
      self._publish = make_publish(part=lora_lib.adapters)
    else:
      self._publish = make_publish()

  def start(self, params: Mapping[str, transformer.Params]) -> None:
    """Start with these parameters of each model, as policy version 0."""
    models = {}
    for name, settings in self._models.items():
      # The first update donates these buffers. They are a copy, because the
      # caller may still use the arrays that were passed in.
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
    """Return the shapes and shardings of the state, for a restore."""
    shapes = train_state.shapes(self._models, self._optimizers)
    return aot.placed(shapes, self._state_sharding)

  def published_shapes(self) -> transformer.Params:
    """Return the shapes, dtypes and shardings of `published`."""
    return self._publish.eval_shape(self._changing(self.abstract_state()))

  def base_shapes(self) -> transformer.Params | None:
    """Return those of `published_base`, or None without a base."""
    if not self.has_base:
      return None
    return self._publish_base.eval_shape(self.abstract_state().policy.frozen)

  def engine_shapes(self) -> transformer.Params:
    """Return the shapes of all weights that an engine has."""
    base, shapes = self.base_shapes(), self.published_shapes()
    return shapes if base is None else lora_lib.joined(base, shapes)

  def _changing(self, state: train_state.TrainState) -> transformer.Params:
    """Return the parameters of the policy that each version publishes."""
    policy = state.policy
    return policy.trainable if self.has_base else policy.params

  def programs(self) -> list[aot.Program]:
    """Return those of the largest expected batch, and that which publishes."""
    state = self.abstract_state()
    trajectory = types.Trajectory(
      member=0,
      tokens=np.zeros(1, np.int32),
      loss_mask=np.zeros(1, np.bool_),
      behavior_logprobs=np.zeros(1, np.float32),
      policy_versions=np.zeros(1, np.int32),
      reward=types.Reward(score=0.0),
    )
    segments = self.plan(
      [packing.without_prompt([trajectory])],
      np.zeros(1, np.float32),
      self.batch_settings.fields([trajectory]),
    )
    params = state.params
    opt_states = {name: x.opt_state for name, x in state.models.items()}
    batch = trained = batch_parts.abstract(segments, self._batch_sharding)
    # The next batch is on the device already, and the weights published last
    # may still be there, because no engine has adopted them yet.
    beside = batch, self.published_shapes()
    programs = []
    for name, program in self._stage_programs.items():
      arguments = params, trained, np.int32(0)
      made = self._abstract(jax.eval_shape(program, *arguments))
      programs.append(
        aot.Program(
          name=name,
          function=program,
          arguments=arguments,
          resident=(opt_states, beside),
        )
      )
      if name in [stage.name for stage in self._stages]:
        trained = trained.with_arrays(made)
    if self._reference_every:
      programs.append(
        aot.Program(
          name="move_reference",
          function=self._move_reference,
          arguments=(state,),
          resident=beside,
        )
      )
    return [
      *programs,
      aot.Program(
        name="update",
        function=self._update,
        arguments=(state, trained, np.int32(0)),
        resident=beside,
      ),
      aot.Program(
        name="publish",
        function=self._publish,
        arguments=(self._changing(state),),
        resident=(
          opt_states,
          {k: v for k, v in state.params.items() if k != train_state.POLICY},
          state.policy.frozen if self.has_base else (),
        ),
      ),
    ]

  def _abstract(self, arrays: Any) -> Any:
    """Return the shapes and shardings of a batch's arrays."""
    return jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(
        x.shape, x.dtype, sharding=self._batch_sharding
      ),
      arrays,
    )

  def published(self) -> transformer.Params:
    """Return a copy of the current weights in the engines' format.

    With a base these are the adapters alone.
    """
    self.world.tell("publish")
    with self._busy.record("publish"):
      return jax.block_until_ready(self._publish(self._changing(self.state)))

  def published_base(self) -> transformer.Params:
    """Return a copy of the policy's base in the engines' format."""
    self.world.tell("publish_base")
    return jax.block_until_ready(self._publish_base(self.state.policy.frozen))

  def prepare(self, groups: list[types.RolloutGroup]) -> PreparedBatch:
    """Compute advantages, pack the groups and move them to the device."""
    settings = self.batch_settings
    learned, advantages = packing.learned(groups, settings.advantages(groups))
    masked = packing.without_steered(learned)
    segments = self.plan(
      packing.without_overlong(masked) if settings.overlong_filter else masked,
      advantages,
      settings.fields([t for g in learned for t in g.trajectories]),
    )
    self._tell_parts("batch", segments)
    return PreparedBatch(
      groups=groups,
      segments=segments,
      arrays=self.placed(segments),
    )

  def placed(self, segments: segments_lib.Segments) -> packing.PackedBatch:
    """Pack the rows of this process's devices, and move them there."""
    return batch_parts.placed(segments, self._batch_sharding)

  def _tell_parts(self, command: str, segments: segments_lib.Segments) -> None:
    """Send each process the segments of its own rows."""
    if self.world.size > 1:
      rows = batch_parts.rows_of_processes(segments.shape, self._batch_sharding)
      parts = [
        {"segments": segments.of_rows(rows.get(rank, []))}
        for rank in range(self.world.size)
      ]
      self.world.tell(command, parts)

  def plan(
    self,
    groups: list[types.RolloutGroup],
    advantages: packing.Advantages,
    fields: Mapping[str, list[np.ndarray]] | None = None,
  ) -> segments_lib.Segments:
    """Decide where each trajectory lies; see `packing.plan`."""
    settings = self.batch_settings
    return packing.plan(
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
    """Run the stages and the updates of one batch.

    Args:
      step: completed train steps, which is the policy version of the weights.
    """
    self.world.tell("step", step=step)
    sums, times = self.run_programs(step, batch.arrays)
    return step_metrics.Pending(
      step=step,
      groups=batch.groups,
      pack_efficiency=batch.segments.pack_efficiency,
      num_epochs=self.batch_settings.num_epochs,
      sums=sums,
      learning_rate=functools.partial(
        self._schedule, max(step * self._num_updates - self._waits, 0)
      ),
      times_s=times,
      programs_s=sum(times.values()),
      models=[
        settings.model
        for settings in self._models.values()
        if settings.has_gradient_through_layers
      ],
      peak_flops=self._peak_flops,
    )

  def run_programs(
    self, step: int, arrays: packing.PackedBatch
  ) -> tuple[train_step.Metrics, dict[str, float]]:
    """Run the stages and the updates of one batch, and nothing else.

    Returns:
      What the updates measured, on the device, and the seconds of each part.
    """
    times = {"proximal_s": 0.0}
    for stage in self._stages:
      start_s = time.perf_counter()
      with self._busy.record(stage.name):
        made = self._stage_programs[stage.name](
          self.state.params, arrays, np.int32(step)
        )
        arrays = arrays.with_arrays(jax.block_until_ready(made))
      times[f"{stage.name}_s"] = time.perf_counter() - start_s
    start_s = time.perf_counter()
    with self._busy.record("update"):
      self.state, sums = self._update(self.state, arrays, np.int32(step))
      jax.block_until_ready(sums)
    times["update_s"] = time.perf_counter() - start_s
    if self._reference_every and (step + 1) % self._reference_every == 0:
      with self._busy.record("reference"):
        self.state = jax.block_until_ready(self._move_reference(self.state))
    return sums, times

  def logprobs(
    self, trajectories: Sequence[types.Trajectory]
  ) -> list[np.ndarray]:
    """Return each trajectory's logprobs under the current weights, [T] each."""
    segments = self.plan(
      [packing.without_prompt(trajectories)],
      np.zeros((len(trajectories),), np.float32),
    )
    self._tell_parts("logprobs", segments)
    logprobs = self.logprobs_of(self.placed(segments))
    return packing.unpack(logprobs, segments)

  def logprobs_of(self, batch: packing.PackedBatch) -> np.ndarray:
    """Return the logprobs of all tokens of a batch, [M, K, B, T]."""
    program = self._stage_programs[train_step.PROXIMAL_STAGE.name]
    made = program(self.state.params, batch, np.int32(0))
    logprobs = made[objectives.PROXIMAL]
    # The array is replicated first, because with several processes none can
    # read the shards of another.
    return np.asarray(jax.device_put(logprobs, self._replicated))


def _num_shards(
  batch: packing.BatchSettings, sharding: jax.sharding.Sharding
) -> int:
  """Return the number of parts that a microbatch's rows are split into."""
  rows = batch.rows_per_microbatch
  shape = 1, 1, rows, batch.tokens_per_row
  return rows // sharding.shard_shape(shape)[2]
