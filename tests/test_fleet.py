"""A fleet of replicas: they come, go, fall silent and fail while it trains."""

import dataclasses
import threading
import time

import fleet_world
import pytest
import waiting

from jaxrl_async.cluster import replica_process
from jaxrl_async.rollout import remote
from jaxrl_async.rollout import wire

NUM_STEPS = 4
pytestmark = pytest.mark.slow


@pytest.fixture
def make_world(tmp_path):
  yield from fleet_world.worlds(tmp_path)


def test_replicas_share_the_groups_and_the_books_balance(make_world):
  world = make_world(num_replicas=2)
  world.begin()
  waiting.until(lambda: world.fleet.num_ready == 2, "both replicas")
  groups = world.train(NUM_STEPS)
  while len(fleet_world.writers(groups)) < 2:
    assert len(groups) < 400
    groups += world.train(1, first=len(groups) // 2)
  fleet_world.check(world, groups)
  assert set(fleet_world.writers(groups)) == {"replica 0", "replica 1"}
  line = world.lines()[0]
  assert {name for t in line["writers"] for name, _, _ in t} <= set(
    fleet_world.writers(groups)
  )
  totals = world.fleet.totals()
  assert totals["generated_tokens"] >= sum(fleet_world.writers(groups).values())
  assert totals["interruptions"] >= 0 and totals["adopt_s"] > 0
  # On the average over the replicas, each of which may skip versions.
  assert 1 <= totals["adoptions"] <= len(groups) // 2 + 1


def test_a_group_at_a_very_slow_replica_may_fail(make_world):
  world = make_world(num_replicas=2, max_group_s=1.0, max_failed_groups=1000)
  world.begin()
  waiting.until(lambda: world.fleet.num_ready == 2, "both replicas")
  groups = world.train(1)
  scheduler = world.handles[0].process._attachment.attached.replica.scheduler
  step = scheduler.step

  def slow_step():
    time.sleep(0.7)
    return step()

  scheduler.step = slow_step
  failed = []
  while not failed or len(groups) < 2 * NUM_STEPS:
    assert len(groups) < 400
    groups += world.train(1, first=len(groups) // 2)
    failed = [x for x in world.lines() if x["fate"] == "failed"]
  reason = "not generated in 1 s (rollout.max_group_seconds)"
  assert {line["reason"] for line in failed} == {reason}
  world.check_books()
  with world.fleet.paused(fleet_world.DEADLINE_S):
    there = [line["index"] for line in world.lines()]
    there += [group.index for group in world.in_flight()]
  assert sorted(there) == list(range(len(there)))


def test_an_overdue_group_is_cancelled_at_its_replica_at_once(make_world):
  world = make_world(num_replicas=1, max_group_s=1e-9, max_failed_groups=1000)
  find, found = world.coordinator.overdue, []

  def overdue():
    found.append(find())
    return found[-1]

  world.coordinator.overdue = overdue
  world.fleet.start()
  world.publish(0)

  def is_found():
    world.fleet.round()
    return bool(found[-1])

  waiting.until(is_found, "an overdue group")
  (work,) = found[-1].values()
  assert work.cancelled
  delivered = [wire.unpack_work(x.work) for x in world.handles[0].delivered]
  assert work in delivered


def test_a_version_that_is_fetched_is_awaited_before_the_next_name(make_world):
  world = make_world(num_replicas=1)
  world.fleet.start()
  (handle,), is_fetched = world.handles, threading.Event()

  class Fetch:
    is_done = False

    def wait(self, timeout_s):
      is_fetched.wait(timeout_s / 1000)  # a clock that is faster

  handle.process._attachment.attached.replica._fetch = Fetch()
  attached = handle.attach("replica 0 #2", world.spec)
  time.sleep(0.5)
  assert not attached.done()
  is_fetched.set()
  attached.result(fleet_world.DEADLINE_S)


def test_a_process_that_failed_unheard_ends_when_it_is_attached(make_world):
  """As after a restart of the trainer, on a cluster that outlives it."""
  world = make_world(num_replicas=1)
  handle = world.launch(0)

  def fail():
    raise LookupError("no such page")

  with pytest.raises(remote.ReplicaFailed, match="no such page"):
    handle.process._do(fail)
  assert not handle.is_orphaned.is_set()
  attached = handle.attach("replica 0", world.spec)
  with pytest.raises(remote.ReplicaFailed, match="no such page"):
    attached.result(fleet_world.DEADLINE_S)
  assert handle.is_orphaned.is_set()


def test_after_a_rollback_replicas_adopt_the_older_version(make_world):
  first = make_world(num_replicas=1)
  first.begin()
  first.train(3)
  handle = first.handles[0]
  waiting.until(
    lambda: handle.process._attachment.attached.replica.version == 3,
    "the third version",
  )
  first.fleet.stop()  # as if its process had ended
  first.thread.join(fleet_world.DEADLINE_S)
  second = make_world(num_replicas=1)
  second.fleet._roster._launch = lambda place: handle
  second.begin()
  engine = handle.process._attachment.engine
  groups = second.train(2)
  fleet_world.check(second, groups)
  assert handle.process._attachment.attached.replica.version <= 2
  assert handle.process._attachment.engine is engine
  first.handles.clear()
  first.fleet._members[0].handle = None


def until_ready(world, count):
  def ready():
    world.fleet._take_events(0.005)
    return world.fleet.num_ready == count

  waiting.until(ready, "replicas")


def test_a_replica_that_nobody_calls_ends(make_world):
  world = make_world(num_replicas=1)
  world.fleet._roster._spec = dataclasses.replace(
    world.spec, coordinator_timeout_s=0.3
  )
  world.fleet.start()
  assert world.handles[0].is_orphaned.wait(fleet_world.DEADLINE_S)


def test_a_replica_that_nobody_attaches_ends():
  is_orphaned = threading.Event()
  process = replica_process.ReplicaProcess(is_orphaned.set, 0.3)
  assert is_orphaned.wait(fleet_world.DEADLINE_S)
  process.end()
  assert process.join(fleet_world.DEADLINE_S)


def test_a_process_that_stood_still_takes_nobody_for_silent(make_world):
  world = make_world(num_replicas=2, replica_timeout_s=20.0)
  world.fleet.start(num_needed=2)
  roster, now_s = world.fleet._roster, time.monotonic()
  roster._seconds = lambda: now_s
  for stood_still_s in (0.0, 5_000.0, 0.1, 5_000.0, 0.1):
    now_s += stood_still_s
    roster.look_for_silence()
  assert world.fleet.num_ready == 2
  for _ in range(5):  # it looks, and hears nothing
    now_s += 4.0
    roster.look_for_silence()
  assert world.fleet.num_ready == 0
