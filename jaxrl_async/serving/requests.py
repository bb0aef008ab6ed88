"""Requests of clients beside whatever else a scheduler does.

Any thread submits and cancels; the thread that owns the scheduler calls `feed`
before each step and `deliver` after it. `serve_loop.ServeLoop` is that thread
where nothing trains. Beside a training it is the rollout worker's, which knows
the queue as a `rollout.client_requests.ClientRequests`.

Slots are shared by client: a free slot goes to the client that has the fewest,
of its requests to the one that has the fewest, and of those to the one whose
turn was the longest ago. So neither many choices nor many requests of one
client keep another's request waiting for longer than a slot takes to end.
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
from jaxrl_async.serving import request_places
from jaxrl_async.text import stop_strings
from jaxrl_async.text import tokenizer as tokenizer_lib


class Handle:
  """One submitted request.

  Belongs to the queue: a client only keeps it, to cancel. In the scheduler its
  sequences are those of `owner`.
  """

  def __init__(
    self,
    number: int,
    request: client_request.Request,
    on_update: Callable[[client_request.Update], None],
  ):
    self.owner = sequence_lib.Owner("request", number)
    self.request = request
    self.on_update = on_update
    self.submitted_s = time.monotonic()
    self.is_cancelled = False
    self.has_started = False  # its first token was delivered
    self.num_begun = 0  # choices that the scheduler has or had
    self.num_unfinished = request.all_choices
    self.writing: dict[int, sequence_lib.Sequence] = {}  # by choice
    self.num_sent: dict[int, int] = {}  # tokens of these, the prompt too
    self.turn = 0  # larger is later

  @property
  def has_more(self) -> bool:
    """The scheduler has not had all of its choices."""
    return self.num_begun < self.request.all_choices

  def num_written(self) -> int:
    """Tokens so far of what is being written."""
    return sum(
      sequence.length - len(self.request.prompt_of(choice))
      for choice, sequence in self.writing.items()
    )


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
  Those are the requests that `_places` counts, and none means drained.

  Threads: `submit`, `cancel`, `drain`, `wake` and the properties are for any
  thread. `feed`, `deliver` and `close` belong to the thread of the scheduler,
  which is also the one that calls each `on_update` and `on_time`: they must
  not block, not raise and not call back. The lock guards `_handles`, `_places`,
  `_new`, `_cancelled` and the two flags.
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
    """Makes an empty queue.

    Args:
      tokenizer: of the policy; finds stop strings.
      max_waiting: requests at a time, running ones included.
      cache_tokens: the most tokens of a prompt with its completion.
      vocab_size: of the model.
      max_choices: of one request, all prompts together.
      max_further_choices: of all requests, besides the first of each.
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
    self._places = request_places.Places(
      max_waiting, max(max_further_choices, max_choices)
    )
    self._new: list[Handle] = []
    self._cancelled: list[Handle] = []
    self._is_draining = False
    self._is_awake = False
    self._running: dict[Handle, None] = {}  # taken up, in order
    self._numbers = itertools.count()
    self._turns = itertools.count()
    self._ended_tokens = 0

  # -- any thread -----------------------------------------------------------

  def submit(
    self,
    request: client_request.Request,
    on_update: Callable[[client_request.Update], None],
  ) -> Handle:
    """Queues a request.

    Raises:
      ValueError: it can never be served.
      QueueFull: not now.
      Draining: not any more.
    """
    self.check(request)
    with self._changed:
      handle = Handle(next(self._numbers), request, on_update)
      if self._is_draining:
        raise client_request.Draining("the server is shutting down")
      refusal = self._places.refusal(request.client, request.all_choices)
      if refusal is not None:
        self.stats.refused += 1
        raise client_request.QueueFull(
          refusal,
          self._places.retry_after_s(request.all_choices, time.monotonic()),
        )
      self._places.take(request.client, request.all_choices)
      self._handles.add(handle)
      self._new.append(handle)
      self.stats.requests += 1
      self.stats.prompt_tokens += sum(map(len, request.prompts))
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

  def check(self, request: client_request.Request) -> None:
    """Raises ValueError, with the field first, if it can never be served."""
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
    """Hands over what is next; ends what was cancelled or took too long.

    Args:
      scheduler: this thread's.
      most: choices that it may have at a time; by default as many as keep its
        slots full.
    """
    with self._changed:
      new, self._new = self._new, []
      # What ended meanwhile was not cancelled.
      cancelled = [h for h in self._cancelled if h in self._handles]
      self._cancelled = []
    for handle in cancelled:
      scheduler.cancel(handle.owner)
      self._forget(handle)
      self.stats.cancelled += 1
    gone = set(cancelled)
    for handle in new:
      if handle not in gone:
        handle.turn = next(self._turns)
        self._running[handle] = None
    now_s = time.monotonic()
    for handle in list(self._running):
      if handle.request.deadline_s <= now_s:
        scheduler.cancel(handle.owner)
        self._fail(handle, client_request.RequestError.DEADLINE)
        self.stats.expired += 1
    num_slots = scheduler.engine.sizes.num_slots
    if most is None:
      most = num_slots + scheduler.engine.sizes.insert_rows
    self._begin(scheduler, most)
    self.stats.num_slots = num_slots
    self.stats.slots_in_use = min(num_slots, len(scheduler.sequences()))
    self.stats.policy_version = scheduler.version

  def _begin(self, scheduler: scheduler_lib.Scheduler, most: int) -> None:
    """Gives the scheduler choices, whoever has the fewest first."""
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
    # Not made before it is written: a thousand waiting choices hold no memory.
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
    )
    handle.num_begun += 1
    handle.writing[choice] = sequence
    handle.num_sent[choice] = len(prompt)
    return sequence

  def deliver(self, ended: Iterable[sequence_lib.Sequence]) -> None:
    """Tells clients what was written since the last time.

    Args:
      ended: of `Scheduler.step`; those of others are left alone.
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
        # Before its last update, whose client may call `cancel` at once.
        self._forget(handle)
      for choice, sequence in writing:
        self._send(handle, choice, sequence)
      if not handle.num_unfinished and not handle.is_cancelled:
        self.stats.finished += 1
        self._on_time("latency", time.monotonic() - handle.submitted_s)

  def _end(self, handle: Handle, choice: int) -> None:
    sequence = handle.writing.pop(choice)
    handle.num_unfinished -= 1
    self._ended_tokens += sequence.length - len(
      handle.request.prompt_of(choice)
    )
    with self._changed:
      self._places.end_choice(time.monotonic())

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
        finish_reason=sequence.finish_reason if is_last else None,
      )
    )

  def _fail(self, handle: Handle, error: client_request.RequestError) -> None:
    self._forget(handle)
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
    if handle in self._running:  # counted once
      del self._running[handle]
      self._ended_tokens += handle.num_written()
    with self._changed:
      if handle in self._handles:
        self._handles.remove(handle)
        self._places.leave(handle.request.client, handle.num_unfinished)

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

  def close(self, *, has_failed: bool) -> None:
    """Ends everything that has not finished; nothing is taken any more.

    Args:
      has_failed: whether clients are told that the engine failed, or else that
        the server is shutting down.
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
