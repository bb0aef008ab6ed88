"""Scores of programs: unit tests and cases, run in the sandbox.

The tests come with the item, in its metadata:

    tests        Python source that raises where the program is wrong. It may
                 define `check(candidate)`, as HumanEval's tests do
    entry_point  name of the function that the tests call
    cases        or a list of {"stdin": ..., "stdout": ...}

A program may call the functions of its own process only with plain data; see
`sandbox`.
"""

from collections.abc import Mapping
import re
from typing import Any

from jaxrl_async.rewards import sandbox as sandbox_lib
from jaxrl_async.types import Completion, Reward

_BLOCK = re.compile(
  r"```[ \t]*(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL
)


def program_of(text: str, prompt: str = "", entry_point: str = "") -> str:
  """Return the program in a completion.

  Args:
    text: of the completion. Its last block of code is the program. A text
      without such a block is the program itself.
    prompt: the beginning of a program. It is completed by a text without a
      block, up to the first line that is not indented; and it precedes a block
      that uses what it defines.
    entry_point: the function that the prompt begins.
  """
  blocks = _BLOCK.findall(text)
  if blocks:
    return _without(prompt, entry_point) + blocks[-1]
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
    timeout_s: for all tests together, or for each case.
    memory_mb: that each of the program's processes may use.
    sandbox: "unsafe" runs programs without a sandbox where none can be made.

  Raises:
    SandboxError: there is no sandbox.
  """
  metadata = item["metadata"]
  box = sandbox_lib.find(allow_unsafe=sandbox == "unsafe")
  limits = sandbox_lib.Limits(
    wall_s=timeout_s, cpu_s=timeout_s, memory_bytes=memory_mb * 2**20
  )
  entry_point = str(metadata.get("entry_point", ""))
  question = str(item["question"])
  is_begun = bool(entry_point) and f"def {entry_point}" in question
  prompt = question if is_begun else ""
  program = program_of(completion.text, prompt, entry_point)
  if "cases" in metadata:
    cases = metadata["cases"]
    verdict = box.run_cases(program, cases, stop_early=False, limits=limits)
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
    setup=prompt,
    limits=limits,
  )
  passed = float(verdict.num_passed)
  return Reward(score=passed, parts={"passed": passed}, answer=program)
