"""What an evaluation has measured of each of its sets of questions."""

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import numpy as np

from jaxrl_async import types
from jaxrl_async.algorithms import divergences
from jaxrl_async.assembly import question_sets
from jaxrl_async.evaluation import answer_results
from jaxrl_async.evaluation import answers as answers_lib

HELD_OUT = question_sets.HELD_OUT
GREEDY = "greedy"  # the same questions again
# Beginnings of the statistics that are metrics, by the name of the set.
_STATISTICS_OF_SETS = ("pass@", "tokens_mean", "frac_truncated")
_STATISTICS = {
  HELD_OUT: ("avg@", *_STATISTICS_OF_SETS),
  GREEDY: ("avg@",),
}


class Evaluation(NamedTuple):
  """The answers to one set of questions, and what they say.

  Attributes:
    answers: all of them, in the order of their questions.
    means: each statistic of `answer_results`, by name. Answers that could not
      be scored are neither right nor wrong.
  """

  answers: list[answers_lib.Answer]
  means: dict[str, float]

  @property
  def accuracy(self) -> float:
    """The share of right answers among the scored answers to a question.

    It is the mean over the questions.
    """
    return self.means["pass@1"]

  @property
  def first(self) -> list[answers_lib.Answer]:
    """The first answer to each question."""
    return [one for one in self.answers if one.question.sample == 0]

  @property
  def failures(self) -> dict[str, str]:
    """The reason for each answer without a score, by the answer's name."""
    return {x.name: x.failure.reason for x in self.answers if x.failure}


def measured(
  answers: Iterable[answers_lib.Answer], solved_score: float
) -> dict[str, Evaluation]:
  """Return the result of each set, from all answers in any order.

  Raises:
    EvaluationError: no answer of a set could be scored. The message has the
      reason and the traceback of the first failure.
  """
  sets: dict[str, list[answers_lib.Answer]] = {}
  for one in sorted(
    answers, key=lambda x: (x.question.number, x.question.sample)
  ):
    sets.setdefault(one.question.of, []).append(one)
  return {name: _measured(found, solved_score) for name, found in sets.items()}


def _measured(
  answers: list[answers_lib.Answer], solved_score: float
) -> Evaluation:
  if all(one.failure for one in answers):
    raise answers_lib.give_up(len(answers), answers[0])
  records = [
    answer_results.Record(
      question=answer.question.number,
      score=answer.trajectory.reward and answer.trajectory.reward.score,
      num_tokens=answer.completed.num_completion_tokens,
      is_truncated=answer.completed.finish_reason is types.FinishReason.LENGTH,
      answer=answer.trajectory.reward and answer.trajectory.reward.answer,
    )
    for answer in answers
  ]
  samples = answers[0].question.settings.samples
  values = answer_results.by_question(
    records, len(answers) // samples, samples, solved_score=solved_score
  )
  return Evaluation(answers, answer_results.means(values))


def metrics_of(found: Mapping[str, Evaluation]) -> dict[str, float]:
  """Return the metrics of an evaluation, by name."""
  values: dict[str, float] = {}
  for name, evaluation in found.items():
    if name not in _STATISTICS:
      values[f"eval/{name}/accuracy"] = evaluation.accuracy
    values[f"eval/{name}/failed"] = float(len(evaluation.failures))
    shown = _STATISTICS.get(name, _STATISTICS_OF_SETS)
    for statistic, mean in evaluation.means.items():
      # Without enough scored answers to any question there is no number.
      if statistic.startswith(shown) and not np.isnan(mean):
        values[f"eval/{name}/{statistic}"] = mean
    parts = types.mean_parts(one.trajectory for one in evaluation.answers)
    for part, mean in parts.items():
      values[f"eval/{name}/parts/{part}"] = mean
  return values


def describe(found: Mapping[str, Evaluation]) -> str:
  """Describe an evaluation in a sentence, including failed scores."""
  text = "held-out accuracy " + ", ".join(
    f"{'' if name == HELD_OUT else f'{name} '}{one.accuracy:.3f}"
    f" ({len(one.first)} questions)"
    for name, one in found.items()
  )
  for one in found.values():
    if failures := one.failures:
      name, reason = next(iter(failures.items()))
      text += (
        f"; {len(failures)} answers could not be scored and do not"
        f" count, the first {name}: {reason}"
      )
  return text


def mismatch_kl(
  trajectories: list[types.Trajectory],
  trainer_logprobs: Callable[[list[types.Trajectory]], list[np.ndarray]],
) -> float:
  """Return the mean `divergences.k3` of engine and trainer logprobs.

  Both have to use the same weights and temperature. The result then measures
  the numerical error of the engine, including the error of quantised weights.

  Args:
    trajectories: with the logprobs of the engine. Tokens that guides have
      changed do not count.
    trainer_logprobs: computes the logprobs of the trainer for all tokens of
      these trajectories.
  """
  total, count = 0.0, 0
  for trajectory, logprobs in zip(
    trajectories, trainer_logprobs(trajectories), strict=True
  ):
    mask = trajectory.learned_mask
    kl = divergences.k3(
      trajectory.behavior_logprobs[mask], logprobs[mask].astype(np.float64)
    )
    total += float(kl.sum())
    count += int(mask.sum())
  return total / max(count, 1)
