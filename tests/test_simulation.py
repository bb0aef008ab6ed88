"""The controller on a virtual clock: faults, and what holds all the same."""

import dataclasses
import json
import pathlib
import random
import subprocess
import sys

import pytest
from simulation import case as case_lib
from simulation import controller
from simulation import event_loop
from simulation import modelled_replica
from simulation import seeds
from simulation import surroundings

from jaxrl_async.buffer import buffer as buffer_lib
from jaxrl_async.buffer import ledger as ledger_lib
from jaxrl_async.engine import scheduler as scheduler_lib
from jaxrl_async.processes import supervisor as supervisor_lib
from jaxrl_async.rollout import coordinator as coordinator_lib
from jaxrl_async.rollout import fleet as fleet_lib
from jaxrl_async.rollout import questions as questions_lib
from jaxrl_async.rollout import replica as replica_lib
from jaxrl_async.rollout import roster as roster_lib
from jaxrl_async.rollout import running_group
from jaxrl_async.rollout import worker as worker_lib

pytestmark = pytest.mark.usefixtures("unchecked")

SEEDS = 160


@pytest.mark.parametrize(
  ("num_seeds", "num_groups", "times"),
  [
    (SEEDS, 1_000, 5),
    pytest.param(
      *(10_000, 100_000, 200),
      marks=[pytest.mark.nightly, pytest.mark.timeout(3600)],
    ),
  ],
)
def test_many_seeds_keep_every_invariant(num_seeds, num_groups, times):
  path = pathlib.Path(__file__).parents[1] / "benchmarks" / "controller.py"
  # In a process of its own, without this session's checks of types.
  done = subprocess.run(
    [sys.executable, str(path), f"--seeds={num_seeds}"],
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 0, done.stderr
  result = json.loads(done.stdout.splitlines()[-1])
  assert result["seeds"] == num_seeds and result["groups"] > num_groups
  assert result["violations"] == result["deadlocks"] == 0
  assert result["groups_per_s"] > 0 and result["wall_s"] > 0
  # They reach what they are about.
  assert result["faults"].keys() == {
    "die", "leave", "fail", "hang", "silence", "slow", "restart",
  }  # fmt: skip
  assert min(result["faults"].values()) >= times, result["faults"]
  assert len(result["seen"]) == 8, result["seen"]
  assert min(result["seen"].values()) >= times, result["seen"]


def record(seed, directory):
  world = controller.World(case_lib.of_seed(seed), directory)
  world.run()
  return world.loop.num_events, world.loop.now, world.ledger_bytes()


def test_a_seed_is_the_same_run_every_time(tmp_path):
  assert [record(seed, tmp_path) for seed in range(5)] == [
    record(seed, tmp_path) for seed in range(5)
  ]


def first_failure(first=0):
  """What the first seed finds that finds something, from `first` on."""
  found = seeds.run(range(first, SEEDS), most_failures=1)
  return next(iter(found.failures.values()), None)


def test_a_bound_that_is_one_too_large_is_found(monkeypatch):
  try_admit = buffer_lib.Buffer.try_admit

  def late(self, engine_version):
    self._max_staleness += 1
    try:
      return try_admit(self, engine_version)
    finally:
      self._max_staleness -= 1

  monkeypatch.setattr(buffer_lib.Buffer, "try_admit", late)
  assert first_failure().startswith("bound")


def test_a_batch_that_leaves_too_much_behind_is_found(monkeypatch):
  fits = buffer_lib.fits
  monkeypatch.setattr(
    buffer_lib,
    "fits",
    lambda num_due, step, groups_per_step: fits(
      num_due, max(0, step - 1), groups_per_step
    ),
  )
  assert first_failure().split(":")[0] in ("bound", "wait")


def silently(method):
  """The method without the wake-ups that it promises."""

  def call(self, *arguments):
    condition, self._condition = self._condition, event_loop.Condition(None)
    try:
      return method(self, *arguments)
    finally:
      self._condition = condition

  return call


@pytest.mark.slow
@pytest.mark.parametrize(
  "name",
  [
    "put",
    pytest.param("drop", marks=pytest.mark.nightly),
    pytest.param("set_policy_version", marks=pytest.mark.nightly),
  ],
)
def test_a_lost_wakeup_is_found(monkeypatch, name):
  method = getattr(buffer_lib.Buffer, name)
  monkeypatch.setattr(buffer_lib.Buffer, name, silently(method))
  assert first_failure().split(":")[0] in ("deadlock", "wait")


def ignored(self, *arguments):
  return None


def whatever_is_asked(self):
  return 0 if self.ask is None else self.ask.room


@pytest.mark.parametrize(
  ("place", "name", "instead", "words"),
  [
    # A lease that is not returned, and one that never ends.
    (coordinator_lib.Coordinator, "drained", ignored, "lease"),
    (roster_lib.Roster, "look_for_silence", ignored, "lease"),
    # A thread that stands still for ever.
    (modelled_replica, "HANG_S", float("inf"), ""),
    # A replica that is given too much.
    (roster_lib.Member, "room", property(whatever_is_asked), ""),
    # A cut that keeps what is being written.
    pytest.param(
      *(worker_lib.RolloutWorker, "cut", ignored, "cut"),
      marks=pytest.mark.nightly,
    ),
    pytest.param(
      fleet_lib.Fleet, "cut", ignored, "cut", marks=pytest.mark.slow
    ),
    # A cut whose groups nobody goes on with.
    (coordinator_lib.Coordinator, "_take_back", ignored, ""),
    # A group that is never overdue.
    (running_group.RunningGroup, "is_overdue", property(ignored), "overdue"),
  ],
)
def test_what_is_left_out_is_found(monkeypatch, place, name, instead, words):
  monkeypatch.setattr(place, name, instead)
  found = first_failure()
  assert found is not None and found.startswith(words)


def test_tokens_that_a_failed_engine_has_lost_are_not_counted(monkeypatch):
  monkeypatch.setattr(
    worker_lib.RolloutWorker,
    "generated_tokens",
    property(lambda self: self.replica.scheduler.stats.generated_tokens),
  )
  assert first_failure(first=50).startswith("balance")


def test_a_score_that_comes_too_late_is_found(monkeypatch):
  submit = surroundings.Rewards.submit

  def late(self, item, trajectories):
    most_s = self._most_s
    self._most_s += 0 if item["number"] % 7 else 70.0
    try:
      return submit(self, item, trajectories)
    finally:
      self._most_s = most_s

  monkeypatch.setattr(surroundings.Rewards, "submit", late)
  assert first_failure().split(":")[0] in ("wait", "deadlock")


def test_a_worker_that_asks_only_when_it_is_idle_is_found(monkeypatch):
  feed = replica_lib.Replica.feed

  def feed_idle(self):
    is_local = isinstance(self._link, coordinator_lib.Coordinator)
    if self.scheduler.is_idle or not is_local:
      feed(self)

  monkeypatch.setattr(replica_lib.Replica, "feed", feed_idle)
  assert first_failure(first=90).startswith("slot: replica 0 has")


def test_room_that_is_never_given_back_is_found(monkeypatch):
  room = roster_lib.Member.room.fget

  def shrinking(self):
    return room(self) - self.num_sent

  monkeypatch.setattr(roster_lib.Member, "room", property(shrinking))
  assert first_failure().split(":")[0] in ("slot", "deadlock")


def test_a_group_that_is_counted_twice_is_found(monkeypatch):
  add_filtered = ledger_lib.Ledger.add_filtered

  def twice(self, group):
    add_filtered(self, group)
    add_filtered(self, group)

  monkeypatch.setattr(ledger_lib.Ledger, "add_filtered", twice)
  assert first_failure().startswith("balance")


def test_a_member_without_a_score_that_nobody_counts_is_found(monkeypatch):
  scored = running_group.scored

  def forgets(group, outcome):
    return dataclasses.replace(scored(group, outcome), dropped=())

  monkeypatch.setattr(running_group, "scored", forgets)
  assert first_failure().startswith("balance")


def test_a_group_that_had_failed_at_a_checkpoint_is_not_trained():
  """Its start comes while an overdue group still waits for a member."""
  assert not seeds.run(range(8252, 8253)).failures


def test_a_group_that_is_trained_twice_is_found(monkeypatch):
  pop = buffer_lib.Buffer._pop_finished

  def keep(self, deadline):
    group = pop(self, deadline)
    if group.index % 5 == 3:
      self._keep_finished(group)
    return group

  monkeypatch.setattr(buffer_lib.Buffer, "_pop_finished", keep)
  assert first_failure() is not None


@pytest.mark.slow
@pytest.mark.nightly
def test_sequences_that_are_forgotten_are_found(monkeypatch):
  """Those without a slot, when weights are adopted."""

  def forget(self):
    self._prefilling = []
    self._drop([e for e in self._entries.values() if e.slot is None])

  monkeypatch.setattr(scheduler_lib.Scheduler, "_unstage", forget)
  assert first_failure() is not None


@pytest.mark.slow
@pytest.mark.nightly
def test_a_cut_after_which_an_older_version_writes_is_found(monkeypatch):
  cut = coordinator_lib.Coordinator.cut

  def forgetful(self, version):
    cut(self, version)
    self._oldest_version = 0

  monkeypatch.setattr(coordinator_lib.Coordinator, "cut", forgetful)
  assert first_failure().startswith("cut")


def test_a_group_that_is_overdue_too_early_is_found(monkeypatch):
  class Hasty(supervisor_lib.Deadline):
    def __init__(self, timeout_s, *arguments):
      super().__init__(0.8 * timeout_s, *arguments)

  monkeypatch.setattr(supervisor_lib, "Deadline", Hasty)
  assert first_failure().startswith("overdue")


def test_an_answer_that_an_older_version_has_written_is_found(monkeypatch):
  ask = questions_lib.Questions.ask

  def early(self, questions, version, **more):
    return ask(self, questions, 0, **more)

  monkeypatch.setattr(questions_lib.Questions, "ask", early)
  assert first_failure().startswith("eval")


def test_a_wait_ends_only_when_it_is_notified():
  loop = event_loop.Loop(random.Random(0))
  condition, turns, is_open = loop.condition(), [], []

  def turn():
    turns.append(loop.now)
    condition.wait_for(lambda: is_open, 0.1)

  process = event_loop.Process(loop, turn)
  process.wake()
  while loop.step():
    pass
  assert len(turns) == 1
  is_open.append(True)
  assert not loop.step()
  with condition:
    condition.notify_all()
  while loop.step():
    pass
  assert len(turns) == 2
