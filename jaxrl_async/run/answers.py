"""Answers of a policy to questions: generated, scored, and returned one by one.

Evaluations within a run and launch/evaluate.py both get their answers here. An
answer depends only on the weights, the seed of the engine, the question's
number and the sample's number. It does not depend on which other answers are
generated, so that an evaluation may begin where an earlier one was stopped.
"""

import collections
from collections.abc import Callable, Iterator, Sequence
import dataclasses
import itertools

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


def generate(
  scheduler: scheduler_lib.Scheduler,
  prompts: Sequence[types.Prompt],
  settings: AnswerSettings,
  *,
  tokenizer: tokenizer_lib.Tokenizer,
  rewards: service_lib.RewardService,
  is_known: Callable[[int], bool] = lambda question: False,
) -> Iterator[Answer]:
  """Yield the answers to all questions, in the order in which they are scored.

  Questions begin in their order, and few of them are under way at a time.

  Args:
    scheduler: holds the weights and has no sequences. It belongs to the
      iterator until that has ended.
    prompts: of the questions.
    settings: how they are answered.
    tokenizer: turns completions into text.
    rewards: scores the answers. An answer that cannot be scored is no failure
      of the evaluation.
    is_known: whether a question, given by number, is left out.
  """
  pairs = itertools.product(range(len(prompts)), range(settings.samples))
  wanted = (pair for pair in pairs if not is_known(pair[0]))
  most_unscored = _UNSCORED_PER_SLOT * scheduler.engine.sizes.num_slots
  unscored: collections.deque[tuple[Answer, service_lib.ScoreHandle]]
  unscored = collections.deque()
  while True:
    for question, sample in itertools.islice(wanted, max(scheduler.room, 0)):
      scheduler.submit(
        _sequence(
          scheduler, prompts[question], question, sample, settings, tokenizer
        )
      )
    if scheduler.is_idle:
      break
    for sequence in scheduler.step():
      answer = _answer(sequence, tokenizer)
      item = prompts[answer.question].item
      unscored.append((answer, rewards.submit(item, [answer.completion])))
    # A handle is asked before its turn too, because that starts its retries.
    are_done = [handle.done() for _, handle in unscored]
    must_wait = len(unscored) - most_unscored
    for i, is_done in enumerate(are_done):
      answer, handle = unscored.popleft()
      if is_done or i < must_wait:
        yield _scored(answer, handle)
      else:
        unscored.append((answer, handle))
  for answer, handle in unscored:
    yield _scored(answer, handle)


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


def _answer(
  sequence: sequence_lib.Sequence, tokenizer: tokenizer_lib.Tokenizer
) -> Answer:
  trajectory = sequence.trajectory()
  return Answer(
    question=sequence.group,
    sample=sequence.member,
    trajectory=trajectory,
    completion=completion_lib.of_trajectory(trajectory, tokenizer),
    failure=None,
  )


def _scored(answer: Answer, handle: service_lib.ScoreHandle) -> Answer:
  """Wait for the score of an answer, and return the answer with it."""
  outcome = handle.result()
  if isinstance(outcome, service_lib.RewardFailure):
    return dataclasses.replace(answer, failure=outcome)
  (reward,) = outcome
  trajectory = dataclasses.replace(answer.trajectory, reward=reward)
  return dataclasses.replace(answer, trajectory=trajectory)
