"""One JSON line for each group that ends: where every generated token went.

Invariant (`check_balance`): generated = trained + filtered + failed + in
flight, in completion tokens, where in flight is what belongs to groups that
have not ended. The worker counts what it generates; the rest is counted here.
"""

import dataclasses
import json
import math
import os
import threading
from typing import Any

import numpy as np

from jaxrl_async import types
from jaxrl_async.storage import disk


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LedgerState:
  """What a checkpoint keeps; the default is an empty ledger.

  Attributes:
    offset_bytes: length of the file.
    trained_tokens: completion tokens of groups of that fate; so the others.
  """

  offset_bytes: int = 0
  trained_tokens: int = 0
  filtered_tokens: int = 0
  failed_tokens: int = 0


def check_balance(
  *, generated: int, trained: int, filtered: int, failed: int, in_flight: int
) -> None:
  """Raise RuntimeError unless every generated token is somewhere, once."""
  missing = generated - (trained + filtered + failed + in_flight)
  if missing:
    raise RuntimeError(
      f"{missing} tokens are unaccounted for: generated {generated}, trained "
      f"{trained}, filtered {filtered}, failed {failed}, in flight {in_flight}"
    )


class Ledger:
  """The file `ledger.jsonl` of a run, open for writing.

  Invariant: the file is whole lines, and the totals are the sums over them.

  Threads: any thread may add a line (rollout threads those of filtered and
  failed groups, the train thread those of trained ones); a lock makes line and
  totals one change.
  """

  def __init__(self, path: str | os.PathLike[str], state: LedgerState):
    """Open the file and cut it to the state's length.

    What stands behind it was written after the checkpoint, perhaps torn, and
    will be written again.

    Raises:
      ValueError: the file is shorter than the state says.
      StorageError: it cannot be opened; so whatever else writes to it.
    """
    self._lock = threading.Lock()
    self._state = state
    self._file = disk.AppendFile(path, state.offset_bytes)

  def add_trained(
    self, group: types.RolloutGroup, *, step: int, skipped_update: bool
  ) -> None:
    """Add a group of a batch.

    Args:
      group: as taken from the buffer.
      step: the train step.
      skipped_update: whether an update of the step was left out because its
        loss or gradient was not finite.
    """
    versions = _versions(group)
    self._add(
      group,
      types.Fate.TRAINED,
      step=step,
      staleness_max=step - int(versions[0]) if versions.size else None,
      skipped_update=skipped_update,
    )

  def add_filtered(self, group: types.RolloutGroup) -> None:
    """Add a group that teaches nothing."""
    self._add(group, types.Fate.FILTERED)

  def add_failed(self, group: types.RolloutGroup, reason: str) -> None:
    """Add a group that could not be finished or scored."""
    self._add(group, types.Fate.FAILED, reason=reason)

  def state(self) -> LedgerState:
    """Return length and totals, after the lines have reached the disk.

    Raises:
      WorkdirError: the file is no longer where it was.
    """
    with self._lock:
      self._file.sync()
      return self._state

  def close(self) -> None:
    """Close the file; nothing can be added afterwards."""
    with self._lock:
      self._file.close()

  def _add(
    self, group: types.RolloutGroup, fate: types.Fate, **more: Any
  ) -> None:
    record = _describe(group) | {"fate": fate} | more
    line = json.dumps(record, allow_nan=False).encode() + b"\n"
    total = f"{fate}_tokens"
    with self._lock:
      self._file.append(line)
      self._state = dataclasses.replace(
        self._state,
        offset_bytes=self._state.offset_bytes + len(line),
        **{total: getattr(self._state, total) + group.num_completion_tokens},
      )


def _versions(group: types.RolloutGroup) -> np.ndarray:
  """Return the distinct versions of the group's written tokens, ascending."""
  written = [t.policy_versions[t.loss_mask] for t in group.trajectories]
  return np.unique(np.concatenate(written)) if written else np.zeros(0, int)


def _describe(group: types.RolloutGroup) -> dict[str, Any]:
  """Return the part of the line that every fate has.

  Rewards are those of the trajectories in order, with a list for each named
  part. What is missing or not finite becomes null, because JSON has no NaN.
  """
  versions = _versions(group)
  rewards = [t.reward for t in group.trajectories]
  names = dict.fromkeys(name for r in rewards if r for name in r.parts)
  return {
    "index": group.index,
    "prompt_id": group.prompt.prompt_id,
    "birth": group.admission.birth,
    "deadline": group.admission.deadline,
    "policy_version_min": int(versions[0]) if versions.size else None,
    "policy_version_max": int(versions[-1]) if versions.size else None,
    "num_policy_versions": int(versions.size),
    "num_prompt_tokens": len(group.prompt.tokens),
    "num_completion_tokens": [
      t.num_completion_tokens for t in group.trajectories
    ],
    "finish_reasons": [t.finish_reason for t in group.trajectories],
    "rewards": [_finite(r and r.score) for r in rewards],
    "reward_parts": {
      name: [_finite(r and r.parts.get(name)) for r in rewards]
      for name in names
    },
    "times_s": {name: float(t) for name, t in group.times_s.items()},
  }


def _finite(value: float | None) -> float | None:
  return None if value is None or not math.isfinite(value) else float(value)
