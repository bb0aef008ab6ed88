"""The totals of a run, and the thread that writes each step down."""

import json
import threading

import pytest
import worker_world

from jaxrl_async.models import configs
from jaxrl_async.replay import timing_record
from jaxrl_async.reporting import metrics as metrics_lib
from jaxrl_async.reporting import progress as progress_lib
from jaxrl_async.reporting import side_outputs as side_outputs_lib
from jaxrl_async.run import recorder as recorder_lib
from jaxrl_async.run import sampler as sampler_lib
from jaxrl_async.text import tokenizer as tokenizer_lib
from jaxrl_async.training import step_metrics

DEADLINE_S = 60.0


class Hand:
  """A clock that is moved by hand."""

  def __init__(self):
    self.now_s = 0.0

  def __call__(self):
    return self.now_s


@pytest.fixture
def hand():
  return Hand()


@pytest.fixture
def recorder(tmp_path, hand):
  world = worker_world.World(tmp_path)
  beside = side_outputs_lib.SideOutputs(lambda text: None)
  writer = metrics_lib.MetricsWriter(tmp_path, beside)
  timing = timing_record.TimingRecord(
    tmp_path,
    0,
    record_steps=True,
    first_step=0,
    environment={},
    config={},
  )
  this = recorder_lib.Recorder(
    {},
    workdir=tmp_path,
    writer=writer,
    ledger=world.ledger,
    rollout=world.worker,
    rewards=world.rewards,
    busy={
      name: metrics_lib.BusyClock(seconds=hand) for name in ("rollout", "train")
    },
    compilations=metrics_lib.CompilationCounter(),
    progress=progress_lib.Progress(1),
    side_outputs=beside,
    sampler=sampler_lib.Sampler(
      tmp_path,
      num_groups=0,
      tokenizer=tokenizer_lib.character_level(),
      answer_prefix="",
      side_outputs=beside,
      first_step=0,
    ),
    timing=timing,
    max_bad_updates=1,
    solved_score=1.0,
  )
  yield this
  this.close(DEADLINE_S)
  timing.close()
  writer.close()
  world.ledger.close()


def without_arrays(kind=step_metrics.Pending):
  """A step whose metrics cannot be made."""
  return kind(
    step=0,
    groups=[],
    pack_efficiency=1.0,
    num_epochs=1,
    sums={},
    programs_s=0.0,
    learning_rate=lambda: 0.0,
    times_s={},
    models=[configs.MODELS["tiny"]],
    peak_flops=1.0,
  )


def test_a_step_that_is_not_written_down_whole_is_in_no_checkpoint(recorder):
  assert recorder.wait(0.0)
  recorder.begin(without_arrays(), {}, {})
  for timeout_s in (DEADLINE_S, 0.0, 0.0):  # whoever asks
    with pytest.raises(KeyError, match="num_loss_tokens"):
      recorder.wait(timeout_s)


def test_too_many_skipped_updates_are_raised_once(recorder, monkeypatch):
  def whole(*_):
    raise recorder_lib.BadUpdatesError("too many")

  monkeypatch.setattr(recorder, "_step", whole)
  recorder.begin(without_arrays(), {}, {})
  with pytest.raises(recorder_lib.BadUpdatesError):
    recorder.wait(DEADLINE_S)
  assert recorder.wait(0.0)  # the last checkpoint may have it


def test_an_evaluation_counts_for_neither_slice(recorder, hand, tmp_path):
  recorder.before |= {"run/warm_start_s": 7.0, "ledger/generated_tokens": 30}
  recorder._rl = (
    {
      "run/rl_s": 100.0,
      "run/rollout_busy_s": 50.0,
      "run/train_busy_s": 40.0,
    },
    None,
  )
  hand.now_s = 10.0
  with recorder.busy["train"].record("publish"):
    recorder.start_rl()
    hand.now_s = 12.0
  with recorder.busy["rollout"].record("decode"):
    hand.now_s = 15.0
    with recorder.evaluating():
      hand.now_s = 18.0  # the worker goes on to the end of its call
  with recorder.evaluating():
    hand.now_s = 20.0
    with recorder.busy["train"].record("publish"):
      hand.now_s = 21.0
    assert recorder.totals()["run/rl_s"] == 100 + 12 - 3 - 4
  hand.now_s = 22.0
  totals = recorder.totals()
  assert totals["run/wall_s"] == 22.0
  assert totals["run/rl_s"] == 100 + (12 - 3 - 3)
  assert totals["run/rollout_busy_s"] == 50 + 3
  assert totals["run/train_busy_s"] == 40 + 2
  recorder.end_rl()
  hand.now_s = 30.0
  with recorder.evaluating():
    hand.now_s = 31.0
  kept = recorder.state()["totals"]
  assert kept == {
    "run/warm_start_s": 7.0,
    "run/wall_s": 31.0,
    "run/rl_s": 106.0,
    "run/rollout_busy_s": 53.0,
    "run/train_busy_s": 42.0,
    "ledger/generated_tokens": 30,
  }
  summary = json.loads(recorder.finish(0))
  assert summary["wall_s"] == 31.0 and summary["train_busy_frac"] == 42 / 106
  (line,) = metrics_lib.lines(tmp_path)
  assert kept.items() < line.items() and line["ledger/in_flight_tokens"] == 30
  start_s, end_s, activities = line["timelines"]["rollout"]
  assert (start_s, end_s) == (10.0, 31.0) and activities.keys() == {"decode"}
  assert (tmp_path / "summary.png").exists()


class NeverDone(step_metrics.Pending):
  """A step whose metrics do not come before a gate opens."""

  gate = threading.Event()

  def metrics(self):
    assert self.gate.wait(DEADLINE_S)
    raise LookupError("the gate is open")


def test_no_wait_for_a_step_that_is_never_written_is_without_a_deadline(
  recorder,
):
  step = without_arrays(NeverDone)
  recorder.begin(step, {}, {})
  assert not recorder.wait(0.01)
  assert "recorder: writing step 1 down since" in recorder.status()
  with pytest.raises(TimeoutError, match="writing step 1 down"):
    recorder.close(0.05)
  # Nor does the end of the process wait for it.
  (thread,) = [t for t in threading.enumerate() if t.name == "recorder"]
  assert thread.daemon
  step.gate.set()
  with pytest.raises(LookupError, match="the gate is open"):
    recorder.wait(DEADLINE_S)


def test_the_idle_time_of_an_adoption_is_told_beside_that_of_a_step():
  names = {
    *("waiting_slot_steps", "prefill_tokens", "busy_slot_steps", "wait_s"),
    *("generated_tokens", "recompute_tokens", "interruptions", "preemptions"),
    *("run/rollout_busy_s", "decode_steps", "cached_tokens"),
    *("guided_tokens", "steered_tokens"),
  }

  def metrics(adopt_s, adoptions):
    delta = dict.fromkeys(names, 1) | {
      "adopt_s": adopt_s,
      "adoptions": adoptions,
    }
    return recorder_lib._rollout_metrics(delta, 1.0)

  # Two of three replicas have adopted once, and one has adopted twice.
  found = metrics(adopt_s=2.0, adoptions=4 / 3)
  assert found["time/adopt_s"] == 2.0
  assert found["time/adoption_s"] == pytest.approx(1.5)
  assert metrics(adopt_s=0.0, adoptions=0)["time/adoption_s"] == 0.0
