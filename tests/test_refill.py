"""No slot idles while work waits, and the device does not wait for the host."""

import tiny

from jaxrl_async.engine import prefill
from jaxrl_async.engine import sampling
from jaxrl_async.engine import scheduler as scheduler_lib


class Watched(scheduler_lib.Scheduler):
  """Keeps each call's results, and what was on its way when it was read."""

  def __init__(self, *args, **options):
    super().__init__(*args, **options)
    self.results, self.num_ahead, self.has_waiting = [], [], []

  def _collect(self, call):
    self.results.append(self.engine.read(call.result))
    self.num_ahead.append(len(self._calls))
    self.has_waiting.append(bool(self._waiting))
    super()._collect(call)


def test_a_slot_that_ends_is_refilled_in_the_next_call():
  scheduler = tiny.ready(cls=Watched)
  tiny.write_all(scheduler, tiny.assorted(16))
  results = scheduler.results
  num_refilled = 0
  for waits, now, after in zip(
    scheduler.has_waiting, results, results[1:], strict=False
  ):
    if not waits:
      break
    ended = now.has_ended
    # Ended in it, and not before.
    ended = ended & now.is_valid[:, 0]
    assert ended.sum() <= scheduler.engine.sizes.insert_rows
    assert (now.tickets[ended] < after.tickets[ended]).all()
    assert after.is_valid[ended, 0].all()
    num_refilled += ended.sum()
  assert num_refilled > 4


def test_slots_that_end_at_their_limits_are_refilled_however_many():
  scheduler = tiny.ready(cls=Watched)
  settings = sampling.SamplingSettings(ignore_eos=True)
  for number in range(16):
    sequence = tiny.sequence(tiny.prompt(5), group=number, limit=18)
    sequence.settings = settings
    scheduler.submit(sequence)
  tiny.finish(scheduler)
  busy = [
    result.is_valid[:, 0].sum()
    for waits, result in zip(
      scheduler.has_waiting, scheduler.results, strict=True
    )
    if waits
  ]
  num_slots = scheduler.engine.sizes.num_slots
  assert num_slots > scheduler.engine.sizes.insert_rows
  # The first call comes before anything is known to end.
  assert len(busy) > 6
  assert set(busy[1:]) == {num_slots}


def test_the_next_call_is_dispatched_before_the_last_one_is_read():
  scheduler = tiny.ready(cls=Watched)
  tiny.write_all(scheduler, tiny.assorted())
  *steady, last = scheduler.num_ahead
  assert set(steady) == {1}
  assert last == 0


def inserted_and_prefilled(monkeypatch, engine):
  """Count the entries of each insertion, and the rows of each prefill."""
  entries, rows = [], []

  def insert(prefix, state, insertion, make=engine.insert):
    entries.append(int((insertion.slots < engine.sizes.num_slots).sum()))
    return make(prefix, state, insertion)

  def prefill_rows(make=engine.prefill, **options):
    rows.append(len(options["padded_tokens"]))
    return make(**options)

  monkeypatch.setattr(engine, "insert", insert)
  monkeypatch.setattr(engine, "prefill", prefill_rows)
  return entries, rows


def test_where_calls_block_each_sequence_is_inserted_once(monkeypatch):
  """On a CPU the host knows which slots are idle before each call."""
  scheduler = tiny.ready(cls=Watched, calls_in_flight=1)
  entries, rows = inserted_and_prefilled(monkeypatch, scheduler.engine)
  sequences = tiny.assorted(16)
  tiny.write_all(scheduler, sequences)
  assert set(scheduler.num_ahead) == {0}
  assert sum(entries) == len(sequences)
  # A prefill waits until its rows are needed, or until it is full.
  assert sum(rows) == len(sequences)
  assert len(rows) <= 0.75 * len(sequences)
  for waits, now, after in zip(
    scheduler.has_waiting,
    scheduler.results,
    scheduler.results[1:],
    strict=False,
  ):
    if waits:
      ended = now.has_ended & now.is_valid[:, 0]
      assert after.is_valid[ended, 0].all()


def test_where_calls_block_the_results_are_the_same_bits():
  records = []
  for calls_in_flight in (1, 2):
    scheduler = tiny.ready(calls_in_flight=calls_in_flight)
    records.append(tiny.write_all(scheduler, tiny.assorted(16)))
  assert records[0] == records[1]


def test_recomputing_keeps_the_prefixes_of_one_prefill_at_a_time(monkeypatch):
  kept = []
  advance = prefill.Prefiller.advance

  def watched(self, *given, **options):
    is_left = advance(self, *given, **options)
    kept.append(len(self._ready))
    return is_left

  monkeypatch.setattr(prefill.Prefiller, "advance", watched)
  scheduler = tiny.ready()
  for number in range(4):
    sequence = tiny.sequence(tiny.prompt(5 + number), group=number, limit=30)
    sequence.settings = sampling.SamplingSettings(ignore_eos=True)
    scheduler.submit(sequence)
  scheduler.step()
  scheduler.step()
  kept.clear()
  scheduler.adopt(tiny.engine_params(1), 1)
  assert scheduler.stats.interruptions == 4
  assert kept == [2, 2]
  tiny.finish(scheduler)
