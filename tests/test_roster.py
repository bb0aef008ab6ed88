"""Replicas of a fleet come, go, fall silent, hang and fail while it trains."""

from concurrent import futures
import dataclasses
import threading
import time

import fleet_world
import pytest
import test_memory_error
import waiting

from jaxrl_async.cluster import hosts
from jaxrl_async.rollout import fleet as fleet_lib
from jaxrl_async.rollout import remote
from jaxrl_async.rollout import roster as roster_lib

NUM_STEPS = 4
pytestmark = pytest.mark.slow


@pytest.fixture
def make_world(tmp_path):
  yield from fleet_world.worlds(tmp_path)


def test_the_groups_of_a_replica_that_dies_are_continued(make_world):
  world = make_world(num_replicas=2)
  world.begin()
  waiting.until(lambda: world.fleet.num_ready == 2, "both replicas")
  groups = world.train(1)
  world.handles[0].kill()
  groups += world.train(NUM_STEPS, first=1)
  fleet_world.check(world, groups)
  waiting.until(lambda: len(world.handles) == 3, "a third replica")
  waiting.until(lambda: world.fleet.num_ready == 2, "two replicas again")
  assert any("is gone (killed)" in note for note in world.notes)
  assert "replica 0 #2" in world.fleet.status()


def test_what_a_silent_replica_says_late_is_refused(make_world):
  world = make_world(num_replicas=2, replica_timeout_s=3.0)
  world.begin()
  waiting.until(lambda: world.fleet.num_ready == 2, "both replicas")
  groups = world.train(1)
  silent = world.handles[0]
  silent.can_speak.clear()
  groups += world.train(NUM_STEPS, first=1)
  waiting.until(lambda: world.fleet.num_ready == 1, "one replica")
  assert any("has said nothing" in note for note in world.notes)
  silent.can_speak.set()
  waiting.until(lambda: world.fleet.num_ready == 2, "both replicas again")
  groups += world.train(NUM_STEPS, first=1 + NUM_STEPS)
  fleet_world.check(world, groups)
  attached = silent.process._attachment.attached.replica
  assert attached.name != "replica 0" and attached.name in world.fleet.status()
  metrics = world.fleet.metrics()
  assert metrics["rollout/replicas"] == 2
  assert metrics["rollout/refused_tokens"] == world.coordinator.refused_tokens
  assert len(world.handles) == 2


def test_a_replica_that_cannot_be_attached_again_is_replaced(make_world):
  world = make_world(
    num_replicas=2, replica_timeout_s=3.0, start_timeout_s=20.0
  )
  world.begin()
  waiting.until(lambda: world.fleet.num_ready == 2, "both replicas")
  groups = world.train(1)
  silent = world.handles[0]
  attach = silent.process._attach
  silent.process._attach = lambda *arguments: time.sleep(3.0)
  world.fleet._roster.start_timeout_s = 1.0
  silent.can_speak.clear()
  waiting.until(lambda: world.fleet.num_ready == 1, "one replica")
  silent.can_speak.set()
  waiting.until(lambda: len(world.handles) == 3, "another process")
  assert any("it was not attached in" in note for note in world.notes)
  silent.process._attach = attach
  groups += world.train(NUM_STEPS, first=1)
  fleet_world.check(world, groups)


def test_a_first_attachment_that_hangs_is_given_up(make_world):
  world = make_world(num_replicas=3)
  launch = world.fleet._roster._launch

  def launch_two_badly(place):
    handle = launch(place)
    if len(world.handles) == 2:
      handle.can_attach.clear()
    if len(world.handles) == 3:
      handle.has_host.clear()
    return handle

  world.fleet._roster._launch = launch_two_badly
  world.begin()
  world.fleet._roster.start_timeout_s = 1.0
  waiting.until(lambda: len(world.handles) == 4, "another process")
  assert any("replica 1 is gone (it was not" in note for note in world.notes)
  waiting.until(lambda: world.fleet.num_ready == 2, "its attachment")
  # What waits for a host may do so for ever.
  assert world.fleet._members[2].name == "replica 2"
  world.handles[2].has_host.set()
  waiting.until(lambda: world.fleet.num_ready == 3, "all of them")
  fleet_world.check(world, world.train(NUM_STEPS))


def hang(handle):
  """Wait until a replica's thread stands still; return what lets it go on."""
  has_begun, go_on = threading.Event(), threading.Event()

  def stand_still():
    has_begun.set()
    assert go_on.wait(fleet_world.DEADLINE_S)

  # It is called in every round, whether there is something to generate or not.
  handle.process._attachment.attached.replica.feed = stand_still
  assert has_begun.wait(fleet_world.DEADLINE_S)
  return go_on.set


def has_hung(world):
  return any("its thread has stood still" in note for note in world.notes)


def test_a_replica_whose_thread_hangs_is_replaced(make_world):
  world = make_world(num_replicas=2, hang_timeout_s=2.0)
  world.begin()
  waiting.until(lambda: world.fleet.num_ready == 2, "both replicas")
  groups = world.train(1)
  go_on = hang(world.handles[0])
  try:
    groups += world.train(NUM_STEPS, first=1)
    waiting.until(lambda: len(world.handles) == 3, "another process")
  finally:
    go_on()
  assert has_hung(world)
  waiting.until(lambda: world.fleet.num_ready == 2, "both replicas again")
  groups += world.train(NUM_STEPS, first=1 + NUM_STEPS)
  fleet_world.check(world, groups)


def test_a_replica_without_device_memory_says_what_to_change(make_world):
  world = make_world(num_replicas=1)
  world.begin()
  waiting.until(lambda: world.fleet.num_ready == 1, "a replica")
  replica = world.handles[0].process._attachment.attached.replica
  replica.feed = test_memory_error.needs_too_much
  waiting.until(lambda: len(world.handles) == 2, "another process")
  (note,) = [note for note in world.notes if "is gone" in note]
  assert "out of device memory in a device program: " in note
  assert (
    "lower " in note and "rollout.prefill_rows" in note and "\n" not in note
  )
  groups = world.train(NUM_STEPS)
  fleet_world.check(world, groups)


def test_a_replica_that_hangs_again_and_again_ends_the_run(make_world):
  world = make_world(num_replicas=1, hang_timeout_s=1.0)
  world.begin()
  released = []

  def hang_once_more():
    if len(world.handles) > len(released) and world.fleet.num_ready:
      released.append(hang(world.handles[-1]))
    return not world.thread.is_alive()

  try:
    waiting.until(hang_once_more, "the end of the run")
  finally:
    for go_on in released:
      go_on()
  assert isinstance(world.error, remote.ReplicaFailed)
  assert "has stood still" in str(world.error)
  assert len(released) == roster_lib._MAX_FAILURES


@pytest.mark.parametrize("is_recalled", [False, True])
def test_a_replica_that_stays_silent_is_replaced(make_world, is_recalled):
  world = make_world(num_replicas=2, replica_timeout_s=1.5)
  world.begin()
  waiting.until(lambda: world.fleet.num_ready == 2, "both replicas")
  groups = world.train(1)
  world.fleet._roster.start_timeout_s = 1.5
  world.handles[0].can_speak.clear()
  if is_recalled:
    with world.fleet.paused(fleet_world.DEADLINE_S):
      world.fleet.cut(1)
  waiting.until(lambda: len(world.handles) == 3, "another process")
  waiting.until(lambda: world.fleet.num_ready == 2, "both replicas")
  assert any("gone (it has said nothing" in note for note in world.notes)
  groups += world.train(NUM_STEPS, first=1)
  fleet_world.check(world, groups)


def test_what_a_replica_has_said_before_it_was_lost_is_dropped(make_world):
  world = make_world(num_replicas=1)
  world.fleet.start()
  roster, (member,) = world.fleet._roster, world.fleet._members
  waiting.until(lambda: roster._events.qsize() == 1, "what it says")
  member.state, member.since_s = roster_lib.State.SILENT, float("-inf")
  roster.look_for_silence()
  assert member.state is roster_lib.State.LOST
  assert list(roster.said(0.0)) == [] and roster._events.empty()
  assert member.state is roster_lib.State.LOST


def test_a_replica_is_counted_once_while_it_begins_anew(make_world):
  world = make_world(num_replicas=1)
  world.fleet.start()
  roster, (member,) = world.fleet._roster, world.fleet._members
  is_halfway, found = threading.Event(), []

  class Totals(dict):
    def items(self):
      yield "generated_tokens", 7
      if threading.current_thread() is not reader:
        is_halfway.set()
        reader.join(0.5)  # it waits, or it counts too much

  def read():
    is_halfway.wait()
    found.append(roster.totals()["generated_tokens"])

  reader = threading.Thread(target=read)
  member.totals = Totals()
  reader.start()
  roster._attach(member)
  reader.join(fleet_world.DEADLINE_S)
  assert found == [7]


def test_a_replica_that_joins_late_gets_work(make_world):
  world = make_world(num_replicas=2)
  launch, late = world.fleet._roster._launch, []

  def launch_one_late(place):
    handle = launch(place)
    if place == 1:
      handle.can_speak.clear()
      late.append(handle)
    return handle

  world.fleet._roster._launch = launch_one_late
  world.begin()
  groups = world.train(2)
  assert set(fleet_world.writers(groups)) == {"replica 0"}
  late[0].can_speak.set()
  waiting.until(lambda: world.fleet.num_ready == 2, "the late one")
  while "replica 1" not in fleet_world.writers(groups):
    assert len(groups) < 400
    groups += world.train(1, first=len(groups) // 2)
  fleet_world.check(world, groups)


def test_without_any_replica_in_time_it_says_so(make_world):
  world = make_world(num_replicas=1, start_timeout_s=0.2)
  launch = world.fleet._roster._launch

  def mute(place):
    handle = launch(place)
    handle.can_speak.clear()
    return handle

  world.fleet._roster._launch = mute
  with pytest.raises(fleet_lib.NoReplicaError, match="was ready in 0.2 s"):
    world.fleet.start()


@pytest.mark.parametrize(
  "change, message",
  [
    (
      lambda spec: {"versions": spec.versions | {"jax": "0.1"}},
      r"has jax \S+ instead of 0.1; install the same versions",
    ),
    (
      lambda spec: {"probe": (spec.probe[0], "elsewhere")},
      "transfer.directory: .* is not the directory that the trainer",
    ),
    (
      lambda spec: {"probe": (spec.probe[0].with_name("none"), "here")},
      "transfer.directory: .* is not the directory that the trainer",
    ),
  ],
  ids=["versions", "other file", "no file"],
)
def test_a_host_that_does_not_fit_is_refused_at_the_start(
  make_world, change, message, monkeypatch
):
  monkeypatch.setattr(hosts, "_SHARED_S", 0.3)
  world = make_world(num_replicas=1)
  world.fleet._roster._spec = dataclasses.replace(
    world.spec, **change(world.spec)
  )
  with pytest.raises(remote.DoesNotFit, match=message):
    world.fleet.start()


def misfit(world, place):
  """A replica whose host does not fit."""
  handle = world.launch(place)

  def attach(name, spec):
    future = futures.Future()
    future.set_exception(remote.DoesNotFit("it has jax 0.1"))
    return future

  handle.attach = attach
  return handle


def test_a_host_that_does_not_fit_ends_a_run_without_train_steps(make_world):
  world = make_world(num_replicas=2)
  launch = world.fleet._roster._launch
  world.fleet._roster._launch = lambda place: (
    misfit(world, place) if place else launch(place)
  )
  with pytest.raises(remote.DoesNotFit, match="has jax 0.1"):
    world.fleet.start(num_needed=2)
  # The same if it comes when others generate already.
  late = make_world(num_replicas=2)
  launch_late = late.fleet._roster._launch

  def launch_one_late(place):
    handle = misfit(late, place) if place else launch_late(place)
    if place:
      attach, handle.attach = handle.attach, lambda *_: futures.Future()
      handle.attach_now = attach
    return handle

  late.fleet._roster._launch = launch_one_late
  late.begin()
  (member,) = (m for m in late.fleet._members if m.place)
  roster = late.fleet._roster
  waiting.until(lambda: roster.may_fail, "that one generates")
  roster._expect(member, "attached", member.handle.attach_now("", None))
  waiting.until(lambda: late.error is not None, "the end")
  assert isinstance(late.error, remote.DoesNotFit)


def test_a_host_that_does_not_fit_later_is_left_alone(make_world, monkeypatch):
  monkeypatch.setattr(roster_lib, "_RELAUNCH_S", 0.0)
  world = make_world(num_replicas=2)
  world.begin()
  waiting.until(lambda: world.fleet.num_ready == 2, "both replicas")
  groups = world.train(1)
  world.fleet._roster._launch = lambda place: misfit(world, place)
  world.handles[1].kill()
  waiting.until(
    lambda: any("no host that fits" in x for x in world.notes), "a note"
  )
  groups += world.train(NUM_STEPS, first=1)
  fleet_world.check(world, groups)
  assert len(world.handles) == 3
  assert world.notes[-1].endswith("another attempt follows in 30 min")


def test_too_few_replicas_in_time_are_counted(make_world):
  world = make_world(num_replicas=2, start_timeout_s=6.0)
  launch = world.fleet._roster._launch

  def launch_one_without_host(place):
    handle = launch(place)
    if place == 1:
      handle.has_host.clear()
    return handle

  world.fleet._roster._launch = launch_one_without_host
  with pytest.raises(fleet_lib.NoReplicaError, match="^1 of 2 .* ready in 6 s"):
    world.fleet.start(num_needed=2)


def test_a_replica_that_fails_is_started_again(make_world):
  world = make_world(num_replicas=2)
  world.begin()
  waiting.until(lambda: world.fleet.num_ready == 2, "both replicas")
  groups = world.train(1)

  def fail():
    raise LookupError("no such page\n  in 'base':\n" + 9999 * "x")

  world.handles[1].process._attachment.attached.replica.feed = fail
  groups += world.train(NUM_STEPS, first=1)
  waiting.until(lambda: len(world.handles) == 3, "a third replica")
  fleet_world.check(world, groups)
  (note,) = [x for x in world.notes if "LookupError" in x]
  assert "LookupError: no such page in 'base': xxx" in note
  assert "\n" not in note and len(note) < 1200


def test_if_all_replicas_fail_over_and_over_the_run_ends(make_world):
  world = make_world(num_replicas=1)
  world.begin()
  groups = world.train(1)
  assert groups
  launch = world.fleet._roster._launch

  def launch_broken(place):
    handle = launch(place)

    def fail(spec):
      raise LookupError("no such page")

    handle.process._attach = lambda name, spec: fail(spec)
    return handle

  world.fleet._roster._launch = launch_broken
  roster_lib._RELAUNCH_S, before = 0.0, roster_lib._RELAUNCH_S
  try:
    world.handles[0].kill()
    waiting.until(lambda: world.error is not None, "the failure")
  finally:
    roster_lib._RELAUNCH_S = before
  assert isinstance(world.error, remote.ReplicaFailed)
  assert "LookupError: no such page" in str(world.error)
