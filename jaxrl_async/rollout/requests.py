"""Requests of clients beside whatever else a scheduler does.

Any thread submits and cancels; the thread that owns the scheduler calls `feed`
before each step and `deliver` after it. `ServeLoop` is that thread where
nothing trains; `worker.RolloutWorker` does the same beside its groups.
"""

import collections
from collections.abc import Callable, Iterable
import dataclasses
import enum
import threading
import time

from jaxtyping import Float, Int
import numpy as np

from jaxrl_async import tokenizer as tokenizer_lib
from jaxrl_async import types
from jaxrl_async.rollout import sampling
from jaxrl_async.rollout import scheduler as scheduler_lib
from jaxrl_async.rollout import sequence as sequence_lib
from jaxrl_async.rollout import stop_strings

MAX_SEED = 2**31 - 1
_NUM_LATENCIES = 32  # that the estimate of a wait is made of


class QueueFull(RuntimeError):
  """There is no room for another request.

  Attributes:
    retry_after_s: when a place will probably be free.
  """

  def __init__(self, message: str, retry_after_s: float):
    super().__init__(message)
    self.retry_after_s = retry_after_s


class TooLong(ValueError):
  """Prompt and completion do not fit into the cache."""


class Draining(RuntimeError):
  """Nothing is taken any more: the server is shutting down."""


class RequestError(enum.StrEnum):
  """Why a request ended without being finished."""

  DEADLINE = "the request's deadline passed"
  SHUT_DOWN = "the server is shutting down"
  FAILED = "the engine failed"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Request:
  """What a client wants written.

  Attributes:
    prompt_tokens: at least one.
    max_tokens: of each choice, at least one.
    settings: how tokens are drawn.
    seed: with the choice, all that the randomness is a function of.
    num_choices: completions of the same prompt.
    stop_strings: the first of them to be written ends a choice; its tokens
      are part of the completion, its text is not.
    deadline_s: on the clock of `time.monotonic`.
  """

  prompt_tokens: Int[np.ndarray, "T"]
  max_tokens: int
  settings: sampling.SamplingSettings
  seed: int
  num_choices: int = 1
  stop_strings: tuple[str, ...] = ()
  deadline_s: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Update:
  """What was written of one choice since its last update.

  Attributes:
    choice: which of them.
    tokens, logprobs, policy_versions: may be empty in the last update.
    finish_reason: given in the choice's last update.
    error: a `RequestError`. It ends all choices that have not finished; no
      update of the request follows.
  """

  choice: int
  tokens: Int[np.ndarray, "T"]
  logprobs: Float[np.ndarray, "T"]
  policy_versions: Int[np.ndarray, "T"]
  finish_reason: types.FinishReason | None = None
  error: str | None = None


class Handle:
  """One submitted request; owner of its sequences in the scheduler.

  Belongs to the queue: a client only keeps it, to cancel.
  """

  def __init__(self, request: Request, on_update: Callable[[Update], None]):
    self.request = request
    self.on_update = on_update
    self.submitted_s = time.monotonic()
    self.is_cancelled = False
    self.has_started = False  # its first token was delivered
    self.sequences: list[sequence_lib.Sequence] = []
    self.num_sent: list[int] = []  # tokens of each sequence, its prompt too
    self.unfinished: set[int] = set(range(request.num_choices))
    self.writing: set[int] = set()  # of these, the scheduler has

  def num_written(self) -> int:
    """Tokens of all choices so far."""
    n = len(self.request.prompt_tokens)
    return sum(s.length - n for s in self.sequences)


@dataclasses.dataclass(kw_only=True, slots=True)
class QueueStats:
  """Counts since the start; the last three are as of the last `feed`."""

  requests: int = 0
  refused: int = 0
  finished: int = 0
  cancelled: int = 0
  expired: int = 0
  failed: int = 0
  prompt_tokens: int = 0
  completion_tokens: int = 0
  slots_in_use: int = 0
  num_slots: int = 0
  policy_version: int = -1


class RequestQueue:
  """Carries requests to the scheduler's thread and what it writes back.

  Invariant: a handle is in `_handles` from `submit` until its last update was
  made (or, cancelled, until `feed` has freed its slots), and nowhere after.
  So `len(_handles)` is what `max_waiting` bounds, and empty means drained.

  Threads: `submit`, `cancel`, `drain`, `wake` and the properties are for any
  thread. `feed`, `deliver` and `close` belong to the thread of the scheduler,
  which is also the one that calls each `on_update` and `on_time`: they must
  not block, not raise and not call back. The lock guards `_handles`, `_new`,
  `_cancelled` and the two flags.
  """

  def __init__(
    self,
    tokenizer: tokenizer_lib.Tokenizer,
    *,
    max_waiting: int,
    cache_tokens: int,
    vocab_size: int,
    max_choices: int = 128,
    on_time: Callable[[str, float], None] = lambda name, seconds: None,
  ):
    """Makes an empty queue.

    Args:
      tokenizer: of the policy; finds stop strings.
      max_waiting: requests at a time, running ones included.
      cache_tokens: the most tokens of a prompt with its completion.
      vocab_size: of the model.
      max_choices: of one request.
      on_time: told "first_token" and "latency" of a request, in seconds.
    """
    self.cache_tokens = cache_tokens
    self.vocab_size = vocab_size
    self.max_waiting = max_waiting
    self.max_choices = max_choices
    self.stats = QueueStats()
    self._tokenizer = tokenizer
    self._on_time = on_time
    self._changed = threading.Condition()
    self._handles: set[Handle] = set()
    self._new: list[Handle] = []
    self._cancelled: list[Handle] = []
    self._is_draining = False
    self._is_awake = False
    self._latencies_s: collections.deque[float] = collections.deque(
      maxlen=_NUM_LATENCIES
    )
    self._running: dict[Handle, None] = {}  # taken up, in order
    self._pending: collections.deque[tuple[Handle, int]] = collections.deque()
    self._ended_tokens = 0

  # -- any thread -----------------------------------------------------------

  def submit(
    self, request: Request, on_update: Callable[[Update], None]
  ) -> Handle:
    """Queues a request.

    Raises:
      ValueError: it can never be served.
      QueueFull: not now.
      Draining: not any more.
    """
    self.check(request)
    handle = Handle(request, on_update)
    with self._changed:
      if self._is_draining:
        raise Draining("the server is shutting down")
      if len(self._handles) >= self.max_waiting:
        self.stats.refused += 1
        raise QueueFull(
          f"{len(self._handles)} requests are waiting or running, which is the"
          " most",
          self._retry_after_s(),
        )
      self._handles.add(handle)
      self._new.append(handle)
      self.stats.requests += 1
      self.stats.prompt_tokens += len(request.prompt_tokens)
      self._changed.notify_all()
    return handle

  def cancel(self, handle: Handle) -> None:
    """Its client is gone: no further updates, its slots are freed soon.

    An update that is being made meanwhile may still arrive. What has ended
    already is left alone.
    """
    with self._changed:
      if handle in self._handles and not handle.is_cancelled:
        handle.is_cancelled = True
        self._cancelled.append(handle)
        self._changed.notify_all()

  def drain(self) -> None:
    """From now on nothing is taken; what was taken is finished."""
    with self._changed:
      self._is_draining = True

  def wake(self) -> None:
    """Ends the current `wait`, or the next one."""
    with self._changed:
      self._is_awake = True
      self._changed.notify_all()

  @property
  def is_draining(self) -> bool:
    """Nothing is taken any more."""
    return self._is_draining

  @property
  def is_empty(self) -> bool:
    """Nothing waits and nothing runs."""
    return self.depth == 0

  @property
  def depth(self) -> int:
    """Requests waiting or running."""
    with self._changed:
      return len(self._handles)

  def _retry_after_s(self) -> float:
    # In a steady state one of n requests leaves every latency / n seconds.
    times = self._latencies_s
    latency_s = sum(times) / len(times) if times else 1.0
    return max(1.0, latency_s / self.max_waiting)

  def check(self, request: Request) -> None:
    """Raises ValueError, with the field first, if it can never be served."""
    prompt, settings = request.prompt_tokens, request.settings
    v = self.vocab_size
    if prompt.ndim != 1 or not len(prompt):
      raise ValueError("prompt: has no tokens")
    if prompt.min() < 0 or prompt.max() >= v:
      raise ValueError(f"prompt: token ids must be in [0, {v})")
    if request.max_tokens < 1:
      raise ValueError(f"max_tokens: {request.max_tokens} is less than 1")
    if len(prompt) + request.max_tokens > self.cache_tokens:
      raise TooLong(
        f"prompt: {len(prompt)} tokens and up to {request.max_tokens} of the"
        f" completion (max_tokens) do not fit into {self.cache_tokens}"
      )
    settings.check(v)
    in_range = {
      ("seed", request.seed): 0 <= request.seed <= MAX_SEED,
      ("n", request.num_choices): 1 <= request.num_choices <= self.max_choices,
      ("min_tokens", settings.min_tokens): (
        settings.min_tokens <= request.max_tokens
      ),
      ("stop", request.stop_strings): stop_strings.are_allowed(
        request.stop_strings
      ),
    }
    for (name, value), is_right in in_range.items():
      if not is_right:
        raise ValueError(f"{name}: {value!r} is out of range")

  # -- the scheduler's thread -----------------------------------------------

  def feed(
    self, scheduler: scheduler_lib.Scheduler, most: int | None = None
  ) -> None:
    """Hands over what is next; ends what was cancelled or took too long.

    Args:
      scheduler: this thread's.
      most: choices that it may have at a time, in the order of requests; by
        default as many as keep its slots full.
    """
    with self._changed:
      new, self._new = self._new, []
      # What ended meanwhile was not cancelled.
      cancelled = [h for h in self._cancelled if h in self._handles]
      self._cancelled = []
    for handle in cancelled:
      scheduler.cancel(handle)
      self._forget(handle)
      self.stats.cancelled += 1
    gone = set(cancelled)
    for handle in new:
      if handle not in gone:
        self._start(handle)
    now_s = time.monotonic()
    for handle in list(self._running):
      if handle.request.deadline_s <= now_s:
        scheduler.cancel(handle)
        self._fail(handle, RequestError.DEADLINE)
        self.stats.expired += 1
    num_slots = scheduler.engine.sizes.num_slots
    if most is None:
      most = num_slots + scheduler.engine.sizes.insert_rows
    num_written = sum(len(handle.writing) for handle in self._running)
    while self._pending and num_written < most:
      handle, choice = self._pending.popleft()
      if handle in self._running:
        handle.writing.add(choice)
        scheduler.submit(handle.sequences[choice])
        num_written += 1
    self.stats.num_slots = num_slots
    self.stats.slots_in_use = min(num_slots, len(scheduler.sequences()))
    self.stats.policy_version = scheduler.version

  def _start(self, handle: Handle) -> None:
    request = handle.request
    self._running[handle] = None
    if request.deadline_s <= time.monotonic():
      return  # `feed` ends it
    n = len(request.prompt_tokens)
    for choice in range(request.num_choices):
      stop = None
      if request.stop_strings:
        stop = stop_strings.StopStrings(
          self._tokenizer,
          request.stop_strings,
          min_tokens=request.settings.min_tokens,
        )
      sequence = sequence_lib.Sequence(
        request.prompt_tokens,
        limit=n + request.max_tokens,
        stream=sampling.Stream.SERVE,
        group=request.seed,
        member=choice,
        settings=request.settings,
        stop=stop,
        owner=handle,
      )
      handle.sequences.append(sequence)
      handle.num_sent.append(n)
      self._pending.append((handle, choice))

  def deliver(self, ended: Iterable[sequence_lib.Sequence]) -> None:
    """Tells clients what was written since the last time.

    Args:
      ended: of `Scheduler.step`; those of others are left alone.
    """
    has_ended = {id(s) for s in ended if isinstance(s.owner, Handle)}
    for handle in list(self._running):
      writing = sorted(handle.writing)
      ended_here = {c for c in writing if id(handle.sequences[c]) in has_ended}
      handle.unfinished -= ended_here
      handle.writing -= ended_here
      if not handle.unfinished:
        # Before its last update, whose client may call `cancel` at once.
        self._forget(handle)
      for choice in writing:
        is_last = choice in ended_here
        length = handle.sequences[choice].length
        if is_last or length > handle.num_sent[choice]:
          self._send(handle, choice, is_last)
      if not handle.unfinished:
        now_s = time.monotonic()
        if not handle.is_cancelled:
          self.stats.finished += 1
          self._latencies_s.append(now_s - handle.submitted_s)
          self._on_time("latency", now_s - handle.submitted_s)

  def _send(self, handle: Handle, choice: int, is_last: bool) -> None:
    sequence = handle.sequences[choice]
    new = slice(handle.num_sent[choice], sequence.length)
    handle.num_sent[choice] = sequence.length
    self.stats.completion_tokens += new.stop - new.start
    if handle.is_cancelled:
      return
    if not handle.has_started:
      handle.has_started = True
      self._on_time("first_token", time.monotonic() - handle.submitted_s)
    handle.on_update(
      Update(
        choice=choice,
        tokens=sequence.tokens[new].copy(),
        logprobs=sequence.behavior_logprobs[new].copy(),
        policy_versions=sequence.policy_versions[new].copy(),
        finish_reason=sequence.finish_reason if is_last else None,
      )
    )

  def _fail(self, handle: Handle, error: RequestError) -> None:
    self._forget(handle)
    if not handle.is_cancelled:
      handle.on_update(
        Update(
          choice=min(handle.unfinished),
          tokens=np.zeros((0,), np.int32),
          logprobs=np.zeros((0,), np.float32),
          policy_versions=np.zeros((0,), np.int32),
          error=error,
        )
      )

  def _forget(self, handle: Handle) -> None:
    if handle in self._running:  # counted once
      del self._running[handle]
      self._ended_tokens += handle.num_written()
    with self._changed:
      self._handles.discard(handle)

  def num_written(self) -> int:
    """Tokens written for requests, whether or not anybody got them."""
    return self._ended_tokens + sum(h.num_written() for h in self._running)

  def wait(self, timeout_s: float) -> None:
    """Waits for something to `feed`, or for `wake`."""
    with self._changed:
      self._changed.wait_for(
        lambda: self._new or self._cancelled or self._is_awake, timeout_s
      )
      self._is_awake = False

  def close(self, error: RequestError = RequestError.SHUT_DOWN) -> None:
    """Ends everything that has not finished; nothing is taken any more."""
    with self._changed:
      self._is_draining = True
      handles = list(self._handles)
      self._new.clear()
      self._cancelled.clear()
    for handle in handles:
      self.stats.failed += not handle.is_cancelled
      self._fail(handle, error)


class ServeLoop:
  """Drives a scheduler for requests alone.

  Waits for requests; is woken by `submit`, `cancel` and `stop`.

  Threads: `run` belongs to one thread, which owns the scheduler; `stop` and
  `is_running` are for any thread. A failure ends every request and is raised.
  """

  def __init__(self, queue: RequestQueue, scheduler: scheduler_lib.Scheduler):
    self.queue = queue
    self.scheduler = scheduler
    self.is_running = False
    self._is_stopping = False

  def stop(self) -> None:
    """Ends `run` before its next step; unfinished requests are told so."""
    self._is_stopping = True
    self.queue.wake()

  def run(self) -> None:
    """Serves until stopped."""
    self.is_running = True
    error = RequestError.FAILED
    try:
      while not self._is_stopping:
        self.queue.feed(self.scheduler)
        if self.scheduler.is_idle:
          self.queue.wait(timeout_s=60.0)
        else:
          self.queue.deliver(self.scheduler.step())
      error = RequestError.SHUT_DOWN
    finally:
      self.is_running = False
      self.queue.close(error)
