"""Reads the schedule of a run, a train step at a time.

A line of `schedule.jsonl` may have megabytes, and there may be thousands. So
the file is read once to see that it is whole and what each train step needs,
and again for each step when it is used.
"""

from collections.abc import Mapping
import dataclasses
import json
import math
import pathlib
from typing import Any

from jaxrl_async import types
from jaxrl_async.coordination import run_schedule
from jaxrl_async.storage import outstanding as outstanding_lib
from jaxrl_async.storage import workdir as workdir_lib

ScheduleError = run_schedule.ScheduleError
# Lines of train steps are long, so that other lines are recognised by this.
_START, _START_WITHIN = b'"start": ', 64


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ScheduledTrajectory:
  """What is recorded of a trajectory.

  Attributes:
    digest: of its tokens, as `run_schedule.digest` returns it.
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

  @property
  def index(self) -> int:
    """Number of the group in the order of admission."""
    return self.admission.index


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ScheduledStep:
  """What is recorded of a train step.

  Attributes:
    step: completed train steps before it.
    groups: in the order of the batch.
    sums: the numbers that its updates measured, by name, as
      `run_schedule.plain_sums` returns them.
  """

  step: int
  groups: tuple[ScheduledGroup, ...]
  sums: Mapping[str, list[Any]]


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
class StepSummary:
  """What is known of a train step without reading it again.

  Attributes:
    offset: where its line begins in the file, in bytes.
    first_version: the oldest version that wrote a part of its trajectories.
    prompt_ids: of its groups.
  """

  offset: int
  first_version: int
  prompt_ids: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RecordedSchedule:
  """A schedule that nobody writes.

  Attributes:
    path: of the file.
    starts: in order; the first is that of the new run.
    summaries: of the train steps, in order and without gaps.
  """

  path: pathlib.Path
  starts: tuple[Start, ...]
  summaries: tuple[StepSummary, ...]

  @property
  def num_steps(self) -> int:
    """The number of train steps."""
    return len(self.summaries)

  def step(self, step: int) -> ScheduledStep:
    """Read a train step.

    Args:
      step: completed train steps before it.

    Raises:
      ScheduleError: the file has changed since it was opened.
    """
    try:
      with open(self.path, "rb") as file:
        file.seek(self.summaries[step].offset)
        found = _read_step(json.loads(file.readline()))
    except (OSError, ValueError, LookupError, TypeError) as error:
      raise ScheduleError(f"{self.path} has changed") from error
    if found.step != step:
      raise ScheduleError(f"{self.path} has changed")
    return found


def read(workdir: pathlib.Path) -> RecordedSchedule:
  """Open the schedule of a run that nobody writes.

  Raises:
    ScheduleError: there is none, or it is damaged.
  """
  path = workdir / workdir_lib.SCHEDULE
  starts: list[Start] = []
  summaries: list[StepSummary] = []
  offset = 0
  try:
    with open(path, "rb") as file:
      for number, line in enumerate(file, 1):
        if not line.endswith(b"\n"):
          break  # the run was killed while it wrote this one
        try:
          _take(path, json.loads(line), offset, starts, summaries)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
          if isinstance(error, ScheduleError):
            raise
          raise ScheduleError(
            f"{path}, line {number} is not of a schedule"
          ) from error
        offset += len(line)
  except OSError as error:
    raise _unreadable(path, error) from error
  return RecordedSchedule(
    path=path, starts=tuple(starts), summaries=tuple(summaries)
  )


def _take(
  path: pathlib.Path,
  record: dict[str, Any],
  offset: int,
  starts: list[Start],
  summaries: list[StepSummary],
) -> None:
  """Add what a line says to the starts, or to the summaries of the steps."""
  if record.get("format", 1) > run_schedule.FORMAT:
    raise ScheduleError(f"{path} is of a newer version than this one")
  if "start" in record:
    starts.append(_read_start(record))
    return
  step = _read_step(record)
  if step.step != len(summaries) or not starts:
    raise ScheduleError(
      f"{path} has no line of train step {len(summaries)} in its place"
    )
  summaries.append(
    StepSummary(
      offset=offset,
      first_version=min(
        (
          build.version
          for group in step.groups
          for trajectory in group.trajectories
          for build in trajectory.cache_builds
        ),
        default=step.step,
      ),
      prompt_ids=tuple(group.prompt_id for group in step.groups),
    )
  )


def start_of(workdir: pathlib.Path, step: int) -> Start:
  """Return the start of the program that made a train step.

  Args:
    workdir: of a run that nobody writes.
    step: completed train steps before it. If the run was started several times
      with so many, this is the last of these starts.

  Raises:
    ScheduleError: there is no schedule, or it is damaged.
  """
  path = workdir / workdir_lib.SCHEDULE
  found = None
  try:
    with open(path, "rb") as file:
      for line in file:
        if not line.endswith(b"\n"):
          break  # the run was killed while it wrote this one
        if not found or _START in line[:_START_WITHIN]:
          record = json.loads(line)
          if found and record["start"] > step:
            break
          found = _read_start(record)
  except OSError as error:
    raise _unreadable(path, error) from error
  except (ValueError, LookupError, TypeError) as error:
    raise ScheduleError(f"{path} has a start that cannot be read") from error
  if found is None:
    raise ScheduleError(f"{path} has no line of a start")
  return found


def _unreadable(path: pathlib.Path, error: OSError) -> ScheduleError:
  return ScheduleError(
    f"{path} cannot be read ({error.strerror}); a run writes it"
  )


def are_equal(found: list[Any] | None, recorded: list[Any]) -> bool:
  """Return whether two lists of sums are the same bits.

  Args:
    found: a value of `run_schedule.plain_sums`.
    recorded: of a schedule. In format 1 numbers that are not finite are None.
  """
  if found is None or len(found) != len(recorded):
    return False
  return all(
    isinstance(here, str) if then is None else _bits(here) == _bits(then)
    for here, then in zip(found, recorded, strict=True)
  )


def _bits(value: float | str) -> tuple[Any, float]:
  if isinstance(value, str):
    return value, 0.0
  return value, math.copysign(1.0, value)  # 0.0 and -0.0 are not the same


def _read_start(record: dict[str, Any]) -> Start:
  return Start(
    step=record["start"],
    environment=record["environment"],
    config=record["config"],
  )


def _read_step(record: dict[str, Any]) -> ScheduledStep:
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
