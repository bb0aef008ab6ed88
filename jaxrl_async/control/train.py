"""A run in environments: actors, inference and the trainer beside each other.

    environments --observations--> inference --segments--> buffer --> trainer
         ^                          |     ^                             |
         +--------actions-----------+     +-----weights (channel)-------+

The buffer, its bound on staleness, the channel, the equations, the optimizer
step and the checkpoints are those of language models. The trainer is the main
thread, inference is a thread or several, and the actors are processes.
"""

from collections.abc import Callable
import contextlib
import json
import pathlib
import sys
from typing import Any

import jax
import numpy as np

from jaxrl_async.buffer import buffer as buffer_lib
from jaxrl_async.config import fields as fields_lib
from jaxrl_async.control import actor as actor_lib
from jaxrl_async.control import fleet as fleet_lib
from jaxrl_async.control import inference as inference_lib
from jaxrl_async.control import learner
from jaxrl_async.control import policies
from jaxrl_async.control import settings as settings_lib
from jaxrl_async.processes import supervisor as supervisor_lib
from jaxrl_async.reporting import metrics as metrics_lib
from jaxrl_async.reporting import side_outputs as side_outputs_lib
from jaxrl_async.storage import checkpoint
from jaxrl_async.storage import disk
from jaxrl_async.storage import workdir as workdir_lib
from jaxrl_async.weights import weight_transfer

_LOOK_S = 1.0
_JOIN_S = 30.0
# Metrics that count since the start of a run, earlier processes included.
_TOTALS = "frames", "episodes", "elapsed_s"


def note(text: str) -> None:
  """Print a line for whoever watches the run."""
  print(text, file=sys.stderr, flush=True)


def train(
  config: settings_lib.ControlConfig,
  workdir: pathlib.Path,
  *,
  is_enough: Callable[[dict[str, Any]], bool] = lambda metrics: False,
) -> dict[str, Any]:
  """Train, or continue from the newest checkpoint of the workdir.

  Args:
    config: of the run.
    workdir: gets config.json, metrics.jsonl and checkpoints/.
    is_enough: is called with the metrics of each step; True ends the run there.

  Returns:
    The metrics of the last step, None where there is no number yet.

  Raises:
    Interrupted, ActorFailed: a signal asked for the end, or environments have
      failed; a checkpoint was written.
    ConfigError: the workdir is that of another run, or damaged.
  """
  spaces = actor_lib.spaces_of(
    config.actors.environment, config.actors.arguments.to_dict()
  )
  network = policies.Network(spaces, config.hidden_size)
  optimizer = learner.make_optimizer(config)
  stop = supervisor_lib.StopRequest()
  with contextlib.ExitStack() as stack:
    stack.enter_context(workdir_lib.Claim(workdir, note))
    stack.enter_context(stop.on_signals(note))
    writer = metrics_lib.MetricsWriter(
      workdir, side_outputs_lib.SideOutputs(note)
    )
    stack.callback(writer.close)
    params = network.init_params(jax.random.key(config.seed))
    state = learner.first_state(params, optimizer)
    state, step, found = _continued(workdir, state, writer)

    def save() -> None:
      host = {"metrics": writer.state(), "found": metrics_lib.finite(found)}
      directory = workdir / workdir_lib.CHECKPOINTS
      checkpoint.save(directory, step, state, host, [])

    # As of any run, the checkpoint comes first (`workdir.check_unused`).
    if not step:
      save()
    plain = json.dumps(fields_lib.plain(config), indent=2)
    disk.replace_text(workdir / "config.json", plain + "\n")
    run_step = learner.make_train_step(network, config.ppo, optimizer)
    rollout = stack.enter_context(
      contextlib.closing(Rollout(config, spaces, network, state, step))
    )
    counters = rollout.inference.counters()
    has_enough = False
    while step < config.num_steps and not has_enough:
      try:
        batch = rollout.next_batch(step, stop)
      except (supervisor_lib.Interrupted, fleet_lib.ActorFailed):
        last = rollout.inference.counters()
        found |= {x: found[x] + last[x] - counters[x] for x in _TOTALS}
        save()
        raise
      key = jax.random.fold_in(jax.random.key(config.seed), step)
      state, metrics = run_step(state, learner.rows_of(batch), key)
      rollout.publish(state, step + 1)
      before, counters = counters, rollout.inference.counters()
      versions = np.concatenate([each.written_versions() for each in batch])
      num_trained = found["frames_trained"] + len(versions)
      found = {
        **{name: float(x) for name, x in metrics.items()},
        **{x: found[x] + counters[x] - before[x] for x in _TOTALS},
        "frames_trained": num_trained,
        "frames_dropped": found["frames_dropped"],
        "staleness": float(np.mean(step - versions)),
        "max_staleness": int(np.max(step - versions)),
        **rollout.inference.episodes(),
        **inference_lib.rates(before, counters),
      }
      step += 1
      writer.write(step, found)
      has_enough = is_enough(found)
      is_last = step == config.num_steps or has_enough
      if is_last or step % config.checkpoint_every == 0:
        save()
    return metrics_lib.finite({"step": step, **found})


def _continued(
  workdir: pathlib.Path, fresh: learner.State, writer: metrics_lib.MetricsWriter
) -> tuple[learner.State, int, dict[str, Any]]:
  """Return what the newest whole checkpoint holds, or a beginning.

  Args:
    workdir: of the run.
    fresh: the train state of a run that begins.
    writer: is cut back to the checkpoint.

  Returns:
    The train state, the completed steps, and the metrics of the last one.

  Raises:
    ConfigError: the workdir is not one to begin in, or to continue.
  """
  directory = workdir / workdir_lib.CHECKPOINTS
  checkpoint.recover(directory)
  whole = checkpoint.newest_whole(directory, note)
  if whole is None:
    workdir_lib.check_unused(workdir)
    names = *_TOTALS, "frames_trained", "frames_dropped"
    return fresh, 0, dict.fromkeys(names, 0)
  shapes = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), fresh
  )
  state, host, _ = checkpoint.restore(
    directory, whole.step, shapes, verified=whole.verified
  )
  lines = host["metrics"]
  workdir_lib.check_lines(workdir / workdir_lib.METRICS, lines["num_bytes"])
  checkpoint.set_aside(directory, whole.damaged)
  writer.restore(lines)
  note(f"continues after step {whole.step}")
  found = host["found"]
  # What was generated and not trained is lost with the process before.
  found["frames_dropped"] = found["frames"] - found["frames_trained"]
  return state, whole.step, found


class Rollout:
  """What goes on beside the trainer, from its start to its close."""

  def __init__(
    self,
    config: settings_lib.ControlConfig,
    spaces: actor_lib.Spaces,
    network: policies.Network,
    state: learner.State,
    step: int,
  ):
    """Start actors and inference with the weights of a step."""
    ppo = config.ppo
    self.buffer: buffer_lib.Buffer[inference_lib.Segment] = buffer_lib.Buffer(
      ppo.rows_per_step, ppo.max_staleness
    )
    self.buffer.restore(
      buffer_lib.BufferState(
        groups_per_step=ppo.rows_per_step,
        next_step=step,
        next_index=step * ppo.rows_per_step,
        running=[],
        finished=[],
      )
    )
    device = jax.sharding.SingleDeviceSharding(jax.devices()[-1])
    self._channel = weight_transfer.DirectChannel(
      jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device),
        state.policy.trainable,
      )
    )
    self.publish(state, step)
    key = jax.random.fold_in(jax.random.key(config.seed + 1), step)
    self._fleet = fleet_lib.Fleet(
      config.actors,
      spaces,
      columns=ppo.columns_per_row,
      seeds=(config.seed, step),
    )
    self.inference = inference_lib.Inference(
      self._fleet, self.buffer, policies.Policy(network, self._channel, key)
    )
    self._supervisor = supervisor_lib.Supervisor(self.buffer.close)
    for i in range(config.actors.inference_threads):
      self._supervisor.spawn(f"inference-{i}", self.inference.run)

  def publish(self, state: learner.State, version: int) -> None:
    """Hand over weights, and tell the buffer."""
    self._channel.publish(state.policy.trainable, version)
    self.buffer.set_policy_version(version)

  def next_batch(
    self, step: int, stop: supervisor_lib.StopRequest
  ) -> list[inference_lib.Segment]:
    """Wait for the batch of a step.

    Raises:
      Interrupted: the run was asked to end.
      ActorFailed, ThreadFailed: inference has ended.
    """
    while True:
      stop.check(f"interrupted after step {step}; the same command continues")
      try:
        batch = self.buffer.get_batch(step, _LOOK_S)
      except buffer_lib.BufferClosed:
        self._supervisor.check()
        raise
      if batch is not None:
        return batch

  def close(self) -> None:
    """End threads and processes."""
    self.inference.stop()
    self.buffer.close()
    self._supervisor.join(_JOIN_S)
    self._fleet.close()
    self._channel.close()
