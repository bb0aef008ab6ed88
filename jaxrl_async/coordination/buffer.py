"""Decides which groups may start and which are trained: the staleness bound.

Terms. P is groups_per_step. Weights of version v have completed v train steps,
so train step s updates version s, and s is here the next step to take a batch.
An outstanding group is one admitted and not yet taken or dropped. Its birth is
the version its engine held at admission, its deadline is birth + max_staleness.

Predicate. Outstanding deadlines d_0 <= d_1 <= ... are schedulable at s when

  d_j >= s + j // P   for every j,

that is, when P groups a step, oldest deadline first, leave none behind.

Counts. Let n(d) be the number of outstanding groups whose deadline is d or
earlier. The groups are schedulable at s if and only if

  n(d) <= (d - s + 1) * P   for every deadline d that occurs,

that is, if what is due by d fits into the steps s to d. Proof: the last group
with deadline d has j = n(d) - 1. In whole numbers, d >= s + j // P is the same
as j < (d - s + 1) * P. The other groups with this deadline have a smaller j. So
the buffer counts its groups by deadline and decides from these counts (`fits`);
`is_schedulable` is the definition, and the tests compare the two. There are few
deadlines: none is below s (see the bound), and none is above s + max_staleness,
for the largest max_staleness under which an outstanding group was admitted.

Invariant. The outstanding groups are schedulable at s. It holds because

- `try_admit` adds a group only if the set with it is schedulable at s;
- `put` changes no deadline;
- `drop` leaves a subset, in which every remaining j is the same or smaller;
- `get_batch` takes a batch only if what remains is schedulable at s + 1.

Bound. No token of a group is older than its birth (`put` checks it), and by the
invariant at j = 0 no deadline is below s. A group taken by step s therefore has
staleness s - version <= s - birth <= deadline - birth = max_staleness.

Nothing is lost to age. By the same line a group is taken, at the latest, by the
step that is its deadline: if it is still there, that step waits for it.

No deadlock, if each admitted group is put or dropped at some time and some
engine adopts at some time. Let step s wait while every outstanding group is
finished. If there are P or more, the P oldest deadlines are a batch, for what
remains has d_{j+P} >= s + (j + P) // P = (s + 1) + j // P. If there are fewer,
a group of an engine at version >= s - max_staleness is admitted, for then all
j // P are 0 and all deadlines >= s; version s exists once step s - 1 is done.

Oldest deadline first is the best choice among finished groups: to swap a taken
group for an older one puts a later deadline into what remains. So if any batch
is allowed, this one is, and a step waits for a running group only if without it
the remaining ones could not all be taken in time.

A batch may be taken while earlier steps are still training, and a checkpoint
then has to give it back. So a taken batch is kept until the weights that it
trained are set as the policy version, and `state` shows the buffer as if it had
never been taken: next_step is the first step whose weights do not exist yet.
The invariant holds for that state too. By induction over the batches kept,
newest first, let R be schedulable at t + 1 and T be the P groups of step t,
which have deadlines >= t by the bound's argument; then R and T together are
schedulable at t. Sort them, T first among equals. At most P of T stand before
a group of R with rank j in R, so its rank i is at most j + P, and
d >= (t + 1) + j // P >= t + i // P. A group of T has at most P - 1 of T before
it; if none of R stands there, i < P and d >= t is enough; else its deadline is
not below that of the last one there, of rank j in R, and i <= j + P again.

With every engine up to date and nothing dropped, admission is AReaL's gate
(arXiv:2505.24298), N <= (version + max_staleness + 1) * P over all N groups
ever admitted: s * P of them are taken, and the new deadline is the latest.
"""

import collections
from collections.abc import Callable, Iterable, Mapping
import dataclasses
import heapq
import operator
import threading
import time
from typing import TypeVar

from jaxrl_async import types

R = TypeVar("R")

_OLDEST_FIRST = operator.attrgetter("deadline", "index")


class BufferClosed(RuntimeError):
  """The run is ending; `__cause__` is the failure that ended it, if any."""


@dataclasses.dataclass(kw_only=True, slots=True)
class BufferState:
  """What a checkpoint keeps of a buffer; lists are in order of the index."""

  groups_per_step: int
  next_step: int
  next_index: int
  running: list[types.Admission]
  finished: list[types.RolloutGroup]

  def admissions(self) -> list[types.Admission]:
    """Those of all groups, running and finished."""
    return [*self.running, *(group.admission for group in self.finished)]


def is_schedulable(
  deadlines: Iterable[int], step: int, groups_per_step: int
) -> bool:
  """Return whether d_j >= step + j // P for the deadlines in any order."""
  return all(
    deadline >= step + j // groups_per_step
    for j, deadline in enumerate(sorted(deadlines))
  )


def fits(num_due: Mapping[int, int], step: int, groups_per_step: int) -> bool:
  """`is_schedulable` of the numbers of groups at each deadline."""
  num_groups = 0
  for deadline in sorted(num_due):
    num_groups += num_due[deadline]
    if num_groups > (deadline - step + 1) * groups_per_step:
      return False
  return True


class Buffer:
  """The outstanding groups, running and finished.

  Invariant: they are schedulable at the next step; the module's docstring says
  why, and what follows from it. `_num_due` counts them by deadline, without
  zeros, so that to admit and to ask for a batch costs the same however many
  groups there are.

  Threads: every method may be called from any thread; one condition guards all
  fields. A method that waits tests its predicate under that condition, and each
  change that can make a predicate true notifies: `put` and `drop` for a batch;
  `drop` and `set_policy_version` for admission; `close` for both. Two changes
  need not notify. An admission makes no batch possible. Neither does a batch
  make an admission possible: its groups had deadlines >= s, so that if the new
  group fits from s + 1 on without them, it fitted at s with them.
  """

  def __init__(
    self,
    groups_per_step: int,
    max_staleness: int,
    clock: Callable[[], float] = time.monotonic,
  ):
    """Start empty, at step 0; the clock is for `waiting` only."""
    self._groups_per_step = groups_per_step
    self._max_staleness = max_staleness
    self._clock = clock
    self._next_step = 0
    self._next_index = 0
    self._policy_version = -1
    self._running: dict[int, types.Admission] = {}
    # By deadline, of which each has a heap by index.
    self._finished: dict[int, list[tuple[int, types.RolloutGroup]]] = {}
    self._num_due: collections.Counter[int] = collections.Counter()
    self._taken: dict[int, list[types.RolloutGroup]] = {}  # by train step
    self._is_closed = False
    self._error: BaseException | None = None
    self._waits: dict[int, tuple[str, str, float]] = {}
    self._condition = threading.Condition()

  @property
  def policy_version(self) -> int:
    """Newest version that was set; -1 before the first."""
    with self._condition:
      return self._policy_version

  @property
  def num_finished(self) -> int:
    """Groups that wait to be taken."""
    with self._condition:
      return self._count_finished()

  def set_policy_version(self, version: int) -> None:
    """Wake the engines that wait: weights of this version can be adopted.

    Batches of earlier steps have been trained; they are forgotten.
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

  def try_admit(self, engine_version: int) -> types.Admission | None:
    """Admit one group of an engine that holds this version, if it fits."""
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
    """Return True once a group can be admitted or a newer version was set.

    Args:
      engine_version: the version it holds.
      seen_version: `policy_version` as read before it last looked for newer
        weights. Weights set since then end the wait; those it looked for and
        could not have do not, or it would spin until they can be adopted.
      timeout_s: real time; False if it has passed first.
    """
    with self._condition:
      found = self._wait_for(
        lambda: self._find_work(engine_version, seen_version),
        f"admission at version {engine_version}",
        timeout_s,
      )
      return found is not None

  def put(self, group: types.RolloutGroup) -> None:
    """Hand in a running group, finished and scored; allowed after `close`."""
    for trajectory in group.trajectories:
      versions = trajectory.policy_versions[trajectory.loss_mask]
      if versions.size and versions.min() < group.admission.birth:
        raise ValueError(
          f"group {group.index}, born at version {group.admission.birth}, has"
          f" a token of version {versions.min()}"
        )
    with self._condition:
      admission = self._get_running(group.index)
      if group.admission != admission:
        raise ValueError(f"group {group.index} is not as admitted: {admission}")
      del self._running[group.index]
      self._keep_finished(group)
      self._condition.notify_all()

  def drop(self, index: int) -> None:
    """Free the place of a running group, filtered or failed."""
    with self._condition:
      admission = self._get_running(index)
      del self._running[index]
      self._subtract_due({admission.deadline: 1})
      self._condition.notify_all()

  def get_batch(
    self, step: int, timeout_s: float
  ) -> list[types.RolloutGroup] | None:
    """Take P finished groups, oldest deadline first, ties by index.

    Waits while there are fewer, or while a running group has to go first. With
    max_staleness = 0 and nothing dropped these are groups step * P and on.

    Args:
      step: the next one; steps take their batches in order.
      timeout_s: real time; None if it has passed first.
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
      self._subtract_due(oldest)
      self._taken[step] = batch
      self._next_step = step + 1
      return batch

  def close(self, error: BaseException | None = None) -> None:
    """End every wait and every later admission or batch with `BufferClosed`.

    The first call's error is kept. What runs may still be put, so that a
    checkpoint taken afterwards has it.
    """
    with self._condition:
      if not self._is_closed:
        self._is_closed = True
        self._error = error
      self._condition.notify_all()

  def state(self) -> BufferState:
    """Return what a checkpoint keeps, all of the same moment.

    What was taken and not trained yet is finished again.
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

  def restore(self, state: BufferState) -> None:
    """Continue from a checkpoint, with its deadlines; the buffer is unused."""
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
    """Say who waits for what since when, and which groups are in the way."""
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
    """How many finished groups of which deadline are the batch, if any."""
    self._check_open()
    if step != self._next_step:
      raise ValueError(f"step {step} asks for the batch of {self._next_step}")
    oldest, num_missing = {}, self._groups_per_step
    for deadline in sorted(self._finished):
      oldest[deadline] = min(num_missing, len(self._finished[deadline]))
      num_missing -= oldest[deadline]
      if not num_missing:
        rest = self._num_due - collections.Counter(oldest)
        return oldest if fits(rest, step + 1, self._groups_per_step) else None
    return None

  def _count_finished(self) -> int:
    return sum(map(len, self._finished.values()))

  def _keep_finished(self, group: types.RolloutGroup) -> None:
    heap = self._finished.setdefault(group.admission.deadline, [])
    heapq.heappush(heap, (group.index, group))

  def _pop_finished(self, deadline: int) -> types.RolloutGroup:
    heap = self._finished[deadline]
    _, group = heapq.heappop(heap)
    if not heap:
      del self._finished[deadline]
    return group

  def _subtract_due(self, counts: Mapping[int, int]) -> None:
    self._num_due -= collections.Counter(counts)

  def _get_running(self, index: int) -> types.Admission:
    if index not in self._running:
      raise ValueError(f"group {index} is not running")
    return self._running[index]
