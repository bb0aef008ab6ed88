"""Scores of programs: unit tests and cases, run in the sandbox.

The tests come with the item, in its metadata:

    tests        Python source that raises where the program is wrong. It may
                 define `check(candidate)`, as HumanEval's tests do
    entry_point  name of the function that the tests call
    cases        or a list of {"stdin": ..., "stdout": ...}

A program may call the functions of its own process only with plain data; see
`sandbox`.
"""

import ast
from collections.abc import Mapping
import contextlib
import math
import re
import signal
from typing import Any

from jaxrl_async.rewards import sandbox as sandbox_lib
from jaxrl_async.types import Completion, Reward

_BLOCK = re.compile(r"```([^\n`]*)\n(.*?)(?:```|\Z)", re.DOTALL)
_LABELS = {"", "py", "python", "python3"}
_SHARE_OF_TIME = 0.9  # that programs get of the time of their score


def program_of(text: str, prompt: str = "", entry_point: str = "") -> str:
  """Return the program in a completion.

  Args:
    text: of the completion. Its last block of code is the program: the last
      one without a label or of Python, if there is one. A text without a block
      is the program itself.
    prompt: the beginning of a program. It is completed by a text without a
      block, up to the first line that is not indented; and it precedes a block
      that uses what it defines.
    entry_point: the function that the prompt begins.
  """
  blocks = _BLOCK.findall(text)
  if blocks:
    python = [
      block for label, block in blocks if label.strip().lower() in _LABELS
    ]
    block = python[-1] if python else blocks[-1][1]
    return _without(prompt, entry_point) + block
  if not prompt:
    return text
  lines = text.split("\n")
  if entry_point and re.match(rf"\s*def\s+{re.escape(entry_point)}\b", text):
    return _without(prompt, entry_point) + text
  body = []
  for line in lines:
    if body and line.strip() and not line[0].isspace():
      break
    body.append(line)
  return prompt + "\n".join(body) + "\n"


def _begins(question: str, entry_point: str) -> bool:
  """Return whether a question is Python source that begins a function."""
  if not re.search(rf"\bdef\s+{re.escape(entry_point)}\b", question):
    return False
  # A function may lack its body, or have a docstring alone.
  for source in (question, f"{question.rstrip()}\n    pass\n"):
    with contextlib.suppress(SyntaxError, ValueError, RecursionError):
      ast.parse(source)
      return True
  return False


def check_item(item: Mapping[str, Any]) -> None:
  """Check that programs can be tested with an item.

  Raises:
    ValueError: it has no tests, or one of its cases is not what a case is.
  """
  metadata = item.get("metadata", {})
  if "cases" not in metadata:
    if not (metadata.get("tests") or metadata.get("test")):
      raise ValueError(
        "it has no tests; its data needs a column tests, test or cases"
        " (docs/rewards.md)"
      )
    return
  cases = metadata["cases"]
  if not isinstance(cases, list | tuple) or not cases:
    raise ValueError(f"metadata.cases is {cases!r:.40}, no list of cases")
  for i, case in enumerate(cases):
    for key in ("stdin", "stdout"):
      if not isinstance(case, Mapping) or not isinstance(case.get(key), str):
        raise ValueError(
          f"metadata.cases[{i}] has no text as {key!r}; a case is"
          ' {"stdin": TEXT, "stdout": TEXT}'
        )


def _time_of_score() -> float:
  """Return the seconds until `scoring` interrupts this score.

  A program that takes as long has failed. Without this bound it would be the
  score that fails, and with some of those in a row the run.
  """
  return signal.getitimer(signal.ITIMER_REAL)[0] or math.inf


def _without(prompt: str, entry_point: str) -> str:
  """Return what comes before the definition of a function."""
  found = re.search(rf"^def\s+{re.escape(entry_point)}\b", prompt, re.MULTILINE)
  return prompt[: found.start()] if entry_point and found else ""


def score(
  item: Mapping[str, Any],
  completion: Completion,
  *,
  timeout_s: float = 5.0,
  memory_mb: int = 512,
  sandbox: str = "safe",
) -> Reward:
  """Score 1 if the completion's program passes all tests of its item.

  The part "passed" is the share of the cases that passed. With tests that is
  the score itself.

  Args:
    item: its metadata has the tests; its question is the beginning of the
      program if it is Python source.
    completion: has the program.
    timeout_s: for all tests together, or for each case. After a case that took
      longer the others are not run, and count as failed. So do those for which
      the score itself has no time left.
    memory_mb: that each of the program's processes may use.
    sandbox: "unsafe" runs programs without a sandbox where none can be made.

  Raises:
    SandboxError: a sandbox cannot be made.
    ValueError: the item has no tests, or its cases are not what they should be.
  """
  check_item(item)
  metadata = item["metadata"]
  box = sandbox_lib.find(allow_unsafe=sandbox == "unsafe")
  total_s = _time_of_score() * _SHARE_OF_TIME
  limits = sandbox_lib.Limits(
    wall_s=min(timeout_s, total_s),
    cpu_s=timeout_s,
    memory_bytes=memory_mb * 2**20,
  )
  entry_point = str(metadata.get("entry_point", ""))
  question = str(item["question"])
  is_begun = bool(entry_point) and _begins(question, entry_point)
  prompt = question if is_begun else ""
  program = program_of(completion.text, prompt, entry_point)
  if "cases" in metadata:
    cases = metadata["cases"]
    verdict = box.run_cases(
      program, cases, stop_early=False, limits=limits, total_s=total_s
    )
    share = verdict.num_passed / len(cases)
    return Reward(
      score=float(share == 1.0), parts={"passed": share}, answer=program
    )
  tests = str(metadata.get("tests") or metadata["test"])
  if "def check(" in tests and entry_point:
    tests += f"\ncheck({entry_point})\n"
  verdict = box.run_tests(
    program,
    tests=tests,
    functions=[entry_point] if entry_point else None,
    setup=_without(prompt, entry_point),
    limits=limits,
  )
  passed = float(verdict.num_passed)
  return Reward(score=passed, parts={"passed": passed}, answer=program)
