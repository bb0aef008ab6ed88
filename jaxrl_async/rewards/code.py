"""Scores of programs: unit tests and cases, run in the sandbox.

The tests come with the item, in its metadata; docs/how-to/rewards.md has its
columns. What a program returns is compared only if it is plain data; see
`sandbox_tests`.
"""

import ast
import builtins
from collections.abc import Collection, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import functools
import importlib
import math
import re
import signal
import symtable
import sys
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
_DEFINED = r"^(?:async[ \t]+)?(?:def|class)[ \t]+{}\b"
_DEFINITIONS = ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef
_FUTURE = re.compile(r"^from __future__ import [^(\n]*$", re.MULTILINE)
_PYTHON = {"py", "python", "python3"}
_CALL = re.compile(r"\w\(")  # programs have one, what they print seldom has
_SHARE_OF_TIME = 0.9  # that programs get of the time of their score
# What tests have to fail, as functions that stand for what they expect.
_WRONG = {
  "only raises": """
def wrong(*args, **kwargs): raise Exception("it does nothing else")
""",
  "returns nothing of use": """
class Useless:
  def __bool__(self): raise BaseException("it is neither true nor false")
def wrong(*args, **kwargs): return Useless()
""",
}
# What tests may replace that the program sees too.
_SEEN = ("builtins.input", "sys.stdin", "sys.stdout", "solution.input")
_SOLUTIONS = ("solution", "canonical_solution")


def program_of(
  text: str,
  setup: str = "",
  begun: str = "",
  tested: Collection[str] = (),
) -> str:
  """Return the program in a completion.

  Args:
    text: of the completion. Its last block of code is the program: preferably
      one that defines what is tested, then one of Python, then one without a
      label. A text without a block is the program itself.
    setup: what it begins with.
    begun: a definition. A text, or a block, that defines nothing that is tested
      goes on with it, up to the first line that is not indented.
    tested: names, such as that of the function that is begun.
  """
  block = None
  if begun and _BODY.match(text):
    text = _FENCE.split(text)[0]  # of the block that the question has begun
  elif (block := _block(text, tested)) is not None:
    text = block
  is_program = block is not None or _defines(text, tested)
  if not begun or (is_program and not text.lstrip("\n")[:1].isspace()):
    # The text has to be the program's beginning for these lines.
    return setup + _FUTURE.sub("", text) if setup else text
  body = []
  for line in text.split("\n"):
    if body and line.strip() and not line[0].isspace():
      break
    body.append(line)
  if text[:1].isspace():
    begun = begun.rstrip(" \t")  # the text has the indentation too
  return setup + begun + "\n".join(body) + "\n"


def _blocks(text: str) -> Iterator[tuple[str, str]]:
  """Yield the label and the text of each block, without its indentation."""
  for match in _BLOCK.finditer(text):
    label = (match[3].strip(" \t{}.").lower().split() or [""])[0]
    block = match[4]
    if indentation := match[1]:
      block = re.sub(rf"^{indentation}", "", block, flags=re.MULTILINE)
    yield label, block


def _block(text: str, tested: Collection[str]) -> str | None:
  """Return the block of a text that is the program, or None."""
  best, best_rank = None, ()
  for label, block in _blocks(text):
    rank = (
      not label or label in _PYTHON,
      _defines(block, tested),
      label in _PYTHON,
      bool(_CALL.search(block)),
    )
    if best is None or rank >= best_rank:
      best, best_rank = block, rank
  return best


def _root(entry_point: str) -> str:
  """Return the name that an entry point begins with."""
  return "".join(re.findall(r"^\w+", entry_point))


def _defines(text: str, tested: Collection[str]) -> bool:
  """Return whether a line of a program defines something that is tested."""
  if not tested:
    return False
  names = f"(?:{'|'.join(sorted(tested))})"
  return bool(
    re.search(rf"{_DEFINED.format(names)}|^{names}[ \t]*=", text, re.MULTILINE)
  )


def _begun(question: str, name: str) -> tuple[str, str]:
  """Return the program that a question begins, if it begins one.

  Args:
    question: Python source, or a text with a block of that.
    name: of the function or class that it defines last.

  Returns:
    What comes before that definition, and the definition if it lacks a body.
  """
  for source in (question, *(block for _, block in _blocks(question))):
    found = name and re.search(_DEFINED.format(name), source, re.MULTILINE)
    if not found:
      continue
    end = found.start()
    with contextlib.suppress(SyntaxError, ValueError, RecursionError):
      body = ast.parse(source[:end]).body
      # Some words are Python too, and so are tests of the program.
      if any(
        isinstance(node, ast.Expr)
        and not isinstance(node.value, ast.Constant | ast.Call)
        for node in body
      ) or re.search(r"^(from|import) solution\b", source, re.MULTILINE):
        continue
      lines = source[:end].splitlines(keepends=True)
      for node in body:
        # The program has to define it too.
        if isinstance(node, _DEFINITIONS) and _lacks_body(ast.unparse(node)):
          end = len("".join(lines[: node.lineno - 1]))
          break
      return source[:end], source[end:] * _lacks_body(source[found.start() :])
  return "", ""


def _lacks_body(begun: str) -> bool:
  """Return whether a definition is, or ends with, a function without a body."""
  try:
    node: Any = ast.parse(begun)
  except (SyntaxError, ValueError, RecursionError):
    return True
  while isinstance(node.body[-1], _DEFINITIONS):
    node = node.body[-1]
  is_function = not isinstance(node, ast.Module | ast.ClassDef)
  return is_function and all(
    isinstance(x, ast.Pass | ast.Import | ast.ImportFrom)
    or (isinstance(x, ast.Expr) and isinstance(x.value, ast.Constant))
    or (isinstance(x, ast.Raise) and "NotImpl" in ast.unparse(x))
    for x in node.body
  )


def _data_classes(tree: ast.Module, question: str) -> str:
  """Return the source of those classes of tests that programs may use.

  The question names them, and they have no methods but special ones: a node of
  a list, say. What else tests define could say what they expect.
  """
  found, imports = [], []
  for node in tree.body:
    if isinstance(node, ast.Import | ast.ImportFrom):
      names = [getattr(node, "module", None), *(x.name for x in node.names)]
      if names[names[0] is None] in sys.stdlib_module_names:
        imports.append(ast.unparse(node))
    elif (
      isinstance(node, ast.ClassDef)
      and re.search(rf"\b{node.name}\b", question)
      and all(hasattr(builtins, ast.unparse(base)) for base in node.bases)
      and all(
        re.match(r"def __\w+__\(|\w+: |__slots__|pass|['\"]", ast.unparse(own))
        for own in node.body
      )
    ):
      found.append(ast.unparse(node))
  return "\n".join([*imports, *found, ""]) if found else ""


def _names(tests: str, entry_point: str, question: str) -> set[str]:
  """Return the names that tests take from the program.

  Those are the entry point, and what the tests use without having it and the
  question speaks of. Without an entry point, nobody can tell what it is.
  What Python's library has, as isclose in isclose(f(1), 2), is a forgotten
  import, unless it is all that the tests use. A program could define it so
  that everything is close.
  """
  tables = [symtable.symtable(tests, "tests.py", "exec")]
  own = {
    x.get_name()
    for x in tables[0].get_symbols()
    if x.is_assigned() or x.is_imported()
  }
  used = set()
  for table in tables:  # it grows
    tables += table.get_children()
    used |= {x.get_name() for x in table.get_symbols() if x.is_global()}
  used -= own | {*vars(builtins), "__file__"}
  names = used - _of_library() if used - _of_library() else used
  root = _root(entry_point)
  if root:
    names = {root} | names.intersection(re.findall(r"\w+", question))
  return names


@functools.cache
def _of_library() -> set[str]:
  """Return the modules of Python's library, and what is used of them most."""
  modules = (
    "bisect collections copy datetime decimal fractions functools heapq"
    " itertools math operator random re statistics string typing unittest"
  ).split()
  common = (dir(importlib.import_module(name)) for name in modules)
  others = {"np", "numpy", "pd", "pandas", "pytest", "approx", "allclose"}
  return others.union(sys.stdlib_module_names, *common)


def _unseen(tree: ast.Module) -> str:
  """Return what tests replace by mocks and programs do not see, or nothing."""
  for call in ast.walk(tree):
    if not isinstance(call, ast.Call):
      continue
    function, *args = map(ast.unparse, (call.func, *call.args))
    if re.search(r"\bpatch(\.\w+)?$", function) and args:
      name = ".".join(arg.strip("'") for arg in args[:2])
      if not function.endswith("patch.object"):
        name = args[0].strip("'")
      if name not in _SEEN and not name.startswith("__main__."):
        return name
  return ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Task:
  """How programs of an item are tested: by tests or by cases.

  Attributes:
    tests: Python source, or nothing.
    cases: each with stdin and stdout.
    entry_point: what is tested.
    defined: the function or class that programs define.
    setup: what programs and tests begin with.
    begun: a definition that programs go on with.
    names: that tests take from the program.
    unseen: what tests replace and a program would not see.
  """

  tests: str
  cases: Sequence[Mapping[str, str]]
  entry_point: str
  defined: str
  setup: str
  begun: str
  names: set[str]
  unseen: str

  def program_of(self, text: str) -> str:
    """Return the program in a completion."""
    tested = {self.defined} if self.defined else self.names
    return program_of(text, self.setup, self.begun, tested)

  def verdict(
    self,
    program: str,
    *,
    timeout_s: float = 5.0,
    memory_mb: int = 512,
    sandbox: str = "safe",
    not_plain_fails: bool = False,  # is of the score
  ) -> sandbox_lib.Verdict:
    """Run the tests of a program, within the time of its score."""
    if self.unseen:
      raise sandbox_lib.TestsError(
        f"its tests replace {self.unseen:.80}, which a program would not see"
      )
    box = sandbox_lib.find(allow_unsafe=sandbox == "unsafe")
    limits = sandbox_lib.Limits(
      wall_s=timeout_s, cpu_s=timeout_s, memory_bytes=memory_mb * 2**20
    )
    total_s = _time_of_score() * _SHARE_OF_TIME
    if self.cases:
      return box.run_cases(program, self.cases, limits=limits, total_s=total_s)
    return box.run_tests(
      program,
      tests=self.tests,
      entry_point=self.entry_point,
      wanted=self.names,
      setup=self.setup,
      limits=limits,
      total_s=total_s,
    )


def _text(metadata: Mapping[str, Any], *names: str) -> str:
  """Return the first column that is there, as a text."""
  found = next(filter(None, map(metadata.get, names)), "")
  if isinstance(found, list | tuple) and all(isinstance(x, str) for x in found):
    found = "\n".join(found)
  if not isinstance(found, str):
    raise ValueError(
      f"its {names[0]} {'are' if names[0][-1] == 's' else 'is'}"
      f" {found!r:.40}, no text or list of texts"
    )
  return found


def _task(item: Mapping[str, Any]) -> _Task:
  """Return how programs of an item are tested.

  Raises:
    ValueError: it has no tests, or they are not what tests are.
  """
  metadata = item.get("metadata", {})
  tests = _text(metadata, "tests", "test")
  entry_point = _text(metadata, "entry_point").strip()
  setup = _text(metadata, "setup")
  question = str(item.get("question", ""))
  try:
    tree = ast.parse(tests)
    # Either the entry point or what the question defines last.
    last = re.findall(
      _DEFINED.format(r"(?!test|Test|check)(\w+)"), question, re.MULTILINE
    )[-1:]
    defined = _root(entry_point) or "".join(last)
    before, begun = _begun(question, defined)
    parts = [setup, before, _data_classes(tree, question)]
    names = _names(tests, entry_point, question)
  except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
    raise ValueError(f"its tests are no Python: {error}") from error
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
      " (docs/how-to/rewards.md)"
    )
  return _Task(
    tests=tests,
    cases=cases,
    entry_point=entry_point,
    defined=defined,
    setup="".join(f"{part.rstrip()}\n\n\n" for part in parts if part.strip()),
    begun="" if cases else begun,  # a script is no body of a function
    names=names,
    unseen=_unseen(tree) if "mock" in tests else "",
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
  endless = 0
  for kind, wrong in _WRONG.items():
    names = "\n".join(f"{name} = wrong" for name in sorted(task.names))
    program = f"{task.setup}{wrong}{names}"
    failures = task.verdict(program, **params).failures
    if not any(failures):
      raise ValueError(f"its tests pass a program that {kind}")
    endless += sandbox_lib.OUT_OF_TIME in failures
  found = [(name, item["metadata"].get(name)) for name in _SOLUTIONS]
  solutions = {name: x for name, x in found if x and isinstance(x, str)}
  if endless == len(_WRONG) and not solutions:
    raise ValueError(
      "its tests take too long by themselves: they do not end where the"
      " program only raises, and there is no solution to show that they can"
    )
  for name, solution in solutions.items():
    program = task.program_of(solution)
    if failures := list(filter(None, task.verdict(program, **params).failures)):
      raise ValueError(f"its own {name} fails its tests: {failures[0]}")


class NotPlainError(RuntimeError):
  """Tests compare an object that only the program could compare."""


def _time_of_score() -> float:
  """Return the seconds until `scoring` interrupts this score.

  A program that takes as long has failed. Without this bound it would be the
  score that fails, and with some of those in a row the run.
  """
  return signal.getitimer(signal.ITIMER_REAL)[0] or math.inf


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
  program = task.program_of(completion.text)
  verdict = task.verdict(
    program, timeout_s=timeout_s, memory_mb=memory_mb, sandbox=sandbox
  )
  share = verdict.num_passed / len(verdict.failures)
  parts = {"passed": share}
  if not task.cases:
    is_lost = not verdict.is_plain and share < 1.0
    if is_lost and not_plain_fails:
      raise NotPlainError(verdict.failures[0])
    parts["not_plain"] = float(is_lost)
  return Reward(score=float(share == 1.0), parts=parts, answer=program)
