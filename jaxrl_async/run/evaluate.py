"""The held-out accuracy of a policy version, sampled and greedy.

An evaluation uses the engine of the run between two of its decode calls. It
runs the same programs with the same shapes. Its weights, its cache and its
stream of random numbers are its own.
"""

from collections.abc import Callable
import dataclasses

import numpy as np

from jaxrl_async import types
from jaxrl_async.algorithms import divergences
from jaxrl_async.coordination import supervisor as supervisor_lib
from jaxrl_async.engine import decode_state as decode_state_lib
from jaxrl_async.engine import engine as engine_lib
from jaxrl_async.engine import sampling
from jaxrl_async.engine import scheduler as scheduler_lib
from jaxrl_async.engine import sequence as sequence_lib
from jaxrl_async.reporting import metrics as metrics_lib
from jaxrl_async.rewards import completion as completion_lib
from jaxrl_async.rewards import service as service_lib
from jaxrl_async.text import tokenizer as tokenizer_lib


class EvaluationError(supervisor_lib.RunError):
  """None of the held-out completions could be scored."""


@dataclasses.dataclass(kw_only=True, slots=True)
class Evaluation:
  """The result of one pass over the held-out prompts.

  Attributes:
    accuracy: share of the scored completions whose score is exactly 1.
    parts: mean of each named part of the rewards.
    trajectories: one per prompt, in the order of the prompts. A trajectory that
      could not be scored has no reward.
    failures: the reason for each completion without a score, by prompt id. The
      accuracy does not count these completions.
  """

  accuracy: float
  parts: dict[str, float]
  trajectories: list[types.Trajectory]
  failures: dict[str, str]


class Evaluator:
  """Completes and scores the held-out prompts.

  Threads: `evaluate` drives the engine in the caller's thread, so no other
  thread may drive it at the same time.
  """

  def __init__(
    self,
    engine: engine_lib.Engine,
    prompts: list[types.Prompt],
    *,
    max_completion_tokens: int,
    tokenizer: tokenizer_lib.Tokenizer,
    rewards: service_lib.RewardService,
  ):
    """Prepare evaluations.

    Args:
      engine: runs its programs for the evaluation. The sequences that it
        decodes for training are not changed.
      prompts: the held-out prompts.
      max_completion_tokens: longest completion, as in training.
      tokenizer: turns completions into text.
      rewards: scores the completions.
    """
    self._engine = engine
    self._prompts = prompts
    self._max_completion_tokens = max_completion_tokens
    self._tokenizer = tokenizer
    self._rewards = rewards

  def evaluate(
    self, params: decode_state_lib.EngineParams, temperature: float
  ) -> Evaluation:
    """Complete every prompt once and score it.

    Args:
      params: the weights to evaluate.
      temperature: the sampling temperature; 0 is greedy.

    Raises:
      EvaluationError: no completion could be scored. The message has the reason
        and the traceback of the first failure.
    """
    prompts, engine = self._prompts, self._engine
    scheduler = scheduler_lib.Scheduler(engine, busy=metrics_lib.BusyClock())
    scheduler.adopt(params, int(params.version))
    for index, prompt in enumerate(prompts):
      limit = len(prompt.tokens) + self._max_completion_tokens
      scheduler.submit(
        sequence_lib.Sequence(
          prompt.tokens,
          limit=min(limit, engine.sizes.cache_tokens),
          stream=sampling.Stream.EVAL,
          group=index,
          member=0,
          settings=sampling.SamplingSettings(temperature=temperature),
        )
      )
    done: dict[int, types.Trajectory] = {}
    scores: dict[int, service_lib.ScoreHandle] = {}
    while not scheduler.is_idle:
      for sequence in scheduler.step():
        trajectory = sequence.trajectory()
        done[sequence.group] = trajectory
        scores[sequence.group] = self._rewards.submit(
          prompts[sequence.group].item,
          [completion_lib.of_trajectory(trajectory, self._tokenizer)],
        )
    failures: dict[str, service_lib.RewardFailure] = {}
    for index in sorted(scores):
      outcome = scores[index].result()
      if isinstance(outcome, service_lib.RewardFailure):
        failures[prompts[index].prompt_id] = outcome
      else:
        done[index].reward = outcome[0]
    rewards = [t.reward for t in done.values() if t.reward is not None]
    if not rewards:
      prompt_id, first = next(iter(failures.items()))
      raise EvaluationError(
        f"none of {len(prompts)} held-out answers could be scored; the first,"
        f" {prompt_id}: {first.reason}\n{first.traceback}".rstrip()
      )
    return Evaluation(
      accuracy=sum(reward.score == 1.0 for reward in rewards) / len(rewards),
      parts=types.mean_parts(done.values()),
      trajectories=[done[i] for i in range(len(prompts))],
      failures={name: failure.reason for name, failure in failures.items()},
    )


def metrics_of(
  sampled: Evaluation, greedy: Evaluation | None
) -> dict[str, float]:
  """Return the metrics of a sampled and a greedy evaluation, by name.

  Each question is answered once, so avg@1 and pass@1 are equal.
  """
  named = {"held_out": sampled} | ({} if greedy is None else {"greedy": greedy})
  values: dict[str, float] = {}
  for name, evaluation in named.items():
    values[f"eval/{name}/avg@1"] = evaluation.accuracy
    values[f"eval/{name}/failed"] = len(evaluation.failures)
    for part, mean in evaluation.parts.items():
      values[f"eval/{name}/parts/{part}"] = mean
  return values | {"eval/held_out/pass@1": sampled.accuracy}


def describe(sampled: Evaluation, greedy: Evaluation | None) -> str:
  """Describe both evaluations in a sentence, including failed scores."""
  text = f"held-out accuracy {sampled.accuracy:.3f}"
  if greedy is not None:
    text += f", greedy {greedy.accuracy:.3f}"
  text += f" ({len(sampled.trajectories)} questions)"
  for evaluation in (sampled, greedy):
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
