"""The thread that is one batch ahead of the trainer."""

import queue
import time

import pytest
import tiny

from jaxrl_async.buffer import buffer as buffer_lib
from jaxrl_async.processes import supervisor as supervisor_lib
from jaxrl_async.training import batch_loader

DEADLINE_S = 20.0


class World:
  """A buffer of one group a step, and a loader whose batches are indices."""

  def __init__(self, num_groups, *, end_step=100, prepare=None):
    self.buffer = buffer_lib.Buffer(1, 8)
    for _ in range(num_groups):
      self.buffer.put(tiny.written_group(self.buffer.try_admit(0)))
    self.prepared = queue.Queue()
    self.loader = batch_loader.BatchLoader(
      self.buffer, prepare or self._prepare, first_step=0, end_step=end_step
    )
    self.supervisor = supervisor_lib.Supervisor(on_failure=self.buffer.close)
    self.supervisor.spawn("batch loader", self.loader.run)

  def _prepare(self, groups):
    indices = [group.index for group in groups]
    self.prepared.put(indices)
    return indices

  def next(self):
    loaded = self.loader.next(DEADLINE_S)
    return loaded and loaded.batch

  def end(self):
    self.loader.stop()
    assert self.supervisor.join(DEADLINE_S) == []


def test_the_next_batch_is_prepared_while_this_one_is_used_and_no_further():
  world = World(5)
  assert world.next() == [0]
  for index in (0, 1):  # the second without being asked for
    assert world.prepared.get(timeout=DEADLINE_S) == [index]
  world.end()
  world.supervisor.check()
  assert world.prepared.empty()
  # Nothing is lost: neither batch was trained.
  state = world.buffer.state()
  assert state.next_step == 0
  assert [group.index for group in state.finished] == [0, 1, 2, 3, 4]


def test_batches_come_in_order_up_to_the_last_step():
  world = World(5, end_step=3)
  assert [world.next() for _ in range(4)] == [[0], [1], [2], None]
  assert world.supervisor.join(DEADLINE_S) == []
  assert world.buffer.state().next_step == 0


def test_it_knows_when_the_groups_were_there():
  world = World(0)
  assert world.loader.next(0.0) is None
  end_s = time.monotonic() + DEADLINE_S
  while "waiting for a batch for step 0 since" not in world.loader.status():
    assert time.monotonic() < end_s
  admission = world.buffer.try_admit(0)
  before_s = time.perf_counter()
  world.buffer.put(tiny.written_group(admission))
  loaded = world.loader.next(DEADLINE_S)
  assert loaded.batch == [0]
  assert before_s <= loaded.taken_s <= time.perf_counter()
  world.end()


def test_a_closed_buffer_ends_it_without_a_second_failure():
  world = World(0)
  world.buffer.close(OSError("another thread"))
  assert world.next() is None
  assert world.supervisor.join(DEADLINE_S) == []
  world.supervisor.check()
  assert "ended" in world.loader.status()


def test_what_cannot_be_prepared_ends_the_run_by_name():
  def prepare(groups):
    raise ValueError(f"group {groups[0].index} does not fit")

  world = World(1, prepare=prepare)
  assert world.next() is None
  assert world.supervisor.join(DEADLINE_S) == []
  with pytest.raises(
    supervisor_lib.ThreadFailed, match="batch loader failed: group 0 does not"
  ):
    world.supervisor.check()
  with pytest.raises(buffer_lib.BufferClosed):
    world.buffer.get_batch(1, 0.0)
