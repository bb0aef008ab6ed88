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
from jaxrl_async.rewards import service as service_lib
from jaxrl_async.text import tokenizer as tokenizer_lib


class EvaluationError(supervisor_lib.RunError):
  """No held-out answer could be scored."""


@dataclasses.dataclass(kw_only=True, slots=True)
class Evaluation:
  """One pass over the held-out prompts.

  Attributes:
    accuracy: share of the scored completions whose score is exactly 1.
    trajectories: one per prompt, in order; without a reward where the score
      failed.
    failures: why a completion has no score, by prompt id; none of them counts
      in the accuracy.
  """

  accuracy: float
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
    """Prepares evaluations.

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
    """Completes every prompt once and scores it.

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
        text = self._tokenizer.decode(trajectory.tokens[trajectory.loss_mask])
        done[sequence.group] = trajectory
        scores[sequence.group] = self._rewards.submit(
          prompts[sequence.group].item, [text]
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
      accuracy=sum(reward == 1.0 for reward in rewards) / len(rewards),
      trajectories=[done[i] for i in range(len(prompts))],
      failures={name: failure.reason for name, failure in failures.items()},
    )


def metrics_of(sampled: Evaluation, greedy: Evaluation | None) -> dict:
  """Their metrics by name. One answer a question: avg@1 and pass@1 agree."""
  named = {"held_out": sampled} | ({} if greedy is None else {"greedy": greedy})
  values: dict[str, float] = {}
  for name, evaluation in named.items():
    values[f"eval/{name}/avg@1"] = evaluation.accuracy
    values[f"eval/{name}/failed"] = len(evaluation.failures)
  return values | {"eval/held_out/pass@1": sampled.accuracy}


def describe(sampled: Evaluation, greedy: Evaluation | None) -> str:
  """Both in words, with what could not be scored."""
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
  """Mean k3 (`divergences.k3`) between the engine's and the trainer's logprobs.

  The sampled weights must be those of `trainer_logprobs`, and the temperature
  too: what is left is the engine's error, quantised weights included.
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
