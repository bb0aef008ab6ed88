"""A fleet of replicas: they come, go, fall silent and fail while it trains."""

import collections
import dataclasses
import time

import fleet_world
import numpy as np
import pytest
import tiny
import worker_world

from jaxrl_async.rollout import answers as answers_lib
from jaxrl_async.rollout import fleet as fleet_lib
from jaxrl_async.rollout import fleet_member
from jaxrl_async.rollout import remote
from jaxrl_async.rollout import wire

NUM_STEPS = 4
pytestmark = pytest.mark.slow


@pytest.fixture
def make_world(tmp_path):
  made = []

  def make(**options):
    path = tmp_path / str(len(made))
    path.mkdir()
    made.append(fleet_world.World(path, **options))
    return made[-1]

  yield make
  for world in made:
    world.close()


def until(is_so, what):
  deadline_s = time.monotonic() + fleet_world.DEADLINE_S
  while not is_so():
    assert time.monotonic() < deadline_s, what
    time.sleep(0.01)


def expected(group):
  """What a scheduler of its own writes for each member of a group."""
  scheduler = tiny.ready()
  sequences = [
    tiny.sequence(
      group.prompt.tokens,
      group=group.index,
      member=member,
      limit=len(group.prompt.tokens) + worker_world.MAX_COMPLETION,
    )
    for member in range(worker_world.GROUP_SIZE)
  ]
  for sequence in sequences:
    scheduler.submit(sequence)
  tiny.finish(scheduler)
  return [sequence.trajectory() for sequence in sequences]


def check(world, groups):
  """Every group once, each as a single engine writes it, the books balanced."""
  assert sorted(group.index for group in groups) == list(range(len(groups)))
  world.check_books()
  for group in groups:
    for trajectory, alone in zip(
      group.trajectories, expected(group), strict=True
    ):
      assert trajectory.tokens.tolist() == alone.tokens.tolist()
      np.testing.assert_allclose(
        trajectory.behavior_logprobs, alone.behavior_logprobs, atol=1e-5
      )
      assert sum(count for _, count in trajectory.writers) == (
        trajectory.num_completion_tokens
      )
    staleness = group.admission.deadline - group.admission.birth
    assert staleness == 1


def writers(groups):
  """How many tokens each replica has written."""
  counts = collections.Counter()
  for group in groups:
    for trajectory in group.trajectories:
      for name, count in trajectory.writers:
        counts[name] += count
  return counts


def test_replicas_share_the_groups_and_the_books_balance(make_world):
  world = make_world(num_replicas=2)
  world.begin()
  until(lambda: world.fleet.num_ready == 2, "both replicas")
  groups = world.train(NUM_STEPS)
  while len(writers(groups)) < 2:
    assert len(groups) < 400
    groups += world.train(1, first=len(groups) // 2)
  check(world, groups)
  assert set(writers(groups)) == {"replica 0", "replica 1"}
  line = world.lines()[0]
  assert {name for t in line["writers"] for name, _, _ in t} <= set(
    writers(groups)
  )
  totals = world.fleet.totals()
  assert totals["generated_tokens"] >= sum(writers(groups).values())
  assert totals["interruptions"] >= 0 and totals["adopt_s"] > 0


def test_the_groups_of_a_replica_that_dies_are_continued(make_world):
  world = make_world(num_replicas=2)
  world.begin()
  until(lambda: world.fleet.num_ready == 2, "both replicas")
  groups = world.train(1)
  world.handles[0].kill()
  groups += world.train(NUM_STEPS, first=1)
  check(world, groups)
  until(lambda: len(world.handles) == 3, "a third replica")
  until(lambda: world.fleet.num_ready == 2, "two replicas again")
  assert any("is gone (killed)" in note for note in world.notes)
  assert "replica 0 #2" in world.fleet.status()


def test_what_a_silent_replica_says_late_is_refused(make_world):
  world = make_world(num_replicas=2, replica_timeout_s=3.0)
  world.begin()
  until(lambda: world.fleet.num_ready == 2, "both replicas")
  groups = world.train(1)
  silent = world.handles[0]
  silent.can_speak.clear()
  groups += world.train(NUM_STEPS, first=1)
  until(lambda: world.fleet.num_ready == 1, "one replica")
  assert any("has said nothing" in note for note in world.notes)
  silent.can_speak.set()
  until(lambda: world.fleet.num_ready == 2, "both replicas again")
  groups += world.train(NUM_STEPS, first=1 + NUM_STEPS)
  check(world, groups)
  attached = silent.process._attachment.attached.replica
  assert attached.name != "replica 0" and attached.name in world.fleet.status()
  metrics = world.fleet.metrics()
  assert metrics["rollout/replicas"] == 2
  assert metrics["rollout/refused_tokens"] == world.coordinator.refused_tokens
  assert len(world.handles) == 2


def test_a_replica_that_becomes_very_slow_holds_nobody_up(make_world):
  world = make_world(num_replicas=2, max_group_s=1.0, max_failed_groups=1000)
  world.begin()
  until(lambda: world.fleet.num_ready == 2, "both replicas")
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
    world.fleet.round(0.01)
    return bool(found[-1])

  until(is_found, "an overdue group")
  (work,) = found[-1].values()
  assert work.cancelled
  delivered = [wire.unpack_work(x.work) for x in world.handles[0].delivered]
  assert work in delivered


def test_a_replica_that_cannot_be_attached_again_is_replaced(make_world):
  world = make_world(
    num_replicas=2, replica_timeout_s=3.0, start_timeout_s=20.0
  )
  world.begin()
  until(lambda: world.fleet.num_ready == 2, "both replicas")
  groups = world.train(1)
  silent = world.handles[0]
  attach = silent.process._attach
  silent.process._attach = lambda *arguments: time.sleep(3.0)
  world.fleet._start_timeout_s = 1.0
  silent.can_speak.clear()
  until(lambda: world.fleet.num_ready == 1, "one replica")
  silent.can_speak.set()
  until(lambda: len(world.handles) == 3, "another process")
  assert any("it was not attached in" in note for note in world.notes)
  silent.process._attach = attach
  groups += world.train(NUM_STEPS, first=1)
  check(world, groups)


def test_a_replica_that_joins_late_gets_work(make_world):
  world = make_world(num_replicas=2)
  launch, late = world.fleet._launch, []

  def launch_one_late(place):
    handle = launch(place)
    if place == 1:
      handle.can_speak.clear()
      late.append(handle)
    return handle

  world.fleet._launch = launch_one_late
  world.begin()
  groups = world.train(2)
  assert set(writers(groups)) == {"replica 0"}
  late[0].can_speak.set()
  until(lambda: world.fleet.num_ready == 2, "the late one")
  while "replica 1" not in writers(groups):
    assert len(groups) < 400
    groups += world.train(1, first=len(groups) // 2)
  check(world, groups)


def test_without_any_replica_in_time_it_says_so(make_world):
  world = make_world(num_replicas=1, start_timeout_s=0.2)
  launch = world.fleet._launch

  def mute(place):
    handle = launch(place)
    handle.can_speak.clear()
    return handle

  world.fleet._launch = mute
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
  make_world, change, message
):
  world = make_world(num_replicas=1)
  world.fleet._spec = dataclasses.replace(world.spec, **change(world.spec))
  with pytest.raises(remote.ReplicaFailed, match=message):
    world.fleet.start()


def test_a_replica_that_fails_is_started_again(make_world):
  world = make_world(num_replicas=2)
  world.begin()
  until(lambda: world.fleet.num_ready == 2, "both replicas")
  groups = world.train(1)

  def fail():
    raise LookupError("no such page")

  world.handles[1].process._attachment.attached.replica.feed = fail
  groups += world.train(NUM_STEPS, first=1)
  until(lambda: len(world.handles) == 3, "a third replica")
  check(world, groups)
  assert any("LookupError: no such page" in note for note in world.notes)


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


def test_if_all_replicas_fail_over_and_over_the_run_ends(make_world):
  world = make_world(num_replicas=1)
  world.begin()
  groups = world.train(1)
  assert groups
  launch = world.fleet._launch

  def launch_broken(place):
    handle = launch(place)

    def fail(spec):
      raise LookupError("no such page")

    handle.process._attach = lambda name, spec: fail(spec)
    return handle

  world.fleet._launch = launch_broken
  fleet_lib._RELAUNCH_S, before = 0.0, fleet_lib._RELAUNCH_S
  try:
    world.handles[0].kill()
    until(lambda: world.error is not None, "the failure")
  finally:
    fleet_lib._RELAUNCH_S = before
  assert isinstance(world.error, remote.ReplicaFailed)
  assert "LookupError: no such page" in str(world.error)


def test_after_a_rollback_replicas_adopt_the_older_version(make_world):
  first = make_world(num_replicas=1)
  first.begin()
  first.train(3)
  handle = first.handles[0]
  until(
    lambda: handle.process._attachment.attached.replica.version == 3,
    "the third version",
  )
  first.fleet.stop()  # as if its process had ended
  first.thread.join(fleet_world.DEADLINE_S)
  second = make_world(num_replicas=1)
  second.fleet._launch = lambda place: handle
  second.begin()
  engine = handle.process._attachment.engine
  groups = second.train(2)
  check(second, groups)
  assert handle.process._attachment.attached.replica.version <= 2
  assert handle.process._attachment.engine is engine
  first.handles.clear()
  first.fleet._members[0].handle = None


def questions(count):
  """Prompts and how they are answered; see `answers_lib.write`."""
  stream = tiny.Prompts()
  settings = answers_lib.AnswerSettings(
    samples=2, temperature=1.0, max_completion_tokens=9
  )
  return [stream.next() for _ in range(count)], settings


def answers_of(written):
  return sorted(
    (one.question, one.sample, one.trajectory.tokens.tolist())
    for step in written
    for one in step
  )


def test_an_evaluation_is_the_same_whoever_answers(make_world):
  world = make_world(num_replicas=2)
  world.fleet.start()
  until_ready(world, 2)
  world.publish(0)
  prompts, settings = questions(40)
  alone = answers_of(
    answers_lib.write(
      tiny.ready(), prompts, settings, tokenizer=world.spec.tokenizer
    )
  )
  together = world.fleet.answers(prompts, settings, 0, 30.0)
  assert answers_of(together) == alone
  # One is gone without a word, and one never answers.
  world.handles[0].is_dead = True
  assert answers_of(world.fleet.answers(prompts, settings, 0, 30.0)) == alone
  world.handles[0].is_dead = False
  world.handles[1].can_speak.clear()
  assert answers_of(world.fleet.answers(prompts, settings, 0, 30.0)) == alone
  world.handles[1].can_speak.set()
  # All are gone: others are started.
  for handle in world.handles:
    handle.is_dead = True
  assert answers_of(world.fleet.answers(prompts, settings, 0, 30.0)) == alone
  assert len(world.handles) > 2


def test_an_evaluation_without_any_replica_in_time_says_so(make_world):
  world = make_world(num_replicas=2, start_timeout_s=3.0)
  world.fleet.start()
  world.publish(0)

  def dead(place):
    handle = world.launch(place)
    handle.is_dead = True
    return handle

  world.fleet._launch = dead
  for handle in world.handles:
    handle.is_dead = True
  with pytest.raises(fleet_lib.NoReplicaError, match="in 3 s .*: killed"):
    list(world.fleet.answers(*questions(1), 0, 30.0))


def test_replicas_that_begin_anew_answer_and_hold(make_world):
  world = make_world(num_replicas=1)
  world.begin()
  until(lambda: world.fleet.num_ready == 1, "a replica")
  (handle,), (member,) = world.handles, world.fleet._members
  asked = questions(4)
  # A checkpoint recalls them, and none is attached again in time.
  with world.fleet.paused(fleet_world.DEADLINE_S):
    handle.can_attach.clear()
    world.fleet.cut(0)
    while member.state is not fleet_member.State.STARTING:
      world.fleet._take_events(0.005)
    held = world.fleet.hold(0)
    assert not held.is_held()
    answers = world.fleet.answers(*asked, 0, 30.0)
    assert next(answers) == []
    handle.can_attach.set()
    assert len(answers_of(answers)) == 8
  until(held.is_held, "that it holds the version")
  assert len(answers_of(held.answers(*asked))) == 8
  held.release()
  world.check_books()


def until_ready(world, count):
  def ready():
    world.fleet._take_events(0.005)
    return world.fleet.num_ready == count

  until(ready, "replicas")


def test_a_replica_that_nobody_calls_ends(make_world):
  world = make_world(num_replicas=1)
  world.fleet._spec = dataclasses.replace(world.spec, coordinator_timeout_s=0.3)
  world.fleet.start()
  assert world.handles[0].is_orphaned.wait(fleet_world.DEADLINE_S)
