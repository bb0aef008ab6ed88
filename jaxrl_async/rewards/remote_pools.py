"""Pools of reward processes on other hosts, whatever transport calls them.

On each of those hosts a process has a `pool.LocalPool`, with all its timers and
its replacement of processes. Here, attempts are divided among them. A host may
join late, vanish or be silent. Its attempts have failed then, as if a process
of this host had died, and the host is started again.
"""

import collections
from collections.abc import Callable
from concurrent import futures
import dataclasses
import enum
import pickle
import queue
import sys
import threading
import time
from typing import Any, Protocol, runtime_checkable

from jaxrl_async.rewards import pool as pool_lib
from jaxrl_async.rewards import scoring

_POLL_S = 0.1
# Attempts that a pool has for each of its processes. More would hide the way
# there better, but fail together with the pool.
_PER_WORKER = 4
# A pool is given up if none of its attempts ends for so much longer than the
# longest of them may take.
_PROGRESS_GRACE_S = 10.0
# Seconds before a pool is started again. They double with each failure.
_RELAUNCH_S, _MAX_RELAUNCH_S = 1.0, 60.0


class PoolLost(RuntimeError):
  """The process of a pool has ended, or its host cannot be reached."""


class PoolFailed(RuntimeError):
  """A pool cannot score; the message says why, in one line."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolSpec:
  """What a pool on another host begins with.

  Attributes:
    pickled: the `scoring.Scorers`. They are bytes because their modules are
      imported only after `search_path` is known.
    num_workers: number of processes.
    search_path: directories in which those modules may be.
  """

  pickled: bytes
  num_workers: int
  search_path: tuple[str, ...]


@runtime_checkable
class Handle(Protocol):
  """A pool on another host, as the coordinator's process knows it.

  A future raises `PoolLost` if its process has ended, and `PoolFailed` if the
  pool cannot score.
  """

  def attach(self, spec: PoolSpec) -> futures.Future[list[str]]:
    """Start its processes, and return lines about them for the user."""
    ...

  def collect(
    self,
  ) -> futures.Future[list[tuple[int, scoring.Outcome]]]:
    """Return the outcomes that have arrived, or none after a while."""
    ...

  def deliver(self, attempts: list[tuple[int, scoring.Attempt]]) -> None:
    """Send attempts with their numbers, without waiting for their arrival."""
    ...

  def kill(self) -> None:
    """End the process, if it has not ended."""
    ...


class _State(enum.Enum):
  """What is waited for from a pool."""

  STARTING = "starting"  # that it is attached
  READY = "ready"  # outcomes
  LOST = "lost"  # nothing; it is started again later


@dataclasses.dataclass(kw_only=True, slots=True)
class _Task:
  """An attempt that has not ended."""

  attempt: scoring.Attempt
  outcome: futures.Future[scoring.Outcome]


@dataclasses.dataclass(kw_only=True, slots=True)
class _Place:
  """A pool, or the place of one.

  Attributes:
    out: its attempts, by number.
    heard_s: when it was last heard of, or when its state began.
    moved_s: when an attempt last ended, or was given to an idle pool.
    num_failures: how often it failed since an attempt last ended.
  """

  number: int
  state: _State = _State.LOST
  handle: Handle | None = None
  out: dict[int, _Task] = dataclasses.field(default_factory=dict)
  heard_s: float = float("-inf")
  moved_s: float = 0.0
  num_failures: int = 0

  def __str__(self) -> str:
    return f"reward pool {self.number}"


class RemotePools:
  """Divides attempts among pools on other hosts.

  Invariant: the future of each attempt ends. An attempt is in exactly one
  place: it waits, or one pool has it. A pool that is lost, that has said
  nothing for `silence_s`, or none of whose attempts ends in the time that the
  longest of them may take is killed, and its attempts have failed. If no pool
  is ready for `start_timeout_s`, the attempts that wait have failed.

  Threads: any thread may call `score`, which only adds to the queue of events,
  as do the threads of the transport. A thread of its own takes them, and
  nothing else touches the places.
  """

  def __init__(
    self,
    scorers: scoring.Scorers,
    *,
    num_pools: int,
    num_workers: int,
    silence_s: float,
    start_timeout_s: float,
    note: Callable[[str], None],
    seconds: Callable[[], float] = time.monotonic,
  ):
    """Create the places. No pool exists before `start`.

    Args:
      scorers: of all processes.
      num_pools: the number of places.
      num_workers: processes of each pool.
      silence_s: a pool is lost after so long a silence.
      start_timeout_s: a pool has to be ready after so long.
      note: is called with a line when a pool comes, goes or fails.
      seconds: a clock.
    """
    self._scorers = scorers
    self._num_workers = num_workers
    self._silence_s = silence_s
    self._start_timeout_s = start_timeout_s
    self._note = note
    self._seconds = seconds
    self._places = [_Place(number=i) for i in range(num_pools)]
    self._waiting: collections.deque[_Task] = collections.deque()
    self._events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
    self._num_attempts = 0
    self._last_ready_s = seconds()
    self._lock = threading.Lock()  # of the two below
    self._is_closed = False
    self._error: BaseException | None = None
    self._ready = threading.Event()  # a pool was ready, or none will be
    self._thread = threading.Thread(
      target=self._run, name="reward pools", daemon=True
    )

  # -- other threads --------------------------------------------------------

  def start(
    self,
    launch: Callable[[int], Handle],
    check: Callable[[], None] = lambda: None,
  ) -> None:
    """Start the pools, and wait until at least one of them is ready.

    Args:
      launch: starts the process of a place.
      check: is called now and then, and may raise.

    Raises:
      PoolFailed: one cannot score, or none was ready in time.
    """
    self._launch = launch
    self._spec = PoolSpec(
      pickled=pickle.dumps(self._scorers),
      num_workers=self._num_workers,
      search_path=tuple(sys.path),
    )
    self._last_ready_s = self._seconds()
    self._thread.start()
    deadline_s = self._seconds() + self._start_timeout_s
    while not self._ready.wait(_POLL_S):
      check()
      if self._seconds() > deadline_s:
        raise PoolFailed(
          f"no reward pool was ready in {self._start_timeout_s:g} s"
          " (cluster.start_timeout_s)"
        )
    self.warm_up(0.0)

  def warm_up(self, timeout_s: float) -> None:
    """Check that a pool was ready, which `start` has waited for.

    Raises:
      TimeoutError: none was.
      PoolFailed: none can score.
    """
    if not self._ready.wait(timeout_s):
      raise TimeoutError(f"no reward pool was ready within {timeout_s:g} s")
    if self._error is not None:
      raise self._error

  def score(self, attempt: scoring.Attempt) -> futures.Future[scoring.Outcome]:
    """Start an attempt; see `pool.Pool`."""
    task = _Task(attempt=attempt, outcome=futures.Future())
    with self._lock:
      if self._is_closed:
        raise self._error or pool_lib.Closed()
      self._events.put(lambda: self._waiting.append(task))
    return task.outcome

  def close(self, timeout_s: float) -> None:
    """End all pools, and give up the attempts that are under way.

    Raises:
      TimeoutError: the thread did not end in time.
    """
    with self._lock:
      self._is_closed = True
    self._events.put(lambda: None)
    if self._thread.ident is None:
      return
    self._thread.join(timeout_s)
    if self._thread.is_alive():
      raise TimeoutError(f"reward pools did not end within {timeout_s:g} s")

  # -- the thread -----------------------------------------------------------

  def _run(self) -> None:
    try:
      while not self._is_closed:
        self._round()
    except BaseException as error:  # every attempt raises it, and `warm_up`
      self._error = error
      self._ready.set()
    with self._lock:
      self._is_closed = True
    self._take_events(0.0)
    for place in self._places:
      if place.handle is not None:
        place.handle.kill()
      self._waiting.extend(place.out.values())
    for task in self._waiting:
      task.outcome.set_exception(self._error or pool_lib.Closed())

  def _round(self) -> None:
    """Take what has happened, and hand out what waits."""
    self._relaunch_lost()
    self._take_events(_POLL_S)
    self._look_at_clocks()
    self._hand_out()

  def _take_events(self, timeout_s: float) -> None:
    """Wait for an event, and take all that there are by then."""
    for _ in range(self._events.qsize() or 1):
      try:
        event = self._events.get(timeout=timeout_s)
      except queue.Empty:
        return
      event()

  def _relaunch_lost(self) -> None:
    for place in self._places:
      wait_s = min(_RELAUNCH_S * 2**place.num_failures, _MAX_RELAUNCH_S)
      waited_s = self._seconds() - place.heard_s
      if place.state is _State.LOST and waited_s >= wait_s:
        place.state, place.heard_s = _State.STARTING, self._seconds()
        place.handle = self._launch(place.number)
        self._expect(place, place.handle.attach(self._spec), self._on_attached)

  def _expect(
    self,
    place: _Place,
    future: futures.Future,
    then: Callable[[_Place, Any], None],
  ) -> None:
    """Call `then` in this thread with the result of a call to a pool."""
    handle = place.handle

    def take() -> None:
      # A call to a process that was replaced says nothing any more.
      if place.handle is not handle:
        return
      try:
        result = future.result()
      except PoolLost as error:
        self._lose(place, f"error: {place} is gone ({error})")
      except PoolFailed as error:
        self._fail(place, error)
      else:
        place.heard_s = self._seconds()
        then(place, result)

    future.add_done_callback(lambda _: self._events.put(take))

  def _on_attached(self, place: _Place, lines: list[str]) -> None:
    place.state = _State.READY
    self._note(f"{place} is ready")
    for line in lines if not self._ready.is_set() else ():
      self._note(line)
    self._collect(place)
    self._ready.set()

  def _collect(self, place: _Place) -> None:
    assert place.handle is not None
    self._expect(place, place.handle.collect(), self._on_outcomes)

  def _on_outcomes(
    self, place: _Place, outcomes: list[tuple[int, scoring.Outcome]]
  ) -> None:
    for number, outcome in outcomes:
      place.moved_s, place.num_failures = self._seconds(), 0
      place.out.pop(number).outcome.set_result(outcome)
    self._collect(place)

  def _lose(self, place: _Place, reason: str) -> None:
    """Fail the attempts of a pool, and start it again later."""
    place.num_failures += 1
    place.state, place.heard_s = _State.LOST, self._seconds()
    place.handle = None
    lost, place.out = place.out, {}
    self._note(f"{reason.partition(': ')[2]}; it is started again")
    for task in lost.values():
      task.outcome.set_result(scoring.RewardFailure(reason))

  def _fail(self, place: _Place, error: PoolFailed) -> None:
    """Start a pool again that cannot score, unless none ever could.

    Raises:
      PoolFailed: none was ready before.
    """
    if not self._ready.is_set():
      raise error
    assert place.handle is not None
    place.handle.kill()
    self._lose(place, f"error: {place} cannot score: {error}")

  def _look_at_clocks(self) -> None:
    now_s = self._seconds()
    for place in self._places:
      if (reason := self._why_lost(place, now_s)) is not None:
        assert place.handle is not None
        place.handle.kill()
        self._lose(place, reason)
    if any(place.state is _State.READY for place in self._places):
      self._last_ready_s = now_s
    if now_s - self._last_ready_s <= self._start_timeout_s:
      return
    while self._waiting:
      self._waiting.popleft().outcome.set_result(
        scoring.RewardFailure(
          "error: no reward pool was ready for"
          f" {self._start_timeout_s:g} s (cluster.start_timeout_s)"
        )
      )

  def _why_lost(self, place: _Place, now_s: float) -> str | None:
    """Return why a pool is to be given up, or None."""
    silence_s = now_s - place.heard_s
    if place.state is _State.STARTING and silence_s > self._start_timeout_s:
      return f"error: {place} was not ready in {silence_s:.0f} s"
    if place.state is not _State.READY:
      return None
    if silence_s > self._silence_s:
      return f"timeout: {place} has said nothing for {silence_s:.0f} s"
    if not place.out:
      return None
    longest_s = max(
      self._scorers.max_attempt_s(task.attempt) for task in place.out.values()
    )
    longest_s += pool_lib.GRACE_S + _PROGRESS_GRACE_S
    if now_s - place.moved_s > longest_s:
      return f"timeout: {place} has ended no attempt for {longest_s:.0f} s"
    return None

  def _hand_out(self) -> None:
    """Give what waits to the pools that have the least."""
    ready = [p for p in self._places if p.state is _State.READY]
    given: dict[int, list[tuple[int, scoring.Attempt]]]
    given = collections.defaultdict(list)
    while self._waiting and ready:
      place = min(ready, key=lambda p: len(p.out))
      if len(place.out) >= _PER_WORKER * self._num_workers:
        break
      if not place.out:
        place.moved_s = self._seconds()
      task = self._waiting.popleft()
      place.out[self._num_attempts] = task
      given[place.number].append((self._num_attempts, task.attempt))
      self._num_attempts += 1
    for number, attempts in given.items():
      handle = self._places[number].handle
      assert handle is not None
      handle.deliver(attempts)
