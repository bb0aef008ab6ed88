"""A sequence with a ticket, and how it is offered to the device."""

import collections
from collections.abc import Callable, Iterable, Iterator, Sequence
import dataclasses
import itertools

from jaxrl_async.engine import decode_state as decode_state_lib
from jaxrl_async.engine import engine as engine_lib
from jaxrl_async.engine import page_admission
from jaxrl_async.engine import prefill
from jaxrl_async.engine import sequence as sequence_lib


@dataclasses.dataclass(kw_only=True, slots=True, eq=False)
class Entry:
  """A prefilled sequence: offered to the device, or in a slot.

  Attributes:
    ticket: counts up; no two entries ever have the same one.
    key: of its prefix.
    slot: where it sits, as far as the calls that were read tell.
  """

  ticket: int
  sequence: sequence_lib.Sequence
  key: bytes
  slot: int | None = None


def urgency(entry: Entry) -> tuple[bool, int, int]:
  """Sorts the latest deadline last, and what has no slot after the others."""
  is_staged = entry.slot is None
  return is_staged, entry.sequence.deadline, entry.ticket


def prefill_batches(
  entries: Iterable[Entry], bucket_of: Callable[[int], int], num_rows: int
) -> list[list[Entry]]:
  """Entries that can be prefilled together, the most urgent batch first.

  Args:
    entries: in any order.
    bucket_of: the padded length of so many tokens.
    num_rows: at most, of a batch.
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
  """What inserts entries in their order: their prefixes, and where they go.

  Neighbours of one prefix share an insertion, as far as it has room for them.

  Args:
    engine: that will insert.
    entries: those without a slot go to whatever slot is idle.
    row_of: the prefix of a key, and the row there.
    admission: knows the pages.
  """
  most = engine.sizes.insert_rows
  rows = [(*row_of(entry.key), entry) for entry in entries]
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
