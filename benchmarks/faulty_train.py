"""launch/train.py, in which things go wrong every few seconds.

    python benchmarks/faulty_train.py COUNTS EVERY_S --config=... --workdir=...

The flags after the first two arguments are those of launch/train.py. One fault
after the other is injected, each EVERY_S seconds after the one before:

    a batch makes the loss of an update not finite
    no file may grow for a second, as on a full disk

COUNTS is a file that says how often each of them has happened.
"""

import dataclasses
import json
import pathlib
import resource
import sys
import threading
import time

import numpy as np
import staged_train

from jaxrl_async import types
from jaxrl_async.training import trainer as trainer_lib

KINDS = ("loss not finite", "disk full")
_FULL_S = 1.0
_FULL_BYTES = 1000  # how long a file may be then


class Faults:
  """Which fault comes next, and how many there were.

  Threads: each kind is asked for by one thread. That of the next kind is the
  only one that changes anything.
  """

  def __init__(self, path: pathlib.Path, every_s: float):
    self._path = path
    self._every_s = every_s
    self._last_s = time.monotonic()
    self._next = 0
    self._counts: dict[str, int] = dict.fromkeys(KINDS, 0)
    if path.exists():
      self._counts |= json.loads(path.read_text())

  def is_due(self, kind: str) -> bool:
    """Return whether to inject a fault of this kind now, and count it."""
    now_s = time.monotonic()
    if KINDS[self._next] != kind or now_s - self._last_s < self._every_s:
      return False
    self._counts[kind] += 1
    self._path.write_text(json.dumps(self._counts))
    self._last_s, self._next = now_s, (self._next + 1) % len(KINDS)
    return True


def inject(faults: Faults) -> None:
  """Have the functions of a run go wrong when it is time."""
  prepare = trainer_lib.Trainer.prepare

  def prepared(
    self: trainer_lib.Trainer, groups: list[types.RolloutGroup]
  ) -> trainer_lib.PreparedBatch:
    used = groups
    if faults.is_due("loss not finite"):
      used = [with_nan(groups[0]), *groups[1:]]
    if faults.is_due("disk full"):
      fill_disk()
    batch = prepare(self, used)
    return dataclasses.replace(batch, groups=groups)

  trainer_lib.Trainer.prepare = prepared


def fill_disk() -> None:
  """Have the system refuse longer files for a while."""
  before = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (_FULL_BYTES, before[1]))
  timer = threading.Timer(
    _FULL_S, resource.setrlimit, (resource.RLIMIT_FSIZE, before)
  )
  timer.daemon = True
  timer.start()


def with_nan(group: types.RolloutGroup) -> types.RolloutGroup:
  """Return a copy of a group with one logprob that is not a number."""
  first, *rest = group.trajectories
  logprobs = first.behavior_logprobs.copy()
  logprobs[np.flatnonzero(first.loss_mask)[:1]] = np.nan
  first = dataclasses.replace(first, behavior_logprobs=logprobs)
  return dataclasses.replace(group, trajectories=[first, *rest])


if __name__ == "__main__":
  inject(Faults(pathlib.Path(sys.argv[1]), float(sys.argv[2])))
  staged_train.run(sys.argv[3:])
