"""launch/train.py, in which things go wrong every few seconds.

    python benchmarks/faulty_train.py COUNTS EVERY_S --config=... --workdir=...

The flags after the first two arguments are those of launch/train.py. One fault
after the other is injected, each EVERY_S seconds after the one before:

    a published version is torn: a byte of it is flipped after it is sealed
    a published version is from another run
    a batch makes the loss of an update not finite
    no file may grow for a second, as on a full disk
    the directory of published versions is removed

COUNTS is a file that says how often each of them has happened.
"""

import dataclasses
import json
import pathlib
import resource
import shutil
import sys
import threading
import time
from typing import Any

import numpy as np
import staged_train

from jaxrl_async import types
from jaxrl_async.coordination import version_files
from jaxrl_async.training import trainer as trainer_lib

KINDS = (
  *("torn version", "foreign version", "loss not finite", "disk full"),
  "versions removed",
)
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
  seal, prepare = version_files.seal, trainer_lib.Trainer.prepare
  num_sealed = 0
  versions: pathlib.Path | None = None  # the directory that has them

  def sealed(
    directory: pathlib.Path, named: dict[str, Any], layout: dict[str, str]
  ) -> None:
    nonlocal num_sealed, versions
    num_sealed, versions = num_sealed + 1, directory.parent
    # A run cannot begin without its first version.
    if num_sealed > 1 and faults.is_due("foreign version"):
      named = named | {"incarnation": "another"}
    seal(directory, named, layout)
    if num_sealed > 1 and faults.is_due("torn version"):
      flip_a_byte(directory)

  def prepared(
    self: trainer_lib.Trainer, groups: list[types.RolloutGroup], step: int = 0
  ) -> trainer_lib.PreparedBatch:
    used = groups
    if faults.is_due("loss not finite"):
      used = [with_nan(groups[0]), *groups[1:]]
    if faults.is_due("disk full"):
      fill_disk()
    if versions is not None and faults.is_due("versions removed"):
      shutil.rmtree(versions, ignore_errors=True)
    batch = prepare(self, used, step)
    return dataclasses.replace(batch, groups=groups)

  version_files.seal = sealed
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


def flip_a_byte(directory: pathlib.Path) -> None:
  """Change the largest file of a version."""
  files = [path for path in directory.rglob("*") if path.is_file()]
  path = max(files, key=lambda path: path.stat().st_size)
  content = bytearray(path.read_bytes())
  content[len(content) // 2] ^= 1
  path.write_bytes(content)


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
