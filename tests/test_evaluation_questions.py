"""Questions of an evaluation among the sequences of the groups."""

import fleet_world
import numpy as np
import pytest
import tiny
import waiting
import worker_world

from jaxrl_async.engine import sampling
from jaxrl_async.evaluation import answers as answers_lib
from jaxrl_async.rollout import messages
from jaxrl_async.rollout import questions as questions_lib
from jaxrl_async.rollout import wire

DEADLINE_S = 60.0
SETTINGS = questions_lib.AnswerSettings(
  samples=2, temperature=1.0, max_completion_tokens=9
)


@pytest.fixture
def make_world(tmp_path):
  yield from worker_world.worlds(tmp_path)


@pytest.fixture
def make_fleet(tmp_path):
  yield from fleet_world.worlds(tmp_path)


def questions(count, settings=SETTINGS):
  stream = tiny.Prompts()
  prompts = [stream.next() for _ in range(count)]
  return questions_lib.of_set("held_out", prompts, settings)


def content(written):
  """What answers are, in the order of their numbers."""
  return sorted(
    (
      one.question.number,
      one.question.sample,
      *(
        getattr(one.trajectory, name).tobytes() for name in worker_world.ARRAYS
      ),
    )
    for one in written
  )


def alone(asked):
  """The answers of a scheduler that has nothing else to do."""
  steps = answers_lib.write(
    tiny.ready(), asked, worker_world.tokenizer_lib.character_level()
  )
  return content(one for step in steps for one in step)


def taken(written):
  return [written.get() for _ in range(written.qsize())]


def test_answers_beside_groups_have_the_bits_of_those_alone(make_world):
  world = make_world()
  asked = questions(20)
  most = max(1, tiny.SIZES.num_slots // 2)
  written = world.coordinator.questions.ask(asked, 0, is_alone=False)
  num_beside = []

  def look(state):
    streams = [s.stream for s in world.scheduler.sequences()]
    num_beside.append(streams.count(sampling.Stream.EVAL))
    return len(state.finished) >= 4 and written.qsize() == len(asked)

  world.run_until(look)
  assert content(taken(written)) == alone(asked)
  # Half of the slots are left to the groups, which do not wait for answers.
  assert max(num_beside) == most
  # No token of an answer is one of a group.
  worker_world.check_balance(world)
  stats = world.scheduler.stats
  assert stats.evaluation_tokens == world.coordinator.questions.recorded_tokens


def test_groups_are_the_same_with_questions_among_them(make_world):
  found = []
  for asked in ([], questions(12)):
    world = make_world()
    world.coordinator.questions.ask(asked, 0, is_alone=False)
    world.run_until(worker_world.finished(4))
    groups = sorted(world.buffer.state().finished, key=lambda g: g.index)
    found.append(
      [t.tokens.tolist() for g in groups[:4] for t in g.trajectories]
    )
  assert found[0] == found[1]


def test_groups_wait_for_questions_that_are_alone(make_world):
  world = make_world()
  asked = questions(6)
  written = world.coordinator.questions.ask(asked, 0, is_alone=True)
  world.run_until(lambda state: written.qsize() == len(asked))
  assert not world.worker.groups()
  assert world.scheduler.stats.generated_tokens == 0
  assert content(taken(written)) == alone(asked)
  world.coordinator.questions.forget()
  world.run_until(worker_world.finished(2))


def test_a_worker_rests_while_an_evaluation_awaits_its_scores(make_world):
  world = make_world()
  written = world.coordinator.questions.ask(questions(1), 0, is_alone=True)
  world.run_until(lambda state: written.qsize() == 2)
  waits = []
  world.worker.replica.wait_for_weights = waits.append
  assert not world.worker.round()
  assert len(waits) == 1 and waits[0] > 0


def test_questions_wait_for_their_version_and_say_which_ones_wrote(make_world):
  world = make_world()
  settings = questions_lib.AnswerSettings(
    temperature=1.0, max_completion_tokens=40
  )
  asked = questions(6, settings)
  written = world.coordinator.questions.ask(asked, 1, is_alone=False)
  world.run_until(worker_world.finished(2))
  assert not world.scheduler.stats.evaluation_tokens

  def train(version):
    batch = world.buffer.get_batch(version - 1, DEADLINE_S)
    world.ledger.add_trained(batch, step=version - 1, skipped_update=False)
    weights = tiny.engine_params(0, seed=version).weights
    world.channel.publish(weights, version)
    world.buffer.set_policy_version(version)

  train(1)
  world.run_until(
    lambda state: (
      world.scheduler.stats.evaluation_tokens and len(state.finished) >= 2
    )
  )
  train(2)
  world.run_until(lambda state: written.qsize() == len(asked))
  found = [one.trajectory for one in taken(written)]
  assert questions_lib.versions_of(found) == (1, 2)
  worker_world.check_balance(world)


def test_what_was_reported_goes_on_at_another_replica(make_world):
  world = make_world()
  asked = questions(4)
  coordinator = world.coordinator
  written = coordinator.questions.ask(asked, 0, is_alone=True)
  world.run_until(
    lambda state: world.scheduler.stats.evaluation_tokens and written.empty()
  )
  world.replica.report_all()
  begun = coordinator.questions.recorded_tokens
  world.replica.give_back()
  coordinator.drained("replica 0")
  world.replica.name = "replica 1"
  coordinator.adopted(messages.Adopted(replica="replica 1", version=0))
  world.run_until(lambda state: written.qsize() == len(asked))
  found = taken(written)
  assert content(found) == alone(asked)
  assert 0 < begun < coordinator.questions.recorded_tokens
  writers = {name for one in found for name, _ in one.trajectory.writers}
  assert writers == {"replica 0", "replica 1"}


def test_what_nobody_wants_any_more_is_cancelled(make_world):
  world = make_world()
  questions_ = world.coordinator.questions
  questions_.ask(questions(4), 0, is_alone=True)
  world.run_until(lambda state: world.scheduler.stats.evaluation_tokens)
  before = len(world.scheduler.sequences())
  questions_.forget()
  world.replica.report_all()
  assert len(world.scheduler.sequences()) < before
  world.run_until(worker_world.finished(2))
  worker_world.check_balance(world)


def test_a_question_travels(make_world):
  questions_ = questions_lib.Questions(max_tokens=64, num_slots=4)
  asked = questions(3)
  questions_.ask(asked, 5, is_alone=True)
  assert not questions_.admit(messages.Ask(replica="a", version=4, room=9))
  turns = questions_.admit(messages.Ask(replica="a", version=6, room=9))
  assert [turn.question for turn in turns] == [0, 0, 1, 1, 2, 2]
  work = wire.unpack_work(wire.pack_work(messages.Work(turns=tuple(turns))))
  for turn, found in zip(turns, work.turns, strict=True):
    assert found.question == turn.question
    assert found.admission == turn.admission and found.admission.index < 0
    np.testing.assert_array_equal(
      found.trajectory.tokens, turn.trajectory.tokens
    )


@pytest.mark.slow
def test_any_replica_of_a_fleet_answers_and_another_one_goes_on(make_fleet):
  world = make_fleet(num_replicas=2)
  asked = questions(40)
  written = world.coordinator.questions.ask(asked, 0, is_alone=False)
  world.begin()
  found = []

  def has_answered(replica):
    found.extend(taken(written))
    return replica in {n for x in found for n, _ in x.trajectory.writers}

  waiting.until(lambda: has_answered("replica 0"), "an answer of the first")
  world.handles[0].is_dead = True
  waiting.until(
    lambda: has_answered("") or len(found) == len(asked), "all answers"
  )
  assert content(found) == alone(asked)
  writers = {name for one in found for name, _ in one.trajectory.writers}
  assert len(writers) > 1
  groups = world.train(2)
  fleet_world.check(world, groups)
