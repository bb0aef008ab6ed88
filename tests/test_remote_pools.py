"""Pools of reward processes elsewhere: what becomes of their attempts."""

from concurrent import futures
import pickle
import random
import threading
import time

import pytest
import reward_groups
import reward_scorers
import waiting

from jaxrl_async import types
from jaxrl_async.rewards import completion as completion_lib
from jaxrl_async.rewards import pool as pool_lib
from jaxrl_async.rewards import remote_pools
from jaxrl_async.rewards import scoring
from jaxrl_async.rewards import service as service_lib
from jaxrl_async.rewards import term as term_lib

DEADLINE_S = 30.0
SCORED = scoring.Scored([types.Reward(score=1.0)], ["a"])
# An attempt of one completion may take 5 s, and 2 more until it is given up.
TERM = term_lib.Term(scorer=reward_scorers.length, timeout_s=5.0, num_retries=1)


class Pool:
  """A pool on another host, which does what the test says."""

  def __init__(self, is_ready=True):
    self.is_ready = is_ready
    self.is_killed = False
    self.attached = futures.Future()
    self.saying = futures.Future()
    self.asked = {}

  def attach(self, spec):
    self.spec = pickle.loads(pickle.dumps(spec))
    if self.is_ready:
      self.attached.set_result([])
    return self.attached

  def collect(self):
    self.saying = futures.Future()
    return self.saying

  def deliver(self, attempts):
    self.asked |= dict(pickle.loads(pickle.dumps(attempts)))

  def kill(self):
    self.is_killed = True

  def say(self, *outcomes):
    waiting.until(
      lambda: not self.saying.done()
    )  # what was said before is taken
    self.saying.set_result(pickle.loads(pickle.dumps(list(outcomes))))

  def end(self, why="its host vanished"):
    self.saying.set_exception(remote_pools.PoolLost(why))


class World:
  """Pools by the order of their start, and a clock that a test moves."""

  def __init__(self, num_pools, make=Pool):
    self.now_s = 100.0
    self.started = []
    self.notes = []
    self.make = make
    self.scorers = reward_groups.scorers(TERM)
    self.pools = remote_pools.RemotePools(
      self.scorers,
      num_pools=num_pools,
      num_workers=1,
      silence_s=60.0,
      start_timeout_s=300.0,
      note=self.notes.append,
      seconds=lambda: self.now_s,
    )

  def launch(self, place):
    self.started.append(self.make())
    return self.started[-1]

  def start(self):
    self.pools.start(self.launch)
    return self

  def score(self, count):
    group = completion_lib.pack([reward_groups.trajectory("Q", "=a")])
    attempt = scoring.Attempt(term=0, item={}, group=group)
    return [self.pools.score(attempt) for _ in range(count)]


@pytest.fixture
def make_world():
  made = []

  def make(*arguments):
    made.append(World(*arguments))
    return made[-1]

  yield make
  for world in made:
    world.pools.close(DEADLINE_S)


def test_attempts_are_divided_and_the_rest_waits_for_a_free_pool(make_world):
  world = make_world(2).start()
  waiting.until(lambda: len(world.notes) == 2)
  first, second = world.started
  outcomes = world.score(11)
  waiting.until(lambda: len(first.asked) == len(second.asked) == 4)
  assert not first.asked.keys() & second.asked.keys()
  assert pickle.loads(first.spec.pickled).terms == (TERM,)
  number, attempt = next(iter(second.asked.items()))
  assert attempt.group.tokens.tolist()[-1] == reward_groups.TOKENIZER.encode(
    "a"
  )
  second.say((number, SCORED))
  waiting.until(lambda: len(second.asked) == 5)
  assert sum(outcome.done() for outcome in outcomes) == 1
  assert outcomes[number].result(0) == SCORED


def test_what_a_lost_pool_had_is_a_failed_attempt_and_is_retried(make_world):
  world = make_world(2).start()
  waiting.until(lambda: len(world.notes) == 2)
  service = service_lib.RewardService(world.scorers, world.pools)
  handle = reward_groups.submit(service, {}, ["=a"])
  waiting.until(lambda: any(pool.asked for pool in world.started))
  lost, other = sorted(world.started, key=lambda pool: not pool.asked)
  lost.end()
  waiting.until(lambda: handle._parts[0].future.done())
  assert not handle.done()  # it begins the second attempt
  waiting.until(lambda: other.asked)
  other.say(*[(number, SCORED) for number in other.asked])
  assert handle.result() == [types.Reward(score=1.0, answer="a")]
  assert service.metrics()["reward_service/errors"] == 1
  (line,) = [note for note in world.notes if "gone" in note]
  assert line.endswith("is gone (its host vanished); it is started again")
  assert len(world.started) == 2
  world.now_s += 2.1
  waiting.until(lambda: len(world.started) == 3)


def test_a_silent_pool_is_killed_and_heard_no_more(make_world):
  world = make_world(1).start()
  (pool,), (outcome,) = world.started, world.score(1)
  waiting.until(lambda: pool.asked)
  world.now_s += 61.0
  failure = outcome.result(DEADLINE_S)
  assert failure.reason == "timeout: reward pool 0 has said nothing for 61 s"
  assert pool.is_killed
  pool.say((0, SCORED))
  world.now_s += 61.0
  waiting.until(lambda: len(world.started) == 2)
  (again,) = world.score(1)
  waiting.until(lambda: world.started[1].asked)
  world.started[1].say((1, SCORED))
  assert again.result(DEADLINE_S) == SCORED


def test_a_pool_that_ends_nothing_is_killed_after_the_longest_attempt(
  make_world,
):
  world = make_world(1).start()
  (pool,), outcomes = world.started, world.score(2)
  waiting.until(lambda: len(pool.asked) == 2)
  for _ in range(2):  # 5 s, 2 s and 10 s of grace; it says that it lives
    world.now_s += 16.0
    pool.say()
    time.sleep(0.25)
    assert not pool.is_killed
    if not outcomes[0].done():
      pool.say((0, SCORED))
      waiting.until(outcomes[0].done)
  world.now_s += 1.5
  assert outcomes[1].result(DEADLINE_S).reason == (
    "timeout: reward pool 0 has ended no attempt for 17 s"
  )
  assert pool.is_killed


def test_attempts_do_not_wait_for_ever_for_a_pool(make_world):
  world = make_world(1).start()
  world.make = lambda: Pool(is_ready=False)
  (pool,) = world.started
  world.now_s += 50.0  # in which there is one
  pool.say()
  waiting.until(lambda: not pool.saying.done())
  pool.end()
  (outcome,) = world.score(1)
  waiting.until(lambda: "gone" in world.notes[-1])
  world.now_s += 5.0
  waiting.until(lambda: len(world.started) == 2)
  world.now_s += 290.0
  time.sleep(0.25)
  assert not outcome.done()
  world.now_s += 10.0
  assert outcome.result(DEADLINE_S).reason == (
    "error: no reward pool was ready for 300 s (cluster.start_timeout_s)"
  )


def test_a_pool_that_cannot_score_ends_the_start_or_is_tried_again(make_world):
  def fails():
    pool = Pool(is_ready=False)
    pool.attached.set_exception(remote_pools.PoolFailed("no module named x"))
    return pool

  with pytest.raises(remote_pools.PoolFailed, match="^no module named x$"):
    make_world(2, fails).start()
  world = make_world(1).start()
  world.make = fails
  world.started[0].end()
  waiting.until(lambda: "gone" in world.notes[-1])
  world.now_s += 3.0
  waiting.until(lambda: len(world.started) == 2 and "cannot" in world.notes[-1])
  world.make = Pool
  world.now_s += 60.0
  waiting.until(lambda: world.notes[-1] == "reward pool 0 is ready")


def test_a_start_without_room_for_a_pool_ends_in_time(make_world):
  world = make_world(1, lambda: Pool(is_ready=False))

  def check():
    world.now_s += 100.0

  with pytest.raises(remote_pools.PoolFailed, match="was ready in 300 s"):
    world.pools.start(world.launch, check)


def test_closing_gives_up_what_waits_and_what_is_out(make_world):
  world = make_world(1).start()
  outcomes = world.score(6)
  waiting.until(lambda: len(world.started[0].asked) == 4)
  world.pools.close(DEADLINE_S)
  assert world.started[0].is_killed
  for outcome in outcomes:
    with pytest.raises(pool_lib.Closed):
      outcome.result(0)
  with pytest.raises(pool_lib.Closed):
    world.score(1)


@pytest.mark.parametrize("seed", range(3))
def test_every_attempt_ends_once_whatever_becomes_of_the_pools(
  make_world, seed
):
  rng = random.Random(seed)
  world = make_world(3).start()
  outcomes = []

  def submit():
    for _ in range(40):
      outcomes.extend(world.score(1))
      time.sleep(0.001)

  threads = [threading.Thread(target=submit) for _ in range(3)]
  for thread in threads:
    thread.start()
  said = {}
  deadline_s = time.monotonic() + DEADLINE_S
  while any(t.is_alive() for t in threads) or not all(
    outcome.done() for outcome in outcomes
  ):
    assert time.monotonic() < deadline_s
    world.now_s += 0.05
    for pool in list(world.started):
      open_ = [n for n in pool.asked if n not in said]
      if pool.saying.done() or pool.is_killed:
        continue
      if rng.random() < 0.02:
        pool.end()
        said |= dict.fromkeys(open_, "lost")
      elif open_:
        some = rng.sample(open_, rng.randint(1, len(open_)))
        said |= dict.fromkeys(some, "scored")
        pool.say(*[(number, SCORED) for number in some])
    time.sleep(0.001)
  for thread in threads:
    thread.join(DEADLINE_S)
  assert len(outcomes) == 120
  failures = [o.result(0) for o in outcomes if o.result(0) != SCORED]
  assert {*map(type, failures)} <= {scoring.RewardFailure}
  num_scored = list(said.values()).count("scored")
  assert len(outcomes) - len(failures) == num_scored
