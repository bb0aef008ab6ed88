"""The training side: groups in, a new policy version out.

`Trainer.prepare` makes groups a batch on the device; it needs no weights, so
another thread does it ahead. `Trainer.step` consumes the batch: proximal
logprobs and updates; it waits for nothing but its device. Its metrics stay on
device until `Pending.metrics` fetches them.
"""

from collections.abc import Callable, Mapping, Sequence
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
from jaxrl_async.models import configs
from jaxrl_async.models import transformer
from jaxrl_async.planning import aot
from jaxrl_async.planning import matmul_rate
from jaxrl_async.reporting import metrics as metrics_lib
from jaxrl_async.training import objectives
from jaxrl_async.training import packing
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


@dataclasses.dataclass(kw_only=True)
class Pending:
  """A dispatched train step whose metrics were not fetched yet."""

  step: int
  groups: list[types.RolloutGroup]
  placement: packing.Placement
  sums: train_step.Metrics
  learning_rate: Callable[[], Any]
  times_s: dict[str, float]
  programs_s: float
  model: configs.ModelConfig
  peak_flops: float

  def metrics(self) -> tuple[dict[str, Any], list[bool]]:
    """Named metrics of the step, and which of its updates were skipped."""
    sums = {k: np.asarray(v, np.float64) for k, v in self.sums.items()}
    count = max(sums["num_loss_tokens"].sum(), 1.0)

    def mean(name):
      return sums[name].sum() / count

    weights = sums["behavior_weight_sum"].sum()
    squares = sums["behavior_weight_square_sum"].sum()
    groups = self.groups
    trajectories = [t for g in groups for t in g.trajectories]
    values = {
      **_reward_metrics(groups),
      **_completion_metrics(trajectories),
      **_staleness_metrics(trajectories, self.step),
      "policy/entropy": mean("entropy_sum"),
      "policy/loss": sums["loss"].mean(),
      "policy/clip_frac": mean("clip_count"),
      "policy/grad_norm": sums["grad_norm"].mean(),
      "policy/approx_kl": mean("approx_kl_sum"),
      "policy/lr": float(self.learning_rate()),
      "offpolicy/behavior_kl": mean("behavior_kl_sum"),
      "offpolicy/behavior_weight_mean": mean("behavior_weight_sum"),
      "offpolicy/behavior_weight_capped_frac": mean(
        "behavior_weight_capped_count"
      ),
      "offpolicy/ess": weights**2 / max(count * squares, 1e-30),
      "train/mfu": self._mfu(trajectories),
      "train/pack_efficiency": self.placement.pack_efficiency,
      "train/bad_updates": sums["bad_updates"].sum(),
      **{f"time/{name}": value for name, value in self.times_s.items()},
    }
    for name in ("loglinear_gap", "loglinear_kl", "reuse_gap"):
      if f"{name}_sum" in sums:
        values[f"offpolicy/{name}"] = mean(f"{name}_sum")
    mismatch_count = sums["mismatch_count"].sum()
    if mismatch_count:
      values["offpolicy/mismatch_kl"] = (
        sums["mismatch_kl_sum"].sum() / mismatch_count
      )
    return values, [bool(x) for x in sums["bad_updates"]]

  def _mfu(self, trajectories: Sequence[types.Trajectory]) -> float:
    """Share of the matmul rate that forward and backward took.

    Over the time of all programs; what stages compute is not counted as work.
    """
    lengths = np.array([len(t.tokens) for t in trajectories])
    flops = matmul_rate.model_flops(self.model, lengths)
    return flops / self.programs_s / self.peak_flops


def _reward_metrics(groups: list[types.RolloutGroup]) -> dict[str, Any]:
  rewards = [np.array([t.score for t in g.trajectories]) for g in groups]
  flat = np.concatenate(rewards)
  parts = types.mean_parts(t for g in groups for t in g.trajectories)
  return {
    "reward/mean": flat.mean(),
    "reward/std": flat.std(),
    "reward/frac_groups_zero_std": np.mean([r.std() == 0 for r in rewards]),
    **{f"reward/parts/{name}": mean for name, mean in parts.items()},
  }


def _completion_metrics(
  trajectories: list[types.Trajectory],
) -> dict[str, Any]:
  lengths = np.array([t.num_completion_tokens for t in trajectories])
  truncated = [
    t.finish_reason is types.FinishReason.LENGTH for t in trajectories
  ]
  return {
    "completion/tokens_mean": lengths.mean(),
    "completion/tokens_max": lengths.max(),
    "completion/frac_truncated": np.mean(truncated),
  }


def _staleness_metrics(
  trajectories: list[types.Trajectory], step: int
) -> dict[str, Any]:
  versions = [t.policy_versions[t.loss_mask] for t in trajectories]
  staleness = step - np.concatenate(versions)
  num_versions = [len(np.unique(v)) for v in versions]
  return {
    "staleness/mean": staleness.mean(),
    "staleness/max": int(staleness.max()),
    "staleness/histogram": np.bincount(staleness).tolist(),
    "staleness/versions_per_trajectory": np.mean(num_versions),
    "staleness/versions_histogram": np.bincount(num_versions).tolist(),
  }


class Trainer:
  """Train state and the compiled programs that change it.

  Threads: belongs to the thread that trains, but for `prepare`, which reads
  nothing that changes and may run in another one.
  """

  def __init__(
    self,
    *,
    mesh: Mesh,
    rules: sections.ShardingRules = mesh_lib.TRAIN_RULES,
    forward: train_step.ForwardSettings,
    loss: objectives.Loss,
    stages: Sequence[train_step.Stage],
    batch: BatchSettings,
    optimizer: sections.OptimizerSection,
    num_steps: int,
    decay: float,
    rollout_dtype: str,
    rollout_weights: sections.WeightFormat = sections.WeightFormat.FLOAT,
    busy: metrics_lib.BusyClock,
  ):
    layout = mesh_lib.Layout(mesh=mesh, rules=rules)
    self.forward = forward = dataclasses.replace(forward, layout=layout)
    self.batch_settings = batch
    self.state: train_step.TrainState | None = None
    self._busy = busy
    self._schedule = train_step.learning_rate_schedule(
      optimizer, total_steps=num_steps * batch.num_minibatches, decay=decay
    )
    self._optimizer = train_step.make_optimizer(optimizer, self._schedule)
    self._params_sharding = mesh_lib.shardings(
      mesh,
      rules,
      transformer.logical_axes(forward.model, is_stacked=True),
    )
    self._state_sharding = state_sharding(
      mesh,
      forward.model,
      self._optimizer,
      self._params_sharding,
      offload=optimizer.offload,
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
    self._init_opt = jax.jit(
      self._optimizer.init, out_shardings=self._state_sharding.opt_state
    )
    self._stages = list(stages)
    # Evaluation asks for logprobs, whatever the stages are.
    self._stage_programs = {
      stage.name: jax.jit(
        functools.partial(stage.run, forward),
        out_shardings=self._batch_sharding,
      )
      for stage in [train_step.PROXIMAL_STAGE, *self._stages]
    }
    self._update = jax.jit(
      functools.partial(
        train_step.update,
        forward,
        loss,
        objectives.rollout_diagnostic,
        self._optimizer,
      ),
      donate_argnums=0,
      out_shardings=(self._state_sharding, replicated),
    )
    self._publish = train_step.make_publish(
      forward.model, layout, dtype=rollout_dtype, weights=rollout_weights
    )

  def start(self, params: transformer.Params) -> None:
    """Takes parameters (of `init_params` or the warm start) as version 0."""
    # A copy: the first update donates it, and the caller may go on using his.
    params = jax.device_put(params, self._params_sharding, may_alias=False)
    self.state = train_step.TrainState(
      params=params, opt_state=self._init_opt(params)
    )

  def abstract_state(self) -> train_step.TrainState:
    """Shapes and shardings of the state, to restore into."""
    shapes = abstract_train_state(self.forward.model, self._optimizer)
    return jax.tree.map(
      lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
      shapes,
      self._state_sharding,
    )

  def published_shapes(self) -> transformer.Params:
    """Shapes, types and shardings of `published`."""
    return self._publish.eval_shape(self.abstract_state().params)

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
    packed, _ = self._pack([_group([trajectory])], np.zeros(1, np.float32))
    max_trips = self.batch_settings.min_microbatches
    batch = trained = self._abstract(packed)
    # The next batch is there, and what was published may not be taken yet.
    beside = batch, self.published_shapes()
    programs = []
    for name, program in self._stage_programs.items():
      arguments = (state.params, trained)
      made = self._abstract(jax.eval_shape(program, *arguments))
      programs.append(
        aot.Program(
          name=name,
          function=program,
          arguments=arguments,
          resident=(state.opt_state, beside),
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
        arguments=(state.params,),
        resident=state.opt_state,
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
    assert self.state is not None
    with self._busy.record("publish"):
      return jax.block_until_ready(self._publish(self.state.params))

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

  def step(self, step: int, batch: PreparedBatch) -> Pending:
    """Trains on one batch.

    Args:
      step: completed train steps, which is the version of the weights.
      batch: of `prepare`.
    """
    assert self.state is not None
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
    return Pending(
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
    assert self.state is not None
    packed, placement = self._pack(
      [_group(trajectories)], np.zeros((len(trajectories),), np.float32)
    )
    batch = mesh_lib.put(packed, self._batch_sharding)
    program = self._stage_programs[train_step.PROXIMAL_STAGE.name]
    logprobs = program(self.state.params, batch)[objectives.PROXIMAL]
    # Of several processes none could read another's part.
    whole = jax.device_put(logprobs, self._replicated)
    return packing.unpack(np.asarray(whole), placement)


def _group(trajectories: Sequence[types.Trajectory]) -> types.RolloutGroup:
  """Trajectories that no prompt of the run stands behind."""
  return types.RolloutGroup(
    index=0,
    birth=0,
    deadline=0,
    prompt=types.Prompt(prompt_id="", tokens=np.zeros(1, np.int32), item={}),
    trajectories=list(trajectories),
  )


def abstract_train_state(
  model: configs.ModelConfig, optimizer: Any
) -> train_step.TrainState:
  """Shapes of parameters and optimizer state, without making them."""

  def init():
    params = transformer.init_params(model, jax.random.key(0))
    return train_step.TrainState(
      params=params, opt_state=optimizer.init(params)
    )

  return jax.eval_shape(init)


def state_sharding(
  mesh: Mesh,
  model: configs.ModelConfig,
  optimizer: Any,
  params_sharding: transformer.Params,
  *,
  offload: bool,
) -> train_step.TrainState:
  """Optimizer moments sharded like their parameters, the rest replicated.

  With `offload` the moments lie in the memory of the devices' host.

  A leaf of the optimizer's state is a parameter's moment when its path ends in
  the parameter's and their shapes agree.
  """
  state = abstract_train_state(model, optimizer)
  params = {
    tuple(map(str, path)): (x.shape, sharding)
    for (path, x), sharding in zip(
      jax.tree_util.tree_leaves_with_path(state.params),
      jax.tree.leaves(params_sharding),
      strict=True,
    )
  }

  def like_param(path, leaf):
    keys = tuple(map(str, path))
    for start in range(len(keys)):
      shape, sharding = params.get(keys[start:], (None, None))
      if shape == leaf.shape:
        return sharding.with_memory_kind("pinned_host") if offload else sharding
    return mesh_lib.replicated(mesh)

  return train_step.TrainState(
    params=params_sharding,
    opt_state=jax.tree_util.tree_map_with_path(like_param, state.opt_state),
  )
