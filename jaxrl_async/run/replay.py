"""Replays a run from its schedule: the same tokens and losses, without timing.

For each version of the weights, all parts of trajectories that were written
with it are generated again (`rollout.rewriting`). Then the train step is made
with the recorded groups. Every trajectory and every train step is compared with
the record, bit for bit, and the first difference ends the replay.
"""

import collections
from collections.abc import Callable, Mapping, Sequence
import copy
import dataclasses
import pathlib
from typing import Any

import jax

from jaxrl_async import types
from jaxrl_async.config import sections
from jaxrl_async.coordination import run_schedule
from jaxrl_async.coordination import supervisor as supervisor_lib
from jaxrl_async.data import prompts
from jaxrl_async.data import source as source_lib
from jaxrl_async.devices import mesh as mesh_lib
from jaxrl_async.reporting import metrics as metrics_lib
from jaxrl_async.reporting import progress as progress_lib
from jaxrl_async.rollout import episode as episode_lib
from jaxrl_async.rollout import rewriting as rewriting_lib
from jaxrl_async.run import assembly
from jaxrl_async.run import checks
from jaxrl_async.run import cluster_checks
from jaxrl_async.run import forced_replay
from jaxrl_async.run import frozen_base
from jaxrl_async.run import initial_params
from jaxrl_async.run import replay_differences
from jaxrl_async.run import schedule_start
from jaxrl_async.run import setup as setup_lib
from jaxrl_async.storage import checkpoint
from jaxrl_async.storage import config_json
from jaxrl_async.storage import workdir as workdir_lib
from jaxrl_async.training import step_metrics
from jaxrl_async.training import trainer as trainer_lib

# Settings that change no bit of what is generated and trained.
_HARMLESS = ("run.", "cluster.", "transfer.", "eval.", "task.")


class Difference(supervisor_lib.RunError):
  """The replay has come to something else than the record; it says what."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wanted:
  """What to replay.

  Attributes:
    until: train steps that are completed at the end; None is all.
    from_step: train step of the checkpoint to begin with; 0 is the beginning.
    from_ledger: whether to train on the stored trajectories, without generating
      them.
    is_forced: the same, and every token is checked: see `forced_replay`.
  """

  until: int | None = None
  from_step: int = 0
  from_ledger: bool = False
  is_forced: bool = False

  @property
  def generates(self) -> bool:
    """Whether the trajectories are generated again."""
    return not (self.from_ledger or self.is_forced)


@dataclasses.dataclass(kw_only=True)
class Result:
  """What was replayed.

  Attributes:
    first_step, last_step: completed train steps before and after it.
    trajectories: how many were generated again and are equal.
    tokens: how many tokens they have that the policy wrote.
    forced: what was found if every token was checked.
  """

  first_step: int
  last_step: int = 0
  trajectories: int = 0
  tokens: int = 0
  forced: forced_replay.ForcedReplay | None = None

  def record(self) -> dict[str, Any]:
    """Return it as JSON."""
    names = ("first_step", "last_step", "trajectories", "tokens")
    record = {name: getattr(self, name) for name in names}
    if self.forced is not None:
      record["at_cdf_boundary"] = self.forced.num_at_boundary
      record["largest_logprob_error"] = self.forced.largest_error
    return record


def replay(
  workdir: pathlib.Path,
  wanted: Wanted,
  devices: Sequence[Any],
  *,
  progress: progress_lib.Progress,
  stop: supervisor_lib.StopRequest,
  source: source_lib.Source | None = None,
  episode: episode_lib.Episode = episode_lib.single_turn,
  xla_flags: str = "",
) -> Result:
  """Replay a run, and compare it with the record.

  Args:
    workdir: of the run. Nothing is written to it.
    wanted: which part of the run.
    devices: they are divided as the run divided its own.
    progress: shows how far the replay is.
    stop: the stop request, which a signal sets.
    source: as in `training_run.run`.
    episode: as in `training_run.run`.
    xla_flags: as in `training_run.run`.

  Raises:
    ConfigError: the run cannot be replayed, or not that part of it.
    Difference: something came out differently.
    Interrupted: the replay was asked to stop.
  """
  try:
    recorded = run_schedule.read(workdir)
  except run_schedule.ScheduleError as error:
    raise sections.ConfigError(f"workdir: {error}") from error
  config, end = _part(recorded, wanted)
  now = schedule_start.environment(xla_flags)
  first = max(s.step for s in recorded.starts if s.step <= wanted.from_step)
  for then in recorded.starts:
    if first <= then.step < max(end, first + 1):
      _tell_environment(then, now, progress.note)
  setup = checks.checked(config, devices, source=source, note=progress.note)
  if cluster_checks.has_remote_replicas(config):
    # The engine of a replica, on devices of this process.
    shape = mesh_lib.shape_of(setup.rollout_mesh)
    mesh = mesh_lib.make_mesh(devices[: shape.num_devices], shape)
    setup = dataclasses.replace(setup, rollout_mesh=mesh)
  this = _Replay(setup, workdir, recorded, wanted, episode, progress, stop)
  return this.run(wanted.from_step, end)


def _config(start: run_schedule.Start) -> sections.Config:
  try:
    config = config_json.from_stored(start.config)
  except ValueError as error:
    raise sections.ConfigError(
      f"workdir: the schedule's config is not of this version ({error})"
    ) from error
  # It decides on which devices the run has trained.
  config.cluster = sections.ClusterSection(kind=config.cluster.kind)
  return config


def _part(
  recorded: run_schedule.RecordedSchedule, wanted: Wanted
) -> tuple[sections.Config, int]:
  """Return the config of the part to replay, and the step where it ends.

  Raises:
    ConfigError: there is no such part, or its config changes on the way.
  """
  last = len(recorded.steps)
  first, until = wanted.from_step, wanted.until
  end = last if until is None else until
  sections.require(
    first < end <= last,
    "until",
    f"the schedule has train steps up to {last}; use one above {first} and not"
    " above that",
  )
  used = [s for s in recorded.starts if s.step <= first][-1:]
  used += [s for s in recorded.starts if first < s.step < end]
  config = _config(used[0])
  for later in used[1:]:
    found = config_json.differences(config, _config(later))
    changed = [path for path in found if not path.startswith(_HARMLESS)]
    if config.train.decay == 1.0 and "train.num_steps" in changed:
      changed.remove("train.num_steps")  # no learning rate ends there
    sections.require(
      not changed,
      "until",
      f"the run went on from step {later.step} with another"
      f" {', '.join(changed)}; replay it with --until={later.step}",
    )
  sections.require(
    config.rollout.kv_on_adopt is not sections.KvOnAdopt.KEEP
    or wanted.from_ledger,
    "workdir",
    "with rollout.kv_on_adopt=keep a cache is of several versions, which is not"
    " recorded; use --from_ledger",
  )
  return config, end


def _tell_environment(
  start: run_schedule.Start,
  now: Mapping[str, Any],
  note: Callable[[str], None],
) -> None:
  """Tell what may make the bits of a start differ from those of now."""
  then = start.environment
  changed = [
    f"{name} was {then.get(name)!r} and is {value!r}"
    for name, value in now.items()
    if then.get(name) != value
  ]
  if changed:
    note(f"bits may differ from step {start.step}: {'; '.join(changed)}")


class _Replay:
  """A replay of some train steps; see `replay`."""

  def __init__(
    self,
    setup: setup_lib.Setup,
    workdir: pathlib.Path,
    recorded: run_schedule.RecordedSchedule,
    wanted: Wanted,
    episode: episode_lib.Episode,
    progress: progress_lib.Progress,
    stop: supervisor_lib.StopRequest,
  ):
    self._setup = setup
    self._workdir = workdir
    self._recorded = recorded
    self._wanted = wanted
    self._episode = episode
    self._progress = progress
    self._stop = stop
    # By how many versions a token of a step may be older than the step.
    self._lag = max(
      group.admission.deadline - group.admission.birth
      for step in recorded.steps
      for group in step.groups
    )
    self._trainer = assembly.make_trainer(setup, metrics_lib.BusyClock())

  def run(self, first: int, end: int) -> Result:
    """Replay from one number of completed train steps to another."""
    result = Result(first_step=first, last_step=first)
    stored = self._begin(first)
    steps = self._recorded.steps[first:end]
    rewritten, write = {}, None
    if self._wanted.generates:
      rewritten, write = self._prepare(steps, stored)
    if self._wanted.is_forced:
      result.forced = forced_replay.ForcedReplay(
        self._trainer, self._setup.config.seed
      )
    coming = collections.deque(steps)
    for step in steps:
      if write is not None:
        self._write(write, step.step, end)
      if result.forced is not None:
        self._force(result.forced, step.step, coming)
      groups = self._groups(step, rewritten)
      for group in groups:
        for trajectory in group.trajectories:
          result.trajectories += 1
          result.tokens += trajectory.num_completion_tokens
      self._train(step, groups)
      result.last_step = step.step + 1
      self._progress.stage("replay", step.step + 1, end)
      self._stop.check(f"stopped after step {step.step + 1}")
    return result

  def _write(self, write: Callable[[int], Any], version: int, end: int) -> None:
    """Generate everything that a version of the weights has generated.

    Raises:
      Difference: it does not fit the record.
    """
    try:
      for num_tokens in write(version):
        self._stop.check(f"stopped after step {version}")
        self._progress.stage(
          "replay", version, end, f"{num_tokens:,} tokens generated"
        )
    except (rewriting_lib.RewritingError, episode_lib.EpisodeError) as error:
      raise Difference(f"version {version}: {error}") from error

  def _force(
    self,
    forced: forced_replay.ForcedReplay,
    version: int,
    coming: collections.deque[run_schedule.ScheduledStep],
  ) -> None:
    """Check all tokens that a version of the weights has generated.

    Args:
      forced: checks them.
      version: the number of completed train steps.
      coming: the steps whose trajectories were not read yet.

    Raises:
      Difference: a token is not the one that had to be drawn.
    """
    while coming and coming[0].step <= version + self._lag:
      forced.add(self._stored(coming.popleft().step))
    if wrong := forced.check(version):
      raise Difference(f"version {version}: {wrong}")

  # -- the beginning --------------------------------------------------------

  def _begin(self, step: int) -> list[types.RolloutGroup]:
    """Restore the state before a step; return the groups outstanding then."""
    directory = self._workdir / workdir_lib.CHECKPOINTS
    there = checkpoint.steps(directory)
    if step or step in there:
      sections.require(
        step in there,
        "from_step",
        f"{self._workdir} has checkpoints of the steps"
        f" {', '.join(map(str, there)) or '(none)'}",
      )
      self._trainer.state, _, outstanding = frozen_base.restore(
        self._setup, self._workdir, step, self._trainer.abstract_state()
      )
      return [one.group for one in outstanding if one.group]

    def show(at: int, loss: float) -> None:
      self._stop.check("stopped in the warm start")
      num_steps = self._setup.config.warm_start.num_steps
      self._progress.stage("warm start", at, num_steps, f"loss {loss:.3f}")

    params = assembly.warm_start(self._setup, show, self._progress.note)
    if self._setup.model.lora is not None:
      params = initial_params.with_adapters(params, self._setup)
    self._trainer.start(initial_params.of_models(self._setup, params))
    return []

  def _prepare(
    self,
    steps: Sequence[run_schedule.ScheduledStep],
    stored: Sequence[types.RolloutGroup],
  ) -> tuple[
    dict[tuple[int, int], rewriting_lib.Rewritten],
    Callable[[int], Any],
  ]:
    """Return the trajectories to generate, and what generates a version's."""
    config, setup = self._setup.config, self._setup
    known = {group.index: group for group in stored}
    groups = [group for step in steps for group in step.groups]
    self._prompts = self._find_prompts(groups, known)
    settings = rewriting_lib.TurnSettings(
      temperature=config.rollout.temperature,
      max_completion_tokens=config.rollout.max_completion_tokens,
      max_tokens=config.rollout.cache_tokens,
      stop=config.rollout.stop,
      stop_token_ids=config.rollout.stop_token_ids,
    )
    rewritten = {}
    for group in groups:
      index, prompt = group.admission.index, self._prompts[group.prompt_id]
      begun = known[index].trajectories if index in known else ()
      of_member = {trajectory.member: trajectory for trajectory in begun}
      for one in group.trajectories:
        try:
          rewritten[index, one.member] = rewriting_lib.Rewritten(
            group.admission,
            prompt,
            one.cache_builds,
            self._episode(prompt),
            settings,
            begun=of_member.get(one.member),
            member=one.member,
          )
        except rewriting_lib.RewritingError as error:
          raise sections.ConfigError(
            f"from_step: {error}; only checkpoints of a run with"
            " run.exact_resume=True are a beginning"
          ) from error
    engine = assembly.make_engine(setup)
    if self._trainer.has_base:
      engine.hold_base(self._trainer.published_base())
    rewriting = rewriting_lib.Rewriting(
      assembly.make_scheduler(setup, engine, metrics_lib.BusyClock()),
      setup.tokenizer,
      rewritten.values(),
    )

    def write(version: int) -> Any:
      weights = self._trainer.published()
      yield from rewriting.write(engine.load_params(weights, version), version)

    return rewritten, write

  def _find_prompts(
    self,
    groups: Sequence[run_schedule.ScheduledGroup],
    known: Mapping[int, types.RolloutGroup],
  ) -> dict[str, types.Prompt]:
    """Return the prompts of groups by their ids."""
    found = {group.prompt.prompt_id: group.prompt for group in known.values()}
    missing = {group.prompt_id for group in groups} - found.keys()
    source = assembly.prompt_source(self._setup)
    # Nothing rests: every question is drawn in its turn.
    task = copy.deepcopy(source.task)
    task.rest_after = 0
    stream = prompts.PromptStream(
      dataclasses.replace(source, task=task), source_lib.Split.TRAIN
    )
    try:
      while missing:
        prompt = stream.next()
        if prompt.prompt_id in missing:
          missing.remove(prompt.prompt_id)
          found[prompt.prompt_id] = prompt
        self._stop.check("stopped while it looked for the prompts")
    finally:
      stream.close()
    return found

  # -- a train step ---------------------------------------------------------

  def _groups(
    self,
    step: run_schedule.ScheduledStep,
    rewritten: Mapping[tuple[int, int], rewriting_lib.Rewritten],
  ) -> list[types.RolloutGroup]:
    """Return the groups of a step, all of which are those of the record.

    Raises:
      Difference: one of them is not.
    """
    if not self._wanted.generates:
      groups = self._stored(step.step)
    else:
      groups = [
        types.RolloutGroup(
          admission=group.admission,
          prompt=self._prompts[group.prompt_id],
          trajectories=[
            dataclasses.replace(
              rewritten[group.admission.index, one.member].trajectory,
              reward=one.reward,
            )
            for one in group.trajectories
          ],
        )
        for group in step.groups
      ]
    for group, recorded in zip(groups, step.groups, strict=True):
      for trajectory, one in zip(
        group.trajectories, recorded.trajectories, strict=True
      ):
        what = replay_differences.of_trajectory(
          self._workdir, step.step, group.index, trajectory, one
        )
        if what:
          raise Difference(
            f"train step {step.step}, group {group.index}, member"
            f" {one.member}: {what}"
          )
    return groups

  def _stored(self, step: int) -> list[types.RolloutGroup]:
    try:
      return run_schedule.read_trajectories(self._workdir, step)
    except run_schedule.ScheduleError as error:
      raise sections.ConfigError(f"workdir: {error}") from error

  def _train(
    self,
    step: run_schedule.ScheduledStep,
    groups: list[types.RolloutGroup],
  ) -> step_metrics.Pending:
    """Make a train step, and compare what its updates measured.

    Raises:
      Difference: it is something else.
    """
    batch: trainer_lib.PreparedBatch = self._trainer.prepare(groups, step.step)
    done = self._trainer.step(step.step, batch)
    sums = run_schedule.plain_sums(jax.device_get(done.sums))
    if self._wanted.is_forced:
      return done  # other programs round differently
    for name, recorded in step.sums.items():
      if sums.get(name) != recorded:
        raise Difference(
          f"train step {step.step}: {name} was {recorded} and is"
          f" {sums.get(name)}"
        )
    return done
