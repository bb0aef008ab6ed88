"""Check and time the rewards for mathematics and code on real data.

uv run benchmarks/rewards.py --data=DIRECTORY

The folder holds gsm8k/{train,test}.jsonl, math500/test.json and
humaneval/HumanEval.jsonl.gz in their usual formats. Every right answer of GSM8K
and MATH-500 has to be verified against itself in its usual spellings, and a
wrong one refused. Every canonical solution of HumanEval has to pass its tests,
and none may pass whose body returns something wrong. Rows in four styles have
right programs that have to pass and subtly wrong ones that have to fail, and
rows whose tests test nothing have to be refused. Hostile programs have to
fail, called by tests and as programs that read and write, in every kind of
sandbox that works here. Odd answers to mathematics and to every dataset of
reasoning-gym are tried as well. What disagrees is listed on stderr. The last
line on stdout is JSON:

    humaneval_pass         fraction of the canonical solutions that pass
    humaneval_broken_pass  fraction of the broken ones that pass
    gsm8k_verified         fraction of answers right in all their spellings
    math500_verified       the same
    wrong_verified         fraction of wrong answers that were taken as right
    wrong_verdicts         right programs and answers taken as wrong, wrong ones
                           as right, and what was no verdict
    unguarded              rows with faulty tests that were not refused, and
                           answers for which a scorer raises or takes long
    code_tasks_per_s       programs with tests, two at a time
    cases_per_s            inputs of programs that read and write, two at a time
    math_per_s             comparisons, in one process
    attacks                hostile programs, times sandboxes and modes
    escapes                those that passed, or failed their judge
    sandbox                what programs ran in
    attacked               sandboxes that were attacked
"""

from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
import contextlib
import functools
import gzip
import json
import os
import pathlib
import random
import socket
import sys
import tempfile
import time
from typing import Any

from absl import app
from absl import flags
import code_rows
import hostile_programs
import numpy as np
import odd_answers

from jaxrl_async import types
from jaxrl_async.rewards import code
from jaxrl_async.rewards import mathematics
from jaxrl_async.rewards import sandbox as sandbox_lib

_DATA = flags.DEFINE_string(
  "data", None, "Folder with gsm8k, math500 and humaneval.", required=True
)
_WORKERS = 2


def _completion(text: str) -> types.Completion:
  return types.Completion(
    text=text,
    turns=(),
    tokens=np.zeros((1,), np.int32),
    finish_reason=types.FinishReason.EOS,
  )


def _note(*words: object) -> None:
  print(*words, file=sys.stderr, flush=True)


# -- mathematics --------------------------------------------------------------


def _gsm8k(folder: pathlib.Path) -> Iterator[tuple[str, list[str]]]:
  """Yield each solution, and spellings of its answer."""
  for part in ("train", "test"):
    with open(folder / "gsm8k" / f"{part}.jsonl") as file:
      for line in file:
        solution = json.loads(line)["answer"]
        answer = solution.rpartition("####")[2].strip()
        number = answer.replace(",", "")
        yield (
          solution,
          [
            solution,
            f"#### {number}",
            f"The answer is \\boxed{{{answer}}}.",
            f"\\boxed{{\\${number}}}",
            f"\\boxed{{{number}.00}}"
            if "." not in number
            else f"#### {number}",
          ],
        )


def _math500(folder: pathlib.Path) -> Iterator[tuple[str, list[str]]]:
  """Yield each answer, and spellings of it."""
  for item in json.loads((folder / "math500" / "test.json").read_text()):
    answer = item["answer"]
    larger = answer.replace("\\frac", "\\dfrac")
    yield (
      answer,
      [
        item["solution"],
        f"\\boxed{{{answer}}}",
        f"#### {answer}",
        f"#### ${answer}$",
        f"\\boxed{{{larger}}}",
        f"so \\[ \\boxed{{ {answer} }}. \\]",
      ],
    )


def _verified(
  answers: Iterable[tuple[str, list[str]]],
) -> tuple[float, float, float]:
  """Return which part is right, which wrong one too, and comparisons a second.

  The wrong answer to a question is the right one of another question.
  """
  items = list(answers)
  num_right = num_comparisons = num_wrong = 0
  start_s = time.perf_counter()
  for expected, spellings in items:
    wrong = [
      s
      for s in spellings
      if not mathematics.score({"answer": expected}, _completion(s)).score
    ]
    num_comparisons += len(spellings)
    num_right += not wrong
    for spelling in wrong:
      _note(f"not verified: {expected[-60:]!r} as {spelling[-60:]!r}")
  per_s = num_comparisons / (time.perf_counter() - start_s)
  rng = random.Random(0)
  others = rng.sample(items, min(len(items), 1_000))
  for (expected, _), (other, spellings) in zip(
    others, others[1:] + others[:1], strict=True
  ):
    gold, answer = (
      mathematics.answer_of(x) or x.strip() for x in (expected, other)
    )
    if gold == answer:
      continue
    said = _completion(spellings[2])
    if mathematics.score({"answer": expected}, said).score:
      num_wrong += 1
      _note(f"taken as equal: {gold!r} and {answer!r}")
  return num_right / len(items), num_wrong / len(others), per_s


# -- code ---------------------------------------------------------------------


def _humaneval(folder: pathlib.Path) -> list[dict[str, Any]]:
  with gzip.open(folder / "humaneval" / "HumanEval.jsonl.gz", "rt") as file:
    return [json.loads(line) for line in file]


def _passes(task: tuple[dict[str, Any], str]) -> bool:
  row, body = task
  item = {"question": row["prompt"], "metadata": row}
  return code.score(item, _completion(body)).score == 1.0


def _code(rows: list[dict[str, Any]]) -> tuple[float, float, float]:
  """Return what passes of the right ones, of the broken ones, and tasks a s."""
  broken = ("    return None\n", '    return "wrong"\n', "    pass\n")
  with futures.ThreadPoolExecutor(_WORKERS) as pool:
    start_s = time.perf_counter()
    right = list(
      pool.map(_passes, [(r, r["canonical_solution"]) for r in rows])
    )
    per_s = len(rows) / (time.perf_counter() - start_s)
    wrong = list(pool.map(_passes, [(r, b) for b in broken for r in rows]))
  for row, passes in zip(rows, right, strict=True):
    if not passes:
      _note(f"{row['task_id']}: the canonical solution fails")
  return sum(right) / len(right), sum(wrong) / len(wrong), per_s


def _is_judged(task: tuple[code_rows.Row, bool]) -> bool:
  row, is_right = task
  said = _completion(row.right if is_right else row.wrong)
  try:
    found = code.score(row.item, said)
  except (ValueError, sandbox_lib.SandboxError) as error:
    _note(f"{row.style}: {row.item['question']!r}: {error}")
    return False
  if found.score != is_right:
    _note(f"{row.style}: scored {found.score}: {said.text}")
  return found.score == is_right


def _wrong_verdicts() -> int:
  """Return how many programs of rows in four styles are judged wrongly."""
  tasks = [(row, right) for row in code_rows.rows() for right in (True, False)]
  with futures.ThreadPoolExecutor(_WORKERS) as pool:
    return list(pool.map(_is_judged, tasks)).count(False)


def _unguarded() -> int:
  """Return how many rows with faulty tests are not refused."""
  found = 0
  for metadata in code_rows.FAULTY:
    item = {"question": "Add 1 to x.", "metadata": metadata}
    try:
      code.try_item(item)
    except ValueError:
      continue
    found += 1
    _note(f"not refused: {metadata}")
  return found


def _cases_per_s(box: sandbox_lib.Sandbox) -> float:
  """Return how many inputs of a program are judged in a second."""
  cases = [{"stdin": f"{i}", "stdout": f"{i + 1}"} for i in range(20)]
  program = "print(int(input()) + 1)"
  with futures.ThreadPoolExecutor(_WORKERS) as pool:
    start_s = time.perf_counter()
    passed = sum(
      verdict.num_passed
      for verdict in pool.map(
        lambda _: box.run_cases(program, cases), range(2 * _WORKERS)
      )
    )
    return passed / (time.perf_counter() - start_s)


def _sandboxes() -> Iterator[sandbox_lib.Sandbox]:
  """Yield all kinds of sandbox that work here."""
  for kind in (sandbox_lib.Kind.BUBBLEWRAP, sandbox_lib.Kind.UNSHARE):
    for has_user in (False, True):
      box = sandbox_lib.Sandbox(kind, has_user)
      with contextlib.suppress(sandbox_lib.SandboxError):
        if not sandbox_lib.reason_against(box):
          yield box


def _attacks(
  box: sandbox_lib.Sandbox, secret: str, port: int
) -> Iterator[tuple[str, Callable[[], sandbox_lib.Verdict]]]:
  """Yield the name of each attack, and what makes it."""
  limits = sandbox_lib.Limits(wall_s=1.5, cpu_s=2.0)
  for name in hostile_programs.PROGRAMS:
    program = hostile_programs.filled(
      name, secret=secret, port=port, sleep_s=4_321.0
    )
    yield (
      f"{name}, by tests",
      functools.partial(
        box.run_tests,
        program,
        tests=hostile_programs.TESTS,
        wanted=["f"],
        limits=limits,
      ),
    )
    yield (
      f"{name}, by cases",
      functools.partial(
        box.run_cases,
        hostile_programs.of_cases(program),
        hostile_programs.CASES,
        limits=limits,
      ),
    )
  for name, program in hostile_programs.COUNTERS.items():
    # That it has run before would be right, and is wrong.
    cases = [{"stdin": "", "stdout": f"{number}"} for number in (1, 2)]
    yield (
      f"{name}, by cases",
      functools.partial(box.run_cases, program, cases, limits=limits),
    )


def _escapes(boxes: Iterable[sandbox_lib.Sandbox]) -> tuple[int, int]:
  """Return how many attacks there were, and how many were not in vain."""
  num_attacks = num_escapes = 0
  with (
    tempfile.TemporaryDirectory() as folder,
    socket.create_server(("127.0.0.1", 0)) as server,
  ):
    secret = pathlib.Path(folder) / "secret.txt"
    secret.write_text("a secret")
    os.environ["JAXRL_TEST_SECRET"] = "a secret"
    for box in boxes:
      for name, attack in _attacks(box, str(secret), server.getsockname()[1]):
        num_attacks += 1
        try:
          has_passed = not any(attack().failures)
        except (sandbox_lib.SandboxError, sandbox_lib.TestsError) as error:
          has_passed = True
          _note(error)
        if has_passed:
          num_escapes += 1
          _note(f"{box.kind}: passed: {name}")
  return num_attacks, num_escapes


def main(_) -> None:
  folder = pathlib.Path(_DATA.value)
  box = sandbox_lib.find()
  gsm8k, gsm8k_wrong, _ = _verified(_gsm8k(folder))
  math500, math500_wrong, math_per_s = _verified(_math500(folder))
  passed, broken, code_per_s = _code(_humaneval(folder))
  boxes = list(_sandboxes())
  attacks, escapes = _escapes(boxes)
  result = {
    "humaneval_pass": passed,
    "humaneval_broken_pass": broken,
    "gsm8k_verified": gsm8k,
    "math500_verified": math500,
    "wrong_verified": max(gsm8k_wrong, math500_wrong),
    "wrong_verdicts": _wrong_verdicts() + odd_answers.wrong_verdicts(_note),
    "unguarded": _unguarded() + odd_answers.unguarded(_note),
    "code_tasks_per_s": round(code_per_s, 1),
    "math_per_s": round(math_per_s, 1),
    "cases_per_s": round(_cases_per_s(box), 1),
    "attacks": attacks,
    "escapes": escapes,
    "sandbox": str(box.kind),
    "attacked": [
      f"{one.kind}{' with a user namespace' * one.has_user}" for one in boxes
    ],
  }
  print(json.dumps(result))


if __name__ == "__main__":
  app.run(main)
