"""Answers, scores and everything that can go wrong with a reward."""

import pickle
import subprocess
import sys

import numpy as np
import pytest
import reward_groups
from reward_groups import TOKENIZER
from reward_groups import submit
from reward_groups import trajectory
import reward_scorers

from jaxrl_async import types
from jaxrl_async.rewards import completion as completion_lib
from jaxrl_async.rewards import extraction
from jaxrl_async.rewards import pool as pool_lib
from jaxrl_async.rewards import reasoning
from jaxrl_async.rewards import scoring
from jaxrl_async.rewards import service as service_lib
from jaxrl_async.rewards import term as term_lib

PARAMS = {"min_terms": 3, "max_terms": 6, "min_digits": 1, "max_digits": 1}


@pytest.mark.parametrize(
  ("completion", "prefix", "answer"),
  [
    ("4-1=3\n3-7=-4\n-4+7=3", "=", "3"),
    ("4-1=3\n3-7=  -4  \n", "=", "-4"),
    ("1=2=3", "=", "3"),
    ("a=", "=", ""),
    ("nothing", "=", None),
    ("", "=", None),
    ("so\nanswer: 4 \nanswer: 5 apples\nbye", "answer:", "5 apples"),
    ("  all of\nit ", "", "all of\nit"),
  ],
)
def test_the_answer_follows_the_last_prefix_up_to_the_end_of_its_line(
  completion, prefix, answer
):
  assert extraction.extract_answer(completion, prefix) == answer


def scores(handle):
  """The scores of a group that could be scored."""
  return [reward.score for reward in handle.result()]


def chain_sum_item(index):
  dataset = reasoning.create_dataset("chain_sum", PARAMS, seed=11, size=99)
  return {"dataset": "chain_sum", "params": PARAMS, **dataset[index]}


def one_term_service(scorer, *, timeout_s, num_retries=0, fails_as_zero=False):
  term = term_lib.Term(
    scorer=scorer,
    timeout_s=timeout_s,
    num_retries=num_retries,
    fails_as_zero=fails_as_zero,
  )
  return reward_groups.service(term)


@pytest.fixture(scope="module")
def make_service():
  """Services that share the fork server, closed when the module is done."""
  services = {}

  def make(scorer=reward_scorers.length, timeout_s=5.0, **limits):
    key = scorer, timeout_s, *limits.items()
    if key not in services:
      services[key] = one_term_service(scorer, timeout_s=timeout_s, **limits)
      services[key].warm_up()
    return services[key]

  yield make
  for service in services.values():
    service.close()


def test_scores_are_reasoning_gyms_own_of_the_extracted_answers(make_service):
  service = make_service(reasoning.score)
  dataset = reasoning.create_dataset("chain_sum", PARAMS, seed=11, size=99)
  handles = []
  for index in range(8):
    item = chain_sum_item(index)
    right = item["answer"]
    answers = [right, str(int(right) + 1), f"{right}.0", f"{right} or so", ""]
    handle = submit(service, item, [f"1=7\n2={a}\nend" for a in answers])
    expected = [dataset.score_answer(a.strip(), item) for a in answers]
    handles.append((handle, expected))
  for handle, expected in handles:
    assert scores(handle) == expected
    assert expected[0] == expected[2] == 1.0 != expected[1]
    assert 0.0 < expected[3] < 1.0


REWARD = types.Reward(
  score=1.5, parts={"correct": 1.0, "format": 0.5}, token_scores={0: -1.0}
)


@pytest.mark.parametrize(
  ("returned", "reward"),
  [
    (2, types.Reward(score=2.0)),
    (True, types.Reward(score=1.0)),
    (np.float32(0.5), types.Reward(score=0.5)),
    (REWARD, REWARD),
    (
      types.Reward(score=0.0, token_scores={}),
      types.Reward(score=0.0, token_scores={}),
    ),
    (
      {
        "score": np.int64(1),
        "parts": {"a": np.float32(2)},
        "token_scores": {np.int64(2): 3},
      },
      types.Reward(score=1.0, parts={"a": 2.0}, token_scores={2: 3.0}),
    ),
  ],
)
def test_a_number_or_a_reward_comes_back_as_plain_numbers(
  make_service, returned, reward
):
  handle = submit(
    make_service(reward_scorers.returns), {"returned": returned}, ["abc"]
  )
  (found,) = handle.result()
  assert found == reward
  numbers = [found.score, *found.parts.values()]
  numbers += (found.token_scores or {}).values()
  assert {type(number) for number in numbers} == {float}
  assert {type(at) for at in found.token_scores or {}} <= {int}


@pytest.mark.parametrize(
  ("wrong", "reason"),
  [
    ({"score": "good"}, "error: the scorer returned 'good', no number"),
    ({"score": float("inf")}, "nan: the scorer returned inf"),
    (
      {"parts": {"a": None}},
      "error: the scorer returned None as the part 'a', no number",
    ),
    (
      {"parts": {"a": float("nan")}},
      "nan: the scorer returned nan as the part 'a'",
    ),
    (
      {"parts": {3: 1.0}},
      "error: the scorer returned a part named 3, no string",
    ),
    (
      {"parts": [1.0]},
      "error: the scorer returned [1.0] as parts, no mapping",
    ),
    (
      {"token_scores": [0.0, 0.0, 1.0]},
      "error: the scorer returned [0.0, 0.0, 1.0] as token_scores, no mapping",
    ),
    (
      {"token_scores": {1: float("nan")}},
      "nan: the scorer returned nan as the score at token 1",
    ),
    *(
      (
        {"token_scores": {at: 1.0}},
        f"error: the scorer returned a score at token {at!r}, but the"
        " completion has the tokens 0 to 2",
      )
      for at in (3, -1, 0.5, "0")
    ),
  ],
)
def test_a_reward_that_is_none_is_a_failure_that_says_what_was_wrong(
  make_service, wrong, reason
):
  returned = {"score": 1.0} | wrong
  service = make_service(reward_scorers.returns)
  failure = submit(service, {"returned": returned}, ["abc"]).result()
  assert isinstance(failure, service_lib.RewardFailure)
  assert failure.reason == reason


def test_a_scorer_sees_text_answer_turns_tokens_and_how_it_ended():
  first, second = "1+1=2\n", "so =4"
  made = completion_lib.of_trajectory(
    trajectory("add\n", first, "and 2+2?", second), TOKENIZER
  )
  assert made.text == first + second and made.answer is None
  assert made.turns == (
    types.Turn(prompt="add\n", completion=first, num_tokens=6),
    types.Turn(prompt="and 2+2?", completion=second, num_tokens=5),
  )
  assert made.tokens.tolist() == TOKENIZER.encode(first + second).tolist()
  assert made.finish_reason is types.FinishReason.EOS
  again = pickle.loads(pickle.dumps(made))
  assert repr(again) == repr(made)


def test_special_tokens_are_in_the_tokens_and_not_in_the_texts():
  one = trajectory("Q", "7")
  one.tokens = np.append(one.tokens, np.int32(TOKENIZER.eos_id))
  one.loss_mask = np.append(one.loss_mask, True)
  made = completion_lib.of_trajectory(one, TOKENIZER)
  assert made.text == made.turns[0].completion == "7"
  assert len(made.tokens) == made.turns[0].num_tokens == 2


def test_the_completion_reaches_the_scorer_with_its_answer(make_service):
  service = make_service(reward_scorers.describes)
  failure = submit(service, {}, ["1=2"]).result()
  assert "text='1=2', answer='2', turns=(Turn(prompt='Q', " in failure.reason


def test_parts_and_token_scores_come_with_each_score(make_service):
  handle = submit(make_service(reward_scorers.adds_up), {}, ["a\n=b\n", "a"])
  assert handle.result() == [
    types.Reward(
      score=2.0,
      parts={"answered": 1.0, "lines": 1.0},
      token_scores={1: 0.5, 4: 0.5},
      answer="b",
    ),
    types.Reward(
      score=0.0, parts={"answered": 0.0, "lines": 0.0}, token_scores={}
    ),
  ]


def test_without_an_answer_the_score_is_zero(make_service):
  handle = submit(make_service(reasoning.score), chain_sum_item(0), ["", "7"])
  assert scores(handle) == [0.0, 0.0]
  # No scorer is asked.
  assert reasoning.score_answer({"dataset": "none", "params": {}}, None) == 0.0


def test_scores_come_in_the_order_of_the_completions(make_service):
  handle = submit(make_service(), {}, ["=", "=a", "=bb", "=ccc", "none"])
  assert scores(handle) == [0.0, 1.0, 2.0, 3.0, 0.0]
  assert handle.done()
  assert submit(make_service(), {}, []).result() == []


@pytest.mark.parametrize(
  ("scorer", "reason", "where"),
  [
    ("raises", "error: LookupError: no such answer a", "raise LookupError"),
    ("exits", "error: SystemExit: 3", "sys.exit(3)"),
    ("dies", "died: the reward process ended with exit code 3", ""),
    ("returns_nan", "nan: the scorer returned nan", ""),
    ("returns_text", "error: the scorer returned 'very good', no number", ""),
    ("hangs", "timeout: a score took longer than 0.3 s", "time.sleep(60)"),
    ("hangs_and_swallows", "timeout: a score took longer than 0.3 s", ""),
    ("hangs_in_c", pool_lib._KILLED, ""),
  ],
)
def test_a_reward_that_misbehaves_is_a_failure_with_its_reason(
  make_service, scorer, reason, where
):
  service = make_service(getattr(reward_scorers, scorer), timeout_s=0.3)
  failure = submit(service, {}, ["=a", "=b"]).result()
  assert isinstance(failure, service_lib.RewardFailure)
  assert failure.reason == reason
  assert where in failure.traceback
  # The service goes on, in another process where it must.
  assert submit(service, {}, []).result() == []
  metrics = service.metrics()
  # A dead process does not say which of the two it was, so each is tried alone.
  count = 3 if scorer in ("dies", "hangs_in_c") else 2
  is_timeout = reason.startswith("timeout")
  assert metrics["reward_service/timeouts"] == count * is_timeout
  assert metrics["reward_service/errors"] == count * (not is_timeout)
  assert metrics["reward_service/latency_s"] > 0.0
  lost = {n: metrics[f"reward_service/lost/{n}"] for n in scoring.KINDS}
  assert lost == dict.fromkeys(scoring.KINDS, 0) | {failure.kind: 2}


def test_what_a_scorer_floods_is_cut(make_service):
  service = make_service(reward_scorers.floods)
  failure = submit(service, {}, ["=a"]).result()
  assert failure.reason.startswith("error: ValueError: flood flood")
  assert failure.reason.endswith("flood a") and len(failure.reason) < 1_100
  assert "in floods" in failure.traceback and len(failure.traceback) < 20_100


def test_the_middle_of_a_long_answer_is_left_out():
  term = term_lib.Term(
    scorer=reward_scorers.returns, timeout_s=5.0, num_retries=0
  )
  scorers = scoring.Scorers(
    terms=(term,), answer_prefix="", tokenizer=TOKENIZER
  )
  text = "ab" + 27_648 * "=" + "ba"  # of configs/deepseek_1p5b.py
  for own in (None, 9 * text, "short"):
    attempt = scoring.Attempt(
      term=0,
      item={"returned": {"score": 1.0, "answer": own}},
      group=completion_lib.pack([trajectory("Q", text)]),
    )
    found = scorers.score(attempt)
    (extracted,), (reward,) = found.answers, found.rewards
    assert extracted.startswith("ab==") and extracted.endswith("==ba")
    if own != "short":
      own = own and extracted
    assert reward.answer == own and len(extracted) < 1_010


@pytest.mark.parametrize(
  ("misbehaves", "kind"),
  [
    ("raises", "error"),
    ("exits", "error"),
    ("dies", "died"),
    ("returns_nan", "nan"),
    ("hangs", "timeout"),
    ("hangs_in_c", "timeout"),
  ],
)
@pytest.mark.parametrize("as_zero", [False, True])
def test_a_completion_that_cannot_be_scored_is_lost_alone(
  make_service, misbehaves, kind, as_zero
):
  service = make_service(
    reward_scorers.on_b, timeout_s=0.3, fails_as_zero=as_zero
  )
  before = service.metrics()[f"reward_service/lost/{kind}"]
  item = {"misbehaves": misbehaves}
  handles = [submit(service, item, ["=a", f"={x}", "=aa"]) for x in "abc"]
  assert scores(handles[0]) == scores(handles[2]) == [1.0, 1.0, 2.0]
  first, failed, last = handles[1].result()
  assert first.score == 1.0 and last.score == 2.0
  if as_zero:
    assert failed.score == 0.0
  else:
    assert isinstance(failed, service_lib.RewardFailure)
    assert failed.kind == kind
  after = service.metrics()[f"reward_service/lost/{kind}"]
  assert after - before == 1


def test_a_scorer_that_fails_on_all_is_broken_and_no_zero(make_service):
  service = make_service(reward_scorers.raises, fails_as_zero=True)
  failure = submit(service, {}, ["=a", "=b"]).result()
  assert isinstance(failure, service_lib.RewardFailure)
  # One alone, as evaluations submit it, does not tell.
  assert scores(submit(service, {}, ["=a"])) == [0.0]


def test_only_those_that_failed_are_tried_again(make_service, tmp_path):
  service = make_service(reward_scorers.counts_and_fails_first, num_retries=1)
  item = {"path": str(tmp_path / "tried")}
  # The fourth call is for the second completion.
  assert scores(submit(service, item, ["=a", "=b", "=b"])) == [1.0, 4.0, 3.0]


def test_a_retry_may_succeed_and_is_counted(make_service, tmp_path):
  service = make_service(reward_scorers.fails_first, num_retries=1)
  handle = submit(service, {"path": str(tmp_path / "tried")}, ["=a"])
  assert scores(handle) == [1.0]
  assert service.metrics()["reward_service/errors"] == 1


def test_after_the_last_retry_a_group_is_a_failure(make_service):
  service = make_service(reward_scorers.raises, num_retries=2)
  failure = submit(service, {}, ["=a"]).result()
  assert failure.reason.startswith("error: LookupError")
  assert service.metrics()["reward_service/errors"] == 3


def test_a_pool_that_broke_is_replaced(make_service):
  service = make_service(reward_scorers.length, timeout_s=4.0)
  assert scores(submit(service, {}, ["=a"])) == [1.0]
  # As the kernel does when memory runs out, while the process is idle.
  for process in list(
    service._pool._processes._pool._pool_manager.worker_manager.workers.values()
  ):
    process.kill()
    process.join(10)
  outcome = submit(service, {}, ["=a"]).result()
  is_failure = isinstance(outcome, service_lib.RewardFailure)
  assert outcome.reason.startswith("error") if is_failure else len(outcome) == 1
  assert scores(submit(service, {}, ["=aa"])) == [2.0]


def test_a_closed_service_says_so():
  service = one_term_service(reward_scorers.hangs, timeout_s=60.0)
  service.warm_up()
  handle = submit(service, {}, ["=a"])
  assert not handle.done()
  service.close(timeout_s=10.0)
  service.close(timeout_s=10.0)
  with pytest.raises(RuntimeError, match="closed"):
    handle.result()
  with pytest.raises(RuntimeError, match="closed"):
    submit(service, {}, ["=a"])


MAIN = """
import jax
import sys
from jaxrl_async.rewards import term
import reward_groups
import reward_scorers

if __name__ == "__main__":
  assert "jax" in sys.modules and "reasoning_gym" not in sys.modules
  rewards = reward_groups.service(
    term.Term(scorer=reward_scorers.reports_jax, timeout_s=5.0, num_retries=0)
  )
  rewards.warm_up()
  print(reward_groups.submit(rewards, {}, ["=a"]).result()[0].score)
  rewards.close()
else:
  print("the main script was run again in", __name__)
"""


def test_reward_processes_do_not_have_jax_though_this_one_has(make_service):
  assert "jax" in sys.modules
  service = make_service(reward_scorers.reports_jax)
  assert scores(submit(service, {}, ["=a"])) == [0.0]


def test_no_score_waits_for_the_import_of_a_verifier(make_service):
  service = make_service(reward_scorers.reports_verifiers)
  assert scores(submit(service, {}, ["=a"])) == [1.0]


@pytest.mark.slow
@pytest.mark.nightly
def test_reward_processes_never_import_jax_nor_the_main_script(tmp_path):
  script = tmp_path / "main.py"
  script.write_text(MAIN)
  tests = str(reward_scorers.__file__).rpartition("/")[0]
  ran = subprocess.run(
    [sys.executable, str(script)],
    env={"PYTHONPATH": tests, "JAX_PLATFORMS": "cpu", "PATH": ""},
    capture_output=True,
    text=True,
    timeout=120,
    check=False,
  )
  assert ran.stdout == "0.0\n", ran.stderr
