"""Scores of programs: unit tests and cases, run in the sandbox.

The tests come with the item, in its metadata:

    tests        Python source that raises where the program is wrong, or a list
                 of such texts. It may define test functions, classes of
                 unittest, or `check(candidate)`, as HumanEval's tests do
    entry_point  what is tested: the name of a function or of a class, or an
                 expression such as Solution().f; `check` is called with it
    cases        or a list of {"stdin": ..., "stdout": ...}

What a program returns is compared only if it is plain data; see
`sandbox_tests`.
"""

import ast
from collections.abc import Collection, Mapping, Sequence
import contextlib
import dataclasses
import math
import re
import signal
from typing import Any

from jaxrl_async.rewards import sandbox as sandbox_lib
from jaxrl_async.types import Completion, Reward

# A block between fences, with the spaces before the first one if there is
# nothing else before it.
_BLOCK = re.compile(
  r"(^[ \t]*)?(?<!`)(`{3,}+|~{3,}+)([^\n`]*)\n(.*?)(?:\2|\Z)",
  re.DOTALL | re.MULTILINE,
)
_FENCE = re.compile(r"^[ \t]*(?:```|~~~)", re.MULTILINE)
_BODY = re.compile(r"\n*(?: {2}|\t)[ \t]*[^\s`~]")  # of a function
_FUTURE = re.compile(r"^from __future__ import [^(\n]*$", re.MULTILINE)
_PYTHON = {"py", "python", "python3"}
_CALL = re.compile(r"\w\(")  # programs have one, what they print seldom has
_SHARE_OF_TIME = 0.9  # that programs get of the time of their score
# What tests have to fail, as functions that stand for what they expect.
_WRONG = {
  "only raises": """
def wrong(*args, **kwargs): raise BaseException("it does nothing else")
""",
  "returns nothing of use": """
class Useless:
  def __bool__(self): raise BaseException("it is neither true nor false")
def wrong(*args, **kwargs): return Useless()
""",
}
_SOLUTIONS = ("solution", "canonical_solution")


def program_of(text: str, prompt: str = "", entry_point: str = "") -> str:
  """Return the program in a completion.

  Args:
    text: of the completion. Its last block of code is the program: preferably
      one that defines the entry point, then one of Python, then one without a
      label. A text without a block is the program itself.
    prompt: the beginning of a program. It is completed by a text, or a block,
      that does not define the entry point, up to the first line that is not
      indented; and it precedes one that does, and uses what it defines.
    entry_point: what is tested, such as the function that the prompt begins.
  """
  block = None
  if prompt and _BODY.match(text):
    text = _FENCE.split(text)[0]  # of the block that the prompt has begun
  elif (block := _block(text, entry_point)) is not None:
    text = block
  if not prompt:
    return text
  is_program = block is not None or _defines(text, entry_point)
  if is_program and not text.lstrip("\n")[:1].isspace():
    # The text has to be the program's beginning for these lines.
    return _without(prompt, entry_point) + _FUTURE.sub("", text)
  body = []
  for line in text.split("\n"):
    if body and line.strip() and not line[0].isspace():
      break
    body.append(line)
  return prompt + "\n".join(body) + "\n"


def _block(text: str, entry_point: str) -> str | None:
  """Return the block of a text that is the program, or None."""
  best, best_rank = None, ()
  for match in _BLOCK.finditer(text):
    label = (match[3].strip(" \t{}.").lower().split() or [""])[0]
    block = match[4]
    if indentation := match[1]:
      block = re.sub(rf"^{indentation}", "", block, flags=re.MULTILINE)
    rank = (
      not label or label in _PYTHON,
      _defines(block, entry_point),
      label in _PYTHON,
      bool(_CALL.search(block)),
    )
    if best is None or rank >= best_rank:
      best, best_rank = block, rank
  return best


def _root(entry_point: str) -> str:
  """Return the name that an entry point begins with."""
  return "".join(re.findall(r"^\w+", entry_point))


def _defines(text: str, entry_point: str) -> bool:
  """Return whether a line of a program defines the entry point."""
  if not (name := _root(entry_point)):
    return False
  return bool(
    re.search(
      rf"^(?:(?:async[ \t]+)?def[ \t]+|class[ \t]+){name}\b|^{name}[ \t]*=",
      text,
      re.MULTILINE,
    )
  )


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Task:
  """How programs of an item are tested: by tests or by cases."""

  tests: str
  entry_point: str
  cases: Sequence[Mapping[str, str]]
  question: str

  @property
  def function(self) -> str:
    """The function that the question begins, if it begins one."""
    defined = re.findall(r"^def\s+(\w+)", self.question, re.MULTILINE)
    return self.entry_point or "".join(defined[-1:])

  @property
  def prompt(self) -> str:
    """The beginning of the program, if the question is that."""
    is_begun = self.function and _begins(self.question, self.function)
    return self.question if is_begun else ""

  def program_of(self, text: str) -> str:
    """Return the program in a completion."""
    return program_of(text, self.prompt, self.function)

  def verdict(
    self,
    program: str,
    box: sandbox_lib.Sandbox,
    limits: sandbox_lib.Limits,
    total_s: float,
  ) -> sandbox_lib.Verdict:
    """Run the tests of a program."""
    if self.cases:
      return box.run_cases(
        program, self.cases, stop_early=False, limits=limits, total_s=total_s
      )
    wanted = self.wanted()
    return box.run_tests(
      program,
      tests=self.tests,
      entry_point=self.entry_point,
      functions=wanted,
      expected=self.expected(wanted),
      setup=_without(self.prompt, self.function),
      limits=limits,
      total_s=total_s,
    )

  def wanted(self) -> set[str]:
    """Return the names that tests may take from the program.

    What they do not import, as `math` in math.isclose(f(1), 2), is not among
    them: a program could define it so that everything is close.
    """
    tree = ast.parse(self.tests)
    owners = {
      id(node.value)
      for node in ast.walk(tree)
      if isinstance(node, ast.Attribute)
    }
    names = {
      node.id
      for node in ast.walk(tree)
      if isinstance(node, ast.Name)
      and (id(node) not in owners or node.id[0].isupper())
    }
    return names | {_root(self.entry_point)} - {""}

  def expected(self, wanted: Collection[str]) -> set[str]:
    """Return those of the names that a program is at fault not to define.

    Those are the entry point and what the question speaks of. Without an entry
    point nobody can tell.
    """
    if not self.entry_point:
      return set(wanted)
    said = {_root(self.entry_point), *re.findall(r"\w+", self.question)}
    return said.intersection(wanted)


def _task(item: Mapping[str, Any]) -> _Task:
  """Return how programs of an item are tested.

  Raises:
    ValueError: it has no tests, or they are not what tests are.
  """
  metadata = item.get("metadata", {})
  tests = metadata.get("tests") or metadata.get("test") or ""
  if isinstance(tests, list | tuple) and all(isinstance(x, str) for x in tests):
    tests = "\n".join(tests)
  if not isinstance(tests, str):
    raise ValueError(f"its tests are {tests!r:.40}, no text or list of texts")
  try:
    ast.parse(tests)
  except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
    raise ValueError(f"its tests are no Python: {error}") from error
  entry_point = metadata.get("entry_point") or ""
  if not isinstance(entry_point, str):
    raise ValueError(f"its entry_point is {entry_point!r:.40}, no text")
  cases = metadata.get("cases") or ()
  if not isinstance(cases, list | tuple):
    raise ValueError(f"metadata.cases is {cases!r:.40}, no list of cases")
  for i, case in enumerate(cases):
    for key in ("stdin", "stdout"):
      if not isinstance(case, Mapping) or not isinstance(case.get(key), str):
        raise ValueError(
          f"metadata.cases[{i}] has no text as {key!r}; a case is"
          ' {"stdin": TEXT, "stdout": TEXT}'
        )
  if bool(tests.strip()) == bool(cases):
    found = "both tests and cases" if cases else "no tests"
    raise ValueError(
      f"it has {found}; its data needs a column tests, test or cases"
      " (docs/rewards.md)"
    )
  return _Task(
    tests=tests,
    entry_point=entry_point.strip(),
    cases=cases,
    question=str(item.get("question", "")),
  )


def check_item(item: Mapping[str, Any]) -> None:
  """Check that programs can be tested with an item, without running any.

  Raises:
    ValueError: it has no tests, or they are not what tests are.
  """
  _task(item)


def try_item(item: Mapping[str, Any], **params: Any) -> None:
  """Run the tests of an item on a wrong program, and on its solution.

  Args:
    item: its metadata may have a solution.
    **params: of `score`.

  Raises:
    SandboxError: a sandbox cannot be made.
    ValueError: its tests pass what is wrong, or fail what is right.
  """
  task = _task(item)
  settings = _Settings(**params)
  names = sorted(task.expected(task.wanted()))
  for kind, wrong in _WRONG.items():
    program = wrong + "\n".join(f"{name} = wrong" for name in names)
    if not any(settings.verdict(task, program).failures):
      raise ValueError(f"its tests pass a program that {kind}")
  for name in _SOLUTIONS:
    solution = item["metadata"].get(name)
    if not solution or not isinstance(solution, str):
      continue
    program = task.program_of(solution)
    if failures := list(filter(None, settings.verdict(task, program).failures)):
      raise ValueError(f"its own {name} fails its tests: {failures[0]}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Settings:
  """The parameters of `score`."""

  timeout_s: float = 5.0
  memory_mb: int = 512
  sandbox: str = "safe"
  not_plain_fails: bool = False

  def verdict(self, task: _Task, program: str) -> sandbox_lib.Verdict:
    """Run the tests of a program, within the time of this score."""
    box = sandbox_lib.find(allow_unsafe=self.sandbox == "unsafe")
    limits = sandbox_lib.Limits(
      wall_s=self.timeout_s,
      cpu_s=self.timeout_s,
      memory_bytes=self.memory_mb * 2**20,
    )
    total_s = _time_of_score() * _SHARE_OF_TIME
    return task.verdict(program, box, limits, total_s)


class NotPlainError(RuntimeError):
  """Tests compare an object that only the program could compare."""


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
  not_plain_fails: bool = False,
) -> Reward:
  """Score 1 if the completion's program passes all tests of its item.

  The part "passed" is the share of the cases that passed. With tests that is
  the score itself, and the part "not_plain" is 1 if they failed because they
  compare an object of the program, which nobody but the program could do.

  Args:
    item: its metadata has the tests; its question is the beginning of the
      program if it is Python source.
    completion: has the program.
    timeout_s: for all tests together, or for each case. After a case that took
      longer the others are not run, and count as failed. So do those for which
      the score itself has no time left.
    memory_mb: that each of the program's processes may use.
    sandbox: "unsafe" runs programs without a sandbox where none can be made.
    not_plain_fails: it is a failure, and no score, if the part "not_plain"
      would be 1.

  Raises:
    NotPlainError: tests compare an object of the program, and may not.
    SandboxError: a sandbox cannot be made.
    ValueError: the item has no tests, or they do not test a program.
  """
  task = _task(item)
  settings = _Settings(
    timeout_s=timeout_s,
    memory_mb=memory_mb,
    sandbox=sandbox,
    not_plain_fails=not_plain_fails,
  )
  program = task.program_of(completion.text)
  verdict = settings.verdict(task, program)
  share = verdict.num_passed / len(verdict.failures)
  parts = {"passed": share}
  if not task.cases:
    is_lost = not verdict.is_plain and share < 1.0
    if is_lost and not_plain_fails:
      raise NotPlainError(verdict.failures[0])
    parts["not_plain"] = float(is_lost)
  return Reward(score=float(share == 1.0), parts=parts, answer=program)
