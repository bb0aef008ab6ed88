"""The staleness bound: which groups may start, and which are trained when.

Terms. P is groups_per_step. Weights of version v have completed v train steps,
so train step s updates the weights of version s. Below, s is the next step that
will take a batch. A group is outstanding from its admission until it is taken
or dropped. Its birth is the version that its engine held at admission. Its
deadline is birth + max_staleness.

Predicate. The groups are schedulable at s if every step from s on can take P
of them, oldest deadline first, and none of them after its deadline. With the
deadlines d_0 <= d_1 <= ... that is

  d_j >= s + j // P   for every j.

Counts. Let n(d) be the number of groups whose deadline is d or earlier. The
groups are schedulable at s if and only if

  n(d) <= (d - s + 1) * P   for every deadline d that occurs,

that is, if the groups that are due by d fit into the steps s to d. Proof: the
last group with deadline d has j = n(d) - 1. For integers, d >= s + j // P is
equivalent to j < (d - s + 1) * P. The other groups with this deadline have a
smaller j. The buffer therefore counts its groups by deadline and decides from
these counts (`fits`); the tests compare them with the definition. There are few
distinct deadlines. None is below s (see the bound). None is above s + m, where
m is the largest max_staleness under which an outstanding group was admitted.

Invariant. The outstanding groups are schedulable at s. It holds because

- `try_admit` adds a group only if the groups including it are schedulable at s;
- `put` and `set_max_staleness` change no deadline;
- `drop` removes a group, which makes no remaining group's j larger;
- `get_batch` takes a batch only if the other groups are schedulable at s + 1.

Bound. No token of a group is older than the group's birth, which `put` checks.
By the invariant at j = 0, no deadline is below s. A group that step s takes
therefore has staleness

  s - version <= s - birth <= deadline - birth = max_staleness,

the setting at its admission. `set_max_staleness` changes the setting for groups
that are admitted afterwards. Nothing here assumes that it is the same for all
groups, so that it may change at any time.

No group becomes too old. Because no deadline is below s, a group is taken at
the latest by the step that equals its deadline. If the group is still running
then, that step waits for it.

No deadlock. This assumes that each admitted group is eventually put or dropped
and that some engine eventually adopts new weights. Suppose that step s waits
while every outstanding group is finished.

- If there are P or more groups, the P groups with the oldest deadlines are a
  batch, because for the others d_{j+P} >= s + (j + P) // P = (s + 1) + j // P.
- If there are fewer, a group is admitted for any engine that holds a version
  >= s - max_staleness, with the setting of that moment, because all j // P are
  0 and all deadlines are >= s. Weights of version s exist once step s - 1 is
  done, so there will be such an engine.

Order. Among finished groups, taking the oldest deadlines first is the best
choice: replacing a taken group by an older one leaves a later deadline among
the remaining groups. If any batch is allowed, this one is. A step therefore
waits for a running group only if the groups that remain could not all be taken
in time otherwise.

Checkpoints. A batch may be taken while earlier steps are still training. A
checkpoint of that moment must include the batch, because its step will be
repeated. The buffer therefore keeps a taken batch until the weights that it
trained are set as the policy version. `state` describes the buffer as if no
such batch had been taken: next_step is the first step that has not produced its
new weights yet.

The invariant also holds for that state, by induction over the batches that are
kept, newest first. Let R be schedulable at t + 1, and let T be the P groups of
step t. Their deadlines are >= t, as shown for the bound. Then R and T together
are schedulable at t. To see this, sort them by deadline, T first among equals,
and let d be a group's deadline and i its rank.

- For a group of R with rank j in R, at most P groups of T come before it. So
  i <= j + P, and d >= (t + 1) + j // P >= t + i // P.
- For a group of T, at most P - 1 other groups of T come before it. If no group
  of R does, then i < P, and d >= t is enough. Otherwise, let j be the rank in R
  of the last group of R before it. Its d is not below the deadline of that
  group, and again i <= j + P.

Relation to AReaL (arXiv:2505.24298). If every engine holds the newest weights
and no group is dropped, admission is AReaL's gate

  N <= (version + max_staleness + 1) * P

for the number N of all groups ever admitted: s * P of them have been taken, and
the new group has the latest deadline.
"""

import collections
from collections.abc import Callable, Mapping
import dataclasses
import heapq
import operator
import threading
import time
from typing import Generic, Protocol, TypeVar, runtime_checkable

from jaxtyping import Int
import numpy as np

from jaxrl_async import types

R = TypeVar("R")


@runtime_checkable
class Group(Protocol):
  """What the buffer asks of that which it holds, such as a `RolloutGroup`."""

  @property
  def admission(self) -> types.Admission: ...

  @property
  def index(self) -> int: ...

  def written_versions(self) -> Int[np.ndarray, "C"]: ...


G = TypeVar("G", bound=Group)

_OLDEST_FIRST = operator.attrgetter("deadline", "index")


def fits(num_due: Mapping[int, int], step: int, groups_per_step: int) -> bool:
  """Return whether groups are schedulable, of which so many have a deadline."""
  num_groups = 0
  for deadline in sorted(num_due):
    num_groups += num_due[deadline]
    if num_groups > (deadline - step + 1) * groups_per_step:
      return False
  return True


class BufferClosed(RuntimeError):
  """The run is ending. `__cause__` is the failure that ended it, if any."""


@dataclasses.dataclass(kw_only=True, slots=True)
class BufferState(Generic[G]):
  """The state of a buffer that a checkpoint stores.

  Attributes:
    next_step: the first step that has not produced its new weights yet.
    running: admissions, ordered by index.
    finished: groups, ordered by index.
  """

  groups_per_step: int
  next_step: int
  next_index: int
  running: list[types.Admission]
  finished: list[G]

  def admissions(self) -> list[types.Admission]:
    """Return the admissions of all groups, running and finished."""
    return [*self.running, *(group.admission for group in self.finished)]


class Buffer(Generic[G]):
  """The outstanding groups, running and finished.

  Invariant: the groups are schedulable at the next step. The module's docstring
  proves this and says what follows from it. `_num_due` counts the groups by
  deadline and holds no zeros. The cost of admitting a group or of asking for a
  batch therefore does not depend on the number of groups.

  Threads: every method may be called from any thread. One condition guards all
  fields. A method that waits tests its predicate under that condition, and each
  change that can make a predicate true notifies: `put` and `drop` for a batch,
  `drop`, `set_policy_version` and `set_max_staleness` for an admission, and
  `close` for both. Two changes need not notify. An admission never makes a
  batch possible. A batch never makes an admission possible: the groups of the
  batch have deadlines >= s, so a new group that fits without them from s + 1 on
  also fitted with them at s.
  """

  def __init__(
    self,
    groups_per_step: int,
    max_staleness: int,
    clock: Callable[[], float] = time.monotonic,
    new_condition: Callable[[], threading.Condition] = threading.Condition,
  ):
    """Create an empty buffer at step 0.

    Args:
      groups_per_step: P, the number of groups in a batch.
      max_staleness: the bound for groups that are admitted from now on, until
        `set_max_staleness` changes it.
      clock: seconds; used by `waiting` only.
      new_condition: makes the condition; on another clock, of another kind.
    """
    self._groups_per_step = groups_per_step
    self._max_staleness = max_staleness
    self._clock = clock
    self._next_step = 0
    self._next_index = 0
    self._policy_version = -1
    self._running: dict[int, types.Admission] = {}
    # For each deadline, a heap of its finished groups, ordered by index.
    self._finished: dict[int, list[tuple[int, G]]] = {}
    self._num_due: collections.Counter[int] = collections.Counter()
    self._taken: dict[int, list[G]] = {}  # by train step
    self._is_closed = False
    self._error: BaseException | None = None
    self._waits: dict[int, tuple[str, str, float]] = {}
    self._condition = new_condition()

  @property
  def policy_version(self) -> int:
    """The newest policy version that was set; -1 before the first."""
    with self._condition:
      return self._policy_version

  @property
  def num_finished(self) -> int:
    """The number of finished groups that wait to be taken."""
    with self._condition:
      return self._count_finished()

  def set_policy_version(self, version: int) -> None:
    """Set the policy version and wake the engines that wait for admission.

    Weights of this version can be adopted from now on. The batches of earlier
    steps have been trained, so the buffer no longer keeps them.
    """
    with self._condition:
      if not self._policy_version <= version <= self._next_step:
        raise ValueError(
          f"policy version {version} after {self._policy_version}, while step "
          f"{self._next_step} has no batch yet"
        )
      self._policy_version = version
      for step in [step for step in self._taken if step < version]:
        del self._taken[step]
      self._condition.notify_all()

  def set_max_staleness(self, max_staleness: int) -> None:
    """Set the bound for groups that are admitted from now on.

    Groups that are outstanding keep their deadlines.
    """
    with self._condition:
      if max_staleness < 0:
        raise ValueError(f"max_staleness {max_staleness} is negative")
      self._max_staleness = max_staleness
      self._condition.notify_all()

  def try_admit(self, engine_version: int) -> types.Admission | None:
    """Admit one group for an engine that holds this version.

    Returns:
      The admission, or None if the group does not fit.

    Raises:
      BufferClosed: the buffer is closed.
    """
    with self._condition:
      self._check_open()
      if not self._can_admit(engine_version):
        return None
      admission = types.Admission(
        index=self._next_index,
        birth=engine_version,
        deadline=engine_version + self._max_staleness,
      )
      self._next_index += 1
      self._running[admission.index] = admission
      self._num_due[admission.deadline] += 1
      return admission

  def wait_for_admission(
    self, engine_version: int, seen_version: int, timeout_s: float
  ) -> bool:
    """Wait until a group can be admitted or a newer version was set.

    Args:
      engine_version: the version that the engine holds.
      seen_version: `policy_version` as read before the engine last looked for
        newer weights. A version set since then ends the wait. The version that
        the engine already looked for does not: the engine may not be able to
        adopt it yet, and would otherwise call in a busy loop until it can.
      timeout_s: the longest wait in seconds of real time.

    Returns:
      False if the timeout has passed first.

    Raises:
      BufferClosed: the buffer is closed.
    """
    with self._condition:
      found = self._wait_for(
        lambda: self._find_work(engine_version, seen_version),
        f"admission at version {engine_version}",
        timeout_s,
      )
      return found is not None

  def put(self, group: G) -> None:
    """Hand in a running group that is finished and scored.

    This is also allowed after `close`.
    """
    versions = group.written_versions()
    if versions.size and versions.min() < group.admission.birth:
      raise ValueError(
        f"group {group.index}, born at version {group.admission.birth}, has a"
        f" token of version {versions.min()}"
      )
    with self._condition:
      admission = self._get_running(group.index)
      if group.admission != admission:
        raise ValueError(f"group {group.index} is not as admitted: {admission}")
      del self._running[group.index]
      self._keep_finished(group)
      self._condition.notify_all()

  def drop(self, index: int) -> None:
    """Remove a running group that was filtered or has failed."""
    with self._condition:
      admission = self._get_running(index)
      del self._running[index]
      self._num_due -= collections.Counter([admission.deadline])
      self._condition.notify_all()

  def get_batch(self, step: int, timeout_s: float) -> list[G] | None:
    """Take P finished groups, oldest deadline first, ties by index.

    The call waits while fewer than P groups are finished, or while a running
    group has to be taken first. If max_staleness is 0 and no group is dropped,
    the batch consists of the P groups with the indices from step * P on.

    Args:
      step: the next step. Steps take their batches in order.
      timeout_s: the longest wait in seconds of real time.

    Returns:
      The batch, or None if the timeout has passed first.

    Raises:
      BufferClosed: the buffer is closed.
    """
    with self._condition:
      oldest = self._wait_for(
        lambda: self._find_batch(step), f"a batch for step {step}", timeout_s
      )
      if oldest is None:
        return None
      batch = [
        self._pop_finished(deadline)
        for deadline, count in oldest.items()
        for _ in range(count)
      ]
      self._num_due -= collections.Counter(oldest)
      self._taken[step] = batch
      self._next_step = step + 1
      return batch

  def close(self, error: BaseException | None = None) -> None:
    """End every wait and every later admission or batch with `BufferClosed`.

    Running groups may still be put, so that a checkpoint written afterwards
    contains them as finished groups.

    Args:
      error: the failure that ends the run, if any. The error of the first call
        is kept.
    """
    with self._condition:
      if not self._is_closed:
        self._is_closed = True
        self._error = error
      self._condition.notify_all()

  def state(self) -> BufferState[G]:
    """Return a consistent state for a checkpoint.

    Groups that were taken but not trained yet are among the finished ones.
    """
    with self._condition:
      taken = [group for batch in self._taken.values() for group in batch]
      finished = [g for heap in self._finished.values() for _, g in heap]
      finished += taken
      return BufferState(
        groups_per_step=self._groups_per_step,
        next_step=min(self._taken, default=self._next_step),
        next_index=self._next_index,
        running=[self._running[i] for i in sorted(self._running)],
        finished=sorted(finished, key=operator.attrgetter("index")),
      )

  def restore(self, state: BufferState[G]) -> None:
    """Continue from the state of a checkpoint.

    The groups keep the deadlines that they were admitted with.

    Raises:
      ValueError: there are outstanding groups, and groups_per_step differs.
      RuntimeError: the buffer was used before.
    """
    outstanding = state.admissions()
    if outstanding and state.groups_per_step != self._groups_per_step:
      raise ValueError(
        f"algorithm.groups_per_step={self._groups_per_step} must stay "
        f"{state.groups_per_step} while the checkpoint has {len(outstanding)} "
        "groups outstanding"
      )
    with self._condition:
      if self._next_index or self._next_step:
        raise RuntimeError("restore of a buffer in use")
      self._next_step = state.next_step
      self._next_index = state.next_index
      self._running = {a.index: a for a in state.running}
      for group in state.finished:
        self._keep_finished(group)
      self._num_due.update(admission.deadline for admission in outstanding)

  def waiting(self) -> list[str]:
    """Describe for the stall report which threads wait, and for what.

    Returns:
      A line for each waiting thread and a line about the groups, with the
      running groups that have the oldest deadlines. Empty if nothing waits.
    """
    with self._condition:
      if not self._waits:
        return []
      now = self._clock()
      lines = [
        f"{who} waits for {what} since {now - since:.1f} s"
        for who, what, since in self._waits.values()
      ]
      oldest = ", ".join(
        f"{a.index} (deadline {a.deadline})"
        for a in heapq.nsmallest(4, self._running.values(), key=_OLDEST_FIRST)
      )
      return [
        *lines,
        f"buffer: next step {self._next_step}, policy version "
        f"{self._policy_version}, {self._count_finished()} groups finished of "
        f"the {self._groups_per_step} of a step, {len(self._running)} running, "
        f"oldest: {oldest or 'none'}",
      ]

  def _wait_for(
    self, poll: Callable[[], R | None], what: str, timeout_s: float
  ) -> R | None:
    """Wait until poll() is not None; it raises if the buffer is closed."""
    thread = threading.current_thread()
    self._waits[threading.get_ident()] = thread.name, what, self._clock()
    try:
      return self._condition.wait_for(poll, timeout_s)
    finally:
      del self._waits[threading.get_ident()]

  def _check_open(self) -> None:
    if self._is_closed:
      raise BufferClosed("the buffer is closed") from self._error

  def _find_work(self, engine_version: int, seen_version: int) -> bool | None:
    self._check_open()
    is_new = self._policy_version > seen_version
    return is_new or self._can_admit(engine_version) or None

  def _can_admit(self, engine_version: int) -> bool:
    if engine_version > self._next_step:
      raise ValueError(
        f"an engine holds version {engine_version}, which does not exist while "
        f"step {self._next_step} has no batch yet"
      )
    deadline = engine_version + self._max_staleness
    num_due = self._num_due + collections.Counter([deadline])
    return fits(num_due, self._next_step, self._groups_per_step)

  def _find_batch(self, step: int) -> dict[int, int] | None:
    """Return how many finished groups of each deadline form the batch, if any.

    The result is None while there is no batch that may be taken.
    """
    self._check_open()
    if step != self._next_step:
      raise ValueError(f"step {step} asks for the batch of {self._next_step}")
    oldest, num_missing = {}, self._groups_per_step
    for deadline in sorted(self._finished):
      oldest[deadline] = min(num_missing, len(self._finished[deadline]))
      num_missing -= oldest[deadline]
      if not num_missing:
        rest = self._num_due - collections.Counter(oldest)
        is_in_time = fits(rest, step + 1, self._groups_per_step)
        return oldest if is_in_time else None
    return None

  def _count_finished(self) -> int:
    return sum(map(len, self._finished.values()))

  def _keep_finished(self, group: G) -> None:
    heap = self._finished.setdefault(group.admission.deadline, [])
    heapq.heappush(heap, (group.index, group))

  def _pop_finished(self, deadline: int) -> G:
    heap = self._finished[deadline]
    _, group = heapq.heappop(heap)
    if not heap:
      del self._finished[deadline]
    return group

  def _get_running(self, index: int) -> types.Admission:
    if index not in self._running:
      raise ValueError(f"group {index} is not running")
    return self._running[index]
