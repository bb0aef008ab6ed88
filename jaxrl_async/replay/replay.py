"""Replays a run from its timing record: the same tokens and losses.

For each version of the weights, all parts of trajectories that were written
with it are generated again (`regeneration`). Then the train step is made with
the recorded groups. Every trajectory and every train step is compared with the
record, bit for bit, and the first difference ends the replay. At the end the
train state is compared with a checkpoint of that step, if there is one.
"""

import collections
from collections.abc import Sequence
import contextlib
import dataclasses
import pathlib
from typing import Any

import jax
import numpy as np

from jaxrl_async import types
from jaxrl_async.assembly import assembly
from jaxrl_async.assembly import checks
from jaxrl_async.assembly import config_checks
from jaxrl_async.assembly import frozen_base
from jaxrl_async.assembly import given as given_lib
from jaxrl_async.assembly import initial_params
from jaxrl_async.assembly import setup as setup_lib
from jaxrl_async.config import sections
from jaxrl_async.data import source as source_lib
from jaxrl_async.devices import mesh as mesh_lib
from jaxrl_async.models import transformer
from jaxrl_async.processes import supervisor as supervisor_lib
from jaxrl_async.replay import recorded_timing
from jaxrl_async.replay import regeneration
from jaxrl_async.replay import replay_differences
from jaxrl_async.replay import replay_prompts
from jaxrl_async.replay import replay_settings
from jaxrl_async.replay import timing_record
from jaxrl_async.replay import timing_start
from jaxrl_async.reporting import metrics as metrics_lib
from jaxrl_async.reporting import progress as progress_lib
from jaxrl_async.rollout import episode as episode_lib
from jaxrl_async.storage import checkpoint
from jaxrl_async.storage import pytree_files
from jaxrl_async.storage import workdir as workdir_lib
from jaxrl_async.training import objectives

Difference = replay_differences.Difference
Wanted = replay_settings.Wanted


@dataclasses.dataclass(kw_only=True)
class Result:
  """What was replayed, and what of it was compared.

  Attributes:
    first_step, last_step: completed train steps before and after it.
    trajectories: how many were trained, all of which are those of the record.
    generated: tokens of these that the replay has generated, and that equal
      the record.
    restored: tokens of these that it has read from the checkpoint instead.
    has_state: whether the train state at the end was compared with a
      checkpoint. If not, what the last update has made of the weights and
      moments was not compared with anything.
  """

  first_step: int
  last_step: int = 0
  trajectories: int = 0
  generated: int = 0
  restored: int = 0
  has_state: bool = False

  def record(self) -> dict[str, Any]:
    """Return it as JSON."""
    record = dataclasses.asdict(self)
    has_state = record.pop("has_state")
    return record | {"state_bit_exact": True if has_state else None}


def replay(
  workdir: pathlib.Path,
  wanted: Wanted,
  devices: Sequence[Any],
  *,
  progress: progress_lib.Progress,
  stop: supervisor_lib.StopRequest,
  initial_params: transformer.Params | None = None,
  source: source_lib.Source | None = None,
  loss: objectives.Loss | None = None,
  episode: episode_lib.Episode | None = None,
  xla_flags: str = "",
) -> Result:
  """Replay a run, and compare it with the record.

  What the run was given in place of what its config names has to be given
  again.

  Args:
    workdir: of the run. Nothing is written to it.
    wanted: which part of the run.
    devices: they are divided as the run divided its own.
    progress: shows how far the replay is.
    stop: the stop request, which a signal sets.
    initial_params: as in `train.run`; used if there is no checkpoint of
      step 0.
    source: as in `train.run`.
    loss: as in `train.run`.
    episode: as in `train.run`.
    xla_flags: as in `train.run`.

  Raises:
    ConfigError: the run cannot be replayed, or not that part of it.
    Difference: something came out differently.
    Interrupted: the replay was asked to stop.
  """
  try:
    recorded = recorded_timing.read(workdir)
    config, end = replay_settings.part(recorded, wanted)
    setup = checks.checked(config, devices, source=source, note=progress.note)
    given = given_lib.Given(
      initial_params=initial_params,
      source=source,
      loss=loss,
      episode=episode,
      xla_flags=xla_flags,
    )
    now = timing_start.environment(given, setup.source)
    replay_settings.check_environment(
      recorded, wanted.from_step, end, now, progress.note
    )
    if config_checks.has_remote_replicas(config):
      # The engine of a replica, on devices of this process.
      shape = mesh_lib.shape_of(setup.rollout_mesh)
      mesh = mesh_lib.make_mesh(devices[: shape.num_devices], shape)
      setup = dataclasses.replace(setup, rollout_mesh=mesh)
    this = _Replay(setup, workdir, recorded, given, progress, stop)
    return this.run(wanted.from_step, end)
  except timing_record.TimingError as error:
    raise sections.ConfigError(f"workdir: {error}") from error


class _Replay:
  """A replay of some train steps; see `replay`."""

  def __init__(
    self,
    setup: setup_lib.Setup,
    workdir: pathlib.Path,
    recorded: recorded_timing.RecordedTiming,
    given: given_lib.Given,
    progress: progress_lib.Progress,
    stop: supervisor_lib.StopRequest,
  ):
    self._setup = setup
    self._workdir = workdir
    self._recorded = recorded
    self._given = given
    self._progress = progress
    self._stop = stop
    self._trainer = assembly.make_trainer(
      setup, metrics_lib.BusyClock(), loss=given.loss
    )

  def run(self, first: int, end: int) -> Result:
    """Replay from one number of completed train steps to another."""
    with contextlib.ExitStack() as closing:
      return self._run(self._groups(first, end, closing), first, end)

  def _run(
    self, groups: regeneration.Regeneration, first: int, end: int
  ) -> Result:
    result = Result(first_step=first, last_step=first)
    coming = self._by_first_version(first, end)
    opened: dict[int, recorded_timing.RecordedStep] = {}
    for version in range(first, end):
      for number in coming.pop(version, ()):
        opened[number] = self._recorded.step(number)
        groups.open(opened[number])
      for num_tokens in groups.write(version):
        self._stop.check(f"stopped after step {version}")
        self._progress.stage("replay", version, end, f"{num_tokens:,} tokens")
      step = opened.pop(version)
      found = groups.close(step)
      self._require_same(replay_differences.of_groups(step, found))
      self._train(step, found)
      result.trajectories += sum(len(g.trajectories) for g in found)
      result.last_step = version + 1
      self._progress.stage("replay", version + 1, end)
      self._stop.check(f"stopped after step {version + 1}")
    result.generated = groups.num_generated
    result.restored = groups.num_restored
    self._compare_state(end, result)
    return result

  def _by_first_version(self, first: int, end: int) -> dict[int, list[int]]:
    """Return the train steps by the version before which they are opened."""
    found = collections.defaultdict(list)
    for number in range(first, end):
      oldest = self._recorded.summaries[number].first_version
      found[min(max(oldest, first), number)].append(number)
    return found

  def _require_same(self, what: str) -> None:
    if what:
      raise Difference(what)

  # -- the beginning --------------------------------------------------------

  def _groups(
    self, first: int, end: int, closing: contextlib.ExitStack
  ) -> regeneration.Regeneration:
    """Restore the state before a step; return what has the groups from then."""
    host_state, begun = self._begin(first)
    prompts = replay_prompts.of_run(
      self._setup,
      self._workdir,
      [
        prompt_id
        for step in range(first, end)
        for prompt_id in self._recorded.summaries[step].prompt_ids
      ],
      host_state=host_state,
      progress=self._progress,
      stop=self._stop,
    )
    closing.callback(prompts.close)
    environment = assembly.make_environment(
      self._setup, self._given.episode, is_replay=True
    )
    closing.callback(environment.close, self._setup.config.run.join_timeout_s)
    return regeneration.Regeneration(
      self._setup, self._trainer, prompts, begun, environment
    )

  def _begin(
    self, step: int
  ) -> tuple[dict[str, Any], list[types.RolloutGroup]]:
    """Restore or make the state before a step.

    Returns:
      The host state of the checkpoint, empty without one, and the groups that
      were outstanding.
    """
    there = checkpoint.steps(self._workdir / workdir_lib.CHECKPOINTS)
    if step or step in there:
      sections.require(
        step in there,
        "from_step",
        f"{self._workdir} has checkpoints of the steps"
        f" {', '.join(map(str, there)) or '(none)'}",
      )
      self._trainer.state, host_state, outstanding = frozen_base.restore(
        self._setup, self._workdir, step, self._trainer.abstract_state()
      )
      return host_state, [one.group for one in outstanding]

    def show(at: int, loss: float) -> None:
      self._stop.check("stopped in the warm start")
      num_steps = self._setup.config.warm_start.num_steps
      self._progress.stage("warm start", at, num_steps, f"loss {loss:.3f}")

    params = self._given.initial_params
    environment = self._recorded.starts[0].environment
    sections.require(
      params is not None or not environment.get(timing_start.INITIAL_PARAMS),
      "initial_params",
      "the run was given its first weights, and there is no checkpoint of step"
      " 0; replay it from a later one, with --from_step",
    )
    if params is None:
      params = assembly.warm_start(self._setup, show, self._progress.note)
    params = initial_params.with_adapters(params, self._setup)
    self._trainer.start(initial_params.of_models(self._setup, params))
    return {}, []

  # -- a train step, and the end --------------------------------------------

  def _train(
    self,
    step: recorded_timing.RecordedStep,
    groups: list[types.RolloutGroup],
  ) -> None:
    """Make a train step, and compare what its updates measured."""
    batch = self._trainer.prepare(groups)
    done = self._trainer.step(step.step, batch)
    sums = timing_record.plain_sums(jax.device_get(done.sums))
    self._require_same(replay_differences.of_sums(step, sums))

  def _compare_state(self, step: int, result: Result) -> None:
    """Compare the train state with a checkpoint of this step, if there is one.

    The trainer has no state afterwards: there may be no room for two.
    """
    if step not in checkpoint.steps(self._workdir / workdir_lib.CHECKPOINTS):
      self._progress.note(
        f"there is no checkpoint of step {step}: what the last update has made"
        " of the weights was not compared"
      )
      return
    trainer = self._trainer
    found = {
      name: np.asarray(array)
      for name, array in pytree_files.named_leaves(trainer.state).items()
    }
    del trainer.state
    stored, _, _ = frozen_base.restore(
      self._setup, self._workdir, step, trainer.abstract_state()
    )
    what = replay_differences.of_state(found, pytree_files.named_leaves(stored))
    result.has_state = True
    if what:
      raise Difference(f"the train state after step {step}: {what}")
