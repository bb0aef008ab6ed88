"""Inference: chooses actions for whatever observations wait, in one call."""

import dataclasses
import threading
import time
from typing import Any

from jaxtyping import Int
import numpy as np

from jaxrl_async import types
from jaxrl_async.buffer import buffer as buffer_lib
from jaxrl_async.control import fleet as fleet_lib
from jaxrl_async.control import policies

_POLL_S = 0.1
# While some environments wait for admission, which no socket tells.
_ADMISSION_POLL_S = 0.002
_MAX_EPISODES = 100


@dataclasses.dataclass(frozen=True, kw_only=True)
class Segment:
  """A finished row with its admission; the buffer's groups are these.

  Attributes:
    row: an array of one row, see `actor.slot_type`.
  """

  admission: types.Admission
  row: np.ndarray

  @property
  def index(self) -> int:
    """Number of the segment in the order of admission."""
    return self.admission.index

  def written_versions(self) -> Int[np.ndarray, "C"]:
    """Return the version that drew each action that is learned from."""
    return self.row["policy_versions"][self.row["loss_mask"]]


class Inference:
  """Answers the actors of a fleet, and hands finished segments to the buffer.

  Consumes observations, versions of the weights and admissions; waits for any
  of the three; is unblocked by actors, the trainer's publication, and a batch
  that was taken.

  Each environment is either at its actor, which owes a step; or in a call of
  the policy; or in `_waiting`, with an observation, for the next call. If it
  has no row either, it also waits for an admission of the buffer.

  Threads: several may be in `run`. One of them gathers at a time, holding
  `_gathering`, which guards the lists, and calls the policy without it. `_lock`
  guards the counters of calls.
  """

  def __init__(
    self,
    fleet: fleet_lib.Fleet,
    buffer: "buffer_lib.Buffer[Segment]",
    policy: policies.Policy,
  ):
    """Prepare; the threads are the caller's."""
    self._fleet, self._buffer, self._policy = fleet, buffer, policy
    self._lock = threading.Lock()
    self._gathering = threading.Lock()
    self._waiting: list[int] = []
    self._admissions: dict[int, types.Admission] = {}
    self._episodes: list[tuple[float, int]] = []
    self._num_calls, self._call_s = 0, 0.0
    self._start_s = time.perf_counter()
    self._is_stopped = False

  def stop(self) -> None:
    """End `run` in all threads, within a fraction of a second."""
    self._is_stopped = True

  def counters(self) -> dict[str, Any]:
    """Return what was counted since the start, by the name of a metric.

    `frames` are steps of environments. `busy_s` and `idle_s` are the sums of
    the actors' times. `calls` are of the policy, and took `call_s`.
    """
    slots = self._fleet.slots
    names = "frames", "episodes", "busy_s", "idle_s"
    return {
      **{name: slots[name].sum().item() for name in names},
      "calls": self._num_calls,
      "call_s": self._call_s,
      "elapsed_s": time.perf_counter() - self._start_s,
    }

  def episodes(self) -> dict[str, float]:
    """Return the mean return and length of the last 100; NaN without any."""
    newest = list(self._episodes) or [(np.nan, np.nan)]
    found = np.array(newest).mean(axis=0)
    return {
      "episode_return": float(found[0]),
      "episode_length": float(found[1]),
    }

  def run(self) -> None:
    """Answer until `stop`, or until the buffer is closed."""
    rows = self._fleet.slots["row"]
    try:
      while True:
        with self._gathering:
          at = self._gather()
        start_s = time.perf_counter()
        found = self._policy.act(rows["observations"][at])
        end_s = time.perf_counter()
        fields = "actions", "behavior_logprobs", "policy_versions"
        for name, values in zip(fields, found, strict=True):
          rows[name][at] = values
        with self._lock:
          self._num_calls += 1
          self._call_s += end_s - start_s
        self._fleet.answer(at[0])
    except buffer_lib.BufferClosed:
      pass

  def _gather(self) -> tuple[np.ndarray, np.ndarray]:
    """Return environments to choose for, and their columns."""
    slots = self._fleet.slots
    while not self._is_stopped:
      seen = self._buffer.policy_version
      version = self._policy.adopt()
      chosen = self._admitted(version)
      if len(chosen):
        return chosen, slots["column"][chosen]
      if len(self._waiting) == len(slots):
        self._buffer.wait_for_admission(version, seen, _POLL_S)
        continue
      wait_s = _ADMISSION_POLL_S if self._waiting else _POLL_S
      self._take(self._fleet.receive(wait_s))
    raise buffer_lib.BufferClosed("inference was stopped")

  def _admitted(self, version: int) -> Int[np.ndarray, "n"]:
    """Take those that wait and have a row, or get one, out of `_waiting`."""
    admitted: list[int] = []
    waiting, self._waiting = self._waiting, []
    for n in waiting:
      if n not in self._admissions:
        admission = self._buffer.try_admit(version)
        if admission is None:
          self._waiting.append(n)
          continue
        self._admissions[n] = admission
      admitted.append(n)
    return np.array(admitted, np.int64)

  def _take(self, arrived: Int[np.ndarray, "n"]) -> None:
    """Count episodes, and hand over the rows that are full."""
    slots = self._fleet.slots
    ended = slots[arrived[slots["has_ended"][arrived]]]
    self._episodes += zip(
      ended["episode_return"].tolist(),
      ended["episode_length"].tolist(),
      strict=True,
    )
    del self._episodes[:-_MAX_EPISODES]
    for n in arrived[slots["is_full"][arrived]].tolist():
      row = slots["row"][n : n + 1]
      admission = self._admissions.pop(n)
      self._buffer.put(Segment(admission=admission, row=row.copy()))
      row[:] = np.zeros((), row.dtype)
      row["observations"][0, 0] = slots["next_observation"][n]
      slots["is_full"][n] = False
    self._waiting += arrived.tolist()


def rates(before: dict[str, Any], after: dict[str, Any]) -> dict[str, float]:
  """Return the rates between two states of the counters."""
  since = {name: after[name] - before[name] for name in after}
  seconds, frames = max(since["elapsed_s"], 1e-6), since["frames"]
  actor_s = max(since["busy_s"] + since["idle_s"], 1e-6)
  return {
    "frames_per_s": frames / seconds,
    "actor_idle_frac": since["idle_s"] / actor_s,
    "inference_busy_frac": since["call_s"] / seconds,
    "frames_per_call": frames / max(since["calls"], 1),
  }
