"""Reads the timing record of a run, a train step at a time.

A line of `timing.jsonl` may have megabytes, and there may be thousands. So
the file is read once to see that it is whole and what each train step needs,
and again for each step when it is used.
"""

from collections.abc import Iterator, Mapping
import dataclasses
import itertools
import json
import math
import pathlib
from typing import Any

from jaxrl_async import types
from jaxrl_async.replay import timing_record
from jaxrl_async.storage import outstanding as outstanding_lib
from jaxrl_async.storage import workdir as workdir_lib

TimingError = timing_record.TimingError


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RecordedTrajectory:
  """What is recorded of a trajectory.

  Attributes:
    reward: without its parts and its answer.
    events: the calls that its episode made.
    digest: of its tokens, as `timing_record.digest` returns it.
  """

  member: int
  num_tokens: int
  finish_reason: types.FinishReason
  cache_builds: tuple[types.CacheBuild, ...]
  reward: types.Reward | None
  events: tuple[types.Event, ...]
  digest: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RecordedGroup:
  """What is recorded of a group that was trained."""

  admission: types.Admission
  prompt_id: str
  trajectories: tuple[RecordedTrajectory, ...]

  @property
  def index(self) -> int:
    """Number of the group in the order of admission."""
    return self.admission.index


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RecordedStep:
  """What is recorded of a train step.

  Attributes:
    step: completed train steps before it.
    groups: in the order of the batch.
    sums: the numbers that its updates measured, by name, as
      `timing_record.plain_sums` returns them.
  """

  step: int
  groups: tuple[RecordedGroup, ...]
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
class RecordedTiming:
  """A timing record that nobody writes.

  Attributes:
    path: of the file.
    starts: in order; the first is that of the new run.
    summaries: of the train steps that were recorded, in order. Those of a start
      without `run.record_timing` are missing.
  """

  path: pathlib.Path
  starts: tuple[Start, ...]
  summaries: Mapping[int, StepSummary]

  @property
  def num_steps(self) -> int:
    """The number of train steps, up to the last one that was recorded."""
    return max(self.summaries, default=-1) + 1

  def step(self, step: int) -> RecordedStep:
    """Read a train step.

    Args:
      step: completed train steps before it.

    Raises:
      TimingError: the file has changed since it was opened.
    """
    try:
      with open(self.path, "rb") as file:
        file.seek(self.summaries[step].offset)
        found = _read_step(json.loads(file.readline()))
    except (OSError, ValueError, LookupError, TypeError) as error:
      raise TimingError(f"{self.path} has changed") from error
    if found.step != step:
      raise TimingError(f"{self.path} has changed")
    return found


def read(workdir: pathlib.Path) -> RecordedTiming:
  """Open the timing record of a run that nobody writes.

  Raises:
    TimingError: there is none, or it is damaged.
  """
  path = workdir / workdir_lib.TIMING
  starts: list[Start] = []
  summaries: dict[int, StepSummary] = {}
  offset = next_step = 0
  try:
    with open(path, "rb") as file:
      for number, line in enumerate(file, 1):
        if not line.endswith(b"\n"):
          break  # the run was killed while it wrote this one
        try:
          if line.startswith(timing_record.START) or not starts:
            starts.append(_read_start(path, json.loads(line)))
            next_step = starts[-1].step
          else:
            summaries[next_step] = _summary(
              path, json.loads(line), next_step, offset
            )
            next_step += 1
        except (ValueError, LookupError, TypeError, AttributeError) as error:
          if isinstance(error, TimingError):
            raise
          raise TimingError(
            f"{path}, line {number} is not of a timing record"
          ) from error
        offset += len(line)
  except OSError as error:
    raise _unreadable(path, error) from error
  return RecordedTiming(path=path, starts=tuple(starts), summaries=summaries)


def _summary(
  path: pathlib.Path, record: dict[str, Any], step: int, offset: int
) -> StepSummary:
  """Return what is kept of the line of a train step."""
  if record["step"] != step:
    raise TimingError(f"{path} has no line of train step {step} in its place")
  return StepSummary(
    offset=offset,
    first_version=min(record["caches"]["version"], default=step),
    prompt_ids=tuple(record["groups"]["prompt_id"]),
  )


def start_of(workdir: pathlib.Path, step: int) -> Start:
  """Return the start of the program that made a train step.

  Args:
    workdir: of a run that nobody writes.
    step: completed train steps before it. If the run was started several times
      with so many, this is the last of these starts.

  Raises:
    TimingError: there is no timing record, or it is damaged.
  """
  path = workdir / workdir_lib.TIMING
  found = None
  try:
    with open(path, "rb") as file:
      for line in file:
        if not line.endswith(b"\n"):
          break  # the run was killed while it wrote this one
        if not found or line.startswith(timing_record.START):
          start = _read_start(path, json.loads(line))
          if found and start.step > step:
            break
          found = start
  except OSError as error:
    raise _unreadable(path, error) from error
  except (ValueError, LookupError, TypeError) as error:
    if isinstance(error, TimingError):
      raise
    raise TimingError(f"{path} has a start that cannot be read") from error
  if found is None:
    raise TimingError(f"{path} has no line of a start")
  return found


def _unreadable(path: pathlib.Path, error: OSError) -> TimingError:
  return TimingError(
    f"{path} cannot be read ({error.strerror}); a run writes it"
  )


def are_equal(found: list[Any] | None, recorded: list[Any]) -> bool:
  """Return whether two lists of `plain_sums` are the same bits."""
  return found is not None and [*map(_bits, found)] == [*map(_bits, recorded)]


def _bits(value: float | str) -> tuple[Any, float]:
  if isinstance(value, str):
    return value, 0.0
  return value, math.copysign(1.0, value)  # 0.0 and -0.0 are not the same


def _read_start(path: pathlib.Path, record: dict[str, Any]) -> Start:
  if record["format"] != timing_record.FORMAT:
    raise TimingError(
      f"{path} has format {record['format']}, of another version than this one,"
      f" which knows {timing_record.FORMAT}; use that version"
    )
  return Start(
    step=record["start"],
    environment=record["environment"],
    config=record["config"],
  )


def _read_step(record: dict[str, Any]) -> RecordedStep:
  trajectories = _trajectories(record)
  groups = _rows(record["groups"])
  return RecordedStep(
    step=record["step"],
    groups=tuple(
      RecordedGroup(
        admission=outstanding_lib.read_admission(group),
        prompt_id=group["prompt_id"],
        trajectories=_taken(trajectories, group["num_trajectories"]),
      )
      for group in groups
    ),
    sums=record["sums"],
  )


def _trajectories(record: dict[str, Any]) -> Iterator[RecordedTrajectory]:
  caches = itertools.starmap(
    types.CacheBuild,
    zip(*[record["caches"][x] for x in types.CacheBuild._fields], strict=True),
  )
  columns = record["trajectories"]
  for name, missing in (("token_scores", None), ("events", ())):
    if columns[name] is None:
      columns[name] = [missing] * len(columns["member"])
  for i, row in enumerate(_rows(columns)):
    at = i * timing_record.DIGEST_LENGTH
    yield RecordedTrajectory(
      member=row["member"],
      num_tokens=row["num_tokens"],
      finish_reason=types.FinishReason(row["finish_reason"]),
      cache_builds=_taken(caches, row["num_caches"]),
      reward=None
      if row["score"] is None
      else types.Reward(
        score=row["score"],
        token_scores=outstanding_lib.read_token_scores(row["token_scores"]),
      ),
      events=tuple(types.Event(*x) for x in row["events"]),
      digest=record["digests"][at : at + timing_record.DIGEST_LENGTH],
    )


def _rows(columns: Mapping[str, list[Any]]) -> Iterator[dict[str, Any]]:
  """Yield a dict for each entry of lists of the same length."""
  for row in zip(*columns.values(), strict=True):
    yield dict(zip(columns, row, strict=True))


def _taken(rest: Iterator[Any], count: int) -> tuple[Any, ...]:
  """Return the next ones."""
  found = tuple(itertools.islice(rest, count))
  if len(found) != count:
    raise ValueError("there are too few")
  return found
