"""The rewards that come with the project, apart from reasoning-gym's."""

import functools
import time

import jax
import numpy as np
import pytest

from jaxrl_async import types
from jaxrl_async.assembly import checks
from jaxrl_async.config import sections
from jaxrl_async.rewards import code
from jaxrl_async.rewards import match
from jaxrl_async.rewards import mathematics
from jaxrl_async.rewards import sandbox as sandbox_lib
from jaxrl_async.rewards import scoring
from jaxrl_async.rewards import term as term_lib


def completion(text, *, answer=None, num_tokens=1, reason="eos"):
  return types.Completion(
    text=text,
    answer=answer,
    turns=(),
    tokens=np.zeros((num_tokens,), np.int32),
    finish_reason=types.FinishReason(reason),
  )


@pytest.mark.parametrize(
  ("text", "answer", "score", "answered"),
  [
    ("so it is \\boxed{18}", None, 1.0, 1.0),
    ("#### 18.0", None, 1.0, 1.0),
    ("#### 19", None, 0.0, 1.0),
    ("= 18", "18", 1.0, 1.0),
    ("\\boxed{19}", "18", 0.0, 1.0),
    ("no idea", None, 0.0, 0.0),
  ],
)
def test_mathematics_reads_the_box_then_the_hashes_then_the_answer(
  text, answer, score, answered
):
  item = {"answer": "18 - 9 = <<18-9=9>>9 ...\n#### 18"}
  reward = mathematics.score(item, completion(text, answer=answer))
  assert (reward.score, reward.parts) == (score, {"answered": answered})


@pytest.mark.parametrize(
  ("answer", "exact", "numeric"),
  [
    ("1,200", 0.0, 1.0),
    ("1200", 1.0, 1.0),
    (" 1200 ", 1.0, 1.0),
    ("it is 1200.0", 0.0, 1.0),
    ("1200 or 1300", 0.0, 0.0),
    ("-1200", 0.0, 0.0),
    ("1.2e3", 0.0, 1.0),
    ("", 0.0, 0.0),
    (None, 0.0, 0.0),
  ],
)
def test_matches_of_text_and_of_numbers(answer, exact, numeric):
  said = completion("", answer=answer)
  assert match.exact({"answer": "1200"}, said) == exact
  assert match.numeric({"answer": "1200"}, said) == numeric


@pytest.mark.parametrize(
  ("gold", "right", "wrong"),
  [
    ("-5", ["−5", "–5", "-$5", "$-5", r"-\$5", "- 5", "x = - 5"], ["5", "(5)"]),
    ("5", ["(5)", "Answer - 5", "7 - 5", "x-5", "—5"], ["-5", "−5", "(-5)"]),
    ("12", ["10-12", "10–12", "$10-$12"], ["-12", "10 -12"]),
    ("1/2", [".5", "0.5", "1/2", "2/4", "50/100"], ["3/2", "2", "1/3", "1/0"]),
    ("-1/2", ["−1/2", "-.5"], ["1/2", "-3/2"]),
    ("1.5", ["1 1/2", "3/2"], ["1/2", "2"]),
    ("1,234", ["1234", "1,234.0", "$1,234", "1 234"], ["234", "1,23,4"]),
    ("1_000", ["1000", "1_000", "$1 000.00 net"], ["1_00", "1 0000", "10 00"]),
    ("-12345", ["-12 345", "−12\xa0345"], ["12 345", "1 and -12 345"]),
    ("200", ["5 100 and 200", "5: 100 200"], ["5 200"]),
    ("-3", ["5 -3"], ["5 - 3"]),
    ("5", ["5cm", "共5个", "Q5", r"\approx5cm"], ["x5y", "ab5c"]),
    ("4", ["3,4", "the 3rd of 4"], ["4,3", "34"]),
    ("1234567", ["1,234,567", "12,34,567"], ["1234568", "1234566"]),
    ("1234567.5", ["1234567.50", "1234568.0"], ["1234569.5"]),
    ("2024", ["12/25/2024"], ["1/2024"]),
    ("1e-05", ["0.00001", "1e-5"], ["0.000011", "0"]),
    ("18 dollars", ["$18"], ["18 or 19"]),
    ("9" * 200, ["9" * 200], ["9" * 199 + "8", "9" * 5_000, "1e999999", "9.5"]),
  ],
)
def test_numbers_are_read_as_people_write_them(gold, right, wrong):
  item = {"answer": gold}
  for answers, score in (right, 1.0), (wrong, 0.0):
    for answer in answers:
      said = completion("", answer=answer)
      assert match.numeric(item, said) == score, answer


@pytest.mark.parametrize(
  "gold",
  [
    "three",
    "",
    "3 or 4",
    "3,4",
    "10-12",
    "1/0",
    "9" * 400,
    "18 - 9 = 9\n#### 9",
    "1 000",
    "x5y",
    [5],
    {"a": 5},
    True,
    None,
  ],
)
def test_a_gold_that_is_not_one_number_is_refused(gold):
  with pytest.raises(ValueError, match="is not one number"):
    match.numeric({"answer": gold}, completion("", answer="3"))


@pytest.mark.parametrize(
  ("num_tokens", "score"), [(80, 0.0), (90, -0.5), (100, -1.0), (120, -1.0)]
)
def test_overlong_completions_lose_by_the_buffer(num_tokens, score):
  said = completion("", num_tokens=num_tokens)
  shaped = match.overlong({}, said, max_tokens=100, buffer_tokens=20)
  assert shaped == pytest.approx(score)


def test_form():
  assert match.answered({}, completion("", answer="1")) == 1.0
  assert match.answered({}, completion("", answer="")) == 0.0
  assert match.ended({}, completion("")) == 1.0
  assert match.ended({}, completion("", reason="length")) == 0.0
  pattern = "<think>.*</think>.+"
  right = completion("<think>\n1\n</think>\n2")
  assert match.matches({}, right, pattern=pattern) == 1.0
  assert match.matches({}, completion("2"), pattern=pattern) == 0.0


PROMPT = '''import math


def area(r):
  """Return the area of a circle."""
'''
TESTS = """
def check(candidate):
  assert round(candidate(1.0), 3) == 3.142
"""
BODY = "  return math.pi * r**2\n"


def item(**metadata):
  return {
    "question": PROMPT,
    "metadata": {"test": TESTS, "entry_point": "area", **metadata},
  }


@pytest.mark.sandbox
@pytest.mark.parametrize(
  ("text", "score"),
  [
    (BODY, 1.0),
    (BODY + "\nprint(area(2))\nassert False\n", 1.0),  # is cut off
    (f"Here it is:\n```python\n{PROMPT}{BODY}```\nDone.", 1.0),
    (f"```\ndef area(r):\n{BODY}```", 1.0),
    (f"def area(r):\n{BODY}", 1.0),
    (f"```python\nx = 1\n```\nand\n```python\ndef area(r):\n{BODY}", 1.0),
    (f"```python3\n{PROMPT}{BODY}```\nDone.", 1.0),
    (f"``` Python\n{PROMPT}{BODY}```\nIt prints\n```text\n3\n```", 1.0),
    (f"```c\nint x;\n```\n```starlark\n{PROMPT}{BODY}```", 1.0),
    ("  return 3\n", 0.0),
    ("I cannot.", 0.0),
    ("", 0.0),
  ],
)
def test_code_is_read_from_blocks_or_goes_on_with_the_prompt(text, score):
  reward = code.score(item(), completion(text))
  parts = {"passed": score, "not_plain": 0.0}
  assert (reward.score, reward.parts) == (score, parts)


@pytest.mark.sandbox
@pytest.mark.parametrize(
  ("question", "text"),
  [
    (f"Complete this:\n```python\n{PROMPT}```", f"```\n{PROMPT}{BODY}```"),
    ("Write `def area(r)` of a circle.", f"```\n{PROMPT}{BODY}```"),
    ("import math\n\ndef area(r):\n    # of a circle\n", "    " + BODY.strip()),
    ("def area(r)", f"```\n{PROMPT}{BODY}```"),
  ],
)
def test_a_question_need_not_be_the_beginning_of_the_program(question, text):
  task = {**item(), "question": question}
  assert code.score(task, completion(text)).score == 1.0
  assert code.score(task, completion("```\ndef area(r): 3\n```")).score == 0.0


@pytest.mark.sandbox
def test_after_a_case_that_never_ends_the_others_have_failed():
  cases = [{"stdin": f"{i}", "stdout": f"{i}"} for i in range(40)]
  task = {"question": "Repeat the number.", "metadata": {"cases": cases}}
  hangs = "n = int(input())\nwhile n: pass\nprint(n)"
  start_s = time.perf_counter()
  reward = code.score(task, completion(hangs), timeout_s=1.0)
  assert time.perf_counter() - start_s < 15.0  # and not 40 s
  assert (reward.score, reward.parts) == (0.0, {"passed": 1 / 40})


@pytest.mark.sandbox
@pytest.mark.parametrize(
  "metadata",
  [
    {"cases": [{"stdin": "", "stdout": ""}] * 40},
    {"tests": "for _ in range(40): f()", "entry_point": "f"},
  ],
)
def test_a_slow_program_has_failed_and_not_its_score(metadata):
  """Failed scores end a run, if there are some in a row."""
  program = "import time\ndef f(): time.sleep(0.4)\nf()"
  term = term_lib.Term(
    scorer=functools.partial(code.score, timeout_s=30.0),
    timeout_s=2.0,
    num_retries=0,
  )
  item = {"question": "Write nothing.", "metadata": metadata}
  (reward,) = scoring.score_group(term, item, [completion(program)])
  assert reward.score == 0.0
  assert 0.0 < reward.parts["passed"] < 1.0 or "tests" in metadata


@pytest.mark.sandbox
@pytest.mark.parametrize(
  "case", [{"input": "1", "output": "1"}, {"stdin": 1, "stdout": "1"}, "1"]
)
def test_cases_that_are_none_are_an_error(case):
  cases = [{"stdin": "1", "stdout": "1"}, case]
  task = {"question": "Repeat it.", "metadata": {"cases": cases}}
  with pytest.raises(ValueError, match=r"cases\[1\] has no text as 'stdin'"):
    code.score(task, completion("print(input())"))


@pytest.mark.sandbox
def test_code_that_reads_and_writes_is_scored_by_its_cases():
  cases = [{"stdin": f"{i}", "stdout": f"{2 * i}"} for i in range(4)]
  task = {"question": "Double the number.", "metadata": {"cases": cases}}
  right = code.score(task, completion("```py\nprint(2 * int(input()))\n```"))
  assert (right.score, right.parts) == (1.0, {"passed": 1.0})
  half = "n = int(input())\nprint(2 * n if n < 2 else 0)"
  reward = code.score(task, completion(half))
  assert (reward.score, reward.parts) == (0.0, {"passed": 0.5})


GOOD = "def f(x):\n  return x + 1\n"
WRONG = "def f(x):\n  return 0\n"
LOOP = "def f(x):\n  while True: pass\n"
CHECKS = "assert f(1) == 2"


def test_without_a_sandbox_programs_run_only_where_that_is_allowed(monkeypatch):
  monkeypatch.setattr(sandbox_lib, "bubblewrap_path", lambda: None)
  monkeypatch.setattr(sandbox_lib.shutil, "which", lambda name: None)
  sandbox_lib.find.cache_clear()
  try:
    with pytest.raises(
      sandbox_lib.SandboxError, match="bubblewrap is not installed.*unshare"
    ):
      sandbox_lib.find()
    unsafe = sandbox_lib.find(allow_unsafe=True)
  finally:
    sandbox_lib.find.cache_clear()
  assert unsafe.kind is sandbox_lib.Kind.UNSAFE
  assert "it does not hold" in sandbox_lib.reason_against(unsafe)
  # Nothing hostile here: there is nothing around it.
  assert unsafe.run_tests(GOOD, tests=CHECKS).failures == [""]
  assert unsafe.run_tests(WRONG, tests=CHECKS).num_passed == 0
  quick = sandbox_lib.Limits(wall_s=1.5, cpu_s=2.0)
  (timeout,) = unsafe.run_tests(LOOP, tests=CHECKS, limits=quick).failures
  assert "timeout" in timeout


def test_a_run_that_scores_code_does_not_start_without_a_sandbox(monkeypatch):
  def nothing_works(**options):
    raise sandbox_lib.SandboxError("no sandbox works on this machine")

  monkeypatch.setattr(sandbox_lib, "find", nothing_works)
  config = sections.Config()
  config.task.reward = "code"
  with pytest.raises(
    sections.ConfigError, match="^task.reward: no sandbox works"
  ):
    checks.checked(config, jax.devices())
