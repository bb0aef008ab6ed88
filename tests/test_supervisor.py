"""Threads that fail, threads that are late, Ctrl-C and stalls."""

import os
import signal
import subprocess
import sys
import threading

import pytest
import waiting

from jaxrl_async.config import sections
from jaxrl_async.processes import supervisor as supervisor_lib
from jaxrl_async.storage import disk

DEADLINE_S = 60.0


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

  this = supervisor_lib.Supervisor(on_failure)
  this.spawn("late one", fail_second)
  this.spawn("early one", fail_first)
  assert this.join(10.0) == []
  with pytest.raises(
    supervisor_lib.ThreadFailed, match="early one failed: the first"
  ) as raised:
    this.check()
  assert isinstance(raised.value.__cause__, LookupError)
  assert reported == [raised.value.__cause__]


def fail_to_write():
  with disk.writing("ledger.jsonl"):
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
  ("error", "expected", "words"),
  [
    (SystemExit(3), supervisor_lib.ThreadFailed, "worker"),
    # What to change in the config, and a disk that refuses, are said as it is.
    (sections.ConfigError("task.name: no"), sections.ConfigError, "^task.name"),
    (fail_to_write, disk.StorageError, "^ledger.jsonl cannot be"),
  ],
)
def test_whatever_a_thread_raises_is_raised(error, expected, words):
  def fail():
    if callable(error):
      error()
    raise error

  this = supervisor_lib.Supervisor(lambda error: None)
  this.spawn("worker", fail)
  assert this.join(10.0) == []
  with pytest.raises(expected, match=words):
    this.check()


def test_without_a_failure_check_is_silent():
  this = supervisor_lib.Supervisor(lambda error: None)
  this.spawn("worker", lambda: None)
  assert this.join(10.0) == []
  this.check()


def test_the_deadline_is_for_all_threads_together_and_late_ones_are_named():
  release = threading.Event()
  this = supervisor_lib.Supervisor(lambda error: None)
  this.spawn("quick", lambda: None)
  this.spawn("slow a", lambda: release.wait(30) and None)
  this.spawn("slow b", lambda: release.wait(30) and None)
  waiting.until(
    lambda: all(t.name != "quick" for t in threading.enumerate()), "quick"
  )
  assert this.join(0.05) == ["slow a", "slow b"]
  release.set()
  assert this.join(10.0) == []


SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


@pytest.mark.parametrize("number", SIGNALS)
def test_one_signal_asks_and_a_second_one_ends(number, capfd):
  ignore = lambda number, frame: None  # noqa: E731
  outside = signal.signal(number, ignore)  # of CI, which may ignore hangups
  notes, cleaned, codes = [], [], []
  noted, ended = threading.Event(), threading.Event()
  stop = supervisor_lib.StopRequest(
    end=lambda code: (codes.append(code), ended.set())
  )
  stop.before_ending_now(lambda: cleaned.append(1 / 0))
  stop.before_ending_now(lambda: cleaned.append("cleaned"))
  with stop.on_signals(lambda text: (notes.append(text), noted.set())):
    assert not stop.is_set
    signal.raise_signal(number)
    assert noted.wait(DEADLINE_S)
    assert stop.is_set and not ended.is_set()
    assert len(notes) == 1 and number.name in notes[0]
    signal.raise_signal(number)
    assert ended.wait(DEADLINE_S)
  assert codes == [128 + number] and cleaned == ["cleaned"]
  (line,) = capfd.readouterr().err.splitlines()
  assert line.startswith(f"{number.name}: ended at once")
  assert signal.signal(number, outside) is ignore
  assert signal.set_wakeup_fd(-1) == -1


def test_a_second_signal_leaves_nothing_of_multiprocessing_behind(tmp_path):
  code = """
import multiprocessing, multiprocessing.util, signal, time
from jaxrl_async.processes import supervisor
multiprocessing.util.get_temp_dir()  # as the first process of a pool does
lock = multiprocessing.get_context("forkserver").Lock()
stop = supervisor.StopRequest()
with stop.on_signals(lambda text: None, at_once="ended"):
  signal.raise_signal(signal.SIGINT)
  stop.wait(60)
  signal.raise_signal(signal.SIGINT)
  time.sleep(60)
"""
  ran = subprocess.run(
    [sys.executable, "-c", code],
    env=os.environ | {"TMPDIR": str(tmp_path)},
    capture_output=True,
    text=True,
    timeout=120,
  )
  assert (ran.returncode, ran.stderr) == (130, "SIGINT: ended\n")
  assert not list(tmp_path.iterdir())


def test_a_signal_is_seen_while_the_main_thread_does_not_look(capfd):
  """A note that never returns is a terminal that takes no more text."""
  ended, forever = threading.Event(), threading.Event()
  stop = supervisor_lib.StopRequest(end=lambda code: ended.set())
  with stop.on_signals(lambda text: forever.wait(DEADLINE_S) and None):
    # Inside of C, where handlers written in Python do not run, as in XLA.
    ask = "import os, signal; os.kill(os.getppid(), signal.SIGTERM)"
    subprocess.run([sys.executable, "-c", ask], timeout=DEADLINE_S, check=True)
    stop.wait(DEADLINE_S)
    subprocess.run([sys.executable, "-c", ask], timeout=DEADLINE_S, check=True)
    assert ended.wait(DEADLINE_S)
    forever.set()


def test_a_hangup_that_is_ignored_stays_ignored():
  before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
  try:
    stop = supervisor_lib.StopRequest()
    with stop.on_signals(lambda text: None):
      assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
  finally:
    signal.signal(signal.SIGHUP, before)


def test_outside_the_main_thread_signals_are_left_alone():
  before = signal.getsignal(signal.SIGINT)
  seen = []

  def work():
    with supervisor_lib.StopRequest().on_signals(lambda text: None):
      seen.append(signal.getsignal(signal.SIGINT))

  thread = threading.Thread(target=work)
  thread.start()
  thread.join(10)
  assert seen == [before]


@pytest.fixture
def now(monkeypatch):
  """The clock, to be set."""
  now = [0.0]
  monkeypatch.setattr(supervisor_lib.time, "monotonic", lambda: now[0])
  return now


def stalled(watch, progress):
  try:
    watch.check(progress, lambda: ["who waits"])
  except supervisor_lib.StallError as error:
    assert str(error).endswith("(run.stall_timeout_s): who waits")
    return True
  return False


def test_a_stall_is_the_same_value_for_the_whole_timeout(now):
  watch = supervisor_lib.StallWatch(10.0)
  values = [*"a" * 10, *"b" * 9, *"a" * 11]
  found = []
  for now[0], value in enumerate(values):
    found.append(stalled(watch, value))
  assert found == [False] * 29 + [True]


def test_time_in_which_the_process_was_stopped_is_no_stall(now):
  watch = supervisor_lib.StallWatch(10.0)
  for now[0] in range(5):
    assert not stalled(watch, "a")
  now[0] += 10_000  # Ctrl-Z, and fg hours later
  assert not stalled(watch, "a")
  for _ in range(3):
    now[0] += 1
    assert not stalled(watch, "a")
  now[0] += 1
  assert stalled(watch, "a")


def test_a_deadline_ends_and_asks_for_a_look_every_second(now):
  deadline = supervisor_lib.Deadline(2.5)
  waits = []
  while wait_s := deadline.next_wait_s():
    waits.append(wait_s)
    now[0] += wait_s
  assert waits == [1.0, 1.0, 0.5]


@pytest.mark.parametrize(
  ("number", "is_limited"), [(signal.SIGTERM, True), (signal.SIGINT, False)]
)
def test_only_sigterm_says_when_the_process_will_be_killed(number, is_limited):
  stop = supervisor_lib.StopRequest(grace_s=30.0)
  assert stop.left_s == float("inf")
  stop._answer(number, lambda text: None, "", "")
  assert stop.is_set and (25.0 < stop.left_s <= 30.0) == is_limited
  assert is_limited or stop.left_s == float("inf")
  without = supervisor_lib.StopRequest()
  without._answer(number, lambda text: None, "", "")
  assert without.left_s == float("inf")
