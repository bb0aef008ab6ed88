"""A version that several replicas hold for questions beside the groups."""

from concurrent import futures
import threading

import fleet_world
import pytest
import test_fleet
import tiny
import waiting

from jaxrl_async.rollout import answers as answers_lib
from jaxrl_async.rollout import fleet_answers
from jaxrl_async.rollout import held_version
from jaxrl_async.rollout import remote

pytestmark = pytest.mark.slow
questions = test_fleet.questions
answers_of, make_world = test_fleet.answers_of, test_fleet.make_world


def test_an_evaluation_beside_groups_keeps_its_version(make_world):
  world = make_world(num_replicas=2)
  world.begin()
  waiting.until(lambda: world.fleet.num_ready == 2, "replicas")
  with world.fleet.paused(fleet_world.DEADLINE_S):
    held = world.fleet.hold(0)
  waiting.until(lambda: len(held._holding()) == 2, "that both hold it")
  prompts, settings = questions(40)
  alone = answers_of(
    answers_lib.write(
      tiny.ready(), prompts, settings, tokenizer=world.spec.tokenizer
    )
  )
  # Other weights from here on. The groups adopt them, the questions do not.
  answers = held.answers(prompts, settings)
  first = next(answers)
  world.train(2, seed=1)
  assert answers_of([first, *answers]) == alone
  # One that is gone is replaced by the other, and all of them by nobody.
  world.handles[0].is_dead = True
  assert answers_of(held.answers(prompts, settings)) == alone
  held.release()
  with pytest.raises(held_version.NotHeld):
    list(held.answers(prompts, settings))
  waiting.until(lambda: len(world.handles) == 3, "another replica")
  waiting.until(lambda: world.fleet.num_ready == 2, "replicas")
  with world.fleet.paused(fleet_world.DEADLINE_S):
    late = world.fleet.hold(0)
  with pytest.raises(held_version.NotHeld, match="was not held"):
    waiting.until(late.is_held, "never")
  world.check_books()


class Holds:
  """A replica whose hold a test ends."""

  def __init__(self):
    self.asked = futures.Future()

  def hold(self, version):
    return self.asked


class OvertakenLock:
  """A lock that one thread gets only after another one has had it."""

  def __init__(self):
    self.lock = threading.Lock()
    self.waits, self.overtaken = threading.Event(), threading.Event()

  def __enter__(self):
    if threading.current_thread() is not threading.main_thread():
      self.waits.set()
      self.overtaken.wait(fleet_world.DEADLINE_S)
    self.lock.acquire()

  def __exit__(self, *_):
    self.lock.release()


def test_a_replica_that_another_thread_asks_meanwhile_is_waited_for():
  first, second = Holds(), Holds()
  ready = [first]
  held = fleet_answers.HeldByFleet(lambda: list(ready), 3, num_slots=1)
  first.asked.set_exception(remote.ReplicaFailed("it has a newer one"))
  lock = held._lock = OvertakenLock()
  found = []
  thread = threading.Thread(
    target=lambda: found.append(held.is_held()), daemon=True
  )
  thread.start()
  assert lock.waits.wait(fleet_world.DEADLINE_S)
  ready.append(second)
  assert not held.is_held()
  lock.overtaken.set()
  thread.join(5.0)
  assert not thread.is_alive() and found == [False]
  second.asked.set_result(None)
  assert held.is_held()
