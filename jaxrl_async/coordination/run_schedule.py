"""The schedule of a run: what timing has decided, so that it can be replayed.

An asynchronous run depends on when things happen: which groups a train step
takes, which version of the weights writes which part of a trajectory, and where
a cache is made again. `schedule.jsonl` records that, and nothing that follows
from it and from the seed. It has two kinds of lines:

    {"start": 0, "environment": {...}, "config": {...}}
    {"step": 7, "groups": [...], "sums": {...}}

A start names the train steps that were completed, the configuration, and what
the bits of a result depend on besides. A step has its groups in the order of
the batch. Of each trajectory it has the caches with which it was written
(`types.CacheBuild`), the reward, and a digest of what was written. `sums` are
the numbers that the updates measured, of each minibatch.

A token depends on the weights, the cache and the number of its position, and
not on its slot, its call or what was written beside it. So calls are not
recorded.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import hashlib
import json
import math
import pathlib
from typing import Any

import numpy as np

from jaxrl_async import types
from jaxrl_async.coordination import stored_trajectories
from jaxrl_async.storage import disk
from jaxrl_async.storage import outstanding as outstanding_lib
from jaxrl_async.storage import workdir as workdir_lib

FORMAT = 1
TRAJECTORIES = stored_trajectories.DIRECTORY
_ENCODER = json.JSONEncoder()


class ScheduleError(ValueError):
  """A schedule cannot be read; the message is one line."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ScheduledTrajectory:
  """What is recorded of a trajectory.

  Attributes:
    digest: of its tokens, as `digest` returns it.
  """

  member: int
  num_tokens: int
  finish_reason: types.FinishReason
  cache_builds: tuple[types.CacheBuild, ...]
  reward: types.Reward | None
  digest: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ScheduledGroup:
  """What is recorded of a group that was trained."""

  admission: types.Admission
  prompt_id: str
  trajectories: tuple[ScheduledTrajectory, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ScheduledStep:
  """What is recorded of a train step.

  Attributes:
    step: completed train steps before it.
    groups: in the order of the batch.
    sums: the numbers that its updates measured, by name; None in place of a
      number that is not finite.
  """

  step: int
  groups: tuple[ScheduledGroup, ...]
  sums: Mapping[str, list[float | None]]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Start:
  """A start of the run.

  Attributes:
    step: train steps that were completed.
    environment: what bits depend on besides the configuration.
    config: the configuration, as `config_json.to_stored` returns it.
  """

  step: int
  environment: Mapping[str, Any]
  config: Any


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RecordedSchedule:
  """A schedule that was read.

  Attributes:
    starts: in order; the first is that of the new run.
    steps: the train steps, in order and without gaps.
  """

  starts: tuple[Start, ...]
  steps: tuple[ScheduledStep, ...]


def digest(trajectory: types.Trajectory) -> str:
  """Return a digest of the bits of a trajectory's tokens and logprobs."""
  found = hashlib.blake2b(digest_size=12)
  for name in types.TOKEN_ARRAYS:
    found.update(np.ascontiguousarray(getattr(trajectory, name)).tobytes())
  return found.hexdigest()


def plain_sums(sums: Mapping[str, Any]) -> dict[str, list[float | None]]:
  """Return the sums of a step as JSON, which holds them exactly."""
  return {
    name: [
      x if math.isfinite(x) else None
      for x in np.asarray(values, np.float64).ravel().tolist()
    ]
    for name, values in sums.items()
  }


class Schedule:
  """The file `schedule.jsonl` of a run, open for writing.

  Invariant: the file consists of whole lines. With `keep_trajectories`, the
  trajectories of each of its steps are in WORKDIR/trajectories.

  Threads: one at a time.
  """

  def __init__(
    self,
    workdir: pathlib.Path,
    num_bytes: int,
    *,
    keep_trajectories: bool,
    first_step: int,
    environment: Mapping[str, Any],
    config: Any,
    note: Callable[[str], None] | None = None,
  ):
    """Open the file, cut it, and record this start.

    Args:
      workdir: of the run.
      num_bytes: its length at the checkpoint from which the run goes on.
      keep_trajectories: whether the trajectories are stored too.
      first_step: train steps that are completed.
      environment: as in `Start`.
      config: as in `Start`.
      note: if given, lines that the disk refuses are kept in memory, and this
        is called with a message.

    Raises:
      ValueError: the file is shorter than that.
      StorageError: it cannot be written. So do the methods.
    """
    self._keeps = keep_trajectories
    self._trajectories = stored_trajectories.StoredTrajectories(
      workdir, first_step, note
    )
    self._file = disk.AppendFile(
      workdir / workdir_lib.SCHEDULE, num_bytes, note
    )
    self._append(
      {
        "format": FORMAT,
        "start": first_step,
        "environment": environment,
        "config": config,
      }
    )

  def add_step(
    self,
    step: int,
    groups: Sequence[types.RolloutGroup],
    sums: Mapping[str, Any],
  ) -> None:
    """Record a train step.

    Args:
      step: completed train steps before it.
      groups: in the order of the batch, with their rewards.
      sums: what the updates measured, as arrays by name.
    """
    if self._keeps:
      self._trajectories.add(step, groups)
    self._append(
      {
        "step": step,
        "groups": [_group_record(group) for group in groups],
        "sums": plain_sums(sums),
      }
    )

  def num_bytes(self) -> int:
    """Flush everything to disk, and return the file's length.

    Raises:
      StorageError: not everything reached the disk.
    """
    self._trajectories.sync()
    self._file.sync()
    return self._file.num_bytes

  def close(self) -> None:
    """Close the file. Nothing can be added afterwards.

    Raises:
      StorageError: there is something in memory that the disk refuses.
    """
    self._file.close()
    self._trajectories.sync()

  def _append(self, record: Mapping[str, Any]) -> None:
    self._file.append(_ENCODER.encode(record).encode() + b"\n")


def _group_record(group: types.RolloutGroup) -> dict[str, Any]:
  return {
    **dataclasses.asdict(group.admission),
    "prompt_id": group.prompt.prompt_id,
    "trajectories": [
      {
        "member": trajectory.member,
        "num_tokens": len(trajectory.tokens),
        "finish_reason": trajectory.finish_reason,
        "cache_builds": trajectory.cache_builds,
        "reward": outstanding_lib.reward_record(trajectory.reward),
        "digest": digest(trajectory),
      }
      for trajectory in group.trajectories
    ],
  }


# -- reading ----------------------------------------------------------------


def read(workdir: pathlib.Path) -> RecordedSchedule:
  """Read the schedule of a run that nobody writes.

  Raises:
    ScheduleError: there is none, or it is damaged.
  """
  path = workdir / workdir_lib.SCHEDULE
  starts, steps = [], []
  try:
    with open(path, "rb") as file:
      for number, line in enumerate(file, 1):
        if not line.endswith(b"\n"):
          break  # the run was killed while it wrote this one
        try:
          record = json.loads(line)
          if record.get("format", FORMAT) > FORMAT:
            raise ScheduleError(f"{path} is of a newer version than this one")
          if "start" in record:
            starts.append(_read_start(record))
          else:
            steps.append(_read_step(record))
        except (ValueError, LookupError, TypeError, AttributeError) as error:
          if isinstance(error, ScheduleError):
            raise
          raise ScheduleError(
            f"{path}, line {number} is not of a schedule"
          ) from error
  except OSError as error:
    raise ScheduleError(
      f"{path} cannot be read ({error.strerror}); a run writes it"
    ) from error
  found = [step.step for step in steps]
  if found != list(range(len(steps))):
    gap = next(i for i, step in enumerate(found) if i != step)
    raise ScheduleError(f"{path} has no line of train step {gap} in its place")
  return RecordedSchedule(starts=tuple(starts), steps=tuple(steps))


def environment_of(workdir: pathlib.Path, step: int) -> Mapping[str, Any]:
  """Return the environment of the start that made a train step.

  Args:
    workdir: of a run that nobody writes.
    step: completed train steps before it.

  Returns:
    Nothing if there is no such start.
  """
  found = {}
  try:
    with open(workdir / workdir_lib.SCHEDULE, "rb") as file:
      for line in file:
        record = json.loads(line)
        if "start" in record and record["start"] <= step:
          found = dict(record["environment"])
  except (OSError, ValueError, LookupError, TypeError):
    pass  # `read` says what is wrong
  return found


def _read_start(record: Mapping[str, Any]) -> Start:
  return Start(
    step=record["start"],
    environment=record["environment"],
    config=record["config"],
  )


def _read_step(record: Mapping[str, Any]) -> ScheduledStep:
  return ScheduledStep(
    step=record["step"],
    groups=tuple(_read_group(group) for group in record["groups"]),
    sums=record["sums"],
  )


def _read_group(record: dict[str, Any]) -> ScheduledGroup:
  return ScheduledGroup(
    admission=outstanding_lib.read_admission(record),
    prompt_id=record["prompt_id"],
    trajectories=tuple(
      ScheduledTrajectory(
        member=one["member"],
        num_tokens=one["num_tokens"],
        finish_reason=types.FinishReason(one["finish_reason"]),
        cache_builds=tuple(types.CacheBuild(*x) for x in one["cache_builds"]),
        reward=outstanding_lib.read_reward(one["reward"]),
        digest=one["digest"],
      )
      for one in record["trajectories"]
    ),
  )


# -- stored trajectories ----------------------------------------------------


def read_trajectories(
  workdir: pathlib.Path, step: int
) -> list[types.RolloutGroup]:
  """Return the groups that were stored of a train step, bit for bit.

  Raises:
    ScheduleError: they were not stored.
  """
  path = workdir / TRAJECTORIES / str(step)
  if not path.is_dir():
    raise ScheduleError(
      f"{path} does not exist; a run stores its trajectories with"
      " --config.run.keep_trajectories"
    )
  return [one.group for one in outstanding_lib.read(path) if one.group]
