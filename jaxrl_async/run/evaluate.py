"""The held-out accuracy of a policy version, sampled and greedy.

An evaluation uses the engines of the run between two of their decode calls. It
runs the same programs with the same shapes. Its cache and its stream of random
numbers are its own. There may be several sets of questions,
each with its own number of answers for a question (`eval.sets`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses

import numpy as np

from jaxrl_async import types
from jaxrl_async.algorithms import divergences
from jaxrl_async.coordination import supervisor as supervisor_lib
from jaxrl_async.rewards import service as service_lib
from jaxrl_async.rollout import answers as answers_lib
from jaxrl_async.run import answer_results
from jaxrl_async.text import tokenizer as tokenizer_lib

# Beginnings of the statistics that are metrics, by the name of the evaluation.
_STATISTICS_OF_SETS = ("pass@", "tokens_mean", "frac_truncated")
_STATISTICS = {
  "held_out": ("avg@", *_STATISTICS_OF_SETS),
  "greedy": ("avg@",),
}


class EvaluationError(supervisor_lib.RunError):
  """None of the held-out completions could be scored."""


@dataclasses.dataclass(kw_only=True, slots=True)
class Evaluation:
  """The result of one pass over the held-out prompts.

  Attributes:
    means: each statistic of `answer_results`, by name.
    parts: mean of each named part of the rewards.
    trajectories: the first answer to each prompt, in the order of the prompts.
      A trajectory that could not be scored has no reward.
    num_answers: number of answers, scored or not.
    failures: the reason for each answer without a score, by prompt id, followed
      by "#" and the number of the answer if it is not the first. The accuracy
      does not count these answers.
  """

  means: dict[str, float]
  parts: dict[str, float]
  trajectories: list[types.Trajectory]
  num_answers: int
  failures: dict[str, str]

  @property
  def accuracy(self) -> float:
    """The share of right answers among the scored answers to a question.

    It is the mean over the questions.
    """
    return self.means["pass@1"]


Write = Callable[
  [Sequence[types.Prompt], answers_lib.AnswerSettings],
  Iterator[list[answers_lib.Written]],
]


class Evaluator:
  """Completes and scores a set of held-out prompts.

  Attributes:
    prompts: the held-out prompts.
  """

  def __init__(
    self,
    prompts: list[types.Prompt],
    settings: answers_lib.AnswerSettings,
    *,
    tokenizer: tokenizer_lib.Tokenizer,
    rewards: service_lib.RewardService,
    num_slots: int,
    solved_score: float = 1.0,
  ):
    """Prepare evaluations.

    Args:
      prompts: the held-out prompts.
      settings: how they are answered, unless the answers are greedy.
      tokenizer: turns completions into text.
      rewards: scores the completions.
      num_slots: of the engine, which says how many answers may await a score.
      solved_score: a completion with at least this score solves its question.
    """
    self.prompts = prompts
    self._settings = settings
    self._tokenizer = tokenizer
    self._rewards = rewards
    self._num_slots = num_slots
    self._solved_score = solved_score

  def evaluate(
    self,
    write: Write,
    *,
    is_greedy: bool = False,
    check: Callable[[], None] = lambda: None,
  ) -> Evaluation:
    """Answer every prompt and score the answers.

    Args:
      write: generates the answers, as `answers.write` does.
      is_greedy: whether each prompt is answered once, greedily.
      check: is called about every second, and may raise to end it.

    Raises:
      EvaluationError: no completion could be scored. The message has the reason
        and the traceback of the first failure.
    """
    prompts, settings = self.prompts, self._settings
    if is_greedy:
      settings = dataclasses.replace(settings, samples=1, temperature=0.0)
    answers = sorted(
      answers_lib.scored(
        write(prompts, settings),
        prompts,
        tokenizer=self._tokenizer,
        rewards=self._rewards,
        num_slots=self._num_slots,
        check=check,
      ),
      key=lambda answer: (answer.question, answer.sample),
    )
    failed = [answer for answer in answers if answer.failure is not None]
    if len(failed) == len(answers):
      first = failed[0].failure
      assert first is not None
      raise EvaluationError(
        f"none of {len(answers)} held-out answers could be scored; the first,"
        f" {_name(prompts, failed[0])}: {first.reason}\n"
        f"{first.traceback}".rstrip()
      )
    values = answer_results.by_question(
      (answer_results.record_of(a.question, a.trajectory) for a in answers),
      len(prompts),
      settings.samples,
      solved_score=self._solved_score,
    )
    return Evaluation(
      means=answer_results.means(values),
      parts=types.mean_parts(a.trajectory for a in answers),
      trajectories=[a.trajectory for a in answers if a.sample == 0],
      num_answers=len(answers),
      failures={
        _name(prompts, a): a.failure.reason
        for a in failed
        if a.failure is not None
      },
    )


def _name(prompts: list[types.Prompt], answer: answers_lib.Answer) -> str:
  prompt_id = prompts[answer.question].prompt_id
  return prompt_id if not answer.sample else f"{prompt_id}#{answer.sample}"


def metrics_of(
  sampled: Evaluation,
  greedy: Evaluation | None,
  sets: Mapping[str, Evaluation] | None = None,
) -> dict[str, float]:
  """Return the metrics of the evaluations, by name.

  Args:
    sampled: of the held-out questions.
    greedy: of the same questions, with greedy answers; None if there is none.
    sets: of the sets of `eval.sets`, by name.
  """
  found = {"held_out": sampled} | ({} if greedy is None else {"greedy": greedy})
  values: dict[str, float] = {}
  for name, evaluation in (found | dict(sets or {})).items():
    if name not in found:
      values[f"eval/{name}/accuracy"] = evaluation.accuracy
    values[f"eval/{name}/failed"] = float(len(evaluation.failures))
    shown = _STATISTICS.get(name, _STATISTICS_OF_SETS)
    for statistic, mean in evaluation.means.items():
      # Without enough scored answers to any question there is no number.
      if statistic.startswith(shown) and not np.isnan(mean):
        values[f"eval/{name}/{statistic}"] = mean
    for part, mean in evaluation.parts.items():
      values[f"eval/{name}/parts/{part}"] = mean
  return values


def describe(
  sampled: Evaluation,
  greedy: Evaluation | None,
  sets: Mapping[str, Evaluation] | None = None,
) -> str:
  """Describe the evaluations in a sentence, including failed scores."""
  text = f"held-out accuracy {sampled.accuracy:.3f}"
  if greedy is not None:
    text += f", greedy {greedy.accuracy:.3f}"
  text += f" ({len(sampled.trajectories)} questions)"
  for name, found in (sets or {}).items():
    text += f", {name} {found.accuracy:.3f} ({len(found.trajectories)})"
  for evaluation in (sampled, greedy, *(sets or {}).values()):
    if evaluation is not None and evaluation.failures:
      prompt_id, reason = next(iter(evaluation.failures.items()))
      text += (
        f"; {len(evaluation.failures)} answers could not be scored and do not"
        f" count, the first {prompt_id}: {reason}"
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
    trajectories: with the logprobs of the engine.
    trainer_logprobs: computes the logprobs of the trainer for all tokens of
      these trajectories.
  """
  total, count = 0.0, 0
  for trajectory, logprobs in zip(
    trajectories, trainer_logprobs(trajectories), strict=True
  ):
    mask = trajectory.loss_mask
    kl = divergences.k3(
      trajectory.behavior_logprobs[mask], logprobs[mask].astype(np.float64)
    )
    total += float(kl.sum())
    count += int(mask.sum())
  return total / max(count, 1)
