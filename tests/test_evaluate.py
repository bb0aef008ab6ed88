"""An answer that cannot be scored is no answer, neither right nor wrong."""

from concurrent import futures

import numpy as np
import pytest
import tiny

from jaxrl_async import types
from jaxrl_async.evaluation import answers as answers_lib
from jaxrl_async.evaluation import evaluated_sets
from jaxrl_async.processes import supervisor as supervisor_lib
from jaxrl_async.rewards import service as service_lib
from jaxrl_async.rollout import questions as questions_lib
from jaxrl_async.text import tokenizer as tokenizer_lib

NUM_PROMPTS = 5


def evaluated(score, rewards=None, samples=1, check=lambda: None, **settings):
  """An evaluation whose answer i has the score `score(i)`."""
  rewards = rewards or tiny.Rewards(lambda item, made: score(item["number"]))
  stream = tiny.Prompts()
  tokenizer = tokenizer_lib.character_level()
  asked = questions_lib.of_set(
    "held_out",
    [stream.next() for _ in range(NUM_PROMPTS)],
    questions_lib.AnswerSettings(
      samples=samples,
      temperature=float(samples > 1),
      max_completion_tokens=4,
      **settings,
    ),
  )
  answers = answers_lib.scored(
    answers_lib.write(tiny.ready(), asked, tokenizer),
    rewards=rewards,
    num_slots=tiny.SIZES.num_slots,
    check=check,
  )
  return evaluated_sets.measured(answers, 1.0)["held_out"]


def firsts(found):
  return [one.trajectory for one in found.first]


def metrics_of(found, **others):
  return evaluated_sets.metrics_of({"held_out": found, **others})


def failure(reason="error: LookupError: no such"):
  return service_lib.RewardFailure(reason, "the scorer's traceback")


def test_failed_scores_count_neither_as_right_nor_as_wrong():
  found = evaluated(lambda i: [[1.0], failure(), [0.5], failure(), [1.0]][i])
  assert found.accuracy == 2 / 3
  scores = [t.reward and t.reward.score for t in firsts(found)]
  assert scores == [1.0, None, 0.5, None, 1.0]
  assert list(found.failures) == ["tiny/train/1", "tiny/train/3"]
  values = metrics_of(found)
  assert values["eval/held_out/failed"] == 2
  assert values["eval/held_out/avg@1"] == 2 / 3
  text = evaluated_sets.describe({"held_out": found})
  assert "0.667" in text and "2 answers could not be scored" in text
  assert "tiny/train/1: error: LookupError: no such" in text


def test_if_nothing_can_be_scored_the_first_reason_is_given():
  with pytest.raises(answers_lib.EvaluationError) as raised:
    evaluated(lambda i: failure(f"error: number {i}"))
  text = str(raised.value)
  assert text.startswith("none of 5 answers to held_out could be scored")
  assert "error: number 0" in text and "the scorer's traceback" in text


def test_without_failures_the_accuracy_is_the_share_of_full_scores():
  found = evaluated(lambda i: [float(i % 2)])
  assert found.accuracy == 2 / 5 and not found.failures
  both = metrics_of(found, greedy=found)
  assert both["eval/greedy/failed"] == both["eval/held_out/failed"] == 0
  assert np.isclose(both["eval/held_out/pass@1"], 0.4)


def test_the_mean_of_each_part_is_over_what_could_be_scored():
  def score(i):
    if i % 2:
      return failure()
    return [types.Reward(score=0.5, parts={"format": i / 4})]

  values = metrics_of(evaluated(score))
  assert values["eval/held_out/parts/format"] == 0.5
  assert values["eval/held_out/avg@1"] == 0.0


def test_the_scorer_is_given_the_whole_completion():
  rewards = tiny.Rewards()
  found = evaluated(lambda i: [1.0], rewards)
  for trajectory, (_, (completion,)) in zip(
    firsts(found),
    sorted(rewards.submitted, key=lambda x: x[0]["number"]),
    strict=True,
  ):
    written = trajectory.tokens[trajectory.loss_mask]
    assert completion.tokens.tolist() == written.tolist()
    assert completion.finish_reason is trajectory.finish_reason
    (turn,) = completion.turns
    assert turn.completion == completion.text
    assert turn.num_tokens == len(written) > 0


def test_several_answers_give_pass_at_k_of_the_ones_that_could_be_scored():
  counts = {}

  def score(i):
    """Of four answers to question i, the first i are right."""
    counts[i] = counts.get(i, 0) + 1
    return failure() if i == 4 and counts[i] == 1 else [float(counts[i] <= i)]

  found = evaluated(score, samples=4)
  assert len(found.answers) == 20 and len(firsts(found)) == 5
  right = [0, 1 / 4, 2 / 4, 3 / 4, 1]
  assert np.isclose(found.accuracy, np.mean(right))
  values = metrics_of(found, other=found)
  assert values["eval/other/accuracy"] == found.accuracy
  for name in ("held_out", "other"):
    assert values[f"eval/{name}/failed"] == 1
    # C(4 - c, 2) / C(4, 2) for c = 0, 1, 2, 3; the last has only right ones.
    assert np.isclose(
      values[f"eval/{name}/pass@2"], np.mean([0, 1 / 2, 5 / 6, 1, 1])
    )
    # The last question has only three scored answers.
    assert np.isclose(values[f"eval/{name}/pass@4"], np.mean([0, 1, 1, 1]))
  assert values["eval/held_out/avg@4"] == found.accuracy
  assert len(found.failures) == 1


def test_answers_do_not_depend_on_each_other():
  def texts(found):
    return [t.tokens.tolist() for t in firsts(found)]

  rewards = tiny.Rewards(lambda item, made: [0.0])
  alone = evaluated(None, rewards, samples=2)
  many = evaluated(None, rewards, samples=7)
  assert texts(alone) == texts(many)
  submitted = [made[0].tokens.tolist() for _, made in rewards.submitted]
  assert len({tuple(tokens) for tokens in submitted}) > NUM_PROMPTS


def test_stop_texts_end_answers_of_evaluations():
  rewards = tiny.Rewards(lambda item, made: [0.0])
  evaluated(None, rewards, samples=2)
  text = next(m[0].text[1] for _, m in rewards.submitted if len(m[0].text) == 4)
  rewards.submitted.clear()
  evaluated(None, rewards, samples=2, stop=(text,))
  found = [m[0] for _, m in rewards.submitted]
  stopped = [c for c in found if c.finish_reason is types.FinishReason.STOP]
  assert stopped and all(c.text.index(text) == len(c.text) - 1 for c in stopped)
  assert all(text not in c.text for c in found if c not in stopped)


class Silent(tiny.Rewards):
  """Never answers."""

  def submit(self, item, trajectories):
    super().submit(item, trajectories)
    handle = service_lib.ScoreHandle.__new__(service_lib.ScoreHandle)
    handle._outcome, handle._parts = None, [self]
    return handle

  future = futures.Future()

  def running(self):
    return [self]

  def done(self):
    return False


def test_scores_that_do_not_come_do_not_keep_an_evaluation_from_ending(
  monkeypatch,
):
  monkeypatch.setattr(answers_lib, "_LOOK_S", 0.01)
  rewards, calls = Silent(), []

  def check():
    calls.append(len(rewards.submitted))
    if calls.count(NUM_PROMPTS) == 3:  # all of them await their scores
      raise supervisor_lib.Interrupted("stopped")

  with pytest.raises(supervisor_lib.Interrupted):
    evaluated(None, rewards, check=check)
  assert calls[-1] == NUM_PROMPTS


def test_slow_scores_hold_generation_back():
  rewards = tiny.Rewards(lambda item, made: [0.0], num_polls=10**9)
  scheduler = tiny.ready()
  stream = tiny.Prompts()
  prompts = [stream.next() for _ in range(100)]
  tokenizer = tokenizer_lib.character_level()
  answers = answers_lib.scored(
    answers_lib.write(
      scheduler,
      questions_lib.of_set(
        "held_out",
        prompts,
        questions_lib.AnswerSettings(temperature=0.0, max_completion_tokens=1),
      ),
      tokenizer,
    ),
    rewards=rewards,
    num_slots=scheduler.engine.sizes.num_slots,
  )
  first = next(answers)
  assert first.trajectory.reward is not None
  assert len(rewards.submitted) < 80
  assert len(list(answers)) == 99
