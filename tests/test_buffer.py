"""What the buffer admits, gives and refuses, and whom it wakes.

Whole schedules are in test_buffer_schedules.py. Threads are joined with a
deadline.
"""

import collections
import dataclasses
import random
import threading

import pytest
import tiny

from jaxrl_async.buffer import buffer as buffer_lib

JOIN_S = 20.0


def test_a_straggler_is_left_for_later_until_its_deadline():
  buffer = buffer_lib.Buffer(2, 1)
  straggler, *others = [buffer.try_admit(0) for _ in range(4)]
  assert buffer.try_admit(0) is None
  for admission in others:
    buffer.put(tiny.written_group(admission))
  assert [g.index for g in buffer.get_batch(0, 0.0)] == [1, 2]
  buffer.set_policy_version(1)
  for admission in [buffer.try_admit(1), buffer.try_admit(1)]:
    buffer.put(tiny.written_group(admission))
  assert buffer.get_batch(1, 0.0) is None
  buffer.put(tiny.written_group(straggler, [0, 1]))
  assert [g.index for g in buffer.get_batch(1, 0.0)] == [0, 3]


def test_a_batch_is_in_the_state_until_its_weights_are_set():
  buffer = buffer_lib.Buffer(1, 2)
  for _ in range(3):
    buffer.put(tiny.written_group(buffer.try_admit(0)))

  def kept():
    state = buffer.state()
    return state.next_step, [group.index for group in state.finished]

  buffer.get_batch(0, 0.0)
  buffer.get_batch(1, 0.0)
  assert kept() == (0, [0, 1, 2])
  buffer.set_policy_version(1)
  assert kept() == (1, [1, 2])
  other = buffer_lib.Buffer(1, 2)
  other.restore(buffer.state())
  assert [g.index for g in other.get_batch(1, 0.0)] == [1]
  buffer.set_policy_version(2)
  assert kept() == (2, [2])


def test_an_engine_too_far_behind_admits_nothing_until_it_adopts():
  buffer = buffer_lib.Buffer(2, 2)
  state = dataclasses.replace(buffer.state(), next_step=5)
  buffer.restore(state)
  assert buffer.try_admit(2) is None
  assert buffer.try_admit(3).deadline == 5


def test_another_groups_per_step_is_refused_while_groups_are_outstanding():
  buffer = buffer_lib.Buffer(2, 1)
  empty = buffer.state()
  buffer.try_admit(0)
  other = buffer_lib.Buffer(3, 1)
  with pytest.raises(ValueError, match="algorithm.groups_per_step=3 .* 2 "):
    other.restore(buffer.state())
  other.restore(empty)
  with pytest.raises(RuntimeError, match="in use"):
    buffer.restore(empty)


def test_a_changed_bound_holds_for_later_groups_only():
  buffer = buffer_lib.Buffer(1, 4)
  old = buffer.try_admit(0)
  other = buffer_lib.Buffer(1, 1)
  other.restore(buffer.state())
  new = other.try_admit(0)
  assert (old.deadline, new.deadline) == (4, 1)
  assert other.state().running == [old, new]


def test_the_bound_may_move_while_groups_are_outstanding():
  buffer = buffer_lib.Buffer(1, 2)
  deadlines = [buffer.try_admit(0).deadline]
  buffer.set_max_staleness(0)
  # Due at once, in place of the group that can wait.
  deadlines.append(buffer.try_admit(0).deadline)
  assert buffer.try_admit(0) is None
  buffer.set_max_staleness(1)
  deadlines.append(buffer.try_admit(0).deadline)
  assert deadlines == [2, 0, 1]
  assert [a.deadline for a in buffer.state().running] == deadlines
  with pytest.raises(ValueError, match="max_staleness -1 is negative"):
    buffer.set_max_staleness(-1)


def test_what_cannot_be_true_is_refused():
  buffer = buffer_lib.Buffer(1, 1)
  first, second = buffer.try_admit(0), buffer.try_admit(0)
  with pytest.raises(ValueError, match="version 1, which does not exist"):
    buffer.try_admit(1)
  with pytest.raises(ValueError, match="policy version 1 after -1"):
    buffer.set_policy_version(1)
  with pytest.raises(ValueError, match="step 1 asks for the batch of 0"):
    buffer.get_batch(1, 0.0)
  with pytest.raises(ValueError, match="has a token of version -1"):
    buffer.put(tiny.written_group(first, [0, -1]))
  with pytest.raises(ValueError, match="not as admitted"):
    buffer.put(tiny.written_group(dataclasses.replace(first, deadline=2)))
  # A group that is refused still runs.
  buffer.put(tiny.written_group(first))
  for call in [
    lambda: buffer.put(tiny.written_group(first)),
    lambda: buffer.drop(0),
  ]:
    with pytest.raises(ValueError, match="group 0 is not running"):
      call()
  buffer.drop(second.index)
  assert [g.index for g in buffer.get_batch(0, 0.0)] == [0]


class Untouchable(dict):
  """Fails whoever looks at all of its groups."""

  def __iter__(self):
    raise AssertionError("every group was looked at")

  keys = values = items = __iter__


def test_asking_again_does_not_look_at_every_group():
  buffer = buffer_lib.Buffer(3, 1)
  for _ in range(6):
    last = buffer.try_admit(0)
  buffer.put(tiny.written_group(last))
  buffer._running = Untouchable(buffer._running)
  assert buffer.try_admit(0) is None
  assert not buffer.wait_for_admission(0, -1, 0.0)
  assert buffer.get_batch(0, 0.0) is None
  assert buffer.num_finished == 1
  buffer.drop(0)
  assert buffer.wait_for_admission(0, -1, 0.0)
  assert buffer.try_admit(0).index == 6


class Blocked:
  """A thread inside a call that waits, known to have begun its wait."""

  def __init__(self, buffer, call):
    self.result = None
    self.error = None

    def target():
      try:
        self.result = call()
      except Exception as error:
        self.error = error

    num_before = len(buffer.waiting())
    self.thread = threading.Thread(target=target, name="sleeper", daemon=True)
    self.thread.start()
    # `waiting` takes the lock, and a registered waiter gives it up only in its
    # wait: once it is listed it sleeps.
    while len(buffer.waiting()) == num_before and self.thread.is_alive():
      pass

  def join(self):
    self.thread.join(JOIN_S)
    assert not self.thread.is_alive(), "lost wake-up"
    return self


def test_a_put_wakes_the_trainer():
  buffer = buffer_lib.Buffer(1, 0)
  admission = buffer.try_admit(0)
  trainer = Blocked(buffer, lambda: buffer.get_batch(0, 1e6))
  group = tiny.written_group(admission)
  buffer.put(group)
  assert trainer.join().result == [group]


def test_a_drop_wakes_the_trainer_and_the_engines():
  buffer = buffer_lib.Buffer(1, 1)
  finished, blocker = buffer.try_admit(0), buffer.try_admit(0)
  buffer.put(tiny.written_group(finished))
  assert buffer.get_batch(0, 0.0) is not None
  buffer.set_policy_version(1)
  finished = buffer.try_admit(1)
  buffer.put(tiny.written_group(finished))
  trainer = Blocked(buffer, lambda: buffer.get_batch(1, 1e6))
  engine = Blocked(buffer, lambda: buffer.wait_for_admission(1, 1, 1e6))
  buffer.drop(blocker.index)
  assert [g.index for g in trainer.join().result] == [finished.index]
  assert engine.join().result is True


def test_a_newer_version_wakes_the_engines_once():
  buffer = buffer_lib.Buffer(1, 0)
  buffer.set_policy_version(0)
  buffer.put(tiny.written_group(buffer.try_admit(0)))
  buffer.get_batch(0, 0.0)
  engines = [
    Blocked(buffer, lambda: buffer.wait_for_admission(0, 0, 1e6))
    for _ in range(3)
  ]
  buffer.set_policy_version(1)
  assert [e.join().result for e in engines] == [True] * 3
  assert not buffer.wait_for_admission(0, 1, 0.0)
  assert buffer.wait_for_admission(0, 0, 0.0)
  assert buffer.wait_for_admission(1, 1, 0.0)


def test_a_larger_bound_wakes_the_engines():
  buffer = buffer_lib.Buffer(1, 0)
  buffer.try_admit(0)
  engine = Blocked(buffer, lambda: buffer.wait_for_admission(0, 0, 1e6))
  buffer.set_max_staleness(1)
  assert engine.join().result is True
  assert buffer.try_admit(0).deadline == 1


def test_close_wakes_everyone_with_the_first_failure():
  buffer = buffer_lib.Buffer(1, 0)
  admission = buffer.try_admit(0)
  blocked = [
    Blocked(buffer, lambda: buffer.get_batch(0, 1e6)),
    Blocked(buffer, lambda: buffer.wait_for_admission(0, 0, 1e6)),
    Blocked(buffer, lambda: buffer.wait_for_admission(0, 0, 1e6)),
  ]
  failure = OSError("first")
  buffer.close(failure)
  buffer.close(OSError("second"))
  errors = [b.join().error for b in blocked]
  for call in [lambda: buffer.try_admit(0), lambda: buffer.get_batch(0, 1e6)]:
    with pytest.raises(buffer_lib.BufferClosed) as caught:
      call()
    errors.append(caught.value)
  for error in errors:
    assert isinstance(error, buffer_lib.BufferClosed)
    assert error.__cause__ is failure
  buffer.put(tiny.written_group(admission))
  assert [g.index for g in buffer.state().finished] == [0]
  assert buffer.waiting() == []


def test_the_stall_report_names_who_waits_for_what_since_when():
  times = iter([10.0, 13.25])
  buffer = buffer_lib.Buffer(2, 1, clock=lambda: next(times))
  admissions = [buffer.try_admit(0) for _ in range(2)]
  buffer.put(tiny.written_group(admissions[1]))
  assert buffer.waiting() == []
  condition, lines = buffer._condition, []
  wait_for = condition.wait_for
  condition.wait_for = lambda *args: lines.extend(buffer.waiting())
  buffer.get_batch(0, 1e6)
  condition.wait_for = wait_for
  assert lines == [
    "MainThread waits for a batch for step 0 since 3.2 s",
    "buffer: next step 0, policy version -1, 1 groups finished of the 2 of a "
    "step, 1 running, oldest: 0 (deadline 1)",
  ]


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_real_threads_neither_deadlock_nor_exceed_the_bound(max_staleness):
  """Waits never time out here, so a lost wake-up would hang a thread."""
  p, num_steps, num_engines = 4, 60, 3
  buffer = buffer_lib.Buffer(p, max_staleness)
  errors, trained = [], []
  lock = threading.Lock()
  pending = collections.deque()
  has_pending = threading.Semaphore(0)

  def guarded(call):
    def target(*args):
      try:
        call(*args)
      except buffer_lib.BufferClosed:
        pass
      except Exception as error:
        errors.append(error)
        buffer.close(error)

    return target

  def rollout():
    version = 0
    while True:
      seen = buffer.policy_version
      admission = buffer.try_admit(version)
      if admission is None:
        assert buffer.wait_for_admission(version, seen, 1e6)
        version = max(version, buffer.policy_version)
      else:
        with lock:
          pending.append((admission, version))
        has_pending.release()

  def score(seed):
    rng = random.Random(seed)
    while True:
      assert has_pending.acquire(timeout=JOIN_S)
      with lock:
        if not pending:
          return
        pending.rotate(rng.randrange(len(pending)))
        admission, version = pending.popleft()
      if rng.random() < 0.2:
        buffer.drop(admission.index)
      else:
        buffer.put(tiny.written_group(admission, [version]))

  def train():
    for step in range(num_steps):
      for group in buffer.get_batch(step, 1e6):
        trained.append(group.index)
        versions = group.trajectories[0].policy_versions[1:]
        assert 0 <= step - versions.min() <= max_staleness
      buffer.set_policy_version(step + 1)
    buffer.close()

  threads = [threading.Thread(target=guarded(train), daemon=True)]
  threads += [
    threading.Thread(target=guarded(rollout), daemon=True)
    for _ in range(num_engines)
  ]
  scorers = [
    threading.Thread(target=guarded(score), args=(i,), daemon=True)
    for i in range(2)
  ]
  for thread in [*threads, *scorers]:
    thread.start()
  for thread in threads:
    thread.join(JOIN_S)
    assert not thread.is_alive(), buffer.waiting()
  with lock:
    pending.clear()
  has_pending.release(len(scorers))
  for thread in scorers:
    thread.join(JOIN_S)
    assert not thread.is_alive()
  assert not errors
  assert len(trained) == len(set(trained)) == num_steps * p
