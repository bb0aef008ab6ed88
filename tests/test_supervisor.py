"""Threads that fail, threads that are late, Ctrl-C and stalls."""

import signal
import threading

import pytest

from jaxrl_async import config
from jaxrl_async import supervisor


def test_the_first_failure_is_kept_and_raised_with_its_threads_name():
  reported = []
  first_reported = threading.Event()

  def on_failure(error):
    reported.append(error)
    first_reported.set()

  def fail_first():
    raise LookupError("the first")

  def fail_second():
    assert first_reported.wait(10)
    raise ValueError("the second")

  this = supervisor.Supervisor(on_failure)
  this.spawn("late one", fail_second)
  this.spawn("early one", fail_first)
  assert this.join(10.0) == []
  with pytest.raises(
    supervisor.ThreadFailed, match="early one failed: the first"
  ) as raised:
    this.check()
  assert isinstance(raised.value.__cause__, LookupError)
  assert reported == [raised.value.__cause__]


def test_system_exit_in_a_thread_is_a_failure_too():
  this = supervisor.Supervisor(lambda error: None)
  this.spawn("worker", lambda: exec("raise SystemExit(3)"))
  assert this.join(10.0) == []
  with pytest.raises(supervisor.ThreadFailed, match="worker"):
    this.check()


def test_what_to_change_in_the_config_is_said_as_it_is():
  def fail():
    raise config.ConfigError("task.dataset: has too few questions")

  this = supervisor.Supervisor(lambda error: None)
  this.spawn("worker", fail)
  assert this.join(10.0) == []
  with pytest.raises(config.ConfigError, match="^task.dataset: has too few"):
    this.check()


def test_without_a_failure_check_is_silent():
  this = supervisor.Supervisor(lambda error: None)
  this.spawn("worker", lambda: None)
  assert this.join(10.0) == []
  this.check()


def test_the_deadline_is_for_all_threads_together_and_late_ones_are_named():
  release = threading.Event()
  this = supervisor.Supervisor(lambda error: None)
  this.spawn("quick", lambda: None)
  this.spawn("slow a", lambda: release.wait(30) and None)
  this.spawn("slow b", lambda: release.wait(30) and None)
  assert this.join(0.05) == ["slow a", "slow b"]
  release.set()
  assert this.join(10.0) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_one_signal_asks_and_a_second_one_ends(number):
  before = signal.getsignal(number)
  notes = []
  stop = supervisor.StopRequest()
  with stop.on_signals(notes.append):
    assert not stop.is_set
    signal.raise_signal(number)
    assert stop.is_set
    assert len(notes) == 1 and number.name in notes[0]
    with pytest.raises(KeyboardInterrupt):
      signal.raise_signal(number)
  assert signal.getsignal(number) is before


def test_outside_the_main_thread_signals_are_left_alone():
  before = signal.getsignal(signal.SIGINT)
  seen = []

  def work():
    with supervisor.StopRequest().on_signals(lambda text: None):
      seen.append(signal.getsignal(signal.SIGINT))

  thread = threading.Thread(target=work)
  thread.start()
  thread.join(10)
  assert seen == [before]


def test_a_stall_is_the_same_value_for_the_whole_timeout(monkeypatch):
  now = [0.0]
  monkeypatch.setattr(supervisor.time, "monotonic", lambda: now[0])
  watch = supervisor.StallWatch(10.0)
  for time_s, value, is_stalled in [
    (0, "a", False),
    (9, "a", False),
    (10, "a", False),
    (11, "a", True),
    (12, "b", False),
    (21, "b", False),
    (22, "a", False),
    (33, "a", True),
  ]:
    now[0] = float(time_s)
    assert watch.is_stalled(value) is is_stalled, time_s
