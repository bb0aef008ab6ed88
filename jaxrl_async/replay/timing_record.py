"""The timing record of a run: what timing decided, so that it can be replayed.

An asynchronous run depends on when things happen: which groups a train step
takes, which version of the weights writes which part of a trajectory, and where
a cache is made again. `timing.jsonl` records that, and nothing that follows
from it and from the seed. It has two kinds of lines:

    {"start":0,"format":1,"environment":{...},"config":{...}}
    {"step":7,"groups":{...},"trajectories":{...},"caches":{...},...}

A start names the train steps that were completed, the configuration, and what
the bits of a result depend on besides. Each start has its line. Train steps
have theirs with `run.record_timing`.

A step has a list for each field, with the values of all its groups in the order
of the batch, of all their trajectories, and of all the caches with which these
were written (`types.CacheBuild`). `num_trajectories` and `num_caches` say how
many belong to each group and to each trajectory. `digests` are those of what
was written, one after the other in one text. `sums` are the numbers that the
updates measured, of each minibatch. `recorded_timing` reads the file.

Of an episode the record has the calls that it made (`types.Event`); its
rewards follow from them. `events` is null if there are none in the step.

Of a reward the record has what is trained on. Its parts are in the ledger,
and so are the replicas that wrote a trajectory. No part of the books but the
samples needs the answers.

A token depends on the weights, the cache and the number of its position, and
not on its slot, its call or what was written beside it. Of a call the record
therefore says only what it admitted and with which version: each cache has the
decode step at which its call began.
"""

import base64
from collections.abc import Callable, Mapping, Sequence
import hashlib
import json
import math
import pathlib
from typing import Any

import numpy as np

from jaxrl_async import types
from jaxrl_async.storage import disk
from jaxrl_async.storage import outstanding as outstanding_lib
from jaxrl_async.storage import workdir as workdir_lib

FORMAT = 1
START = b'{"start":'  # the line of a start begins with it
DIGEST_LENGTH = 8  # characters
_DIGEST_BYTES = 6
_NO_CACHES = ((),) * len(types.CacheBuild._fields)
_ENCODER = json.JSONEncoder(separators=(",", ":"))


class TimingError(ValueError):
  """A timing record cannot be read; the message is one line."""


def digest(trajectory: types.Trajectory) -> str:
  """Return a digest of the bits of a trajectory's tokens and logprobs.

  Which tokens were steered is part of it if some were.
  """
  found = hashlib.sha256()  # processors have instructions for it
  for name in types.TOKEN_ARRAYS:
    found.update(np.ascontiguousarray(getattr(trajectory, name)).data)
  found.update(np.array(trajectory.steered, np.int32).data)
  return base64.b64encode(found.digest()[:_DIGEST_BYTES]).decode()


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


class TimingRecord:
  """The file `timing.jsonl` of a run, open for writing.

  Invariant: the file consists of whole lines: those of all starts, and with
  `record_steps` of the train steps.

  Threads: one at a time.
  """

  def __init__(
    self,
    workdir: pathlib.Path,
    num_bytes: int,
    *,
    record_steps: bool,
    first_step: int,
    environment: Mapping[str, Any],
    config: Any,
    note: Callable[[str], None] | None = None,
  ):
    """Open the file, cut it, and record this start.

    Args:
      workdir: of the run.
      num_bytes: its length at the checkpoint from which the run goes on.
      record_steps: whether train steps are recorded.
      first_step: train steps that are completed.
      environment: as in `Start`.
      config: as in `Start`.
      note: if given, lines that the disk refuses are kept in memory, and this
        is called with a message.

    Raises:
      ValueError: the file is shorter than that.
      StorageError: it cannot be written. So do the methods.
    """
    self._records = record_steps
    self._file = disk.AppendFile(workdir / workdir_lib.TIMING, num_bytes, note)
    self._append(
      {
        "start": first_step,
        "format": FORMAT,
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
    """Record a train step, if steps are recorded.

    Args:
      step: completed train steps before it.
      groups: in the order of the batch, with their rewards.
      sums: what the updates measured, as arrays by name.
    """
    if self._records:
      self._append({"step": step, **_columns(groups), "sums": plain_sums(sums)})

  def num_bytes(self) -> int:
    """Flush everything to disk, and return the file's length.

    Raises:
      StorageError: not everything reached the disk.
    """
    self._file.sync()
    return self._file.num_bytes

  def close(self) -> None:
    """Close the file. Nothing can be added afterwards.

    Raises:
      StorageError: there is something in memory that the disk refuses.
    """
    self._file.close()

  def _append(self, record: Mapping[str, Any]) -> None:
    self._file.append(_ENCODER.encode(record).encode() + b"\n")


def _columns(groups: Sequence[types.RolloutGroup]) -> dict[str, Any]:
  """Return a list for each field of groups, trajectories and caches."""
  trajectories = [t for group in groups for t in group.trajectories]
  rewards = [t.reward for t in trajectories]
  scores = [r and outstanding_lib.token_scores_record(r) for r in rewards]
  events = [
    [event for event in t.events if event.is_call] for t in trajectories
  ]
  caches = [cache for t in trajectories for cache in t.cache_builds]
  of_caches = zip(*caches, strict=True) if caches else _NO_CACHES
  return {
    "groups": {
      **{
        name: [getattr(group.admission, name) for group in groups]
        for name in outstanding_lib.ADMISSION_FIELDS
      },
      "prompt_id": [group.prompt.prompt_id for group in groups],
      "num_trajectories": [len(group.trajectories) for group in groups],
    },
    "trajectories": {
      "member": [t.member for t in trajectories],
      "num_tokens": [len(t.tokens) for t in trajectories],
      "finish_reason": [t.finish_reason for t in trajectories],
      "score": [r and r.score for r in rewards],
      "token_scores": scores if any(x is not None for x in scores) else None,
      "events": events if any(events) else None,
      "num_caches": [len(t.cache_builds) for t in trajectories],
    },
    "caches": dict(zip(types.CacheBuild._fields, of_caches, strict=True)),
    "digests": "".join(map(digest, trajectories)),
  }
