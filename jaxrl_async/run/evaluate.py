"""Held-out accuracy of a policy version, sampled and greedy.

Evaluation borrows the engine between two decode calls: same programs
and shapes, its own weights, its own cache and its own stream of randomness.
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
  """No held-out answer could be scored."""


@dataclasses.dataclass(kw_only=True, slots=True)
class Evaluation:
  """One pass over the held-out prompts.

  Attributes:
    accuracy: share of the scored completions whose score is exactly 1.
    parts: mean of each named part of their rewards.
    trajectories: one per prompt, in order; without a reward where the score
      failed.
    failures: why a completion has no score, by prompt id; none of them counts
      in the accuracy.
  """

  accuracy: float
  parts: dict[str, float]
  trajectories: list[types.Trajectory]
  failures: dict[str, str]


class Evaluator:
  """Completes and scores the held-out prompts.

  Threads: who calls it drives the engine meanwhile.
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
      engine: whose programs run; its training sequences stay as they are.
      prompts: held-out.
      max_completion_tokens: as in training.
      tokenizer: turns completions into text.
      rewards: the scorer.
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
      temperature: 0 is greedy.

    Raises:
      EvaluationError: every score failed; says how the first one did.
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
  """Return the metrics of both by name.

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
  """Describe both in words, with what could not be scored."""
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
  """Mean `divergences.k3` between the engine's and the trainer's logprobs.

  Both have to be of the same weights and temperature. What is left then is the
  error of the engine, and of its quantised weights if it has such.
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
