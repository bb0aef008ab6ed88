"""When checkpoints are taken, tried again and given up; without a run."""

import signal
import threading
import time

import pytest

from jaxrl_async.config import sections
from jaxrl_async.processes import supervisor as supervisor_lib
from jaxrl_async.run import checkpointing
from jaxrl_async.storage import disk

TIMEOUT_S = 20.0


class Disk:
  """What `save` copies, and a disk that can hold writes back or fail."""

  def __init__(self):
    self.taken, self.written = [], []
    self.may_write = threading.Event()
    self.may_write.set()
    self.fails_to_take = self.fails_to_write = False

  def save(self, step):
    if self.fails_to_take:
      raise disk.StorageError("full at once")
    self.taken.append(step)
    return lambda: self.write(step)

  def write(self, step):
    assert self.may_write.wait(TIMEOUT_S)
    if self.fails_to_write:
      raise disk.StorageError("full")
    self.written.append(step)


class World:
  """Checkpoints on such a disk, and what is said of them."""

  def __init__(self, *, every=2, most=3, grace_s=0.0, stall_s=300.0):
    self.disk, self.notes = Disk(), []
    self.stop = supervisor_lib.StopRequest(grace_s=grace_s)
    self.checkpoints = checkpointing.Checkpointing(
      self.disk.save,
      sections.RunSection(
        checkpoint_every=every,
        max_checkpoint_failures=most,
        stall_timeout_s=stall_s,
      ),
      self.stop,
      self.notes.append,
    )

  def preempt(self):
    """What SIGTERM does."""
    self.stop._answer(signal.SIGTERM, self.notes.append, "", "")
    self.notes.clear()

  def train(self, first, last):
    """Complete these steps, as the loop of a run does."""
    for step in range(first, last + 1):
      if self.checkpoints.is_due(step):
        self.checkpoints.take(step)

  def settle(self):
    """Wait until nothing is being written."""
    for thread in threading.enumerate():
      if thread.name == "checkpoint":
        thread.join(TIMEOUT_S)


@pytest.fixture
def soon(monkeypatch):
  """Attempts follow each other without a wait."""
  monkeypatch.setattr(checkpointing, "FIRST_WAIT_S", 0.0)


def test_steps_go_on_while_a_checkpoint_is_written_and_one_waits():
  world = World()
  world.disk.may_write.clear()
  world.train(1, 5)
  assert world.disk.taken == [2] and world.disk.written == []
  assert world.notes == [
    "the checkpoint of step 4 waits until that of step 2 is written"
  ]
  world.disk.may_write.set()
  world.settle()
  assert world.disk.written == [2]
  world.train(6, 6)
  world.settle()
  assert world.disk.written == [2, 6]
  world.train(7, 7)
  assert world.disk.taken == [2, 6]


def test_a_checkpoint_that_waited_is_taken_after_the_next_step():
  world = World(every=4)
  world.disk.may_write.clear()
  world.train(1, 8)
  world.disk.may_write.set()
  world.settle()
  world.train(9, 9)
  world.settle()
  assert world.disk.written == [4, 9]


def test_the_last_one_waits_for_the_one_before_and_for_itself():
  world = World()
  world.train(1, 2)
  world.checkpoints.take_now(3)
  assert world.disk.written == [2, 3]
  numbers = world.checkpoints.metrics()
  assert numbers["checkpoint/failures"] == 0
  assert numbers["checkpoint/stood_still_s"] > 0
  assert world.checkpoints.metrics()["checkpoint/stood_still_s"] == 0


@pytest.mark.parametrize("where", ["fails_to_take", "fails_to_write"])
def test_a_failure_is_said_and_tried_again_at_the_next_step(soon, where):
  world = World(every=10)
  setattr(world.disk, where, True)
  world.train(1, 10)
  world.settle()
  assert world.disk.written == []
  if where == "fails_to_write":  # noticed at the next step, and tried again
    world.train(11, 11)
    world.settle()
  setattr(world.disk, where, False)
  world.train(12, 13)
  world.settle()
  assert world.disk.written == [12]
  world.train(14, 14)
  numbers = world.checkpoints.metrics()
  assert numbers["checkpoint/failures"] == len(world.notes) - 1 >= 1
  assert world.notes[0].startswith(
    "WARNING: the checkpoint of step 10 could not be written (full"
  )
  assert "attempt 1 of 3 (run.max_checkpoint_failures)" in world.notes[0]
  assert world.notes[-1].endswith(" is written")


def test_no_attempt_is_made_before_its_time():
  world = World(every=1)
  world.disk.fails_to_take = True
  world.train(1, 9)
  assert len(world.notes) == 1
  assert "after 5 s" in world.notes[0]


@pytest.mark.parametrize("where", ["fails_to_take", "fails_to_write"])
def test_too_many_failures_in_a_row_end_the_run(soon, where):
  world = World(every=1, most=3)
  for _ in range(2):  # a success in between counts from the start again
    setattr(world.disk, where, True)
    for step in (1, 2):
      world.train(step, step)
      world.settle()
    setattr(world.disk, where, False)
    world.train(3, 3)
    world.settle()
    world.train(4, 4)
    world.settle()
  setattr(world.disk, where, True)
  with pytest.raises(disk.StorageError) as raised:
    for step in range(5, 10):
      world.train(step, step)
      world.settle()
  message = str(raised.value)
  assert "attempt 3 in a row" in message and "\n" not in message
  assert "run.max_checkpoint_failures" in message
  assert step < 9


def test_the_first_one_fails_at_once_and_the_last_one_has_patience(soon):
  world = World()
  world.disk.fails_to_write = True
  with pytest.raises(disk.StorageError, match="^full$"):
    world.checkpoints.take_first()
  assert world.notes == []


def test_the_last_one_is_tried_until_it_is_written(soon):
  world = World()
  world.disk.fails_to_take = True

  def mend(text):
    world.disk.fails_to_take = len(seen) == 0
    seen.append(text)

  seen = []
  checkpoints = checkpointing.Checkpointing(
    world.disk.save, sections.RunSection(), world.stop, mend
  )
  checkpoints.take_now(7)
  assert world.disk.written == [7] and len(seen) == 3


def test_a_stop_request_ends_the_attempts():
  world = World(most=9)
  world.disk.fails_to_write = True
  world.stop.set()
  with pytest.raises(disk.StorageError, match="^full$"):
    world.checkpoints.take_now(7)
  assert len(world.notes) == 1


def test_a_bug_in_the_thread_is_raised_as_it_is():
  world = World()

  def save(step):
    world.disk.written = None
    return lambda: world.disk.write(step)

  checkpoints = checkpointing.Checkpointing(
    save, sections.RunSection(), world.stop, world.notes.append
  )
  with pytest.raises(AttributeError, match="append"):
    checkpoints.take_now(1)


def test_a_rescue_takes_what_is_not_taken_yet_and_hides_no_failure():
  world = World()
  world.train(1, 2)
  world.checkpoints.rescue(2, TIMEOUT_S)
  assert world.disk.taken == [2]
  world.checkpoints.rescue(3, TIMEOUT_S)
  world.checkpoints.close(TIMEOUT_S)
  assert world.disk.written == [2, 3]

  def save(step):
    raise RuntimeError("tokens are unaccounted for")

  checkpoints = checkpointing.Checkpointing(
    save, sections.RunSection(), world.stop, world.notes.append
  )
  checkpoints.rescue(4, TIMEOUT_S)
  assert world.notes == [
    "no checkpoint of step 4 could be taken: tokens are unaccounted for"
  ]


def test_a_rescue_takes_again_what_could_not_be_written():
  world = World()
  world.disk.fails_to_write = True
  world.train(1, 2)
  world.settle()
  world.disk.fails_to_write = False
  world.checkpoints.rescue(2, TIMEOUT_S)
  world.checkpoints.close(TIMEOUT_S)
  assert world.disk.taken == [2, 2] and world.disk.written == [2]


def test_a_rescue_waits_for_what_is_being_written(soon):
  world = World()
  world.disk.may_write.clear()
  world.disk.fails_to_write = True
  world.train(1, 2)

  def save_again(step):
    world.disk.fails_to_write = False
    return world.disk.save(step)

  world.checkpoints._save = save_again
  threading.Timer(0.2, world.disk.may_write.set).start()
  world.checkpoints.rescue(2, TIMEOUT_S)
  world.checkpoints.close(TIMEOUT_S)
  assert world.disk.taken == [2, 2] and world.disk.written == [2]


def test_closing_waits_and_tells_what_failed():
  world = World()
  world.disk.may_write.clear()
  world.train(1, 2)
  with pytest.raises(TimeoutError, match="step 2 was not written in 0.01 s"):
    world.checkpoints.close(0.01)
  world.disk.fails_to_write = True
  world.disk.may_write.set()
  with pytest.raises(disk.StorageError, match="full"):
    world.checkpoints.close(TIMEOUT_S)
  world.checkpoints.close(TIMEOUT_S)


# -- a stop, and a disk that does not respond ----------------------------------


def test_at_a_stop_the_step_is_taken_unless_it_was():
  world = World()
  world.train(1, 2)
  assert world.checkpoints.take_before_stop(2) == 2
  assert world.disk.written == [2]
  assert world.checkpoints.take_before_stop(3) == 3
  assert world.disk.written == [2, 3]


@pytest.mark.parametrize(
  ("grace_s", "write_s", "expected"),
  [(30.0, 40.0, 2), (30.0, 0.0, 3), (0.0, 40.0, 3)],
)
def test_no_second_write_is_queued_that_does_not_fit_before_the_end(
  grace_s, write_s, expected
):
  world = World(grace_s=grace_s)
  world.disk.may_write.clear()
  world.train(1, 3)
  begin_s = time.perf_counter()
  world.checkpoints._writing.add_done_callback(lambda _: time.sleep(0.01))
  world.preempt()
  threading.Timer(0.05, world.disk.may_write.set).start()
  # It has taken so long already.
  look = world.checkpoints._look

  def looked():
    look()
    world.checkpoints._write_s += write_s

  world.checkpoints._look = looked
  assert world.checkpoints.take_before_stop(3) == expected
  assert world.disk.written == [2, 3][: expected - 1]
  assert len(world.notes) == (expected == 2)
  assert time.perf_counter() - begin_s < TIMEOUT_S


def test_what_has_failed_is_tried_again_however_little_time_is_left(soon):
  world = World(grace_s=0.001)
  world.disk.fails_to_write = True
  world.train(1, 2)
  world.settle()
  world.preempt()
  world.disk.fails_to_write = False
  assert world.checkpoints.take_before_stop(3) == 3


@pytest.mark.parametrize("waits", [True, False])
def test_nobody_waits_for_ever_for_a_disk_that_does_not_respond(
  monkeypatch, waits
):
  monkeypatch.setattr(checkpointing, "_LOOK_S", 0.005)
  world = World(every=100, most=3, stall_s=0.1)
  world.disk.may_write.clear()
  world.checkpoints.take(100)
  begin_s = time.monotonic()
  with pytest.raises(disk.StorageError, match="not written after 0.3 s"):
    if waits:
      world.checkpoints.take_now(101)
    while time.monotonic() < begin_s + TIMEOUT_S:
      assert not world.checkpoints.is_due(101)
      time.sleep(0.005)
  assert time.monotonic() - begin_s >= 0.3
  assert world.disk.taken == [100]  # nothing is written beside it
  with pytest.raises(TimeoutError):
    world.checkpoints.close(TIMEOUT_S)
  world.disk.may_write.set()
  world.settle()


def test_a_process_that_was_stopped_takes_no_checkpoint_for_late(monkeypatch):
  world = World(every=100)
  world.disk.may_write.clear()
  world.checkpoints.take(100)
  now_s = time.monotonic()
  monkeypatch.setattr(time, "monotonic", lambda: now_s + 1e6)
  assert not world.checkpoints.is_due(101)
  monkeypatch.undo()
  world.disk.may_write.set()
  world.settle()
