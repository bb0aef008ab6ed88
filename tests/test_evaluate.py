"""An answer that cannot be scored is no answer, neither right nor wrong."""

import numpy as np
import pytest
import tiny

from jaxrl_async import types
from jaxrl_async.rewards import service as service_lib
from jaxrl_async.run import evaluate
from jaxrl_async.text import tokenizer as tokenizer_lib

NUM_PROMPTS = 5


def evaluated(score, rewards=None):
  """An evaluation whose answer i has the score `score(i)`."""
  rewards = rewards or tiny.Rewards(lambda item, made: score(item["number"]))
  stream = tiny.Prompts()
  this = evaluate.Evaluator(
    tiny.engine(),
    [stream.next() for _ in range(NUM_PROMPTS)],
    max_completion_tokens=4,
    tokenizer=tokenizer_lib.character_level(),
    rewards=rewards,
  )
  return this.evaluate(tiny.engine_params(), 0.0)


def failure(reason="error: LookupError: no such"):
  return service_lib.RewardFailure(reason, "the scorer's traceback")


def test_failed_scores_count_neither_as_right_nor_as_wrong():
  found = evaluated(lambda i: [[1.0], failure(), [0.5], failure(), [1.0]][i])
  assert found.accuracy == 2 / 3
  scores = [t.reward and t.reward.score for t in found.trajectories]
  assert scores == [1.0, None, 0.5, None, 1.0]
  assert list(found.failures) == ["tiny/train/1", "tiny/train/3"]
  values = evaluate.metrics_of(found, None)
  assert values["eval/held_out/failed"] == 2
  assert values["eval/held_out/avg@1"] == 2 / 3
  text = evaluate.describe(found, None)
  assert "0.667" in text and "2 answers could not be scored" in text
  assert "tiny/train/1: error: LookupError: no such" in text


def test_if_nothing_can_be_scored_the_first_reason_is_given():
  with pytest.raises(evaluate.EvaluationError) as raised:
    evaluated(lambda i: failure(f"error: number {i}"))
  text = str(raised.value)
  assert text.startswith("none of 5 held-out answers could be scored")
  assert "error: number 0" in text and "the scorer's traceback" in text


def test_without_failures_the_accuracy_is_the_share_of_full_scores():
  found = evaluated(lambda i: [float(i % 2)])
  assert found.accuracy == 2 / 5 and not found.failures
  both = evaluate.metrics_of(found, found)
  assert both["eval/greedy/failed"] == both["eval/held_out/failed"] == 0
  assert np.isclose(both["eval/held_out/pass@1"], 0.4)


def test_the_mean_of_each_part_is_over_what_could_be_scored():
  def score(i):
    if i % 2:
      return failure()
    return [types.Reward(score=0.5, parts={"format": i / 4})]

  values = evaluate.metrics_of(evaluated(score), None)
  assert values["eval/held_out/parts/format"] == 0.5
  assert values["eval/held_out/avg@1"] == 0.0


def test_the_scorer_is_given_the_whole_completion():
  rewards = tiny.Rewards()
  found = evaluated(lambda i: [1.0], rewards)
  for trajectory, (_, (completion,)) in zip(
    found.trajectories,
    sorted(rewards.submitted, key=lambda x: x[0]["number"]),
    strict=True,
  ):
    written = trajectory.tokens[trajectory.loss_mask]
    assert completion.tokens.tolist() == written.tolist()
    assert completion.finish_reason is trajectory.finish_reason
    (turn,) = completion.turns
    assert turn.completion == completion.text
    assert turn.num_tokens == len(written) > 0
