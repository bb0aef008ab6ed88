"""Which sequence sits in which slot: continuous batching over one engine.

`submit` queues sequences. Each `step` refills slots, dispatches the next
`generate` call, reads the one before and returns the sequences that ended in
it. So a call is on its way while another is read, and the device never waits
for the host.

The price is that the host fills slots before it knows which ones are idle. So
the device decides. Prefilled sequences are offered to whatever slots are idle
when a call begins; each offer has a ticket, tickets count up, and the device
takes offers in their order. The tickets come back with the results of the call
and tell which offers were taken. An offer whose outcome is not known yet is
simply repeated in the next call: the device ignores every ticket up to the
newest one that sits in a slot, because that one was taken by an earlier call.

With a cache of pages, a sequence enters when there are pages for its prompt
(`page_admission`). When none are left for a running one, the sequence with the
latest deadline gives up its own and waits; its tokens stay.
"""

import collections
from collections.abc import Iterator
import dataclasses
import itertools

import numpy as np

from jaxrl_async.config import sections
from jaxrl_async.engine import decode_state as decode_state_lib
from jaxrl_async.engine import engine as engine_lib
from jaxrl_async.engine import entry as entry_lib
from jaxrl_async.engine import jetstream_api
from jaxrl_async.engine import page_admission
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


@dataclasses.dataclass(kw_only=True, slots=True)
class _Call:
  """A call whose result was not read."""

  result: jetstream_api.ResultTokens
  num_unplaced: int  # sequences for which it had no slot


class Scheduler:
  """Keeps an engine's slots full.

  Invariant: a sequence is in `_waiting`, in `_prefilling`, in one entry, or
  gone. Entries are offered in the order of their tickets, and the device takes
  them in that order, so the newest ticket that sits in a slot tells which were
  taken. While no call is on its way, an entry has a slot if and only if its
  sequence sits there; otherwise the host may not have heard of it yet.

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
    self._entries: dict[int, entry_lib.Entry] = {}
    self._next_ticket = 0
    self._calls: collections.deque[_Call] = collections.deque()
    self._ended: list[sequence_lib.Sequence] = []
    self._prefiller = prefill.Prefiller(
      engine, shared_tokens=shared_tokens, busy=busy
    )
    self._admission = page_admission.make(
      engine.sizes, steps_ahead=_DEPTH * engine.sizes.decode_steps_per_call
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
  def room(self) -> int:
    """How many further sequences would soon be written; may be negative.

    As many as one insertion takes wait prefilled, and as many as will have
    reached their limits, so that a slot that ends finds one.
    """
    return self.num_free + self._num_ahead()

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
    most = self._admission.max_tokens
    if sequence.limit > most:
      raise ValueError(
        f"a sequence of up to {sequence.limit} tokens does not fit"
        f" cache_tokens {most}"
      )
    if not 0 < sequence.length < sequence.limit:
      raise ValueError(
        f"{sequence.length} prompt tokens leave no room below {sequence.limit}"
      )
    sequence.num_prefilled = sequence.length
    self._waiting.append(sequence)

  def cancel(self, owner: sequence_lib.Owner) -> int:
    """Forgets an owner's sequences; returns how many there were.

    What was read of them stays in them. What calls on their way write of them
    is not read any more.
    """
    before = len(self.sequences())
    self._waiting = collections.deque(
      s for s in self._waiting if s.owner != owner
    )
    self._prefilling = [(k, s) for k, s in self._prefilling if s.owner != owner]
    self._drop([e for e in self._entries.values() if e.sequence.owner == owner])
    return before - len(self.sequences())

  # -- weights --------------------------------------------------------------

  def adopt(self, params: decode_state_lib.EngineParams, version: int) -> None:
    """Changes the weights; the next call uses them.

    With kv_on_adopt RECOMPUTE the caches of running sequences are rebuilt
    under the new weights (arXiv:2505.24298, section 4.1).
    """
    # Afterwards the host knows where everything sits, so that what is rebuilt
    # can go to its own slot, and no later call mixes old tickets with new ones.
    self._drain()
    self._params, self._version = params, version
    self._prefiller.adopt(params)
    self._admission.forget_contents()
    self._unstage()
    self.stats.interruptions += len(self._entries)
    if self.kv_on_adopt is sections.KvOnAdopt.RECOMPUTE:
      self._recompute()

  def _unstage(self) -> None:
    """Puts what has no slot back to the front of the queue, in order.

    It was prefilled with the weights before, so it has to be prefilled again.
    """
    self._waiting.extendleft(s for _, s in self._prefilling[::-1])
    self._prefilling = []
    self._put_back([e for e in self._entries.values() if e.slot is None])

  def _recompute(self) -> None:
    """Prefills what sits in slots under the new weights, and inserts it again.

    The most urgent go first, because the last ones may find too few pages:
    what shared pages before need not share as many afterwards.
    """
    entries = list(self._entries.values())
    for entry in entries:
      entry.sequence.num_prefilled = entry.sequence.length
      # All before any takes new ones, or the first might find too few.
      self._admission.release(entry.ticket)
    # A prefill at a time: all prefixes together would be a second cache.
    for batch in entry_lib.prefill_batches(
      entries, self._prefiller.bucket, self.engine.sizes.prefill_rows
    ):
      self._recompute_batch(batch)

  def _recompute_batch(self, batch: list[entry_lib.Entry]) -> None:
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
    # The next call goes out before the one before it is read.
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

  def _reach(self, entry: entry_lib.Entry, num_more: int) -> int:
    """The most tokens an entry can have after calls that were not read yet.

    Args:
      entry: whose sequence is counted.
      num_more: calls besides those on their way.
    """
    calls = len(self._calls) + num_more
    steps = self.engine.sizes.decode_steps_per_call
    return min(entry.sequence.length + steps * calls, entry.sequence.limit)

  def _dispatch(self) -> None:
    assert self._params is not None
    self._stage()
    self._grow()
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
        tables=self._admission.tables(
          {e.slot: e.ticket for e in entries if e.slot is not None}
        ),
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
    """Reads a call: who sits where, what was written, and what has ended."""
    with self._busy.record("decode"):
      result = self.engine.read(call.result)
    in_use = num_placed = 0
    ended, stopped = [], []
    for slot, ticket in enumerate(result.tickets.tolist()):
      entry = self._entries.get(ticket)
      if entry is None:
        continue  # ended before, or cancelled meanwhile
      # An offer that was taken. Its slot is not where it was dispatched to, but
      # wherever the device had an idle one.
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
        stopped.append(entry)  # by a stop string, which the device cannot see
    self._ended += [entry.sequence for entry in ended + stopped]
    self._forget(ended)
    self._drop(stopped)
    if num_placed:
      self._forget_prefixes()
    # The next call counted them as unplaced, as nobody knew better.
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
    while self._waiting and places > 0:
      promised = [sequence for _, sequence in self._prefilling]
      if not self._admission.may_enter(
        self._waiting[0], promised, len(self._entries)
      ):
        break  # and nothing overtakes it, or long prompts would wait for ever
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
      entry = entry_lib.Entry(
        ticket=self._next_ticket, sequence=sequence, key=key
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
    """Inserts staged sequences wherever a slot is idle on device.

    Some of them were offered to the call before as well, whose tickets were not
    read yet. What it took is not taken twice.
    """
    staged = [e for e in self._entries.values() if e.slot is None]
    sizes = self.engine.sizes
    # More than are known to be free: some may have ended meanwhile.
    most = sizes.num_slots - self._num_placed() + self._num_ahead()
    self._insert(staged[:most])

  def _insert(self, entries: list[entry_lib.Entry]) -> None:
    """Inserts entries in the order of the list."""
    for prefix, insertion in entry_lib.insertions(
      self.engine, entries, self._prefiller.get, self._admission
    ):
      with self._busy.record("prefill"):
        self._state = self.engine.insert(prefix, self._state, insertion)

  def _put_back(self, entries: list[entry_lib.Entry]) -> None:
    """Returns entries to the front of the queue, in order."""
    self._drop(entries)
    self._waiting.extendleft(e.sequence for e in entries[::-1])

  def _drop(self, entries: list[entry_lib.Entry]) -> None:
    """Forgets entries and stops them on device."""
    self._forget(entries)
    tickets = [entry.ticket for entry in entries]
    self._state = self.engine.release(self._state, tickets)

  def _forget(self, entries: list[entry_lib.Entry]) -> None:
    for entry in entries:
      del self._entries[entry.ticket]
      self._admission.release(entry.ticket)

  # -- room in the cache ----------------------------------------------------

  def _take_pages(self, entry: entry_lib.Entry) -> bool:
    """Fills pages with what was prefilled; False when there are too few."""
    length = entry.sequence.num_prefilled
    new = self._admission.take(
      entry.ticket,
      entry.sequence.tokens[: length - 1],  # the last one is not cached yet
      self._prefiller.bucket(length),
    )
    if new is None:
      return False
    if new.size:
      prefix, row = self._prefiller.get(entry.key)
      with self._busy.record("prefill"):
        self._state = self.engine.fill_pages(prefix, row, self._state, new)
    return True

  def _grow(self) -> None:
    """Gives everyone room for the next call, the latest deadlines last.

    When pages run out, calls on their way are read first, as what ended in them
    frees its pages. Only then is a sequence preempted: the least urgent one, so
    that what is due first is never kept waiting by what is due later. It ends,
    because each round reads a call or preempts an entry, and a sequence that is
    left alone fits (`submit` checks that).
    """
    while not self._admission.grow(self._needs()):
      if self._calls:
        self._drain()
      else:
        self._preempt([max(self._entries.values(), key=entry_lib.urgency)])

  def _needs(self) -> Iterator[tuple[int, int]]:
    """Tickets, and the tokens for which each needs room, most urgent first."""
    for entry in sorted(self._entries.values(), key=entry_lib.urgency):
      # The table of an entry is sent along once the host knows its slot. Until
      # then it has the pages it was inserted with, which must last for as long.
      num_more = _DEPTH if entry.slot is None else 1
      yield entry.ticket, self._reach(entry, num_more)

  def _preempt(self, entries: list[entry_lib.Entry]) -> None:
    """Takes away what entries have of the cache; what they wrote stays."""
    self.stats.preemptions += sum(e.slot is not None for e in entries)
    self._put_back(entries)
