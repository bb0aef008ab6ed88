"""A version that answers questions while groups go on with newer ones."""

import threading

import numpy as np
import pytest
import tiny
import worker_world

from jaxrl_async.reporting import metrics as metrics_lib
from jaxrl_async.rollout import answers as answers_lib
from jaxrl_async.rollout import held_version
from jaxrl_async.text import tokenizer as tokenizer_lib

DEADLINE_S = 60.0
BUSY = metrics_lib.BusyClock()
SETTINGS = answers_lib.AnswerSettings(
  samples=2, temperature=1.0, max_completion_tokens=9
)


@pytest.fixture
def make_world(tmp_path):
  yield from worker_world.worlds(tmp_path)


def prompts(count=12):
  stream = tiny.Prompts()
  return [stream.next() for _ in range(count)]


def content(written):
  """What answers are, in the order of their numbers."""
  return sorted(
    (
      one.question,
      one.sample,
      *(
        getattr(one.trajectory, name).tobytes() for name in worker_world.ARRAYS
      ),
    )
    for step in written
    for one in step
  )


def paused(asked, version=0):
  """The answers of a scheduler that has nothing else to do."""
  scheduler = tiny.ready()
  scheduler.adopt(tiny.engine_params(version), version)
  tokenizer = tokenizer_lib.character_level()
  return content(
    answers_lib.write(scheduler, asked, SETTINGS, tokenizer=tokenizer)
  )


def test_answers_beside_groups_have_the_same_bits_and_their_own_version(
  make_world,
):
  world = make_world()
  held = world.worker.hold(0)
  calls, answers = [], []
  asked = prompts(40)

  def collect():
    answers.extend(held.answers(asked, SETTINGS))

  make_step = world.replica.answer_beside

  def answer_beside(busy):
    has_answered = make_step(busy)
    calls.append("question" if has_answered else "")
    return has_answered

  def train(num_steps):
    calls.append("group")
    if world.channel.newest_version() == 1 or not held.is_held():
      return
    if len(world.buffer.state().finished) >= 2:
      batch = world.buffer.get_batch(0, DEADLINE_S)
      world.ledger.add_trained(batch, step=0, skipped_update=False)
      # Of other weights, so that an answer by them would be another one.
      world.channel.publish(tiny.engine_params(0, seed=1).weights, 1)
      world.buffer.set_policy_version(1)

  world.replica.answer_beside = answer_beside
  thread = threading.Thread(target=collect, daemon=True)
  thread.start()
  num_adopted = []
  rounds = 0
  world.scheduler.after_step = train
  while thread.is_alive():
    world.worker.round()
    if len(world.adopted) == 2 and not num_adopted:
      num_adopted.append(len(answers))
    rounds += 1
    assert rounds < 10_000
  assert content(answers) == paused(asked)
  assert world.adopted == [0, 1]  # for the groups, in the middle of them
  assert 0 < num_adopted[0] < len(answers)
  made = [call for call in calls if call]
  first = made.index("question")
  assert made[first : first + 10] == ["question", "group"] * 5
  worker_world.check_balance(world)  # no token of an answer is one of a group
  held.release()
  world.worker.round()
  assert held._scheduler is None
  with pytest.raises(held_version.NotHeld, match="version 0 was released"):
    next(held.answers(asked, SETTINGS))


def test_questions_go_on_when_no_group_may_start(make_world):
  world = make_world()
  held = world.worker.hold(0)
  asked = prompts(30)
  answers = []
  thread = threading.Thread(
    target=lambda: answers.extend(held.answers(asked, SETTINGS)), daemon=True
  )
  thread.start()
  # Staleness 1 and 2 groups a step: 4 groups, and no step is ever trained.
  world.run_until(
    lambda state: len(state.finished) >= 4 and not thread.is_alive()
  )
  assert content(answers) == paused(asked)


def test_a_version_that_was_not_held_in_time_is_refused(make_world):
  world = make_world()
  world.channel.publish(tiny.engine_params(0, seed=1).weights, 1)
  world.replica.adopt_version(1, DEADLINE_S)
  held = world.worker.hold(0)
  assert not held.is_held()
  assert not world.replica.answer_beside(BUSY)
  with pytest.raises(held_version.NotHeld, match="version 0 was not held"):
    held.is_held()
  with pytest.raises(held_version.NotHeld, match="version 0 was released"):
    next(held.answers(prompts(), SETTINGS))


def test_answers_that_nobody_takes_hold_the_questions_back(make_world):
  world = make_world()
  held = world.worker.hold(0)
  taken = held.answers(prompts(40), SETTINGS)
  has_begun = threading.Event()
  first = []

  def take_one():
    has_begun.set()
    first.append(next(taken))

  thread = threading.Thread(target=take_one, daemon=True)
  thread.start()
  assert has_begun.wait(DEADLINE_S)
  while thread.is_alive():
    world.replica.may_adopt() and world.replica.adopt()
    world.replica.answer_beside(BUSY)
  steps = sum(world.replica.answer_beside(BUSY) for _ in range(200))
  assert steps <= held_version._MOST_UNREAD
  assert not world.replica.answer_beside(BUSY)
  np.testing.assert_equal(len(first), 1)


def test_whoever_waits_for_a_version_to_answer_may_look_up(make_world):
  world = make_world()
  answers = world.worker.answers(prompts(), SETTINGS, 1, DEADLINE_S)
  assert next(answers) == [] and next(answers) == []
  world.channel.publish(tiny.engine_params(0, seed=1).weights, 1)
  assert content(answers) and world.replica.version == 1
  with pytest.raises(TimeoutError):
    list(world.worker.answers(prompts(), SETTINGS, 2, 0.1))


def test_the_end_of_the_worker_ends_those_who_wait_for_answers(make_world):
  world = make_world()
  held = world.worker.hold(0)
  found = []

  def collect():
    try:
      list(held.answers(prompts(), SETTINGS))
    except held_version.NotHeld as error:
      found.append(error)

  thread = threading.Thread(target=collect, daemon=True)
  thread.start()
  world.worker.stop()
  world.worker.run()
  thread.join(DEADLINE_S)
  assert not thread.is_alive() and len(found) == 1
