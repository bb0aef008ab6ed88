"""Answers, scores and everything that can go wrong with a reward."""

import subprocess
import sys

import pytest
import reward_scorers

from jaxrl_async.rewards import extraction
from jaxrl_async.rewards import reasoning
from jaxrl_async.rewards import service as service_lib

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


def chain_sum_item(index):
  dataset = reasoning.create_dataset("chain_sum", PARAMS, seed=11, size=99)
  return {"dataset": "chain_sum", "params": PARAMS, **dataset[index]}


@pytest.fixture(scope="module")
def make_service():
  """Services that share the fork server, closed when the module is done."""
  services = {}

  def make(scorer=reward_scorers.length, timeout_s=5.0, num_retries=0):
    key = scorer, timeout_s, num_retries
    if key not in services:
      services[key] = service_lib.RewardService(
        num_workers=1,
        timeout_s=timeout_s,
        num_retries=num_retries,
        answer_prefix="=",
        scorer=scorer,
      )
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
    handle = service.submit(item, [f"1=7\n2={a}\nend" for a in answers])
    expected = [dataset.score_answer(a.strip(), item) for a in answers]
    handles.append((handle, expected))
  for handle, expected in handles:
    assert handle.result() == expected
    assert expected[0] == expected[2] == 1.0 != expected[1]
    assert 0.0 < expected[3] < 1.0


def test_without_an_answer_the_score_is_zero(make_service):
  handle = make_service(reasoning.score).submit(chain_sum_item(0), ["", "7"])
  assert handle.result() == [0.0, 0.0]
  # No scorer is asked.
  assert reasoning.score({"dataset": "none", "params": {}}, None) == 0.0


def test_scores_come_in_the_order_of_the_completions(make_service):
  handle = make_service().submit({}, ["=", "=a", "=bb", "=ccc", "none"])
  assert handle.result() == [0.0, 1.0, 2.0, 3.0, 0.0]
  assert handle.done()
  assert make_service().submit({}, []).result() == []


@pytest.mark.parametrize(
  ("scorer", "reason", "where"),
  [
    ("raises", "error: LookupError: no such answer a", "raise LookupError"),
    ("exits", "error: SystemExit: 3", "sys.exit(3)"),
    ("dies", "error: the reward process died with exit code 3", ""),
    ("returns_nan", "nan: the scorer returned nan", ""),
    ("returns_text", "error: the scorer returned 'very good', no number", ""),
    ("hangs", "timeout: a score took longer than 0.3 s", "time.sleep(60)"),
    ("hangs_and_swallows", "timeout: a score took longer than 0.3 s", ""),
    ("hangs_in_c", service_lib._KILLED, ""),
  ],
)
def test_a_reward_that_misbehaves_is_a_failure_with_its_reason(
  make_service, scorer, reason, where
):
  service = make_service(getattr(reward_scorers, scorer), timeout_s=0.3)
  failure = service.submit({}, ["=a", "=b"]).result()
  assert isinstance(failure, service_lib.RewardFailure)
  assert failure.reason == reason
  assert where in failure.traceback
  # The service goes on, in another process where it must.
  assert service.submit({}, []).result() == []
  metrics = service.metrics()
  is_timeout = reason.startswith("timeout")
  assert metrics["reward_service/timeouts"] == is_timeout
  assert metrics["reward_service/errors"] == (not is_timeout)
  assert metrics["reward_service/latency_s"] > 0.0


def test_one_member_that_fails_fails_its_group_and_no_other(make_service):
  service = make_service(reward_scorers.raises_on_b)
  handles = [service.submit({}, ["=a", f"={x}"]) for x in "abc"]
  first, second, third = [handle.result() for handle in handles]
  assert first == third == [1.0, 1.0]
  assert isinstance(second, service_lib.RewardFailure)


def test_a_retry_may_succeed_and_is_counted(make_service, tmp_path):
  service = make_service(reward_scorers.fails_first, num_retries=1)
  handle = service.submit({"path": str(tmp_path / "tried")}, ["=a"])
  assert handle.result() == [1.0]
  assert service.metrics()["reward_service/errors"] == 1


def test_after_the_last_retry_a_group_is_a_failure(make_service):
  service = make_service(reward_scorers.raises, num_retries=2)
  failure = service.submit({}, ["=a"]).result()
  assert failure.reason.startswith("error: LookupError")
  assert service.metrics()["reward_service/errors"] == 3


def test_a_pool_that_broke_is_replaced(make_service):
  service = make_service(reward_scorers.length, timeout_s=4.0)
  assert service.submit({}, ["=a"]).result() == [1.0]
  # As the kernel does when memory runs out, while the process is idle.
  for process in list(
    service._pool._pool_manager.worker_manager.workers.values()
  ):
    process.kill()
    process.join(10)
  outcome = service.submit({}, ["=a"]).result()
  assert outcome == [1.0] or outcome.reason.startswith("error")
  assert service.submit({}, ["=aa"]).result() == [2.0]


def test_a_closed_service_says_so():
  service = service_lib.RewardService(
    num_workers=1,
    timeout_s=60.0,
    num_retries=0,
    answer_prefix="=",
    scorer=reward_scorers.hangs,
  )
  service.warm_up()
  handle = service.submit({}, ["=a"])
  assert not handle.done()
  service.close(timeout_s=10.0)
  service.close(timeout_s=10.0)
  with pytest.raises(RuntimeError, match="closed"):
    handle.result()
  with pytest.raises(RuntimeError, match="closed"):
    service.submit({}, ["=a"])


MAIN = """
import jax
import sys
from jaxrl_async.rewards import service
import reward_scorers

if __name__ == "__main__":
  assert "jax" in sys.modules and "reasoning_gym" not in sys.modules
  rewards = service.RewardService(
    num_workers=1, timeout_s=5.0, num_retries=0, answer_prefix="=",
    scorer=reward_scorers.reports_jax,
  )
  rewards.warm_up()
  print(rewards.submit({}, ["=a"]).result())
  rewards.close()
else:
  print("the main script was run again in", __name__)
"""


def test_reward_processes_do_not_have_jax_though_this_one_has(make_service):
  assert "jax" in sys.modules
  service = make_service(reward_scorers.reports_jax)
  assert service.submit({}, ["=a"]).result() == [0.0]


@pytest.mark.slow
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
  assert ran.stdout == "[0.0]\n", ran.stderr


@pytest.mark.slow
def test_a_dependencys_warnings_are_not_shown_and_ours_are(tmp_path):
  code = (
    "import jaxrl_async.rewards.reasoning as reasoning, warnings;"
    "reasoning.library(); warnings.warn('ours', SyntaxWarning)"
  )
  ran = subprocess.run(
    [sys.executable, "-c", code],
    # As in a fresh installation: what warns is the compilation.
    env={"PYTHONPYCACHEPREFIX": str(tmp_path), "PATH": ""},
    capture_output=True,
    text=True,
    timeout=150,
    check=False,
  )
  assert ran.stderr.count("Warning") == 1, ran.stderr
  assert "SyntaxWarning: ours" in ran.stderr


def test_the_modules_of_a_reward_process_import_without_jax():
  code = (
    "import jaxrl_async.rewards.preload, jaxrl_async.rewards.service, sys;"
    "print(sorted({'jax', 'flax', 'grain'} & set(sys.modules)))"
  )
  ran = subprocess.run(
    [sys.executable, "-c", code], capture_output=True, text=True, timeout=120
  )
  assert ran.stdout == "[]\n", ran.stderr
