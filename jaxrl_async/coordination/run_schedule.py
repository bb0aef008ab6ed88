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
the numbers that the updates measured, of each minibatch. `recorded_schedule`
reads the file.

A token depends on the weights, the cache and the number of its position, and
not on its slot, its call or what was written beside it. Of a call the schedule
therefore says only what it admitted and with which version: each cache has the
decode step at which its call began, and `writers` names the replicas.
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

# In format 1, sums that are not finite were null. In format 2, caches had no
# decode step.
FORMAT = 3
TRAJECTORIES = stored_trajectories.DIRECTORY
_ENCODER = json.JSONEncoder()


class ScheduleError(ValueError):
  """A schedule cannot be read; the message is one line."""


def digest(trajectory: types.Trajectory) -> str:
  """Return a digest of the bits of a trajectory's tokens and logprobs."""
  found = hashlib.blake2b(digest_size=12)
  for name in types.TOKEN_ARRAYS:
    found.update(np.ascontiguousarray(getattr(trajectory, name)).tobytes())
  return found.hexdigest()


def plain_sums(sums: Mapping[str, Any]) -> dict[str, list[float | str]]:
  """Return the sums of a step as JSON, which holds them exactly.

  JSON has no numbers that are not finite. They are "nan", "inf" and "-inf".
  """
  return {
    name: [
      x if math.isfinite(x) else str(x)
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
    self._file = disk.AppendFile(
      workdir / workdir_lib.SCHEDULE, num_bytes, note
    )
    self._trajectories = stored_trajectories.StoredTrajectories(
      workdir, first_step, note, self._file.check_in_place
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
        "writers": trajectory.writers,
        "cache_builds": trajectory.cache_builds,
        "reward": outstanding_lib.reward_record(trajectory.reward),
        "digest": digest(trajectory),
      }
      for trajectory in group.trajectories
    ],
  }


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
