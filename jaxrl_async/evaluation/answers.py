"""Answers of a policy to questions: written, and scored one by one.

An answer depends only on the weights, the seed of the engine, the question's
number and its own. It does not depend on which other answers are written, so an
evaluation may begin where an earlier one was stopped.
"""

import collections
from collections.abc import Callable, Iterable, Iterator
import dataclasses
import itertools

from jaxrl_async import types
from jaxrl_async.engine import scheduler as scheduler_lib
from jaxrl_async.processes import supervisor as supervisor_lib
from jaxrl_async.rewards import service as service_lib
from jaxrl_async.rollout import questions as questions_lib
from jaxrl_async.rollout import replica as replica_lib
from jaxrl_async.rollout.questions import Answer
from jaxrl_async.text import tokenizer as tokenizer_lib

# So many answers may await their scores for each slot of the engine. With more
# of them none is taken, so that slow rewards do not fill the memory.
_UNSCORED_PER_SLOT = 16
_LOOK_S = 0.5


class EvaluationError(supervisor_lib.RunError):
  """None of the answers could be scored."""


def write(
  scheduler: scheduler_lib.Scheduler,
  questions: Iterable[questions_lib.Question],
  tokenizer: tokenizer_lib.Tokenizer,
) -> Iterator[list[Answer]]:
  """Yield the answers that each step of a scheduler ends.

  Args:
    scheduler: holds the weights and has no sequences. It belongs to the
      iterator until that has ended.
    questions: begun in this order, few at a time.
    tokenizer: of the policy, to find the texts that end answers.
  """
  waiting = enumerate(questions, 1)
  asked: dict[int, questions_lib.Question] = {}
  while True:
    for number, one in itertools.islice(waiting, max(scheduler.room, 0)):
      asked[-number] = one
      turn = questions_lib.turn_of(
        one, -number, scheduler.engine.sizes.cache_tokens
      )
      scheduler.submit(replica_lib.sequence_of(turn, tokenizer))
    if scheduler.is_idle:
      return
    yield [
      Answer(asked.pop(one.owner.number), one.trajectory())
      for one in scheduler.step()
      if one.owner is not None
    ]


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
