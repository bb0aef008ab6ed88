"""Verdicts on programs, and errors of the rows that have their tests."""

import functools
import time

import numpy as np
import pytest

from jaxrl_async import types
from jaxrl_async.config import sections
from jaxrl_async.rewards import code
from jaxrl_async.rewards import reward_terms
from jaxrl_async.rewards import sandbox as sandbox_lib
from jaxrl_async.rewards import scoring
from jaxrl_async.rewards import term as term_lib

pytestmark = pytest.mark.sandbox

RIGHT = "def f(x):\n  return x + 1\n"
WRONG = "def f(x):\n  return x\n"
ASSERT = "assert f(1) == 2"


def completion(text):
  return types.Completion(
    text=text,
    turns=(),
    tokens=np.zeros((1,), np.int32),
    finish_reason=types.FinishReason.EOS,
  )


def reward(program, question="Write it.", **metadata):
  item = {"question": question, "metadata": metadata}
  return code.score(item, completion(f"```python\n{program}\n```"))


def score(program, question="Write it.", **metadata):
  return reward(program, question, **metadata).score


UNITTEST = """
import unittest
class Tests(unittest.TestCase):
  def setUp(self): self.one = 1
  def test_f(self): self.assertEqual(f(self.one), 2)
"""


@pytest.mark.parametrize(
  "metadata",
  [
    {"tests": ASSERT},
    {"tests": [ASSERT, "assert f(2) == 3"]},
    {"tests": "def test_f(): assert f(1) == 2"},
    {"tests": "async def test_f(): assert f(1) == 2"},
    {"tests": "class TestF:\n  def test_f(self): assert f(1) == 2"},
    {"tests": UNITTEST},
    {"tests": f"{UNITTEST}\nif __name__ == '__main__': unittest.main()"},
    {"tests": f"if __name__ == '__main__': {ASSERT[:6]} f(1) == 2"},
    {"tests": "from solution import f as g\nassert g(1) == 2"},
    {"tests": "import solution\nassert solution.f(1) == 2"},
    {"tests": "def check(c): assert c(1) == 2", "entry_point": "f"},
    {"tests": "if f(1) != 2: exit(1)"},
    {"tests": ASSERT, "entry_point": None},
    {"tests": ASSERT, "cases": None},
    {"tests": ASSERT, "cases": []},
    {"tests": None, "test": ASSERT},
  ],
)
def test_tests_of_every_form_tell_right_from_wrong(metadata):
  assert score(RIGHT, **metadata) == 1.0
  assert score(WRONG, **metadata) == 0.0


@pytest.mark.parametrize(
  ("metadata", "message"),
  [
    ({"tests": '["assert f(1) == 2"]'}, "do not call the program"),
    ({"tests": '{"inputs": [1], "outputs": [2]}'}, "do not call the program"),
    ({"tests": "def check(c): assert c(1) == 2"}, "do not call the program"),
    ({"tests": "def test_f(g): assert g(1) == 2"}, "test_f needs g"),
    ({"tests": "import unittest"}, "do not call the program"),
    ({"tests": "x = 1"}, "do not call the program"),
    ({"tests": "def test_f(): return f(1) == 2"}, "has to assert it"),
    ({"tests": {"f": 1}}, "no text or list of texts"),
    ({"tests": [1, 2]}, "no text or list of texts"),
    ({"tests": 1.5}, "no text or list of texts"),
    ({"tests": None}, "no tests"),
    ({"tests": " \n", "cases": []}, "no tests"),
    (
      {"tests": ASSERT, "cases": [{"stdin": "", "stdout": ""}]},
      "both tests and cases",
    ),
    ({"tests": ASSERT, "entry_point": 3}, "its entry_point is 3"),
    ({"tests": "assert f(1) = 2"}, "its tests are no Python"),
    ({"tests": ASSERT, "entry_point": "f("}, "its tests are wrong: SyntaxE"),
    ({"tests": f"import numpy\n{ASSERT}"}, "No module named 'numpy'"),
    ({"tests": f"from numpy import array\n{ASSERT}"}, "No module named"),
    (
      {"tests": f"import pytest\n@pytest.fixture\ndef g(): pass\n{ASSERT}"},
      "no attribute 'fixture'",
    ),
    ({"tests": ASSERT, "setup": "import numpy"}, "No module named 'numpy'"),
    ({"tests": ASSERT, "setup": "def g("}, "its tests are wrong: SyntaxE"),
    (
      {"tests": f"import unittest.mock\nmock.patch('time.time')\n{ASSERT}"},
      "its tests replace time.time, which a program would not see",
    ),
    (
      {"tests": "from unittest.mock import Mock\nf(Mock())"},
      "a Mock cannot be sent to the program",
    ),
    ({"tests": "assert math.isclose(f(1), 2)"}, "name 'math' is not defined"),
    (
      {"tests": "assert isclose(f(1), 2)", "entry_point": "f"},
      "name 'isclose' is not defined",
    ),
    ({"tests": f"{{}}['x']\n{ASSERT}"}, "KeyError: 'x'"),
    ({"tests": "assert 1 == 2"}, "assertion failed"),
    ({"tests": "f(object())"}, "a object cannot be sent to the program"),
  ],
)
@pytest.mark.parametrize("program", [RIGHT, WRONG], ids=["right", "wrong"])
def test_tests_that_test_nothing_or_are_wrong_are_an_error(
  metadata, message, program
):
  with pytest.raises(ValueError) as raised:
    score(program, **metadata)
  assert message in str(raised.value)


@pytest.mark.parametrize(
  ("program", "metadata"),
  [
    ("def g(x): return x + 1", {"tests": ASSERT}),
    ("def g(x): return x + 1", {"tests": ASSERT, "entry_point": "f"}),
    ("def f(x): return x +", {"tests": ASSERT}),
    ("raise ValueError", {"tests": ASSERT}),
    ("import numpy\ndef f(x): return x + 1", {"tests": ASSERT}),
    ("def f(x): return y", {"tests": ASSERT}),
    ("def f(x): import numpy", {"tests": ASSERT}),
    ("exit()", {"tests": ASSERT}),
    ("def f(x): exit()", {"tests": ASSERT}),
    ("def g(x): pass", {"tests": "import solution\nsolution.f(1)"}),
    ("def g(x): pass", {"tests": "from solution import f\nf(1)"}),
    ("f = 2", {"tests": ASSERT}),
    ("f = object()", {"tests": ASSERT}),
    ("def DATA(): pass", {"tests": "for x in DATA: f(x)"}),
    (
      "async def f(x): return x\ndef g(x): return x",
      {"tests": "assert g(f(1)) == 1"},
    ),
    ("def f(x): return None", {"tests": "assert f(1)['a'] == 2"}),
    ("N = 2", {"tests": "assert N == 3\nassert f(1) == 2"}),
    (RIGHT, {"tests": f"{ASSERT}\nassert g(1) == 2"}),
    (
      "def f(x): raise ImportError('x', name='y')",
      {"tests": ASSERT, "entry_point": "f"},
    ),
  ],
)
def test_faults_of_a_program_are_its_own(program, metadata):
  assert score(program, **metadata) == 0.0


def test_a_name_of_the_question_is_one_that_the_program_has_to_define():
  tests = {"tests": "assert f(1) == 2\nassert g(1) == 3", "entry_point": "f"}
  both = f"{RIGHT}\ndef g(x): return x + 2"
  assert score(both, "Write f(x) and g(x).", **tests) == 1.0
  assert score(RIGHT, "Write f(x) and g(x).", **tests) == 0.0
  for program in RIGHT, both:  # which may have guessed it
    with pytest.raises(sandbox_lib.TestsError, match="'g' is not defined"):
      score(program, "Write f(x).", **tests)


SOLUTION = "class Solution:\n  def f(self, x): return x + {}"
NODE = """
class Node:
  def __init__(self, value, next=None): self.value, self.next = value, next
def listed(node): return [node.value, *listed(node.next)] if node else []
"""
NEXT = "def f(n):\n  for i in range({}): yield i"
LOOP = "def f():\n  i = {}\n  while True:\n    yield i\n    i += 1"
REVERSED = """
def f(node):
  last = None
  while node{}: node.next, last, node = last, node, node.next
  return last
"""
ERRORS = """
class Bad(Exception): pass
class Worse(Bad):
  def __init__(self, n):
    self.n = n
    super().__init__("worse")
def f(): raise {}
"""
CAUGHT = """
try: f()
except Bad as error: assert error.n == 3 and str(error) == "worse"
else: assert False
"""
STACK = """
class Stack:
  def __init__(self, items=()): self.items = list(items)
  def push(self, x):
    self.items.append(x)
    return self
  def pop(self): return self.items.pop({})
  def __len__(self): return len(self.items)
  def __iter__(self): return iter(self.items)
  def __getitem__(self, i): return self.items[i]
  def __add__(self, other): return Stack(self.items + other.items)
"""
STACKED = """
s = Stack()
assert s.push(1).push(2).push(3) is s
assert len(s) == 3 and s[0] == 1 and s[1:] == [2, 3] and 2 in s and 5 not in s
assert list(s + s) == 2 * [1, 2, 3]
assert isinstance(s, Stack) and not isinstance(1, Stack)
assert s.pop() == 3 and s.items == [1, 2]
"""


# What a program has, what makes it right and wrong, and its tests.
@pytest.mark.parametrize(
  ("program", "right", "wrong", "tests"),
  [
    (SOLUTION, "1", "2", "assert Solution().f(1) == 2"),
    (SOLUTION, "1", "2", "s = Solution()\nassert s.f(1) == 2"),
    (
      "class Solution:\n  def f(self, x: List[int]) -> int: return x[{}]",
      "0",
      "1",
      "assert Solution().f([1, 2]) == 1",
    ),
    ("f = lambda x: x + {}", "1", "2", ASSERT),
    ("def g(x): return x + {}\nf = g", "1", "2", ASSERT),
    (
      "import functools\nf = functools.partial(max, {})",
      "2",
      "3",
      ASSERT,
    ),
    (
      "async def f(x): return x + {}",
      "1",
      "2",
      "import asyncio\nassert asyncio.run(f(1)) == 2",
    ),
    (
      "async def f(x): return x + {}",
      "1",
      "2",
      "async def test(): assert await f(1) == 2",
    ),
    (
      "from collections import Counter\nf = lambda x: Counter(x + {!r})",
      "",
      "a",
      "assert f('aab') == {'a': 2, 'b': 1} and f('')['c'] == 0\n"
      "assert f('aab').most_common(1) == [('a', 2)]",
    ),
    (
      "from collections import defaultdict\ndef f(x):\n"
      "  d = defaultdict(list)\n  d[x].append({})\n  return d",
      "1",
      "2",
      "assert f(1) == {1: [1]} and f(1)[3] == []",
    ),
    (
      "from collections import OrderedDict\n"
      "f = lambda x: OrderedDict([(x, {}), (2, 3)])",
      "1",
      "2",
      "assert f(1) == {1: 1, 2: 3} and list(f(1)) == [1, 2]",
    ),
    (
      "from collections import namedtuple\nP = namedtuple('P', 'a b')\n"
      "f = lambda x: P(x, {})",
      "2",
      "3",
      "assert f(1) == (1, 2) and f(1).b == 2 and f(1) == P(1, 2)",
    ),
    (
      "from typing import NamedTuple\nclass P(NamedTuple):\n  a: int\n"
      "f = lambda x: [P(x + {})]",
      "1",
      "2",
      "assert f(1) == [(2,)]",
    ),
    (
      "from fractions import Fraction\nf = lambda x: Fraction(x, {})",
      "2",
      "3",
      "from fractions import Fraction\n"
      "assert f(1) == Fraction(1, 2) == 0.5 and f(1) + 1 == 1.5",
    ),
    (
      "from decimal import Decimal\nf = lambda x: Decimal(x) / {}",
      "4",
      "8",
      "from decimal import Decimal\nassert f(1) == Decimal('0.25')",
    ),
    (
      "import datetime\nf = lambda y: datetime.date(y, 1, {})",
      "2",
      "3",
      "import datetime\nassert f(2020) == datetime.date(2020, 1, 2)\n"
      "assert str(f(2020)) == '2020-01-02'",
    ),
    (
      "from collections import deque\nf = lambda x: deque([1, x], {})",
      "1",
      "2",
      "assert list(f(2)) == [2] and f(2).maxlen == 1",
    ),
    (
      "import enum\nclass E(enum.IntEnum):\n  A = 1\n  B = 2\n"
      "f = lambda: [E.A, E.{}]",
      "A",
      "B",
      "assert f() == [1, 1]",
    ),
    (
      "import enum\nclass E(enum.Enum):\n  A = 1\n  B = 2\nf = lambda: E.{}",
      "A",
      "B",
      "assert f() == E.A and f().name == 'A'",
    ),
    (
      "class S(str): pass\nf = lambda: S('a{}')",
      "b",
      "c",
      "assert f() == 'ab' and type(f()) is str",
    ),
    ("f = lambda n: range({}, n)", "1", "2", "assert f(3) == range(1, 3)"),
    (
      "f = lambda x: {{1: {}}}.keys()",
      "2",
      "2 }.keys() - {1",
      "f(1)\nassert f(1) == {1}",
    ),
    ("f = lambda x: {{1: {}}}.values()", "2", "3", "assert list(f(1)) == [2]"),
    ("f = lambda x: {{1: {}}}.items()", "2", "3", "assert f(1) == {(1, 2)}"),
    (NEXT, "n", "n + 1", "assert list(f(3)) == [0, 1, 2]"),
    (NEXT, "n", "n - 1", "assert sum(f(4)) == 6 and next(f(1)) == 0"),
    (
      LOOP,
      "0",
      "1",
      "g = f()\nassert [next(g) for _ in range(3)] == [0, 1, 2]",
    ),
    (
      "f = lambda x: map(str, x + {})",
      "[]",
      "[1]",
      "assert list(f([1])) == ['1']",
    ),
    (
      "f = lambda x: (zip(x, x), {})",
      "1",
      "2",
      "a, b = f([3])\nassert (list(a), b) == ([(3, 3)], 1)",
    ),
    (
      "f = lambda x: x.sort(reverse={})",
      "False",
      "True",
      "x = [2, 1]\nf(x)\nassert x == [1, 2]",
    ),
    (
      "def f(grid): grid[0], grid[1] = grid[1], grid[{}]",
      "0",
      "1",
      "a, b = [1], [2]\ngrid = [a, b]\nf(grid)\nassert grid == [[2], [1]]\n"
      "assert grid[0] is b and grid[1] is a",
    ),
    (
      "def f(d): d.setdefault('a', []).append({})",
      "1",
      "2",
      "d = {}\nf(d)\nassert d == {'a': [1]}\nf(d)\nassert d == {'a': [1, 1]}",
    ),
    ("def f(s): s.discard({})", "1", "2", "s = {1, 2}\nf(s)\nassert s == {2}"),
    (
      "def f(x): x += b'{}'",
      "b",
      "c",
      "x = bytearray(b'a')\nf(x)\nassert x == b'ab'",
    ),
    ("def f(x): x.append(x{})", "", "[:]", "x = []\nf(x)\nassert x[0] is x"),
    (
      "def f(x):\n  x.sort({})\n  return x",
      "",
      "key=lambda y: -y",
      "x = [2, 1]\nassert f(x) is x and x == [1, 2]",
    ),
    (
      REVERSED,
      "",
      ".next",
      f"{NODE}\nassert listed(f(Node(1, Node(2)))) == [2, 1]",
    ),
    (
      REVERSED,
      "",
      " and False",
      f"{NODE}\nfirst = Node(1, Node(2))\nf(first)\nassert first.next is None",
    ),
    (
      NODE + "def f(x): return Node(x, Node({}))",
      "2",
      "3",
      "n = f(1)\nassert n.value == 1 and n.next.value == 2 and not n.next.next",
    ),
    (
      "f = lambda k, x: sorted(x, key=k{})",
      "",
      ", reverse=True",
      "assert f(lambda y: -y, [1, 2]) == [2, 1]",
    ),
    (
      "f = lambda g, *x: g(*x) + {}",
      "0",
      "1",
      "assert f(max, 1, 2) == f(len, 'ab') == f(int, '2') == 2",
    ),
    (
      "f = lambda x: [y + {} for y in x]",
      "1",
      "2",
      "assert f(iter([1])) == f(y for y in [1]) == [2]",
    ),
    (
      "def f(g):\n  def h(x): return g(x) + {}\n  return h",
      "1",
      "2",
      "@f\ndef double(x): return 2 * x\nassert double(3) == 7",
    ),
    (
      "f = lambda x: x.sort() or len(x) + {}",
      "0",
      "1",
      "x = list(range(200_000, 0, -1))\nassert f(x) == 200_000\n"
      "assert x[:2] == [1, 2]",
    ),
    ("def f(n): return lambda x: x + n + {}", "0", "1", "assert f(1)(2) == 3"),
    (
      "import sys\ndef f(x):\n  print('\u20ac', x + {}, flush=True)\n"
      "  sys.stdout.buffer.write(b'!')",
      "1",
      "2",
      "import contextlib, io\nout = io.StringIO()\n"
      "with contextlib.redirect_stdout(out): f(1)\n"
      "assert out.getvalue() == '\u20ac 2\\n!'",
    ),
    (
      "def f(x):\n  for i in range(10**5): print(i, 'x' * 99)\n  return x + {}",
      "1",
      "2",
      "assert f(1) == f(1) == 2",
    ),
    (
      "LIMIT = {}\ndef f(x): return LIMIT + x",
      "1",
      "2",
      "assert LIMIT == 1 and f(1) == 2",
    ),
    (
      "TABLE = {{'a': [{}]}}\nf = len",
      "1",
      "2",
      "assert TABLE == {'a': [1]} and f([]) == 0",
    ),
    ("n = {}\ndef f():\n  global n\n  n += 1", "0", "1", "f()\nassert n == 1"),
    (ERRORS, "Worse(3)", "Worse(2)", CAUGHT),
    (
      "def f(): raise KeyError('a', {})",
      "1",
      "2",
      "try: f()\nexcept KeyError as e: assert e.args == ('a', 1)",
    ),
    (
      "def f(): {{}}['a{}']",
      "",
      "b",
      "try: f()\nexcept KeyError as e: assert str(e) == repr('a')",
    ),
    (
      "def f(): b'{}'.decode('ascii')",
      "\\xff",
      "\\xfe",
      "try: f()\nexcept UnicodeDecodeError as e: assert '0xff' in str(e)",
    ),
    (
      "def f():\n  'Do it {}.'\n  yield 1",
      "now",
      "later",
      "import types\nassert f.__doc__ == 'Do it now.'\n"
      "assert isinstance(f(), types.GeneratorType)",
    ),
    (ERRORS, "Worse(3)", "ValueError(3)", CAUGHT),
    (STACK, "", "0", STACKED),
    (
      STACK,
      "",
      "0",
      "import unittest\nclass T(unittest.TestCase):\n  s = Stack([1, 2])\n"
      "  def test(self): self.assertEqual(self.s.pop(), 2)",
    ),
    (
      "def f(x):\n  if x < {}: raise ValueError('negative')",
      "0",
      "-5",
      "import unittest\nclass T(unittest.TestCase):\n  def test(self):\n"
      "    with self.assertRaisesRegex(ValueError, 'neg'): f(-1)",
    ),
    (
      "def sum(x): return x + {}",
      "1",
      "2",
      "from solution import sum\nassert sum(1) == 2",
    ),
  ],
)
def test_right_programs_pass_and_wrong_ones_fail(program, right, wrong, tests):
  assert reward(program.format(right), tests=tests) == types.Reward(
    score=1.0,
    parts={"passed": 1.0, "not_plain": 0.0},
    answer=program.format(right) + "\n",
  )
  assert score(program.format(wrong), tests=tests) == 0.0


@pytest.mark.parametrize("entry_point", ["sum", "Solution().f", "Solution.f"])
def test_an_entry_point_may_be_an_expression_or_a_name_of_python(entry_point):
  program = """
def sum(x): return x + {0}
class Solution:
  @staticmethod
  def f(x): return x + {0}
"""
  task = {"tests": "def check(c): assert c(1) == 2", "entry_point": entry_point}
  assert score(program.format(1), **task) == 1.0
  assert score(program.format(2), **task) == 0.0
  assert score("x = 1", **task) == 0.0


POINT = """
import dataclasses
@dataclasses.dataclass
class Point:
  x: int
def f(): return Point(1)
"""


@pytest.mark.parametrize(
  ("tests", "is_lost"),
  [
    ("assert f() == Point(1)", 1.0),
    ("assert f() in [Point(1)]", 1.0),
    ("assert f() != 3", 1.0),
    ("assert f().x == 1", None),
    ("assert f().x == 2", 0.0),
  ],
)
def test_what_only_the_program_could_compare_is_a_part_or_a_failure(
  tests, is_lost
):
  found = reward(POINT, tests=tests)
  assert found.score == (is_lost is None)
  assert found.parts["not_plain"] == (is_lost or 0.0)
  strict = functools.partial(code.score, not_plain_fails=True)
  item = {"question": "q", "metadata": {"tests": tests}}
  if is_lost:
    with pytest.raises(code.NotPlainError, match="a Point cannot leave"):
      strict(item, completion(POINT))
  else:
    assert strict(item, completion(POINT)).score == found.score


PROMPT = 'import math\n\ndef f(x):\n  """Add one."""\n'


@pytest.mark.parametrize(
  ("text", "is_right"),
  [
    (f"```\n{RIGHT}```\nOutput:\n```\n2\n```", True),
    (f"```python\n{RIGHT}```\nOutput:\n```\nf(1)\n```", True),
    (f"```python\n{RIGHT}```\nUse:\n```python\nprint(f(1))\n```", True),
    (f"```python\n{WRONG}```\nNo:\n```python\n{RIGHT}```", True),
    (f"```python\n{RIGHT}```\nNo:\n```python\n{WRONG}```", False),
    (f"~~~python\n{RIGHT}~~~", True),
    (f"````Python title=x\n{RIGHT}````", True),
    (f"```{{.python}}\n{RIGHT}```", True),
    ("1. It:\n   ```python\n   def f(x):\n     return x + 1\n   ```", True),
    ("1. It:\n   ```python\n   def f(x):\n     return x\n   ```", False),
    ("- It:\n\t```\n\tdef f(x):\n\t  return x + 1\n\t```", True),
    (f"from typing import List\n\n{RIGHT}", True),
    (f"import sys\nfrom typing import List\n{WRONG}", False),
    ("```python\n  return x + 1\n```", True),
    ("  return x + 1\n", True),
    ("  return x + 1\n```\nThis adds one:\n```\nf(1)\n```", True),
    ("  return x + 1\n\nprint(f(1))", True),
    (" It is:\n```\ndef f(x):\n  return x + 1\n```", True),
    (f"```\nfrom __future__ import annotations\n{RIGHT}```", True),
    ("f = lambda x: x + 1", True),
    ("async def f(x): return x + 1", False),
  ],
)
def test_the_program_of_a_completion(text, is_right):
  for entry_point in ("f", None):
    task = {"tests": ASSERT, "entry_point": entry_point}
    item = {"question": PROMPT, "metadata": task}
    assert code.score(item, completion(text)).score == is_right


@pytest.mark.parametrize(
  "text",
  [
    "```\nprint(int(input()) + 1)\n```\nOutput:\n```\n2\n```",
    "```python\nprint(int(input()) + 1)\n```\nOutput:\n```\nprint(0)\n```",
    "```\nprint(int(input()) + 1)\nexit()\n```",
    "```\nprint(int(input()) + 1)\nquit()\nprint(3)\n```",
    "```\nif __name__ == '__main__':\n  print(int(input()) + 1)\n```",
    "print(int(input()) + 1)",
  ],
)
def test_the_program_of_a_completion_that_reads_and_writes(text):
  cases = [{"stdin": "1", "stdout": "2"}]
  question = "Read:\n```python\ndef main():\n```\n"
  item = {"question": question, "metadata": {"cases": cases, "tests": None}}
  assert code.score(item, completion(text)).score == 1.0
  wrong = text.replace("+ 1", "+ 2")
  assert code.score(item, completion(wrong)).score == 0.0


@pytest.mark.parametrize(
  "metadata",
  [
    {"tests": "f()", "entry_point": "f"},
    {"cases": [{"stdin": "", "stdout": ""}] * 3},
  ],
)
def test_the_start_of_a_sandbox_is_in_the_time_of_a_score(
  metadata, monkeypatch
):
  """A machine that is busy starts it late."""
  box = sandbox_lib.Sandbox(sandbox_lib.Kind.UNSHARE, has_user=True)
  slow = ["sh", "-c", "sleep 60"]
  monkeypatch.setattr(sandbox_lib, "_unshare", lambda *_, **__: slow)
  monkeypatch.setattr(sandbox_lib, "find", lambda **_: box)
  term = term_lib.Term(scorer=code.score, timeout_s=1.0, num_retries=0)
  item = {"question": "q", "metadata": metadata}
  start_s = time.monotonic()
  (found,) = scoring.score_group(term, item, [completion("def f(): pass")])
  assert found.score == 0.0 and time.monotonic() - start_s < 1.0


@pytest.mark.parametrize(
  ("metadata", "message"),
  [
    ({"tests": ASSERT}, ""),
    ({"tests": ASSERT, "entry_point": "f", "solution": RIGHT}, ""),
    ({"tests": ASSERT, "solution": WRONG}, "its own solution fails"),
    ({"tests": "assert f(2)"}, ""),
    ({"tests": "f(1) == 2"}, "returns nothing of use"),
    ({"tests": "try: f(1)\nexcept Exception: pass"}, "only raises"),
    ({"tests": "x = 1"}, "do not call the program"),
    ({"tests": f"import numpy\n{ASSERT}"}, "No module named"),
    ({"tests": ASSERT, "canonical_solution": None}, ""),
    ({"cases": [{"stdin": "", "stdout": "\n"}]}, "only raises"),
    ({"cases": [{"stdin": "1", "stdout": "2"}]}, ""),
    (
      {
        "cases": [{"stdin": "1", "stdout": "2"}],
        "solution": "print(int(input()))",
      },
      "its own solution fails its tests: wrote '1",
    ),
  ],
)
def test_tests_of_the_first_rows_are_tried_before_a_run(metadata, message):
  terms = reward_terms.of_task(sections.TaskSection(reward="code"))
  prompt = types.Prompt(
    prompt_id="mine/3",
    tokens=np.zeros(1, np.int32),
    item={"question": "q", "metadata": metadata},
  )
  if not message:
    reward_terms.check_prompts(terms, [prompt])
    return
  with pytest.raises(sections.ConfigError) as raised:
    reward_terms.check_prompts(terms, [prompt])
  assert message in str(raised.value)
