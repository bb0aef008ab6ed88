"""The queue of client requests that share a scheduler.

Any thread may submit and cancel requests. The thread that owns the scheduler
calls `feed` before each step and `deliver` after it. Without training that is
the thread of `ServeLoop`. During training it is the rollout worker's
thread, to which the queue is a `rollout.client_requests.ClientRequests`.

Slots are shared fairly between clients. A free slot goes to the client that
holds the fewest slots. Among this client's requests it goes to the one that
holds the fewest, and then to the one that has waited longest for its turn. A
request therefore waits no longer than one slot takes to become free, however
many requests or choices another client has.
"""

import collections
from collections.abc import Callable, Iterable
import dataclasses
import itertools
import threading
import time

from jaxtyping import Int
import numpy as np

from jaxrl_async.engine import sampling
from jaxrl_async.engine import scheduler as scheduler_lib
from jaxrl_async.engine import sequence as sequence_lib
from jaxrl_async.serving import client_request
from jaxrl_async.text import stop_strings
from jaxrl_async.text import tokenizer as tokenizer_lib

_RESERVED = 8  # one place in eight is for clients that have no request yet


class Handle:
  """One submitted request.

  The handle belongs to the queue. A client only keeps it to cancel the request.

  Attributes:
    owner: the owner of the request's sequences in the scheduler.
    num_begun: number of choices that were submitted to the scheduler.
    writing: the sequences that are being generated, by choice.
    num_sent: for each choice, the tokens sent so far, the prompt included.
    turn: when the request last got a slot. A larger number is later.
  """

  def __init__(
    self,
    number: int,
    request: client_request.Request,
    on_update: Callable[[client_request.Update], None],
  ):
    """Create the handle of a request, numbered by the queue."""
    self.owner = sequence_lib.Owner("request", number)
    self.request = request
    self.on_update = on_update
    self.submitted_s = time.monotonic()
    self.is_cancelled = False
    self.has_started = False  # its first token was delivered
    self.num_begun = 0
    self.num_unfinished = request.all_choices
    self.writing: dict[int, sequence_lib.Sequence] = {}
    self.num_sent: dict[int, int] = {}
    self.turn = 0

  @property
  def has_more(self) -> bool:
    """Whether some choices have not been submitted to the scheduler yet."""
    return self.num_begun < self.request.all_choices

  def num_written(self) -> int:
    """Return the tokens generated so far for the choices in progress."""
    return sum(
      sequence.length - len(self.request.prompt_of(choice))
      for choice, sequence in self.writing.items()
    )


@dataclasses.dataclass(kw_only=True, slots=True)
class QueueStats:
  """Counts since the start. The last three fields are as of the last `feed`."""

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
  """Passes requests to the scheduler's thread and their updates to clients.

  Invariant: a handle is in `_handles` from `submit` until its last update. A
  cancelled one stays until `feed` has freed its slots. Afterwards it is in no
  collection. A draining queue is done when there are none.

  Threads: any thread may use `submit`, `cancel`, `drain`, `wake` and the
  properties. `feed`, `deliver` and `close` belong to the scheduler's thread.
  That thread also calls `on_update` and `on_time`, which must not block, raise
  or call the queue. The lock guards `_handles`, `_new`, `_cancelled` and the
  two flags.
  """

  def __init__(
    self,
    tokenizer: tokenizer_lib.Tokenizer,
    *,
    max_waiting: int,
    cache_tokens: int,
    vocab_size: int,
    max_choices: int = 128,
    max_further_choices: int = 512,
    on_time: Callable[[str, float], None] = lambda name, seconds: None,
  ):
    """Create an empty queue.

    Args:
      tokenizer: the policy's tokenizer, used to find stop strings.
      max_waiting: most requests at a time, running ones included.
      cache_tokens: most tokens of a prompt together with its completion.
      vocab_size: vocabulary size of the model.
      max_choices: most choices of one request, all prompts together.
      max_further_choices: most choices of all requests together, not counting
        the first of each.
      on_time: called with "first_token" or "latency" and the seconds that a
        request took until then.
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
    self._max_further = max(max_further_choices, max_choices)
    self._new: list[Handle] = []
    self._cancelled: list[Handle] = []
    self._is_draining = False
    self._is_awake = False
    self._running: dict[Handle, None] = {}  # accepted by `feed`, in order
    self._numbers = itertools.count()
    self._turns = itertools.count()
    self._ended_tokens = 0

  # -- any thread -----------------------------------------------------------

  def submit(
    self,
    request: client_request.Request,
    on_update: Callable[[client_request.Update], None],
  ) -> Handle:
    """Queue a request.

    Args:
      request: the request.
      on_update: called on the scheduler's thread with each update.

    Raises:
      ValueError: the request can never be served.
      QueueFull: there is no room for the request now.
      Draining: the queue accepts no further requests.
    """
    self.check(request)
    with self._changed:
      handle = Handle(next(self._numbers), request, on_update)
      if self._is_draining:
        raise client_request.Draining("the server is shutting down")
      refusal = self._refusal(request)
      if refusal is not None:
        self.stats.refused += 1
        raise client_request.QueueFull(refusal)
      self._handles.add(handle)
      self._new.append(handle)
      self.stats.requests += 1
      self.stats.prompt_tokens += sum(map(len, request.prompts))
      self._changed.notify_all()
    return handle

  def _refusal(self, request: client_request.Request) -> str | None:
    """Return why there is no room for a request now; the lock is held.

    A request takes one place. Choices beyond the first are counted separately,
    so that a request for a single completion finds room even if other requests
    ask for many choices.
    """
    num_requests, most = len(self._handles), self.max_waiting
    if any(h.request.client == request.client for h in self._handles):
      most -= self.max_waiting // _RESERVED
    if num_requests >= most:
      return f"{num_requests} requests are waiting or running; at most {most}"
    num_choices = sum(handle.num_unfinished for handle in self._handles)
    further = max(0, num_choices - num_requests) + request.all_choices - 1
    if request.all_choices > 1 and further > self._max_further:
      return (
        f"{num_choices} choices are waiting or running, which leaves no room"
        f" for {request.all_choices} more (n, or a list of prompts)"
      )
    return None

  def cancel(self, handle: Handle) -> None:
    """Cancel a request whose client has left.

    No further updates are sent, except one that may be under way. The next
    `feed` frees the request's slots. A request that has ended is not affected.
    """
    with self._changed:
      if handle in self._handles and not handle.is_cancelled:
        handle.is_cancelled = True
        self._cancelled.append(handle)
        self._changed.notify_all()

  def drain(self) -> None:
    """Accept no further requests; those already accepted are finished."""
    with self._changed:
      self._is_draining = True

  def wake(self) -> None:
    """End the current `wait`, or the next one."""
    with self._changed:
      self._is_awake = True
      self._changed.notify_all()

  @property
  def is_draining(self) -> bool:
    """Whether the queue accepts no further requests."""
    return self._is_draining

  @property
  def is_empty(self) -> bool:
    """Whether no request is waiting or running."""
    return self.depth == 0

  @property
  def depth(self) -> int:
    """Number of requests that are waiting or running."""
    with self._changed:
      return len(self._handles)

  def check(self, request: client_request.Request) -> None:
    """Check that a request can be served.

    Raises:
      ValueError: it can never be served. The message begins with the field.
    """
    settings, v = request.settings, self.vocab_size
    if not request.prompts:
      raise ValueError("prompt: is missing")
    for prompt in request.prompts:
      self._check_prompt(prompt, request.max_tokens)
    settings.check(v)
    in_range = {
      ("seed", request.seed): 0 <= request.seed <= client_request.MAX_SEED,
      ("n", request.num_choices): (
        request.num_choices >= 1 and request.all_choices <= self.max_choices
      ),
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

  def _check_prompt(
    self, prompt: Int[np.ndarray, "T"], max_tokens: int
  ) -> None:
    if prompt.ndim != 1 or not len(prompt):
      raise ValueError("prompt: has no tokens")
    if prompt.min() < 0 or prompt.max() >= self.vocab_size:
      raise ValueError(f"prompt: token ids must be in [0, {self.vocab_size})")
    if max_tokens < 1:
      raise ValueError(f"max_tokens: {max_tokens} is less than 1")
    if len(prompt) + max_tokens > self.cache_tokens:
      raise client_request.TooLong(
        f"prompt: {len(prompt)} tokens and up to {max_tokens} of the"
        f" completion (max_tokens) do not fit into {self.cache_tokens}"
      )

  # -- the scheduler's thread -----------------------------------------------

  def feed(
    self, scheduler: scheduler_lib.Scheduler, most: int | None = None
  ) -> None:
    """Submit the next choices, and end cancelled and expired requests.

    Args:
      scheduler: the scheduler that this thread owns.
      most: most choices that the scheduler may hold at a time. None means as
        many as keep its slots full.
    """
    with self._changed:
      new, self._new = self._new, []
      # A request that ended before this call does not count as cancelled.
      cancelled = [h for h in self._cancelled if h in self._handles]
      self._cancelled = []
    for handle in cancelled:
      scheduler.cancel(handle.owner)
      self.stats.cancelled += 1
      self._forget(handle)
    gone = set(cancelled)
    for handle in new:
      if handle not in gone:
        handle.turn = next(self._turns)
        self._running[handle] = None
    now_s = time.monotonic()
    for handle in list(self._running):
      if handle.request.deadline_s <= now_s:
        scheduler.cancel(handle.owner)
        self.stats.expired += 1
        self._fail(handle, client_request.RequestError.DEADLINE)
    num_slots = scheduler.engine.sizes.num_slots
    if most is None:
      most = num_slots + scheduler.engine.sizes.insert_rows
    self._begin(scheduler, most)
    self.stats.num_slots = num_slots
    self.stats.slots_in_use = min(num_slots, len(scheduler.sequences()))
    self.stats.policy_version = scheduler.version

  def _begin(self, scheduler: scheduler_lib.Scheduler, most: int) -> None:
    """Submit choices, those of the client with the fewest slots first."""
    held: collections.Counter[str] = collections.Counter()
    for handle in self._running:
      held[handle.request.client] += len(handle.writing)
    num_free = most - held.total()
    waiting = {handle for handle in self._running if handle.has_more}
    for _ in range(num_free):
      if not waiting:
        return
      handle = min(
        waiting,
        key=lambda h: (held[h.request.client], len(h.writing), h.turn),
      )
      scheduler.submit(self._next_sequence(handle))
      held[handle.request.client] += 1
      handle.turn = next(self._turns)
      if not handle.has_more:
        waiting.remove(handle)

  def _next_sequence(self, handle: Handle) -> sequence_lib.Sequence:
    # The sequence is created only now, so that waiting choices take no memory.
    request, choice = handle.request, handle.num_begun
    prompt = request.prompt_of(choice)
    stop = None
    if request.stop_strings:
      stop = stop_strings.StopStrings(
        self._tokenizer,
        request.stop_strings,
        min_tokens=request.settings.min_tokens,
      )
    sequence = sequence_lib.Sequence(
      prompt,
      limit=len(prompt) + request.max_tokens,
      stream=sampling.Stream.SERVE,
      group=request.seed,
      member=choice,
      settings=request.settings,
      stop=stop,
      owner=handle.owner,
      adapter=request.adapter,
      guide=None if request.guide is None else request.guide.copy(),
    )
    handle.num_begun += 1
    handle.writing[choice] = sequence
    handle.num_sent[choice] = len(prompt)
    return sequence

  def deliver(self, ended: Iterable[sequence_lib.Sequence]) -> None:
    """Send clients the tokens that were generated since the last call.

    Args:
      ended: the sequences that `Scheduler.step` returned. Sequences that do
        not belong to a request are ignored.
    """
    has_ended = {(s.owner, s.member) for s in ended}
    for handle in list(self._running):
      writing = list(handle.writing.items())
      if not writing:
        continue
      for choice, _ in writing:
        if (handle.owner, choice) in has_ended:
          self._end(handle, choice)
      if not handle.num_unfinished:
        # This comes before the last update, because the client may call
        # `cancel` or read the statistics as soon as it gets the update.
        self._forget(handle)
        if not handle.is_cancelled:
          self.stats.finished += 1
          self._on_time("latency", time.monotonic() - handle.submitted_s)
      guides = [sequence.guide for _, sequence in writing]
      if any(guide is not None and guide.error for guide in guides):
        self._report(handle, client_request.RequestError.GUIDE)
        self.cancel(handle)  # whatever of it is still being written
        continue
      for choice, sequence in writing:
        self._send(handle, choice, sequence)

  def _end(self, handle: Handle, choice: int) -> None:
    sequence = handle.writing.pop(choice)
    handle.num_unfinished -= 1
    self._ended_tokens += sequence.length - len(
      handle.request.prompt_of(choice)
    )

  def _send(
    self, handle: Handle, choice: int, sequence: sequence_lib.Sequence
  ) -> None:
    is_last = choice not in handle.writing
    new = slice(handle.num_sent[choice], sequence.length)
    if new.start == new.stop and not is_last:
      return
    handle.num_sent[choice] = sequence.length
    self.stats.completion_tokens += new.stop - new.start
    if handle.is_cancelled:
      return
    if not handle.has_started:
      handle.has_started = True
      self._on_time("first_token", time.monotonic() - handle.submitted_s)
    handle.on_update(
      client_request.Update(
        choice=choice,
        tokens=sequence.tokens[new].copy(),
        logprobs=sequence.behavior_logprobs[new].copy(),
        policy_versions=sequence.policy_versions[new].copy(),
        num_cached=sequence.num_cached or 0,
        finish_reason=sequence.finish_reason if is_last else None,
      )
    )

  def _fail(self, handle: Handle, error: client_request.RequestError) -> None:
    self._forget(handle)
    self._report(handle, error)

  def _report(self, handle: Handle, error: client_request.RequestError) -> None:
    if not handle.is_cancelled:
      handle.on_update(
        client_request.Update(
          choice=min(handle.writing, default=0),
          tokens=np.zeros((0,), np.int32),
          logprobs=np.zeros((0,), np.float32),
          policy_versions=np.zeros((0,), np.int32),
          error=error,
        )
      )

  def _forget(self, handle: Handle) -> None:
    if handle in self._running:  # so that its tokens are counted once
      del self._running[handle]
      self._ended_tokens += handle.num_written()
    with self._changed:
      self._handles.discard(handle)

  def num_written(self) -> int:
    """Return the tokens generated for requests, delivered or not."""
    return self._ended_tokens + sum(h.num_written() for h in self._running)

  def wait(self, timeout_s: float) -> None:
    """Wait up to `timeout_s` for new or cancelled requests, or for `wake`."""
    with self._changed:
      self._changed.wait_for(
        lambda: self._new or self._cancelled or self._is_awake, timeout_s
      )
      self._is_awake = False

  def close(self, *, has_failed: bool) -> None:
    """End all unfinished requests and accept no further ones.

    Args:
      has_failed: True tells clients that the engine failed, False that the
        server is shutting down.
    """
    error = (
      client_request.RequestError.FAILED
      if has_failed
      else client_request.RequestError.SHUT_DOWN
    )
    with self._changed:
      self._is_draining = True
      handles = list(self._handles)
      self._new.clear()
      self._cancelled.clear()
    for handle in handles:
      self.stats.failed += not handle.is_cancelled
      self._fail(handle, error)


class ServeLoop:
  """Drives a scheduler for client requests alone.

  The loop waits while there are no requests. `submit` and `cancel` of the queue
  and `stop` wake it.

  Threads: `run` belongs to one thread, which owns the scheduler. `stop` and
  `is_running` are for any thread. If the scheduler fails, `run` ends all
  requests and raises the exception.
  """

  def __init__(self, queue: RequestQueue, scheduler: scheduler_lib.Scheduler):
    """Create a loop; a thread of the caller has to call `run`."""
    self.queue = queue
    self.scheduler = scheduler
    self.is_running = False
    self._is_stopping = False

  def stop(self) -> None:
    """End `run` before its next step, and all unfinished requests with it."""
    self._is_stopping = True
    self.queue.wake()

  def run(self) -> None:
    """Serve requests until the loop is stopped."""
    self.is_running = True
    has_failed = True
    try:
      while not self._is_stopping:
        self.queue.feed(self.scheduler)
        if self.scheduler.is_idle:
          self.queue.wait(timeout_s=60.0)
        else:
          self.queue.deliver(self.scheduler.step())
      has_failed = False
    finally:
      self.is_running = False
      self.queue.close(has_failed=has_failed)
