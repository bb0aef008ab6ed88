"""Sequences with tickets, and how they are inserted into the device's slots."""

import collections
from collections.abc import Callable, Iterable, Iterator, Sequence
import dataclasses
import itertools

from jaxrl_async.engine import decode_state as decode_state_lib
from jaxrl_async.engine import engine as engine_lib
from jaxrl_async.engine import jetstream_api
from jaxrl_async.engine import page_admission
from jaxrl_async.engine import prefill
from jaxrl_async.engine import sequence as sequence_lib


@dataclasses.dataclass(kw_only=True, slots=True, eq=False)
class Entry:
  """A prefilled sequence that waits for a slot or is in one.

  Attributes:
    ticket: a number that counts up. No two entries ever have the same ticket.
    key: the key of its prefix in the `Prefiller`.
    slot: the slot it is in, or None if the calls read so far have not shown
      it in a slot.
  """

  ticket: int
  sequence: sequence_lib.Sequence
  key: bytes
  slot: int | None = None


@dataclasses.dataclass(kw_only=True, slots=True)
class Call:
  """A dispatched call whose result has not been read yet.

  Attributes:
    result: what the device returns.
    num_unplaced: sequences without a slot in this call.
  """

  result: jetstream_api.ResultTokens
  num_unplaced: int


def urgency(entry: Entry) -> tuple[bool, int, int]:
  """Return a sort key that puts the most urgent entry first.

  Entries in slots come before entries without a slot. Within each of the two
  kinds the earliest deadline comes first.
  """
  is_staged = entry.slot is None
  return is_staged, entry.sequence.deadline, entry.ticket


def prefill_batches(
  entries: Iterable[Entry], bucket_of: Callable[[int], int], num_rows: int
) -> list[list[Entry]]:
  """Return batches of entries of one bucket, the most urgent batch first.

  Args:
    entries: the entries to be prefilled, in any order.
    bucket_of: returns the padded length for a number of tokens.
    num_rows: the largest number of entries in a batch.
  """
  by_bucket = collections.defaultdict(list)
  for entry in sorted(entries, key=urgency):
    by_bucket[bucket_of(entry.sequence.length)].append(entry)
  batches = [
    members[start : start + num_rows]
    for members in by_bucket.values()
    for start in range(0, len(members), num_rows)
  ]
  return sorted(batches, key=lambda batch: urgency(batch[0]))


def insertions(
  engine: engine_lib.Engine,
  entries: Sequence[Entry],
  row_of: Callable[[bytes], prefill.Row],
  admission: page_admission.CacheAdmission,
) -> Iterator[tuple[decode_state_lib.Prefix, decode_state_lib.Insertion]]:
  """Yield the insertions that put entries into slots, in the entries' order.

  Consecutive entries with the same prefix share an insertion, up to
  insert_rows of them.

  Args:
    engine: the engine that will insert them.
    entries: the entries. An entry without a slot goes to any idle slot.
    row_of: returns the prefix for a key, and the row in that prefix.
    admission: knows the pages of each ticket.

  Yields:
    A prefix, and the insertion of some of its rows.
  """
  most = engine.sizes.insert_rows
  rows = [(*row_of(entry.key)[:2], entry) for entry in entries]
  for _, run in itertools.groupby(rows, lambda row: id(row[0])):
    members = list(run)
    for start in range(0, len(members), most):
      insertion = engine.unused_insertion()
      for i, (_, row, entry) in enumerate(members[start : start + most]):
        slot = decode_state_lib.PICK if entry.slot is None else entry.slot
        insertion.slots[i] = slot
        insertion.sources[i] = row
        insertion.settings.tickets[i] = entry.ticket
        insertion.settings.pages[i] = admission.row(entry.ticket)
        entry.sequence.describe(insertion, i, engine.end_tokens)
      yield members[0][0], insertion
