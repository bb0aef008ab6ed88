"""Held-out accuracy of a policy version, sampled and greedy.

Evaluation borrows the engine between two decode calls: same programs
and shapes, its own weights, its own cache and its own stream of randomness.
"""

from collections.abc import Callable
import dataclasses

import numpy as np

from jaxrl_async import metrics
from jaxrl_async import tokenizer as tokenizer_lib
from jaxrl_async import types
from jaxrl_async.rewards import service
from jaxrl_async.rollout import decode_state
from jaxrl_async.rollout import engine as engine_lib
from jaxrl_async.rollout import sampling
from jaxrl_async.rollout import scheduler as scheduler_lib
from jaxrl_async.rollout import sequence as sequence_lib


class EvaluationError(RuntimeError):
  """A held-out answer could not be scored."""


@dataclasses.dataclass(kw_only=True, slots=True)
class Evaluation:
  """One pass over the held-out prompts.

  Attributes:
    accuracy: share of completions whose score is exactly 1.
    trajectories: one per prompt, in order.
  """

  accuracy: float
  trajectories: list[types.Trajectory]


def evaluate(
  engine: engine_lib.Engine,
  params: decode_state.EngineParams,
  prompts: list[types.Prompt],
  *,
  temperature: float,
  max_completion_tokens: int,
  tokenizer: tokenizer_lib.Tokenizer,
  rewards: service.RewardService,
) -> Evaluation:
  """Completes every prompt once and scores it.

  Args:
    engine: whose programs run; its training sequences stay as they are.
    params: the weights to evaluate.
    prompts: held-out.
    temperature: 0 is greedy.
    max_completion_tokens: as in training.
    tokenizer: turns completions into text.
    rewards: the scorer.

  Raises:
    EvaluationError: a score failed; accuracy over the rest would be another
      number than the one asked for.
  """
  scheduler = scheduler_lib.Scheduler(engine, busy=metrics.BusyClock())
  scheduler.adopt(params, int(params.version))
  for index, prompt in enumerate(prompts):
    limit = len(prompt.tokens) + max_completion_tokens
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
  scores: dict[int, service.ScoreHandle] = {}
  while not scheduler.is_idle:
    for sequence in scheduler.step():
      trajectory = sequence.trajectory()
      text = tokenizer.decode(trajectory.tokens[trajectory.loss_mask])
      done[sequence.group] = trajectory
      scores[sequence.group] = rewards.submit(
        prompts[sequence.group].item, [text]
      )
  correct = 0
  for index in sorted(scores):
    outcome = scores[index].result()
    if isinstance(outcome, service.RewardFailure):
      raise EvaluationError(
        f"{prompts[index].prompt_id}: {outcome.reason}\n{outcome.traceback}"
      )
    correct += outcome[0] == 1.0
    done[index].reward = outcome[0]
  trajectories = [done[i] for i in range(len(prompts))]
  return Evaluation(accuracy=correct / len(prompts), trajectories=trajectories)


def mismatch_kl(
  trajectories: list[types.Trajectory],
  trainer_logprobs: Callable[[list[types.Trajectory]], list[np.ndarray]],
) -> float:
  """Mean k3 (`divergences.k3`) between the engine's and the trainer's logprobs.

  The sampled weights must be those of `trainer_logprobs`, and the temperature
  too: what is left is the engine's error, quantised weights included.
  """
  total, count = 0.0, 0
  for trajectory, logprobs in zip(
    trajectories, trainer_logprobs(trajectories), strict=True
  ):
    mask = trajectory.loss_mask
    log_ratio = logprobs[mask].astype(np.float64)
    log_ratio -= trajectory.behavior_logprobs[mask]
    total += float(np.sum(np.expm1(log_ratio) - log_ratio))
    count += int(mask.sum())
  return total / max(count, 1)
