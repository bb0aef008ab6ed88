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
import shutil
from typing import Any

import numpy as np

from jaxrl_async import types
from jaxrl_async.storage import disk
from jaxrl_async.storage import outstanding as outstanding_lib
from jaxrl_async.storage import workdir as workdir_lib

FORMAT = 1
TRAJECTORIES = "trajectories"
START = b'{"start":'  # the line of a start begins with it
DIGEST_LENGTH = 8  # characters
_DIGEST_BYTES = 6
_TRAINED = "trained"
# Bytes of trajectories that are kept in memory at most.
_MOST_KEPT = 2**30
_NO_CACHES = ((),) * len(types.CacheBuild._fields)
_ENCODER = json.JSONEncoder(separators=(",", ":"))


class TimingError(ValueError):
  """A timing record cannot be read; the message is one line."""


def digest(trajectory: types.Trajectory) -> str:
  """Return a digest of the bits of a trajectory's tokens and logprobs."""
  found = hashlib.sha256()  # processors have instructions for it
  for name in types.TOKEN_ARRAYS:
    found.update(np.ascontiguousarray(getattr(trajectory, name)).data)
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
  `record_steps` of the train steps. With `keep_trajectories`, the trajectories
  of each of its steps are in WORKDIR/trajectories.

  Threads: one at a time.
  """

  def __init__(
    self,
    workdir: pathlib.Path,
    num_bytes: int,
    *,
    record_steps: bool,
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
      record_steps: whether train steps are recorded.
      keep_trajectories: whether their trajectories are stored too.
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
    self._keeps = keep_trajectories
    self._file = disk.AppendFile(workdir / workdir_lib.TIMING, num_bytes, note)
    self._trajectories = StoredTrajectories(
      workdir, first_step, note, self._file.check_in_place
    )
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
    if not self._records:
      return
    if self._keeps:
      self._trajectories.add(step, groups)
    self._append({"step": step, **_columns(groups), "sums": plain_sums(sums)})

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


def _columns(groups: Sequence[types.RolloutGroup]) -> dict[str, Any]:
  """Return a list for each field of groups, trajectories and caches."""
  trajectories = [t for group in groups for t in group.trajectories]
  rewards = [t.reward for t in trajectories]
  scores = [r and outstanding_lib.token_scores_record(r) for r in rewards]
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
      "num_caches": [len(t.cache_builds) for t in trajectories],
    },
    "caches": dict(zip(types.CacheBuild._fields, of_caches, strict=True)),
    "digests": "".join(map(digest, trajectories)),
  }


# -- stored trajectories ----------------------------------------------------


class StoredTrajectories:
  """The trajectories of a run's train steps, open for writing.

      WORKDIR/trajectories/<step>/    as a checkpoint stores its groups

  They are as safe as the lines of the timing record.

  Invariant: the directory of a step is complete and has reached the disk. What
  the disk has refused is kept, and is written before anything else.

  Threads: one at a time.
  """

  def __init__(
    self,
    workdir: pathlib.Path,
    first_step: int,
    note: Callable[[str], None] | None = None,
    check: Callable[[], None] = lambda: None,
  ):
    """Remove what a start that was killed stored after the checkpoint.

    Args:
      workdir: of the run.
      first_step: train steps that are completed.
      note: if given, trajectories that the disk refuses are kept in memory, and
        this is called with a message about the first of them.
      check: is called before something is written. It raises if the workdir is
        not where it was.

    Raises:
      StorageError: it could not be removed.
    """
    self._path = workdir / TRAJECTORIES
    self._note = note
    self._check = check
    self._kept: list[tuple[int, dict[str, disk.Pieces]]] = []
    with disk.writing(self._path):
      for path in self._path.glob("*"):
        if not path.name.isdecimal() or int(path.name) >= first_step:
          shutil.rmtree(path)

  def add(self, step: int, groups: Sequence[types.RolloutGroup]) -> None:
    """Store the trajectories of a train step, prompts and rewards included.

    Args:
      step: completed train steps before it.
      groups: in the order of the batch.

    Raises:
      StorageError: the disk refused them, and they are not kept.
      WorkdirError: another directory is in the place of the workdir.
    """
    num_kept = len(self._kept)
    files = outstanding_lib.packed(
      [
        outstanding_lib.OutstandingGroup(
          admission=group.admission, status=_TRAINED, group=group
        )
        for group in groups
      ]
    )
    self._kept.append((step, files))
    try:
      with disk.keeping(
        self._path,
        "trajectories",
        self._note,
        num_kept=num_kept,
        is_full=lambda: self._num_bytes() > _MOST_KEPT,
      ):
        self.sync()
    except (workdir_lib.WorkdirError, disk.StorageError):
      self._kept.pop()
      raise

  def _num_bytes(self) -> int:
    return sum(
      memoryview(piece).nbytes
      for _, files in self._kept
      for pieces in files.values()
      for piece in pieces
    )

  def sync(self) -> None:
    """Wait until everything has reached the disk.

    Raises:
      StorageError: the disk refused it.
    """
    while self._kept:
      self._write(*self._kept[0])
      self._kept.pop(0)

  def _write(self, step: int, files: dict[str, disk.Pieces]) -> None:
    self._check()
    target = self._path / str(step)
    with disk.writing(target):
      self._path.mkdir(exist_ok=True)
      with disk.replacing(target) as incomplete:
        incomplete.mkdir()
        for name, pieces in files.items():
          disk.write_pieces(incomplete / name, pieces, sync=True)
        disk.sync_names(incomplete)
        # It is there if its name could not be confirmed.
        disk.remove(target)
      disk.sync_names(self._path)


def read_trajectories(
  workdir: pathlib.Path, step: int
) -> list[types.RolloutGroup]:
  """Return the groups that were stored of a train step, bit for bit.

  Raises:
    TimingError: they were not stored.
  """
  path = workdir / TRAJECTORIES / str(step)
  if not path.is_dir():
    raise TimingError(
      f"{path} does not exist; a run stores its trajectories with"
      " --config.run.keep_trajectories"
    )
  return [one.group for one in outstanding_lib.read(path) if one.group]
