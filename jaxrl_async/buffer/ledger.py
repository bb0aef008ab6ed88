"""The ledger: a JSON line per ended group, which accounts for all its tokens.

Invariant, checked by `check_balance`, in completion tokens:

  generated = trained + filtered + failed + in flight

Tokens in flight belong to groups that have not ended. The rollout worker counts
the generated tokens. The ledger counts the trained, filtered and failed ones.
"""

import bisect
from collections.abc import Callable, Sequence
import dataclasses
import itertools
import json
import math
import os
import threading
from typing import Any

from jaxtyping import Int
import numpy as np

from jaxrl_async import types
from jaxrl_async.storage import disk

_ENCODER = json.JSONEncoder(allow_nan=False)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LedgerState:
  """The state of a ledger that a checkpoint stores; by default an empty one.

  Attributes:
    offset_bytes: length of the file.
    trained_tokens: completion tokens of all trained groups.
    filtered_tokens: completion tokens of all filtered groups.
    failed_tokens: completion tokens of all failed groups, and of the members
      that other groups went on without.
  """

  offset_bytes: int = 0
  trained_tokens: int = 0
  filtered_tokens: int = 0
  failed_tokens: int = 0


def check_balance(
  *, generated: int, trained: int, filtered: int, failed: int, in_flight: int
) -> None:
  """Check that every generated token is accounted for exactly once.

  All arguments are numbers of completion tokens.

  Raises:
    RuntimeError: the generated tokens are not the sum of the others.
  """
  missing = generated - (trained + filtered + failed + in_flight)
  if missing:
    raise RuntimeError(
      f"{missing} tokens are unaccounted for: generated {generated}, trained "
      f"{trained}, filtered {filtered}, failed {failed}, in flight {in_flight}"
    )


class Ledger:
  """The file `ledger.jsonl` of a run, open for writing.

  Invariant: the file consists of whole lines, and the totals are the sums over
  these lines.

  Threads: any thread may add a line. Rollout threads add filtered and failed
  groups, and the recorder's thread adds trained groups. A lock makes writing
  the line and updating the totals one change.
  """

  def __init__(
    self,
    path: str | os.PathLike[str],
    state: LedgerState,
    *,
    on_untrained: Callable[
      [types.RolloutGroup, types.Fate, str], None
    ] = lambda group, fate, reason: None,
    note: Callable[[str], None] | None = None,
  ):
    """Open the file and truncate it to the length in the state.

    Anything after that was written after the checkpoint. It may end in the
    middle of a line, and the continued run will write it again.

    Args:
      path: of the file.
      state: of the checkpoint.
      on_untrained: is called with each group that ended without being trained,
        with its fate and the reason of a failure, and with each member alone
        that a group goes on without.
      note: if given, lines that the disk refuses are kept in memory, and this
        is called with a message.

    Raises:
      ValueError: the file is shorter than the state says.
      StorageError: the file cannot be opened. The methods that write to it
        raise StorageError as well, those that add a line only without `note`.
    """
    self._lock = threading.Lock()
    self._state = state
    self._on_untrained = on_untrained
    self._file = disk.AppendFile(path, state.offset_bytes, note)

  def add_trained(
    self,
    groups: Sequence[types.RolloutGroup],
    *,
    step: int,
    skipped_update: bool,
  ) -> None:
    """Add the groups of a train step, in one write.

    Args:
      groups: as taken from the buffer.
      step: the train step that trained them.
      skipped_update: whether an update of the step was skipped because its loss
        or gradient was not finite.
    """
    self._add(
      groups, types.Fate.TRAINED, step=step, skipped_update=skipped_update
    )

  def add_filtered(self, group: types.RolloutGroup) -> None:
    """Add a group that was filtered, because it would teach nothing."""
    self._add([group], types.Fate.FILTERED)
    self._on_untrained(group, types.Fate.FILTERED, "")

  def add_failed(self, group: types.RolloutGroup, reason: str) -> None:
    """Add a group that could not be finished or scored."""
    self._add([group], types.Fate.FAILED, reason=reason)
    self._on_untrained(group, types.Fate.FAILED, reason)

  def tell_dropped(
    self, whole: types.RolloutGroup, dropped: Sequence[types.Dropped]
  ) -> None:
    """Pass on the members of a group that could not be scored.

    The group goes on without them, and its own line will list them.
    """
    of_member = {t.member: t for t in whole.of_members().trajectories}
    for one in dropped:
      alone = dataclasses.replace(whole, trajectories=[of_member[one.member]])
      self._on_untrained(alone, types.Fate.FAILED, one.reason)

  def totals(self) -> LedgerState:
    """Return the length and the totals, lines that are in memory included."""
    with self._lock:
      return self._state

  def state(self) -> LedgerState:
    """Flush the file to disk, then return its length and the totals.

    Raises:
      WorkdirError: another file is in its place.
      StorageError: not everything reached the disk.
    """
    with self._lock:
      self._file.sync()
      return self._state

  def close(self) -> None:
    """Close the file. Nothing can be added afterwards."""
    with self._lock:
      self._file.close()

  def _add(
    self, groups: Sequence[types.RolloutGroup], fate: types.Fate, **more: Any
  ) -> None:
    lines, num_tokens, num_dropped = [], 0, 0
    for group in groups:
      record = {**_describe(group), "fate": fate, **more}
      if fate is types.Fate.TRAINED:
        oldest = record["policy_version_min"]
        record["staleness_max"] = (
          None if oldest is None else more["step"] - oldest
        )
      num_tokens += sum(record["num_completion_tokens"])
      num_dropped += sum(one.num_completion_tokens for one in group.dropped)
      lines.append(_ENCODER.encode(record) + "\n")
    written = "".join(lines).encode()
    with self._lock:
      self._file.append(written)
      totals = dataclasses.asdict(self._state)
      totals["offset_bytes"] += len(written)
      totals[f"{fate}_tokens"] += num_tokens
      totals["failed_tokens"] += num_dropped
      self._state = LedgerState(**totals)


def _writers(
  trajectories: Sequence[types.Trajectory],
  nums_tokens: Sequence[int],
  versions: Int[np.ndarray, "C"],
  edges: Sequence[int],
) -> list[list[tuple[str, int, int]]]:
  """Return replica, version and number of tokens of each run of tokens.

  Args:
    trajectories: of a group.
    nums_tokens: how many tokens of each the policy generated.
    versions: that wrote their tokens, those of all trajectories end to end.
    edges: where a token has another version than the one before it.
  """
  found, first = [], 0
  for trajectory, num_tokens in zip(trajectories, nums_tokens, strict=True):
    start, runs = first, []
    for replica, count in trajectory.writers:
      end = start + count
      inside = edges[
        bisect.bisect(edges, start) : bisect.bisect_left(edges, end)
      ]
      runs += [
        (replica, int(versions[a]), b - a)
        for a, b in itertools.pairwise([start, *inside, end])
      ]
      start = end
    first += num_tokens
    found.append(runs)
  return found


def _describe(group: types.RolloutGroup) -> dict[str, Any]:
  """Return the fields that the lines of all groups have.

  There is one entry for each member, whose branches are taken together
  (`types.whole`). The finish reason is that of what is learned
  (`types.learned`). `writers` says which replica generated how many tokens
  with which version of the weights, in order: [replica, version, tokens].
  Rewards are listed in the order of the trajectories, with another list for
  each named part. `dropped` are the members that could not be scored. A reward
  that is missing or not finite becomes null, because JSON has no NaN.
  """
  finish_reasons = [
    types.learned(branches)[-1].finish_reason for branches in group.branches()
  ]
  group = group.of_members()
  members = group.trajectories
  versions = group.written_versions()
  edges = np.flatnonzero(versions[1:] != versions[:-1]) + 1
  distinct = sorted({*versions[:1].tolist(), *versions[edges].tolist()})
  counts = [t.num_completion_tokens for t in members]
  rewards = [t.reward for t in members]
  names = dict.fromkeys(name for r in rewards if r for name in r.parts)
  return {
    "index": group.index,
    "prompt_id": group.prompt.prompt_id,
    "birth": group.admission.birth,
    "deadline": group.admission.deadline,
    "policy_version_min": distinct[0] if distinct else None,
    "policy_version_max": distinct[-1] if distinct else None,
    "num_policy_versions": len(distinct),
    "num_prompt_tokens": len(group.prompt.tokens),
    "num_completion_tokens": counts,
    "finish_reasons": finish_reasons,
    "writers": _writers(members, counts, versions, edges.tolist()),
    "rewards": [_finite(r and r.score) for r in rewards],
    "reward_parts": {
      name: [_finite(r and r.parts.get(name)) for r in rewards]
      for name in names
    },
    "dropped": [dataclasses.asdict(one) for one in group.dropped],
    "times_s": {name: float(t) for name, t in group.times_s.items()},
  }


def _finite(value: float | None) -> float | None:
  return None if value is None or not math.isfinite(value) else float(value)
