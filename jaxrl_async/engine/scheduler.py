"""Which sequence sits in which slot: continuous batching over one engine.

`submit` queues sequences; each `step` refills slots, dispatches the next
`generate` call, reads the one before and returns the sequences that ended in
it. So the device never waits for the host. What the host does not know yet, the
device decides: prefilled sequences are offered to whatever slot is idle when
the call begins, and the tickets in its results tell which were taken.

With a cache of pages, a sequence enters when there are pages for its prompt.
When none are left for a running one, the sequence with the latest deadline
gives up its own and waits; its tokens stay.
"""

import collections
import dataclasses
import itertools

import numpy as np

from jaxrl_async.config import sections
from jaxrl_async.engine import decode_state as decode_state_lib
from jaxrl_async.engine import engine as engine_lib
from jaxrl_async.engine import jetstream_api
from jaxrl_async.engine import page_pool
from jaxrl_async.engine import prefill
from jaxrl_async.engine import sequence as sequence_lib
from jaxrl_async.reporting import metrics as metrics_lib

_DEPTH = 2  # calls on their way: the one that is read and the one after it
_NO_TOKENS = np.zeros((0,), np.int32)


@dataclasses.dataclass(kw_only=True, slots=True)
class SchedulerStats:
  """Counts since the start; occupancy is over calls made while work waited."""

  generated_tokens: int = 0
  prefill_tokens: int = 0
  recompute_tokens: int = 0
  interruptions: int = 0
  preemptions: int = 0
  busy_slot_steps: int = 0
  waiting_slot_steps: int = 0


@dataclasses.dataclass(kw_only=True, slots=True, eq=False)
class _Entry:
  """A prefilled sequence: offered to the device, or in a slot."""

  ticket: int
  sequence: sequence_lib.Sequence
  key: bytes  # of its prefix
  pages: list[int]
  slot: int | None = None


@dataclasses.dataclass(kw_only=True, slots=True)
class _Call:
  """A call whose result was not read."""

  result: jetstream_api.ResultTokens
  num_unplaced: int  # sequences for which it had no slot


class Scheduler:
  """Keeps an engine's slots full.

  Invariant: a sequence is in `_waiting`, in `_prefilling`, in one entry, or
  gone. Entries are offered in the order of their tickets, and the device takes
  them in it: so the newest ticket that sits in a slot tells which were taken.
  While no call is on its way, an entry has a slot if and only if it sits there.

  Threads: one thread at a time; nothing here is locked.
  """

  def __init__(
    self,
    engine: engine_lib.Engine,
    *,
    kv_on_adopt: sections.KvOnAdopt = sections.KvOnAdopt.RECOMPUTE,
    shared_tokens: np.ndarray = _NO_TOKENS,
    busy: metrics_lib.BusyClock,
  ):
    """Starts empty.

    Args:
      engine: whose programs run.
      kv_on_adopt: what new weights do to running sequences' caches.
      shared_tokens: what prompts commonly begin with; see `prefill`.
      busy: hears of every call.
    """
    self.engine = engine
    self.kv_on_adopt = kv_on_adopt
    self.stats = SchedulerStats()
    self._busy = busy
    self._params: decode_state_lib.EngineParams | None = None
    self._version = -1
    self._state = engine.init_decode_state()
    self._waiting: collections.deque[sequence_lib.Sequence] = (
      collections.deque()
    )
    self._prefilling: list[tuple[bytes, sequence_lib.Sequence]] = []
    self._entries: dict[int, _Entry] = {}
    self._next_ticket = 0
    self._calls: collections.deque[_Call] = collections.deque()
    self._ended: list[sequence_lib.Sequence] = []
    self._prefiller = prefill.Prefiller(
      engine, shared_tokens=shared_tokens, busy=busy
    )
    sizes = engine.sizes
    self._pool = (
      page_pool.PagePool(sizes.num_pages) if sizes.num_pages else None
    )

  # -- what it holds --------------------------------------------------------

  @property
  def version(self) -> int:
    """Policy version of the weights in use; -1 before the first."""
    return self._version

  @property
  def num_free(self) -> int:
    """Slots that nothing sits in or waits for; negative: work is waiting."""
    return self.engine.sizes.num_slots - len(self.sequences())

  @property
  def has_room(self) -> bool:
    """A further sequence would soon be written.

    As many as one insertion takes wait prefilled, and as many as will have
    reached their limits, so that a slot that ends finds one.
    """
    return self.num_free + self._num_ahead() > 0

  @property
  def is_idle(self) -> bool:
    """Nothing runs, waits or is left to be returned."""
    return not (self.sequences() or self._calls or self._ended)

  def _num_ahead(self) -> int:
    """How many wait prefilled: for ends that are known, and some others."""
    num_ending = sum(
      e.slot is not None and self._reach(e, 0) == e.sequence.limit
      for e in self._entries.values()
    )
    return self.engine.sizes.insert_rows + num_ending

  def sequences(self) -> list[sequence_lib.Sequence]:
    """Everything running or waiting."""
    entered = [e.sequence for e in self._entries.values()]
    prefilling = [sequence for _, sequence in self._prefilling]
    return entered + prefilling + list(self._waiting)

  def submit(self, sequence: sequence_lib.Sequence) -> None:
    """Queues a sequence.

    Raises:
      ValueError: it cannot be held, or asks for what cannot be drawn.
    """
    sequence.settings.check(self.engine.model.vocab_size)
    sizes = self.engine.sizes
    held = sizes.cache_tokens
    if sizes.num_pages:
      held = min(held, sizes.num_pages * sizes.page_tokens)
    if sequence.limit > held:
      raise ValueError(
        f"a sequence of up to {sequence.limit} tokens does not fit"
        f" cache_tokens {held}"
      )
    if not 0 < sequence.length < sequence.limit:
      raise ValueError(
        f"{sequence.length} prompt tokens leave no room below {sequence.limit}"
      )
    sequence.num_prefilled = sequence.length
    self._waiting.append(sequence)

  def cancel(self, owner: object) -> int:
    """Forgets an owner's sequences; returns how many there were."""
    before = len(self.sequences())
    self._waiting = collections.deque(
      s for s in self._waiting if s.owner is not owner
    )
    self._prefilling = [
      (k, s) for k, s in self._prefilling if s.owner is not owner
    ]
    self._drop([e for e in self._entries.values() if e.sequence.owner is owner])
    return before - len(self.sequences())

  # -- weights --------------------------------------------------------------

  def adopt(self, params: decode_state_lib.EngineParams, version: int) -> None:
    """Changes the weights; the next call uses them.

    With kv_on_adopt RECOMPUTE the caches of running sequences are rebuilt
    under the new weights (arXiv:2505.24298, section 4.1).
    """
    self._drain()
    self._params, self._version = params, version
    self._prefiller.adopt(params)
    if self._pool is not None:
      self._pool.forget_names()
    self._unstage()
    self.stats.interruptions += len(self._entries)
    if self.kv_on_adopt is sections.KvOnAdopt.RECOMPUTE:
      self._recompute()

  def _unstage(self) -> None:
    """Back to the front of the queue, in order, what has no slot."""
    self._waiting.extendleft(s for _, s in self._prefilling[::-1])
    self._prefilling = []
    self._put_back([e for e in self._entries.values() if e.slot is None])

  def _recompute(self) -> None:
    running = sorted(self._entries.values(), key=_urgency)
    by_bucket = collections.defaultdict(list)
    for entry in running:
      entry.sequence.num_prefilled = entry.sequence.length
      by_bucket[self._prefiller.bucket(entry.sequence.length)].append(entry)
      if self._pool is not None:
        self._pool.release(entry.pages)
        entry.pages = []
    # A prefill at a time: all prefixes together would be a second cache.
    rows = self.engine.sizes.prefill_rows
    batches = [
      entries[start : start + rows]
      for entries in by_bucket.values()
      for start in range(0, len(entries), rows)
    ]
    for batch in sorted(batches, key=lambda entries: _urgency(entries[0])):
      self._recompute_batch(batch)

  def _recompute_batch(self, batch: list[_Entry]) -> None:
    for entry in batch:
      entry.key = self._prefiller.want(entry.sequence.written())
    self._advance_prefill(is_patient=False)
    fitting = [e for e in batch if self._take_pages(e)]
    self._preempt([e for e in batch if e not in fitting])
    self.stats.recompute_tokens += sum(e.sequence.length for e in fitting)
    self._insert(fitting)
    self._forget_prefixes()

  # -- one call -------------------------------------------------------------

  def step(self) -> list[sequence_lib.Sequence]:
    """Dispatches the next call, reads the one before, returns what ended.

    Raises:
      ValueError: nothing was adopted yet.
    """
    if self._params is None:
      raise ValueError("adopt weights before the first step")
    while len(self._calls) < _DEPTH and self._has_work():
      self._dispatch()
    if self._calls:
      self._collect(self._calls.popleft())
    ended, self._ended = self._ended, []
    return ended

  def _has_work(self) -> bool:
    """Whether the next call could write anything."""
    return bool(self._waiting or self._prefilling) or any(
      entry.slot is None or self._reach(entry, 0) < entry.sequence.limit
      for entry in self._entries.values()
    )

  def _reach(self, entry: _Entry, num_more: int) -> int:
    """Tokens it has at most after what is dispatched and so many calls more."""
    calls = len(self._calls) + num_more
    steps = self.engine.sizes.decode_steps_per_call
    return min(entry.sequence.length + steps * calls, entry.sequence.limit)

  def _dispatch(self) -> None:
    assert self._params is not None
    self._stage()
    if self._pool is not None:
      self._grow(self._pool)
    self._offer()
    entries = self._entries.values()
    reach = max((self._reach(e, 1) for e in entries), default=1)
    sizes = self.engine.sizes
    window = next(w for w in sizes.window_buckets if w >= reach)
    with self._busy.record("decode"):
      self._state, result = self.engine.generate(
        self._params,
        self._state,
        window=window,
        is_filtered=any(e.sequence.settings.is_filtered for e in entries),
        tables=self._tables(),
      )
    unplaced = len(self.sequences()) - self._num_placed()
    self._calls.append(_Call(result=result, num_unplaced=unplaced))

  def _num_placed(self) -> int:
    return sum(e.slot is not None for e in self._entries.values())

  def _drain(self) -> None:
    """Reads every call: the host then knows what the device knows."""
    while self._calls:
      self._collect(self._calls.popleft())

  def _collect(self, call: _Call) -> None:
    with self._busy.record("decode"):
      result = self.engine.read(call.result)
    in_use = num_placed = 0
    ended, stopped = [], []
    for slot, ticket in enumerate(result.tickets.tolist()):
      entry = self._entries.get(ticket)
      if entry is None:
        continue  # ended before, or cancelled meanwhile
      num_placed += entry.slot is None
      entry.slot = slot
      num_new, num_kept = entry.sequence.take(
        result, slot, self.engine.end_tokens
      )
      in_use += num_new
      self.stats.generated_tokens += num_kept
      if result.has_ended[slot]:
        ended.append(entry)
      elif entry.sequence.finish_reason is not None:
        stopped.append(entry)
    self._ended += [entry.sequence for entry in ended + stopped]
    self._forget(ended)
    self._drop(stopped)
    if num_placed:
      self._forget_prefixes()
    for later in self._calls:
      later.num_unplaced -= num_placed
    if call.num_unplaced > num_placed:
      self.stats.waiting_slot_steps += result.is_valid.size
      self.stats.busy_slot_steps += in_use

  # -- from the queue to the slots ------------------------------------------

  def _stage(self) -> None:
    """Takes sequences from the queue and has them prefilled."""
    sizes = self.engine.sizes
    places = sizes.num_slots + self._num_ahead()
    places -= len(self._entries) + len(self._prefilling)
    while self._waiting and places > 0 and self._may_enter(self._waiting[0]):
      sequence = self._waiting.popleft()
      if sizes.preemption is sections.Preemption.FAST:
        sequence.num_prefilled = sequence.length
      key = self._prefiller.want(sequence.tokens[: sequence.num_prefilled])
      self._prefilling.append((key, sequence))
      places -= 1
    self._advance_prefill(is_patient=self._num_placed() > 0)
    for key, sequence in self._prefilling:
      if not self._prefiller.is_ready(key):
        continue
      entry = _Entry(
        ticket=self._next_ticket, sequence=sequence, key=key, pages=[]
      )
      if not self._take_pages(entry):
        continue  # it keeps its prefix and asks again
      self._next_ticket += 1
      self._entries[entry.ticket] = entry
    entered = {id(e.sequence) for e in self._entries.values()}
    self._prefilling = [
      (k, s) for k, s in self._prefilling if id(s) not in entered
    ]
    self._forget_prefixes()

  def _advance_prefill(self, *, is_patient: bool) -> None:
    self._prefiller.advance(is_patient=is_patient)
    self.stats.prefill_tokens = self._prefiller.num_tokens

  def _forget_prefixes(self) -> None:
    """Keeps what is staged, and what comes next and begins with the same."""
    keys = {e.key for e in self._entries.values() if e.slot is None}
    keys |= {key for key, _ in self._prefilling}
    coming = itertools.islice(self._waiting, self.engine.sizes.num_slots)
    keys |= {s.tokens[: s.num_prefilled].tobytes() for s in coming}
    self._prefiller.keep_only(keys)

  def _offer(self) -> None:
    """Inserts staged sequences wherever a slot is idle on device."""
    staged = [e for e in self._entries.values() if e.slot is None]
    sizes = self.engine.sizes
    # More than are known to be free: some may have ended meanwhile.
    most = sizes.num_slots - self._num_placed() + self._num_ahead()
    self._insert(staged[:most])

  def _insert(self, entries: list[_Entry]) -> None:
    """Inserts entries in their order, neighbours of one prefix together."""
    most = self.engine.sizes.insert_rows
    rows = [(self._prefiller.get(entry.key), entry) for entry in entries]
    for _, run in itertools.groupby(rows, lambda row: id(row[0][0])):
      members = list(run)
      for start in range(0, len(members), most):
        insertion = self.engine.unused_insertion()
        for i, ((_, row), entry) in enumerate(members[start : start + most]):
          slot = decode_state_lib.PICK if entry.slot is None else entry.slot
          insertion.slots[i] = slot
          insertion.sources[i] = row
          insertion.tickets[i] = entry.ticket
          insertion.pages[i, : len(entry.pages)] = entry.pages
          entry.sequence.describe(insertion, i, self.engine.end_tokens)
        prefix = members[0][0][0]
        with self._busy.record("prefill"):
          self._state = self.engine.insert(prefix, self._state, insertion)

  def _put_back(self, entries: list[_Entry]) -> None:
    """To the front of the queue, in order; their pages are free."""
    self._drop(entries)
    self._waiting.extendleft(e.sequence for e in entries[::-1])

  def _drop(self, entries: list[_Entry]) -> None:
    """Forgets entries and stops them on device."""
    self._forget(entries)
    b = self.engine.sizes.num_slots
    for start in range(0, len(entries), b):
      tickets = np.full((b,), -1, np.int32)
      some = [e.ticket for e in entries[start : start + b]]
      tickets[: len(some)] = some
      self._state = self.engine.release(self._state, tickets)

  def _forget(self, entries: list[_Entry]) -> None:
    for entry in entries:
      del self._entries[entry.ticket]
      if self._pool is not None:
        self._pool.release(entry.pages)

  # -- pages ----------------------------------------------------------------

  def _num_pages(self, num_tokens: int) -> int:
    return -(-num_tokens // self.engine.sizes.page_tokens)

  def _may_enter(self, sequence: sequence_lib.Sequence) -> bool:
    """Whether there are pages for it, and one more for all that run."""
    if self._pool is None or not (self._entries or self._prefilling):
      return True
    steps = _DEPTH * self.engine.sizes.decode_steps_per_call

    def needed(sequence):
      return self._num_pages(min(sequence.length + steps, sequence.limit))

    promised = sum(needed(s) for _, s in self._prefilling)
    reserve = promised + len(self._entries)
    return needed(sequence) + reserve <= self._pool.num_free

  def _take_pages(self, entry: _Entry) -> bool:
    """Pages for what was prefilled, shared where they are; False: too few."""
    pool, sizes = self._pool, self.engine.sizes
    if pool is None:
      return True
    row = self._prefiller.get(entry.key)
    length = entry.sequence.num_prefilled
    taken = pool.take_for(
      entry.sequence.tokens[: length - 1],  # the last one is not cached yet
      bucket=self._prefiller.bucket(length),
      page_tokens=sizes.page_tokens,
    )
    if taken is None:
      return False
    entry.pages, new = taken
    if (new < sizes.num_pages).any():
      with self._busy.record("prefill"):
        self._state = self.engine.fill_pages(*row, self._state, new)
    return True

  def _grow(self, pool: page_pool.PagePool) -> None:
    """Gives everyone pages for the next call, the latest deadlines last."""
    for entry in sorted(self._entries.values(), key=_urgency):
      while self._entries.get(entry.ticket) is entry and self._lacks(entry):
        if pool.num_free:
          entry.pages.append(pool.take())
        elif self._calls:
          self._drain()  # what ended frees its pages
        else:
          self._preempt([max(self._entries.values(), key=_urgency)])

  def _lacks(self, entry: _Entry) -> bool:
    # Where it will sit is known, and its table sent, only two calls later.
    num_more = _DEPTH if entry.slot is None else 1
    return len(entry.pages) < self._num_pages(self._reach(entry, num_more))

  def _preempt(self, entries: list[_Entry]) -> None:
    """Takes away their pages; what they wrote stays."""
    self.stats.preemptions += sum(e.slot is not None for e in entries)
    self._put_back(entries)

  def _tables(self) -> tuple[np.ndarray, np.ndarray] | None:
    """Tickets by slot and their pages, of what is known to sit there."""
    sizes = self.engine.sizes
    if self._pool is None:
      return None
    tickets = np.full((sizes.num_slots,), -1, np.int32)
    pages = np.full((sizes.num_slots, sizes.pages_per_slot), 0, np.int32)
    for entry in self._entries.values():
      if entry.slot is not None:
        tickets[entry.slot] = entry.ticket
        pages[entry.slot, : len(entry.pages)] = entry.pages
    return tickets, pages


def _urgency(entry: _Entry) -> tuple[bool, int, int]:
  """Sorts the latest deadline last, and what has no slot after the others."""
  is_staged = entry.slot is None
  return is_staged, entry.sequence.deadline, entry.ticket
