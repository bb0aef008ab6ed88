"""Answers of a policy to questions: written, and scored one by one.

An answer depends only on the weights, the seed of the engine, the question's
number and its own. It does not depend on which other answers are written, so an
evaluation may begin where an earlier one was stopped.
"""

import collections
from collections.abc import Callable, Iterable, Iterator
import contextlib
import dataclasses
import queue

from jaxrl_async import types
from jaxrl_async.engine import scheduler as scheduler_lib
from jaxrl_async.processes import supervisor as supervisor_lib
from jaxrl_async.rewards import service as service_lib
from jaxrl_async.rollout import environment as environment_lib
from jaxrl_async.rollout import messages
from jaxrl_async.rollout import questions as questions_lib
from jaxrl_async.rollout import replica as replica_lib
from jaxrl_async.rollout.questions import Answer
from jaxrl_async.text import tokenizer as tokenizer_lib

# So many answers may await their scores for each slot of the engine. With more
# of them none is taken, so that slow rewards do not fill the memory.
_UNSCORED_PER_SLOT = 16
_LOOK_S = 0.5
_WAIT_S = 0.2
_ENGINE = "engine"


class EvaluationError(supervisor_lib.RunError):
  """None of the answers could be scored."""


def write(
  scheduler: scheduler_lib.Scheduler,
  questions: Iterable[questions_lib.Question],
  tokenizer: tokenizer_lib.Tokenizer,
  environment: environment_lib.Environment | None = None,
) -> Iterator[list[Answer]]:
  """Yield the answers that each step of a scheduler ends.

  Args:
    scheduler: holds the weights and has no sequences. It belongs to the
      iterator until that has ended.
    questions: begun in this order, few at a time.
    tokenizer: of the policy, to find the texts that end answers.
    environment: has the episodes; without it answers have a single turn.
  """
  environment = environment or environment_lib.Environment()
  sizes = scheduler.engine.sizes
  asked = questions_lib.Questions(
    max_tokens=sizes.cache_tokens,
    num_slots=sizes.num_slots,
    environment=environment,
  )
  answers = asked.ask(questions, 0, is_alone=True)
  num_known: dict[tuple[int, int], int] = {}
  while asked.num_missing or not answers.empty():
    ask = messages.Ask(replica=_ENGINE, version=0, room=max(scheduler.room, 0))
    for turn in asked.admit(ask):
      sequence = replica_lib.sequence_of(turn, tokenizer)
      num_known[turn.admission.index, sequence.member] = sequence.length
      scheduler.submit(sequence)
    ended = [] if scheduler.is_idle else scheduler.step()
    for one in ended:
      assert one.owner is not None
      index = one.owner.number
      begin = num_known.pop((index, one.member))
      asked.report(
        _ENGINE,
        messages.Written(
          group=index, begin=begin, trajectory=one.trajectory(begin)
        ),
      )
    environment.fail_late()
    # With nothing to write, an episode has to answer.
    may_wait = scheduler.is_idle and environment.num_waiting > 0
    with contextlib.suppress(queue.Empty):
      asked.take(environment.answers.get(may_wait, _WAIT_S))
      while True:
        asked.take(environment.answers.get_nowait())
    yield _taken(answers)


def _taken(answers: "queue.SimpleQueue[Answer]") -> list[Answer]:
  found = []
  with contextlib.suppress(queue.Empty):
    while True:
      found.append(answers.get_nowait())
  return found


def scored(
  written: Iterable[list[Answer]],
  *,
  rewards: service_lib.RewardService,
  num_slots: int,
  check: Callable[[], None] = lambda: None,
) -> Iterator[Answer]:
  """Yield the answers in the order in which they are scored.

  Args:
    written: the answers as they are written.
    rewards: scores the answers. An answer that cannot be scored is no failure
      of the evaluation.
    num_slots: of the engine. If many times more answers await their scores, no
      further ones are taken.
    check: is called about every second, and may raise to end it.
  """
  most_unscored = _UNSCORED_PER_SLOT * num_slots
  unscored: collections.deque[tuple[Answer, service_lib.ScoreHandle]]
  unscored = collections.deque()
  for step in written:
    check()
    for answer in step:
      if answer.failure is not None:  # its episode has failed
        yield answer
        continue
      handle = rewards.submit(answer.question.prompt.item, [answer.trajectory])
      unscored.append((answer, handle))
    # A handle is asked before its turn too, because that starts its retries.
    are_done = [handle.done() for _, handle in unscored]
    must_wait = len(unscored) - most_unscored
    for i, is_done in enumerate(are_done):
      answer, handle = unscored.popleft()
      if is_done or i < must_wait:
        yield _scored(answer, handle, check)
      else:
        unscored.append((answer, handle))
  for answer, handle in unscored:
    yield _scored(answer, handle, check)


def _scored(
  answer: Answer, handle: service_lib.ScoreHandle, check: Callable[[], None]
) -> Answer:
  """Wait for the score of an answer, and return the answer with it."""
  while not handle.wait(_LOOK_S):
    check()
  outcome = handle.result()
  if isinstance(outcome, service_lib.RewardFailure):
    return answer._replace(failure=outcome)
  (reward,) = outcome
  assert isinstance(reward, types.Reward)  # one that failed fails its group
  trajectory = dataclasses.replace(answer.trajectory, reward=reward)
  return answer._replace(trajectory=trajectory)


def give_up(count: int, answer: Answer) -> EvaluationError:
  """Return the error of an evaluation without a single score."""
  failure = answer.failure
  assert failure is not None
  return EvaluationError(
    f"none of {count} answers to {answer.question.of} could be scored; that to"
    f" {answer.name}: {failure.reason}\n{failure.traceback}".rstrip()
  )
