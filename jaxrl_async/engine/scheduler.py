"""Continuous batching: which sequence is in which slot of an engine.

`submit` queues sequences. Each `step` refills slots, dispatches the next
`generate` call, reads the call before it, and returns the sequences that ended
in that call. The device runs one call while the host reads another, so it
never waits for the host. (On a CPU, where a call blocks, `step` reads the call
that it dispatches; see `Engine.calls_in_flight`.)

The host therefore has to fill slots before it knows which ones are idle, and
the device chooses the slots. Before each call the host offers prefilled
sequences for insertion into any idle slots. Each offered sequence has a ticket.
Tickets count up, and the device takes offers in the order of their tickets. The
tickets in the results of the call show which offers were taken. If the host
does not know yet whether an offer was taken, it repeats the offer before the
next call. The device ignores every ticket up to the newest one in a slot,
because these were taken by earlier calls.

With a cache of pages, a sequence enters when there are pages for its prompt
(`page_admission`). When a running sequence needs a page and none is left, the
sequence with the latest deadline gives up its pages and waits. It keeps its
tokens.

Pages may be kept when their sequence has ended (`EngineSizes.kept_tokens`). A
sequence that begins as it did, such as the next turn of a conversation, goes on
from them, and prefill computes only the rest.
"""

import collections
from collections.abc import Iterator
import itertools
from typing import Any

import numpy as np

from jaxrl_async.config import sections
from jaxrl_async.engine import decode_state as decode_state_lib
from jaxrl_async.engine import engine as engine_lib
from jaxrl_async.engine import entry as entry_lib
from jaxrl_async.engine import page_admission
from jaxrl_async.engine import prefill
from jaxrl_async.engine import sampling
from jaxrl_async.engine import scheduler_stats
from jaxrl_async.engine import sequence as sequence_lib
from jaxrl_async.reporting import metrics as metrics_lib


class Scheduler:
  """A scheduler that keeps an engine's slots full.

  Invariant: a sequence is in exactly one of `_waiting`, `_prefilling` and
  `_entries`, or has left. While no call is in flight, an entry has a slot if
  and only if its sequence is in that slot. During a call, the device may have
  taken an entry without the host knowing.

  Threads: one thread at a time; nothing here is locked.
  """

  def __init__(
    self,
    engine: engine_lib.Engine,
    *,
    kv_on_adopt: sections.KvOnAdopt = sections.KvOnAdopt.RECOMPUTE,
    busy: metrics_lib.BusyClock,
  ):
    """Create a scheduler without sequences.

    Args:
      engine: the engine whose programs run.
      kv_on_adopt: what happens to the caches of running sequences when new
        weights are adopted.
      busy: records the time of every call.
    """
    self.engine = engine
    self.kv_on_adopt = kv_on_adopt
    self.stats = scheduler_stats.SchedulerStats()
    self._busy = busy
    self._params: decode_state_lib.EngineParams | None = None
    self._version = -1
    self._waiting = collections.deque[sequence_lib.Sequence]()
    self._prefilling: list[tuple[bytes, sequence_lib.Sequence]] = []
    self._entries: dict[int, entry_lib.Entry] = {}
    self._next_ticket = 0
    self._calls = collections.deque[entry_lib.Call]()
    self._ended: list[sequence_lib.Sequence] = []
    self._admission = page_admission.make(
      engine.sizes,
      steps_ahead=engine.calls_in_flight * engine.sizes.decode_steps_per_call,
    )
    self._prefiller = prefill.Prefiller(
      engine,
      admission=self._admission,
      busy=busy,
    )
    self._state: Any = engine.init_decode_state()

  # -- contents -------------------------------------------------------------

  @property
  def version(self) -> int:
    """The policy version of the current weights; -1 before the first."""
    return self._version

  @property
  def num_free(self) -> int:
    """The number of slots minus the number of running and waiting sequences."""
    return self.engine.sizes.num_slots - len(self.sequences())

  @property
  def num_held_pages(self) -> int:
    """The number of pages that running sequences hold; kept ones are free."""
    return self._admission.num_held

  @property
  def room(self) -> int:
    """The number of further sequences that are useful now; may be negative.

    It is the number of free slots plus the number of sequences that should wait
    prefilled, so that a slot whose sequence ends is refilled at once.
    """
    return self.num_free + self._num_ahead()

  @property
  def is_idle(self) -> bool:
    """Whether no sequence runs, waits or still has to be returned."""
    return not (self.sequences() or self._calls or self._ended)

  def _num_ahead(self) -> int:
    """Return the number of sequences that should wait prefilled.

    There is one for each sequence that will have reached its limit after the
    calls in flight. In addition there are insert_rows for other ends.
    """
    num_ending = sum(
      e.slot is not None and self._reach(e, 0) == e.sequence.limit
      for e in self._entries.values()
    )
    return self.engine.sizes.insert_rows + num_ending

  def sequences(self) -> list[sequence_lib.Sequence]:
    """Return all sequences that run or wait."""
    entered = [e.sequence for e in self._entries.values()]
    prefilling = [sequence for _, sequence in self._prefilling]
    return entered + prefilling + list(self._waiting)

  def submit(self, sequence: sequence_lib.Sequence) -> None:
    """Queue a sequence.

    Raises:
      ValueError: the sequence does not fit the cache, or its sampling settings
        are not allowed.
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
    """Forget an owner's sequences and return their number.

    They keep the tokens read so far, and lose those of calls in flight.
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
    """Adopt new weights, which the next call uses.

    Unless kv_on_adopt is KEEP, the caches of running sequences are rebuilt
    under the new weights (arXiv:2505.24298, section 4.1). Kept pages are of no
    use then, while with KEEP a conversation goes on over its own.
    """
    # Afterwards the host knows which sequence is in which slot. Rebuilt ones
    # can go to their own, and no later call mixes old tickets with new ones.
    self._drain()
    self._params, self._version = params, version
    self._prefiller.adopt(params)
    if not self._goes_on_over_old_pages:
      self._admission.forget_contents()
    self._unstage()
    self.stats.adoptions += 1
    self.stats.interruptions += len(self._entries)
    if self.kv_on_adopt is not sections.KvOnAdopt.KEEP:
      self._recompute()

  @property
  def _goes_on_over_old_pages(self) -> bool:
    """Whether a sequence may begin with pages of weights before these."""
    keeps = self.kv_on_adopt is sections.KvOnAdopt.KEEP
    return keeps and self.engine.sizes.kept_pages > 0

  def _lineage(self, sequence: sequence_lib.Sequence) -> sequence_lib.Lineage:
    """Return which other sequences' pages a sequence may share.

    If old pages are used, these are the pages of sequences that began with the
    same weights.
    """
    version = self._version
    if self._goes_on_over_old_pages and sequence.began >= 0:
      version = sequence.began
    return sequence_lib.Lineage(sequence.adapter, version)

  def _unstage(self) -> None:
    """Return sequences without a slot to the front of the queue, in order.

    They were prefilled with the old weights and must be prefilled again.
    """
    self._waiting.extendleft(s for _, s in self._prefilling[::-1])
    self._prefilling.clear()
    self._put_back([e for e in self._entries.values() if e.slot is None])

  def _recompute(self) -> None:
    """Prefill the sequences in slots again, under the new weights.

    The most urgent ones go first, because the last ones may find too few pages:
    sequences that shared pages before may share fewer afterwards.
    """
    entries = list(self._entries.values())
    for entry in entries:
      entry.sequence.num_prefilled = entry.sequence.length
      # All pages are released before any is taken again. Otherwise the first
      # sequences might find too few.
      self._admission.release(entry.ticket)
    # One batch at a time, as all prefixes together would be as large as the
    # cache.
    for batch in entry_lib.prefill_batches(
      entries, self._prefiller.bucket, self.engine.sizes.prefill_rows
    ):
      self._recompute_batch(batch)

  def _recompute_batch(self, batch: list[entry_lib.Entry]) -> None:
    for entry in batch:
      entry.key = self._prefiller.want(
        entry.sequence.written(), self._lineage(entry.sequence)
      )
    while self._advance_prefill(is_patient=False):
      pass
    fitting = [e for e in batch if self._take_pages(e)]
    self._preempt([e for e in batch if e not in fitting])
    self.stats.recompute_tokens += sum(e.sequence.length for e in fitting)
    self._insert(fitting)
    self._forget_prefixes()

  # -- one call -------------------------------------------------------------

  def step(self) -> list[sequence_lib.Sequence]:
    """Dispatch the next call, read the one before, return ended sequences.

    Raises:
      ValueError: no weights have been adopted yet.
    """
    if self._params is None:
      raise ValueError("adopt weights before the first step")
    while len(self._calls) < self._most_calls() and self._has_work():
      self._dispatch()
    if self._calls:
      self._collect(self._calls.popleft())
    ended, self._ended = self._ended, []
    return ended

  def _has_work(self) -> bool:
    """Return whether another call could generate any token."""
    return bool(self._waiting or self._prefilling) or any(
      entry.slot is None or self._reach(entry, 0) < entry.sequence.limit
      for entry in self._entries.values()
    )

  def _most_calls(self) -> int:
    """Return how many calls may be in flight.

    A guide needs every token before it allows the next one.
    """
    return 1 if self._has_guides() else self.engine.calls_in_flight

  def _has_guides(self) -> bool:
    return any(e.sequence.guide is not None for e in self._entries.values())

  def _guided(self) -> np.ndarray | None:
    """Return the tokens that guides allow in each slot, as bits, or None."""
    words = -(-self.engine.model.vocab_size // 32)
    allowed = np.full((self.engine.sizes.num_slots, words), -1, np.int32)
    is_guided = False
    for entry in self._entries.values():
      guide = entry.sequence.guide
      if guide is not None and entry.slot is not None:
        guide.allow(allowed[entry.slot])
        is_guided = True
    return allowed if is_guided else None

  def _reach(self, entry: entry_lib.Entry, num_more: int) -> int:
    """Return the most tokens of an entry after calls in flight and others."""
    calls = len(self._calls) + num_more
    steps = self.engine.sizes.decode_steps_per_call
    return min(entry.sequence.length + steps * calls, entry.sequence.limit)

  def _dispatch(self) -> None:
    assert self._params is not None
    self._stage()
    if self._has_guides():
      self._drain()
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
        guided=self._guided() if self._has_guides() else None,
      )
    unplaced = len(self.sequences()) - self._num_placed()
    self._calls.append(entry_lib.Call(result=result, num_unplaced=unplaced))

  def _num_placed(self) -> int:
    return sum(e.slot is not None for e in self._entries.values())

  def _drain(self) -> None:
    """Read all calls in flight, so that the host knows the device's state."""
    while self._calls:
      self._collect(self._calls.popleft())

  def _collect(self, call: entry_lib.Call) -> None:
    """Read a call: slots of sequences, new tokens, and ended sequences."""
    with self._busy.record("decode"):
      result = self.engine.read(call.result)
    in_use = num_placed = 0
    ended, stopped = [], []
    for slot, ticket in enumerate(result.tickets.tolist()):
      entry = self._entries.get(ticket)
      if entry is None:
        continue  # it ended earlier or has been cancelled
      # Without a slot, its offer was taken, and the device chose the slot.
      num_placed += entry.slot is None
      entry.slot = slot
      num_steered = len(entry.sequence.steered)
      num_new, num_kept = entry.sequence.take(
        result, slot, self.engine.end_tokens, self.stats.decode_steps
      )
      # The last token is not cached yet. What later calls write is after it.
      written = entry.sequence.written()
      self._admission.name(entry.ticket, written[:-1])
      in_use += num_new
      if entry.sequence.stream is sampling.Stream.EVAL:
        self.stats.evaluation_tokens += num_kept
      else:
        self.stats.generated_tokens += num_kept
      self._count_guided(entry.sequence, num_kept, num_steered)
      if result.has_ended[slot]:
        ended.append(entry)
      elif entry.sequence.finish_reason is not None:
        stopped.append(entry)  # at a stop string, which only the host finds
    self._ended += [entry.sequence for entry in ended + stopped]
    self._forget(ended)
    self._drop(stopped)
    if num_placed:
      self._forget_prefixes()
    # Later calls were dispatched before it was known that these have slots.
    for later in self._calls:
      later.num_unplaced -= num_placed
    self.stats.decode_steps += result.is_valid.shape[1]
    if call.num_unplaced > num_placed:
      self.stats.waiting_slot_steps += result.is_valid.size
      self.stats.busy_slot_steps += in_use

  def _count_guided(
    self, sequence: sequence_lib.Sequence, num_kept: int, num_before: int
  ) -> None:
    """Count tokens that a sequence has got, if it has a guide.

    Args:
      num_kept: how many they are.
      num_before: steered tokens that the sequence had before.
    """
    if sequence.guide is None or sequence.stream is not sampling.Stream.TRAIN:
      return
    self.stats.guided_tokens += num_kept
    self.stats.steered_tokens += len(sequence.steered) - num_before

  # -- from the queue to the slots ------------------------------------------

  def _stage(self) -> None:
    """Take sequences from the queue, prefill them, and make them entries."""
    sizes = self.engine.sizes
    places = sizes.num_slots + self._num_ahead()
    places -= len(self._entries) + len(self._prefilling)
    while self._waiting and places > 0:
      promised = [sequence for _, sequence in self._prefilling]
      if not self._admission.may_enter(
        self._waiting[0], promised, len(self._entries)
      ):
        break  # no other may overtake it, or a long prompt might never enter
      sequence = self._waiting.popleft()
      if sizes.preemption is sections.Preemption.FAST:
        sequence.num_prefilled = sequence.length
      key = self._prefiller.want(
        sequence.tokens[: sequence.num_prefilled], self._lineage(sequence)
      )
      self._prefilling.append((key, sequence))
      places -= 1
    # A call costs as much for one row as for all. So it waits until its rows
    # are needed, or until there are enough of them.
    num_staged = len(self._entries) - self._num_placed()
    if num_staged < self._num_offered() or not self._prefiller.may_wait():
      while self._advance_prefill(is_patient=self._num_placed() > 0):
        self._enter()
    self._enter()

  def _enter(self) -> None:
    """Make entries of the sequences that are prefilled and find their pages."""
    for key, sequence in self._prefilling:
      if not self._prefiller.is_ready(key):
        continue
      entry = entry_lib.Entry(
        ticket=self._next_ticket, sequence=sequence, key=key
      )
      if not self._take_pages(entry):
        continue  # it keeps its prefix, and the next call tries again
      self._next_ticket += 1
      self._entries[entry.ticket] = entry
    entered = {id(e.sequence) for e in self._entries.values()}
    self._prefilling = [
      (k, s) for k, s in self._prefilling if id(s) not in entered
    ]
    self._forget_prefixes()

  def _advance_prefill(self, *, is_patient: bool) -> bool:
    """Prefill, and return whether it has to be called again to do all."""
    is_left = self._prefiller.advance(self._state, is_patient=is_patient)
    self.stats.prefill_tokens = self._prefiller.num_tokens
    self.stats.cached_tokens = self._prefiller.num_cached
    return is_left

  def _forget_prefixes(self) -> None:
    """Forget prefixes that no staged or soon to be staged sequence needs."""
    keys = {e.key for e in self._entries.values() if e.slot is None}
    keys |= {key for key, _ in self._prefilling}
    coming = itertools.islice(self._waiting, self.engine.sizes.num_slots)
    keys |= {
      prefill.key_of(s.tokens[: s.num_prefilled], self._lineage(s))
      for s in coming
    }
    self._prefiller.keep_only(keys)

  def _offer(self) -> None:
    """Offer staged sequences to whichever slots are idle on the device.

    Some were already offered to the call before, which has not been read yet.
    The device does not take an offer twice. With a guide the host chooses the
    slots, because it has to say what each of them may draw.
    """
    staged = [e for e in self._entries.values() if e.slot is None]
    staged = staged[: self._num_offered()]
    if self._has_guides():  # no call is in flight, so the host knows them
      used = {e.slot for e in self._entries.values()}
      free = [s for s in range(self.engine.sizes.num_slots) if s not in used]
      staged = staged[: len(free)]
      for entry, slot in zip(staged, free, strict=False):
        entry.slot = slot
    self._insert(staged)

  def _num_offered(self) -> int:
    """Return how many staged sequences the next call can take.

    If another call is in flight, these are more than the slots known to be
    free, as some of its sequences may have ended.
    """
    num_free = self.engine.sizes.num_slots - self._num_placed()
    return num_free + (self._num_ahead() if self._calls else 0)

  def _insert(self, entries: list[entry_lib.Entry]) -> None:
    """Insert entries in the order of the list."""
    for prefix, insertion in entry_lib.insertions(
      self.engine, entries, self._prefiller.get, self._admission
    ):
      with self._busy.record("prefill"):
        self._state = self.engine.insert(prefix, self._state, insertion)

  def _put_back(self, entries: list[entry_lib.Entry]) -> None:
    """Stop entries and put their sequences at the queue's front, in order."""
    self._drop(entries)
    self._waiting.extendleft(e.sequence for e in entries[::-1])

  def _drop(self, entries: list[entry_lib.Entry]) -> None:
    """Forget entries and stop their sequences on the device."""
    self._forget(entries)
    tickets = [entry.ticket for entry in entries]
    self._state = self.engine.release(self._state, tickets)

  def _forget(self, entries: list[entry_lib.Entry]) -> None:
    for entry in entries:
      del self._entries[entry.ticket]
      self._admission.release(entry.ticket)

  # -- room in the cache ----------------------------------------------------

  def _take_pages(self, entry: entry_lib.Entry) -> bool:
    """Take and fill an entry's pages; return False if there are too few."""
    length = entry.sequence.num_prefilled
    new = self._admission.take(
      entry.ticket,
      entry.sequence.tokens[: length - 1],  # the last one is not cached yet
      self._prefiller.bucket(length),
      self._lineage(entry.sequence),
    )
    if new is None:
      return False
    entry.sequence.record_cache(self._version)
    row = self._prefiller.get(entry.key)
    if entry.sequence.num_cached is None:
      entry.sequence.num_cached = row.num_cached
    if new.size:
      with self._busy.record("prefill"):
        self._state = self.engine.fill_pages(
          row.prefix, row.index, self._state, new
        )
    return True

  def _grow(self) -> None:
    """Take pages for the next call, the most urgent sequences first.

    When pages run out, the calls in flight are read first, because sequences
    that ended in them free their pages. Only then is a sequence preempted. It
    is the least urgent one, so that an early deadline never waits for a later
    one. The loop ends, because each round reads calls or preempts an entry, and
    a single remaining sequence always fits, as `submit` checks.
    """
    while not self._admission.grow(self._needs()):
      if self._calls:
        self._drain()
      else:
        self._preempt([max(self._entries.values(), key=entry_lib.urgency)])

  def _needs(self) -> Iterator[tuple[int, int]]:
    """Yield tickets and the tokens each needs room for, most urgent first."""
    for entry in sorted(self._entries.values(), key=entry_lib.urgency):
      # The host sends an entry's pages with each call once it knows the slot.
      # Until then the device uses the pages of the insertion, which must last
      # for one more call.
      num_more = self.engine.calls_in_flight if entry.slot is None else 1
      yield entry.ticket, self._reach(entry, num_more)

  def _preempt(self, entries: list[entry_lib.Entry]) -> None:
    """Take entries out of the cache and queue their sequences again.

    The sequences keep their tokens.
    """
    self.stats.preemptions += sum(e.slot is not None for e in entries)
    self._put_back(entries)
