"""Metrics stay valid JSON across a resume; busy time is counted once."""

import json
import struct
import threading

import disks
import jax
from jax import numpy as jnp
from jax.experimental.compilation_cache import compilation_cache
import numpy as np
import pytest
from tensorboardX.proto import event_pb2

from jaxrl_async.reporting import metrics as metrics_lib
from jaxrl_async.reporting import side_outputs as side_outputs_lib
from jaxrl_async.storage import disk


def make_writer(workdir, notes=None):
  said = [] if notes is None else notes
  return metrics_lib.MetricsWriter(
    workdir, side_outputs_lib.SideOutputs(said.append)
  )


def lines(workdir):
  def refuse(constant):
    raise ValueError(constant)

  text = (workdir / "metrics.jsonl").read_text()
  return [json.loads(x, parse_constant=refuse) for x in text.splitlines()]


def events(workdir):
  """Every TensorBoard event of a folder, in the order it was written."""
  for path in sorted((workdir / "tensorboard").iterdir()):
    data = path.read_bytes()
    at = 0
    while at < len(data):
      (size,) = struct.unpack_from("<Q", data, at)
      yield event_pb2.Event.FromString(data[at + 12 : at + 12 + size])
      at += 12 + size + 4


def test_a_step_is_one_json_object(tmp_path):
  writer = make_writer(tmp_path)
  writer.write(
    1,
    {
      "reward/mean": np.float32(0.5),
      "policy/loss": jnp.float32(2),
      "completion/tokens_max": 7,
      "staleness/histogram": np.array([4, 0, 1]),
    },
  )
  writer.write(2, {"policy/loss": float("nan"), "policy/lr": -np.inf})
  writer.close()
  assert lines(tmp_path) == [
    {
      "step": 1,
      "reward/mean": 0.5,
      "policy/loss": 2.0,
      "completion/tokens_max": 7,
      "staleness/histogram": [4, 0, 1],
    },
    {"step": 2, "policy/loss": None, "policy/lr": None},
  ]


def test_tensorboard_gets_scalars_and_the_histogram(tmp_path):
  writer = make_writer(tmp_path)
  writer.write(3, {"reward/mean": 0.25, "staleness/histogram": [0, 4, 1]})
  writer.close()
  values = {
    v.tag: (e.step, v) for e in events(tmp_path) for v in e.summary.value
  }
  step, reward = values["reward/mean"]
  assert (step, reward.simple_value) == (3, 0.25)
  histogram = values["staleness/histogram"][1].histo
  assert (histogram.min, histogram.max, histogram.num) == (1, 2, 5)
  assert (histogram.sum, histogram.sum_squares) == (6, 8)
  counts = dict(zip(histogram.bucket_limit, histogram.bucket, strict=True))
  assert counts[1.5] == 4 and counts[2.5] == 1


def test_a_histogram_has_limits_also_after_a_resume(tmp_path):
  values = [0.0, 0.25, 1.0, 1.0]
  found = metrics_lib.histogram_of(values)
  assert sum(found.counts) == 4 and len(found.limits) == len(found.counts) + 1
  assert (found.counts[0], found.counts[-1]) == (1, 2)
  assert (found.limits[0], found.limits[-1]) == (0.0, 1.0)
  alike = metrics_lib.histogram_of([3.0, 3.0])
  assert sum(alike.counts) == 2 and alike.limits[0] < 3.0 < alike.limits[-1]

  writer = make_writer(tmp_path)
  writer.write(1, {"a": 1})
  writer.write(2, {"reward/histogram": found})
  writer.close()
  assert lines(tmp_path)[1] == {
    "step": 2,
    "reward/histogram": {"limits": found.limits, "counts": found.counts},
  }
  (histogram,) = (
    v.histo
    for e in events(tmp_path)
    for v in e.summary.value
    if v.tag == "reward/histogram"
  )
  assert histogram.num == 4
  assert list(histogram.bucket_limit)[-1] >= 1.0
  assert sum(histogram.bucket) == 4


def test_events_are_on_disk_when_write_returns(tmp_path):
  writer = make_writer(tmp_path)
  writer.write(1, {"x": 1})
  # A process that is killed now closes nothing.
  assert [e.step for e in events(tmp_path) if e.summary.value] == [1]
  writer.close()


def test_tensorboard_that_fails_is_said_once_counted_and_tried_again(tmp_path):
  notes = []
  beside = side_outputs_lib.SideOutputs(notes.append)
  writer = metrics_lib.MetricsWriter(tmp_path, beside)
  in_the_way = tmp_path / "tensorboard"
  in_the_way.touch()
  for step in (1, 2):
    writer.write(step, {"x": step})
    writer.state()
  (note,) = notes
  assert "WARNING: TensorBoard" in note and len(note.splitlines()) == 1
  assert beside.num_failures == 2
  in_the_way.unlink()
  writer.write(3, {"x": 3})
  with disks.files_of_at_most((tmp_path / "metrics.jsonl").stat().st_size + 99):
    writer.write(4, {"x" * 50: 4})  # it fits into metrics.jsonl alone
  writer.write(5, {"x": 5})
  writer.close()
  assert beside.num_failures == 3
  assert [x["step"] for x in lines(tmp_path)] == [1, 2, 3, 4, 5]
  written = [e.step for e in events(tmp_path) if e.summary.value]
  assert written == [3, 5]


def test_metrics_that_cannot_be_written_end_the_run(tmp_path):
  writer = make_writer(tmp_path)
  writer.write(1, {"x": 1})
  with disks.files_of_at_most(20):
    with pytest.raises(disk.StorageError, match="metrics.jsonl cannot be"):
      writer.write(2, {"x": 2})
  writer.close()
  assert [x["step"] for x in lines(tmp_path)] == [1]


def test_an_evaluation_is_a_line_of_its_own_also_of_an_earlier_step(tmp_path):
  writer = make_writer(tmp_path)
  writer.write(1, {"x": 1})
  writer.write_evaluation(1, {"eval/x": np.float32(0.5)})
  writer.write(2, {"x": 2})
  state = json.loads(json.dumps(writer.state()))
  writer.write_evaluation(1, {"eval/y": 7})  # is lost, and made again
  writer.close()
  resumed = make_writer(tmp_path)
  resumed.restore(state)
  resumed.write_evaluation(1, {"eval/y": 8})
  with pytest.raises(ValueError, match="step 1 comes after step 2"):
    resumed.write(1, {"x": 2})
  resumed.write(3, {"x": 3})
  resumed.close()
  assert lines(tmp_path) == [
    {"step": 1, "x": 1},
    {"step": 1, "eval/x": 0.5},
    {"step": 2, "x": 2},
    {"step": 1, "eval/y": 8},
    {"step": 3, "x": 3},
  ]


def test_a_resume_drops_what_came_after_the_checkpoint(tmp_path):
  writer = make_writer(tmp_path)
  writer.write(1, {"x": 1})
  writer.write(2, {"x": 2})
  state = json.loads(json.dumps(writer.state()))
  writer.write(3, {"x": 3})
  writer.close()
  resumed = make_writer(tmp_path)
  resumed.restore(state)
  assert [x["step"] for x in lines(tmp_path)] == [1, 2]
  assert resumed.state() == state
  resumed.write(3, {"x": 30})
  resumed.close()
  assert [x["x"] for x in lines(tmp_path)] == [1, 2, 30]
  starts = [e for e in events(tmp_path) if e.session_log.status]
  assert [e.step for e in starts] == [0, 3]


def test_a_writer_that_is_not_restored_begins_anew(tmp_path):
  for value in (1, 2):
    writer = make_writer(tmp_path)
    writer.write(1, {"x": value})
    writer.close()
  assert lines(tmp_path) == [{"step": 1, "x": 2}]


def test_a_file_shorter_than_the_checkpoint_knows_is_refused(tmp_path):
  writer = make_writer(tmp_path)
  with pytest.raises(ValueError, match="has 0 bytes"):
    writer.restore({"num_bytes": 10, "last_step": 1})


def test_lines_have_totals_and_what_is_no_metric_is_in_no_other_file(tmp_path):
  writer = make_writer(tmp_path)
  totals = iter(range(10))
  writer.totals = lambda: {"total": next(totals), "x": 100}
  timelines = {"train": [1.0, 2.0, {"update": "00ff"}]}
  writer.write(1, {"x": 1, metrics_lib.TIMELINES: timelines})
  writer.write(1, {"y": 2})
  writer.close()
  assert [*metrics_lib.lines(tmp_path)] == [
    {"step": 1, "total": 0, "x": 1, "timelines": timelines},
    {"step": 1, "total": 1, "x": 100, "y": 2},
  ]
  assert metrics_lib.by_step(tmp_path) == [
    {"step": 1, "total": 1, "x": 100, "y": 2, "timelines": timelines}
  ]
  found = {v.tag for e in events(tmp_path) for v in e.summary.value}
  assert found == {"total", "x", "y"}


def test_lines_are_in_order_and_only_numbers_are_metrics(tmp_path):
  writer = make_writer(tmp_path)
  writer.write(1, {"x": 1})
  with pytest.raises(ValueError, match="step 0 comes after step 1"):
    writer.write(0, {"x": 2})
  for value in ("text", None, [[1, 2]]):
    with pytest.raises(TypeError, match="metric y"):
      writer.write(2, {"y": value})
  writer.close()
  assert len(lines(tmp_path)) == 1


class Hand:
  """A clock that is moved by hand."""

  def __init__(self):
    self.now_s = 0.0

  def __call__(self):
    return self.now_s


def busy_s(clock):
  return metrics_lib.read({"": clock}).busy_s[""]


def test_time_inside_counts_before_it_has_ended():
  hand = Hand()
  clock = metrics_lib.BusyClock(seconds=hand)
  with clock.record("decode"):
    hand.now_s = 3.0
    assert metrics_lib.read({"train": clock}) == (3.0, {"train": 3.0})
  hand.now_s = 5.0
  assert metrics_lib.read({"train": clock}) == (5.0, {"train": 3.0})
  assert clock.activity_s() == {"decode": 3.0}


@pytest.mark.parametrize("seed", range(20))
def test_busy_time_equals_counting_ticks(seed):
  """Of intervals that overlap and are entered and left in any order."""
  rng = np.random.default_rng(seed)
  hand = Hand()
  clock = metrics_lib.BusyClock(seconds=hand)
  starts = rng.integers(0, 60, 12)
  ends = starts + rng.integers(0, 9, 12)
  entered = {}
  for tick in range(70):
    hand.now_s = float(tick)
    for i in np.flatnonzero(starts == tick):
      entered[i] = clock.record(f"activity {i % 3}")
      entered[i].__enter__()
    for i in np.flatnonzero(ends == tick):
      entered.pop(i).__exit__(None, None, None)
    ticks = {t for a, b in zip(starts, ends, strict=True) for t in range(a, b)}
    assert busy_s(clock) == sum(t < tick for t in ticks)
  assert not entered
  assert sum(clock.activity_s().values()) == (ends - starts).sum()


def test_recording_survives_an_error_and_many_threads():
  clock = metrics_lib.BusyClock()

  def work():
    for _ in range(200):
      with pytest.raises(KeyError), clock.record("decode"):
        raise KeyError

  threads = [threading.Thread(target=work) for _ in range(4)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(timeout=30)
  intervals = clock.since(-1.0)
  assert len(intervals) == 256  # of 800
  assert {x.activity for x in intervals} == {"decode"}
  assert all(0 <= x.start_s <= x.end_s for x in intervals)
  assert 0 < busy_s(clock) <= clock.now()


def test_a_slice_is_never_busy_for_longer_than_there_was_time():
  clocks = {name: metrics_lib.BusyClock(0.0) for name in ("rollout", "train")}
  is_over = threading.Event()

  def work(clock):
    while not is_over.is_set():
      with clock.record("decode"):
        pass

  threads = [threading.Thread(target=work, args=(c,)) for c in clocks.values()]
  for thread in threads:
    thread.start()
  before = metrics_lib.read(clocks)
  for _ in range(300):
    after = metrics_lib.read(clocks)
    for name, busy in after.busy_s.items():
      idle_s = after.now_s - before.now_s - (busy - before.busy_s[name])
      assert idle_s >= -1e-9
    before = after
  is_over.set()
  for thread in threads:
    thread.join(timeout=30)


def test_clocks_of_one_run_share_their_origin():
  early = metrics_lib.BusyClock(origin_s=0.0)
  late = metrics_lib.BusyClock(origin_s=100.0)
  assert early.now() - late.now() == pytest.approx(100, abs=1)


def test_every_compiled_program_is_counted_once():
  def program(x):
    return x * 3 + 1

  x = np.ones(3, np.float32)
  compiled = jax.jit(program)
  with metrics_lib.CompilationCounter() as counter:
    compiled(x)
    compiled(x)
    assert counter.num_programs == 1
    compiled(np.ones(4, np.float32))
  jax.jit(lambda x: x - 5)(x)
  assert counter.num_programs == 2
  assert 0 <= counter.num_cache_hits <= 2
  assert counter.num_compiled == 2 - counter.num_cache_hits
  assert counter.total_s > 0


def test_what_the_cache_held_is_not_a_compilation(tmp_path):
  before = jax.config.jax_compilation_cache_dir
  x = np.ones(5, np.float32)
  try:
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    compilation_cache.reset_cache()
    counts = []
    for _ in range(2):
      jax.clear_caches()
      with metrics_lib.CompilationCounter() as counter:
        jax.jit(lambda x: x * 7 - 2)(x)
      counts.append((counter.num_programs, counter.num_cache_hits))
  finally:
    jax.config.update("jax_compilation_cache_dir", before)
    compilation_cache.reset_cache()
  assert counts == [(1, 0), (1, 1)]
