"""Answers of a policy to questions: generated, scored, and returned one by one.

`write` generates answers, in whichever process the engine is. `scored` has them
scored. Evaluations within a run and launch/evaluate.py both use them. An
answer depends only on the weights, the seed of the engine, the question's
number and the sample's number. It does not depend on which other answers are
generated, so that an evaluation may begin where an earlier one was stopped.
"""

import collections
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import dataclasses
import itertools
from typing import NamedTuple

from jaxrl_async import types
from jaxrl_async.engine import sampling
from jaxrl_async.engine import scheduler as scheduler_lib
from jaxrl_async.engine import sequence as sequence_lib
from jaxrl_async.rewards import completion as completion_lib
from jaxrl_async.rewards import service as service_lib
from jaxrl_async.text import stop_strings
from jaxrl_async.text import tokenizer as tokenizer_lib

# So many answers may await their scores for each slot of the engine. With more
# of them generation waits, so that slow rewards do not fill the memory.
_UNSCORED_PER_SLOT = 16
_LOOK_S = 0.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnswerSettings:
  """How questions are answered.

  Attributes:
    samples: answers for each question.
    temperature: the sampling temperature; 0 is greedy.
    max_completion_tokens: longest answer.
    stop: texts each of which ends an answer.
    stop_token_ids: tokens each of which ends an answer.
  """

  samples: int = 1
  temperature: float
  max_completion_tokens: int
  stop: tuple[str, ...] = ()
  stop_token_ids: tuple[int, ...] = ()


class Written(NamedTuple):
  """One answer to one question, before it is scored."""

  question: int
  sample: int
  trajectory: types.Trajectory


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
  """One answer to one question.

  Attributes:
    question: number of the question.
    sample: number of the answer among those of its question.
    trajectory: prompt and completion, with the reward if there is one.
    completion: what the scorer was shown, without the extracted answer.
    failure: why the answer has no reward; None if it has one.
  """

  question: int
  sample: int
  trajectory: types.Trajectory
  completion: types.Completion
  failure: service_lib.RewardFailure | None


def write(
  scheduler: scheduler_lib.Scheduler,
  prompts: Sequence[types.Prompt] | Mapping[int, types.Prompt],
  settings: AnswerSettings,
  *,
  tokenizer: tokenizer_lib.Tokenizer,
  questions: Iterable[int] | None = None,
) -> Iterator[list[Written]]:
  """Yield the answers that each step of the scheduler ends.

  Questions begin in their order, and few of them are under way at a time.

  Args:
    scheduler: holds the weights and has no sequences. It belongs to the
      iterator until that has ended.
    prompts: by the number of the question.
    settings: how they are answered.
    tokenizer: of the policy, to find the texts that end answers.
    questions: numbers of the questions to answer; None means all of them.
  """
  numbers = range(len(prompts)) if questions is None else questions
  wanted = itertools.product(numbers, range(settings.samples))
  while True:
    for question, sample in itertools.islice(wanted, max(scheduler.room, 0)):
      scheduler.submit(
        _sequence(
          scheduler, prompts[question], question, sample, settings, tokenizer
        )
      )
    if scheduler.is_idle:
      break
    yield [
      Written(sequence.group, sequence.member, sequence.trajectory())
      for sequence in scheduler.step()
    ]


def scored(
  written: Iterable[list[Written]],
  prompts: Sequence[types.Prompt],
  *,
  tokenizer: tokenizer_lib.Tokenizer,
  rewards: service_lib.RewardService,
  num_slots: int,
  check: Callable[[], None] = lambda: None,
) -> Iterator[Answer]:
  """Yield the answers in the order in which they are scored.

  Args:
    written: the answers as they are generated.
    prompts: of all questions.
    tokenizer: turns completions into text.
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
    for one in step:
      answer = _answer(one, tokenizer)
      item = prompts[answer.question].item
      unscored.append((answer, rewards.submit(item, [answer.trajectory])))
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


def _sequence(
  scheduler: scheduler_lib.Scheduler,
  prompt: types.Prompt,
  question: int,
  sample: int,
  settings: AnswerSettings,
  tokenizer: tokenizer_lib.Tokenizer,
) -> sequence_lib.Sequence:
  limit = len(prompt.tokens) + settings.max_completion_tokens
  return sequence_lib.Sequence(
    prompt.tokens,
    limit=min(limit, scheduler.engine.sizes.cache_tokens),
    stream=sampling.Stream.EVAL,
    group=question,
    member=sample,
    settings=sampling.SamplingSettings(
      temperature=settings.temperature, end_tokens=settings.stop_token_ids
    ),
    stop=stop_strings.check_of(tokenizer, settings.stop),
  )


def _answer(written: Written, tokenizer: tokenizer_lib.Tokenizer) -> Answer:
  return Answer(
    **written._asdict(),
    completion=completion_lib.of_trajectory(written.trajectory, tokenizer),
    failure=None,
  )


def _scored(
  answer: Answer, handle: service_lib.ScoreHandle, check: Callable[[], None]
) -> Answer:
  """Wait for the score of an answer, and return the answer with it."""
  while not handle.wait(_LOOK_S):
    check()
  outcome = handle.result()
  if isinstance(outcome, service_lib.RewardFailure):
    return dataclasses.replace(answer, failure=outcome)
  (reward,) = outcome
  trajectory = dataclasses.replace(answer.trajectory, reward=reward)
  return dataclasses.replace(answer, trajectory=trajectory)
