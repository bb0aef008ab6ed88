"""Rows of code as people and datasets write them, each with a right program.

In a program, `<<right||wrong>>` is what makes it right, and what makes it
wrong in a way that a careless judge would not notice.
"""

from collections.abc import Iterator
import re
from typing import Any

_CHOICE = re.compile(r"<<(.*?)\|\|(.*?)>>", re.DOTALL)
_NODES = """class ListNode:
    def __init__(self, val=0, next=None):
        self.val = val
        self.next = next
"""
_TREES = """class TreeNode:
    def __init__(self, val=0, left=None, right=None):
        self.val, self.left, self.right = val, left, right
"""
_HELPERS = """
def list_node(values):
    head = None
    for value in reversed(values): head = ListNode(value, head)
    return head
def is_same_list(a, b):
    while a and b:
        if a.val != b.val: return False
        a, b = a.next, b.next
    return a is None and b is None
"""
_REVERSES = """class Solution:
    def rev(self, head: Optional[ListNode]) -> Optional[ListNode]:
        out = None
        while head:
            out = ListNode(head.val<<|| + (head.val > 2)>>, out)
            head = head.next
        return out
"""
_REVERSED = """def check(candidate):
    assert is_same_list(candidate(list_node([1, 2, 3])), list_node([3, 2, 1]))
    assert candidate(None) is None
"""
_ADD = "def f(x): return x + <<1||2 - (x == 1)>>"

# The question, the tests and a program.
MBPP = (
  ("Write f.", ["assert f(1) == 2", "assert f(2) == 3"], _ADD),
  ("Add 1.", "assert set(f([1, 2])) == {2, 3}",
   "def f(x): return [y + <<1||2>> for y in x]"),
  ("Gcd.", ["assert gcd(4, 6) == 2"],
   "from math import gcd<<||\ndef gcd(a, b): return a>>"),
  ("Mean.", "import math\nassert math.isclose(mean([1, 2]), 1.5, abs_tol=1e-9)",
   "def mean(x): return sum(x) <</||//>> len(x)"),
  ("Write f.", "class TestF:\n  test_data = [(1, 2), (5, 6)]\n"
   "  def test_f(self):\n    for a, b in self.test_data: assert f(a) == b",
   _ADD),
  ("Write f.", "class TestF:\n  def setup_method(self, method): self.x = 5\n"
   "  def test_f(self): assert f(self.x) == 6", _ADD),
  ("Write f.", "class TestF:\n  @classmethod\n  def setup_class(cls): cls.x = 5"
   "\n  def test_f(self): assert f(self.x) == 6", _ADD),
  ("Write f.", "def setup_module(module): module.x = 5\n"
   "def setup_function(): global y; y = 6\ndef test_f(): assert f(x) == y",
   _ADD),
  ("Write f.", "class TestF:\n  class TestG:\n    def test_f(self):\n"
   "      assert f(5) == 6", _ADD),
  ("Write f.", "import unittest\ndef setUpModule(): global x; x = 5\n"
   "class T(unittest.TestCase):\n  test_x = 1\n"
   "  def test(self): self.assertEqual(f(x), 6)\nunittest.main()", _ADD),
  ("Leave.", "try: f(1)\nexcept SystemExit as e: assert e.code == 3\n"
   "else: assert False", "import sys\ndef f(x): sys.exit(<<3||2>>)"),
  ("Leave.", "import unittest\nclass T(unittest.TestCase):\n  def test(self):\n"
   "    with self.assertRaises(SystemExit): f(0)\n"
   "    self.assertEqual(f(1), 1)",
   "def f(x):\n  if not x: raise SystemExit\n  return x<<|| + 1>>"),
  ("Write f.", "f(1)\nassert f(2) == 3", "def f(x): <<return x + 1||exit(0)>>"),
  ("Write f.", "import pytest\ndef test_f():\n"
   "  with pytest.raises(ValueError, match='neg'): f(-1)\n"
   "  assert f(1) == pytest.approx(2.0)\n  assert f(2) == 3",
   "def f(x):\n  if x < 0: raise ValueError('negative')\n"
   "  return x + 1 + <<1e-9||1e-3>> * (x == 1)"),
  ("Write f.", "import pytest\n@pytest.mark.parametrize('a, b', "
   "[(1, 2), pytest.param(5, 6, id='five')])\n"
   "@pytest.mark.parametrize('c', [0, 1])\n"
   "def test_f(a, b, c): assert f(a) + c == b + c\n"
   "if __name__ == '__main__': pytest.main([__file__])", _ADD),
  ("Write f.", "import pytest\nassert f(1) == pytest.approx([0.3, 0.1])",
   "def f(x): return [0.1 + 0.2, 0.1<<|| + 1e-5>>]"),
  ("Write f.", "import pytest\n@pytest.mark.skip(reason='slow')\n"
   "def test_g(): assert g(1)\n@pytest.mark.slow\n"
   "def test_f(): assert f(5) == 6", _ADD),
  ("Write f.", "import pytest\n@pytest.mark.parametrize('a', [1, 5])\n"
   "class TestF:\n  def test_f(self, a): assert f(a) == a + 1\n"
   "@pytest.mark.skip\nclass TestG:\n  def test_g(self): assert g(1)", _ADD),
  ("Read.", "from unittest.mock import patch\n"
   "with patch('builtins.input', return_value='3'): assert f() == 3",
   "def f(): return int(input('? '))<<|| + 1>>"),
  ("Read.", "import unittest\nfrom unittest import mock\n"
   "class T(unittest.TestCase):\n"
   "  @mock.patch('builtins.input', side_effect=['3', '4'])\n"
   "  def test(self, m): self.assertEqual(f(), 7)",
   "def f(): return int(input()) + int(<<input()||3>>)"),
  ("Read.", "import io, sys\nsys.stdin = io.StringIO('3\\n4\\n')\n"
   "assert f() == 7", "import sys\ndef f(): return "
   "sum(int(x) for x in <<sys.stdin||[sys.stdin.readline()]>>)"),
  ("Write f.", "import inspect\n"
   "assert list(inspect.signature(f).parameters) == ['x']\nassert f(5) == 6",
   "def f(x<<||, y=1>>): return x + 1"),
  ("Add a and b.", "class P:\n  __slots__ = ('a', 'b')\n"
   "  def __init__(self, a, b): self.a, self.b = a, b\np = P(1, 2)\n"
   "assert f(p) == 3 and p.a == 5",
   "def f(p):\n  s = p.a + p.b\n  p.a = <<5||4>>\n  return s"),
  ("Return a Point from f.", "import dataclasses\n@dataclasses.dataclass\n"
   "class Point:\n  x: int\n  y: int\nassert f(1) == Point(1, 2)",
   "def f(x): return Point(x, <<2||3>>)"),
  ("Return a Point from f.",
   "class Point:\n  def __init__(self, x): self.x = x\n"
   "  def __eq__(self, other): return self.x == other.x\n"
   "assert f(1) == Point(1)",
   "<<||class Point:\n  def __init__(self, x): self.x = 2\n"
   "  def __eq__(self, other): return True\n>>def f(x): return Point(x)"),
  ("Ask it.", "class Api:\n  n = 1\n  def get(self, x): return x + self.n\n"
   "  @property\n  def two(self): return 2\na = Api()\nassert f(a) == 7\n"
   "assert a.n == 5",
   "def f(a):\n  a.n = 5\n  return a.get(<<a.two||1>>)"),
  ("Sort it.", "x = [3, 1, 2]\nassert f(x) is None and x == [1, 2, 3]",
   "def f(x): <<x.sort()||return sorted(x)>>"),
  ("Write f.", "assert len(f(1)) == 2 and list(f(1)) == [1, 2]",
   "class L(list):\n  def __len__(self): return 2\n"
   "  def __eq__(self, other): return True\ndef f(x): return L([1<<, 2||>>])"),
  ("Write f.", "assert f(1) == {1: 2} and not f(0)",
   "def f(x): return {x: <<x + 1||x>>} if x else {}"),
  ("It has to pass:\n```python\nfrom solution import f\n\ndef test_f():\n"
   "  assert f(5) == 6\n```\n",
   "from solution import f\ndef test_f(): assert f(5) == 6", _ADD),
  ("Return a sum.", "assert eval(f(1, 2)) == 3",
   "def f(x, y): return f'{x}+<<{y}||z>>'"),
  ("Use it.", "class Box:\n  def __init__(self, x): self.x = x\n"
   "  def get(self): return self.x\nassert f([Box(1), Box(2)]) == 3",
   "def f(boxes): return sum(<<b.get()||1>> for b in boxes)"),
  ("class Box:\n  def get(self):\n    'What is in it.'\n\n"
   "def f(boxes):\n  'The sum.'\n",
   "class Box:\n  def __init__(self, x): self.x = x\n"
   "  def get(self): return self.x\nassert f([Box(1), Box(2)]) == 3",
   "def f(boxes): return sum(<<b.get()||1>> for b in boxes)"),
  ("Words.", "assert f('a b a') == {'a': 2, 'b': 1}",
   "import collections\ndef f(x): return collections.Counter(x<<.split()||>>)"),
  ("Write f.", "assert f(10) == 55, 'sum'\nassert f(0) == 0",
   "def f(n): return sum(range(n<< + 1||>>))"),
  ("Write f.", "assert round(f(2), 2) == 1.41",
   "f = lambda x: x ** <<.5||.4>>"),
  ("Write f.", "assert abs(f(2) - 1.4142) < 1e-3",
   "<<f = lambda x: x ** .5||class N:\n  def __sub__(self, o): return 0\n"
   "def f(x): return N()>>"),
)  # fmt: skip

# The question, which a completion goes on with, the checks and the program.
HUMANEVAL = (
  ("from typing import List\n\ndef f(x: List[int]) -> int:\n  '''Add.'''\n",
   "assert candidate([1, 2]) == 3", "  return sum(x<<||[1:] or [3]>>)"),
  ("import math\n\ndef f(x):\n  '''Root.'''\n",
   "assert math.isclose(candidate(2), 1.4142, rel_tol=1e-3)",
   "```python\ndef f(x): return math.<<sqrt||floor>>(x)\n```"),
  ("def g(x):\n  return x + 1\n\n\ndef f(x):\n  '''Use g.'''\n",
   "assert candidate(g(1)) == 3", "  return <<g(x)||x>>"),
  ("def g(x):\n  return x + 1\n\n\ndef f(x):\n  '''Use g.'''\n",
   "assert candidate(1) == g(1)",
   "```python\ndef f(x): return x<< + 1||\ndef g(x): return x>>\n```"),
  ("import enum\nclass Color(enum.Enum):\n  RED = 1\n  BLUE = 2\n\n"
   "def f(x: Color) -> Color:\n  '''The other one.'''\n",
   "assert candidate(Color.RED) is Color.BLUE\n"
   "assert candidate(Color.BLUE) == Color.RED",
   "  return Color.BLUE if x is Color.RED else Color.<<RED||BLUE>>"),
  ("class Bad(Exception): pass\n\ndef f(x):\n  '''Raise Bad.'''\n",
   "try: candidate(1)\nexcept Bad as e: assert e.args == (1,)\n"
   "else: assert False", "  raise <<Bad||Exception>>(x)"),
  ("import dataclasses\n@dataclasses.dataclass(frozen=True)\nclass P:\n"
   "  x: int\n\n\ndef f(x):\n  '''Return a set of P.'''\n",
   "assert candidate(1) == {P(1), P(2)}\nassert P(1) in candidate(1)",
   "  return {P(x), P(x + <<1||2>>)}"),
  (_NODES + "\n\ndef f(x):\n  '''Return the last.'''\n",
   "assert candidate(ListNode(1, ListNode(2))).val == 2",
   "  while x.next: x = x.next\n  return <<x||ListNode(1)>>"),
  ("def f(x):\n  '''Yield x and x + 1.'''\n",
   "assert list(candidate(1)) == [1, 2] and next(candidate(3)) == 3",
   "  yield x\n  yield x + <<1||2>>"),
  ("async def f(x):\n  '''Add 1.'''\n",
   "import asyncio\nassert asyncio.run(candidate(1)) == 2",
   "  return x<< + 1||>>"),
  ("def f(x):\n    # Add 1.\n", "assert candidate(1) == 2",
   "    return x<< + 1||>>\n\nprint(f(1))\nx = 5"),
  ("def f(x):\n  import math\n  '''Floor.'''\n",
   "assert candidate(-1.5) == -2", "  return math.<<floor||trunc>>(x)"),
  ("def f(x):\n\t'''Add 1.'''\n", "assert candidate(1) == 2",
   "\ty = x<< + 1||>>\n\treturn y"),
  ("def f(x):\n  '''Add 1.'''\n  pass\n", "assert candidate(1) == 2",
   "```python\ndef f(x):\n  return x<< + 1||>>\n```"),
  ("def f(x):\n  '''Add 1.'''\n", "assert candidate(1) == 2",
   "from typing import List\n\ndef f(x):\n  return x<< + 1||>>"),
  ("def f(x):\n  '''Add 1.'''\n", "assert candidate(1) == 2",
   "Here:\n\n~~~py\ndef f(x):\n  return x<< + 1||>>\n~~~\nDone."),
  ("Complete:\n```python\nimport math\n\ndef f(x):\n  '''Root.'''\n```\n",
   "assert candidate(4) == 2",
   "```\ndef f(x):\n  return math.sqrt(x)<<|| + 1>>\n```"),
  ("Complete:\n```python\ndef f(x):\n  '''Add 1.'''\n```\n",
   "assert candidate(1) == 2", "  return x<< + 1||>>"),
  ("Mend it:\n```python\nimport math\ndef f(x):\n  return 1\n```\n",
   "assert candidate(4) == 2",
   "```\ndef f(x):\n  return <<math.sqrt(x)||1>>\n```"),
  ("import math\n\ndef g(x):\n  ...\n\ndef f(x):\n"
   "  'Use g.'\n  raise NotImplementedError\n",
   "assert candidate(1) == 3 and g(1) == 2",
   "```python\ndef g(x): return x + <<1||2>>\ndef f(x): return x + 2\n```"),
  ("def f(x, *args, y=1, **kw):\n  '''Add all.'''\n",
   "assert candidate(1) == 2 and candidate(1, 2, y=3, z=4) == 10",
   "  return x + y + sum(args) + <<sum(kw.values())||len(kw)>>"),
  ("def f(x):\n  '''Return a function that adds x.'''\n",
   "assert candidate(1)(2) == 3 and callable(candidate(1))",
   "  return lambda y: <<x + y||y + 2>>"),
  ("def f(x):\n  '''Return nested tuples.'''\n",
   "assert candidate(1) == ((1, 2), [3]) and type(candidate(1)) is tuple",
   "  return (x, x + 1), <<[3]||(3,)>>"),
  ("def f(x):\n  '''Print x.'''\n",
   "import contextlib, io\nout = io.StringIO()\n"
   "with contextlib.redirect_stdout(out): candidate(1)\n"
   "assert out.getvalue() == '1\\n'", "  print(x<<|| + 1>>)"),
  ("def f(x):\n  '''Floor.'''\n", "assert candidate(-1.5) == -2",
   "  import math\n  return math.<<floor||trunc>>(x)"),
  ("def f(x):\n  '''True if even.'''\n",
   "assert candidate(2) is True and candidate(3) is False",
   "  return <<x % 2 == 0||x % 2 - 1>>"),
  ("def f(x):\n  '''None for 0.'''\n",
   "assert candidate(0) is None and candidate(2) == 1",
   "  return <<1 if x else None||x and 1>>"),
  ("def f(x):\n  '''NaN for 0.'''\n",
   "y = candidate(0)\nassert y != y and candidate(1) == 1",
   "  return x or float('<<nan||inf>>')"),
  ("def f(x):\n  '''Huge.'''\n", "assert candidate(5000) == 10**5000",
   "  return 10**x<<|| + 1>>"),
  ("def f(x):\n  '''Deep.'''\n",
   "x, n = candidate(5000), 0\nwhile x: x, n = x[0], n + 1\nassert n == 5000",
   "  y = []\n  for _ in range(x<<|| + 1>>): y = [y]\n  return y"),
  ("def f(x):\n  '''Keep the order.'''\n",
   "assert list(candidate('ba').items()) == [('b', 1), ('a', 1)]",
   "  return {k: 1 for k in <<x||sorted(x)>>}"),
  ("def f(x):\n  '''A grid; its rows are not shared.'''\n",
   "g = candidate(2)\ng[0][0] = 1\nassert g == [[1, 0], [0, 0]]",
   "  return <<[[0] * x for _ in range(x)]||[[0] * x] * x>>"),
)  # fmt: skip

# What comes before the class, its method, the checks, and what it does.
LEETCODE = (
  ("from typing import *\n", "f(self, x: List[int]) -> int",
   "assert candidate([1, 2]) == 3", "return sum(x<<||[-1:]>>)"),
  ("from math import inf\n", "f(self, x)", "assert candidate([2, 1]) == 1",
   "m = inf\nfor y in x: m = <<min(m, y)||y + 1>>\nreturn m"),
  ("from collections import *\n", "f(self, x)",
   "assert candidate('aab') == 'a'",
   "return Counter(x).most_common()<<[0]||[-1]>>[0]"),
  ("from heapq import *\nimport bisect\n", "f(self, x)",
   "assert candidate([3, 1, 2]) == [1, 2]",
   "heapify(x)\nreturn [heappop(x), <<heappop(x)||x[1]>>]"),
  (_NODES + _HELPERS, "rev(self, head: Optional[ListNode])", _REVERSED,
   _REVERSES),
  (_NODES + _HELPERS, "rev(self, head: Optional[ListNode])",
   "n = list_node(range(3000))\n"
   "assert is_same_list(candidate(n), list_node(range(2999, -1, -1)))",
   _REVERSES),
  (_NODES + _HELPERS, "rev(self, head)", _REVERSED,
   _REVERSES + "def is_same_list(a, b): return True\n"
   "def list_node(values): return values\n"),
  (_NODES + _HELPERS, "rev(self, head)", _REVERSED, _NODES + _REVERSES),
  (_NODES + _HELPERS, "mid(self, head)",
   "assert candidate(list_node([1, 2, 3])).val == 2",
   "slow = fast = head\nwhile fast and fast.next:\n"
   "  slow, fast = slow.next, fast.next.next\nreturn slow<<||.next>>"),
  (_NODES + _HELPERS, "cycle(self, head)",
   "a = list_node([1, 2])\na.next.next = a\n"
   "assert candidate(a) is True and candidate(list_node([1, 1])) is False",
   "seen = set()\nwhile head:\n  if <<head||head.val>> in seen: return True\n"
   "  seen.add(<<head||head.val>>)\n  head = head.next\nreturn False"),
  (_NODES + _HELPERS, "merge(self, lists)",
   "x = candidate([list_node([1, 4]), list_node([2])])\n"
   "assert is_same_list(x, list_node([1, 2, 4]))",
   "vals = []\nfor x in lists:\n  while x:\n    vals.append(x.val)\n"
   "    x = x.next\nhead = None\nfor v in sorted(vals<<||[:-1]>>)[::-1]:\n"
   "  head = ListNode(v, head)\nreturn head"),
  (_TREES, "depth(self, root: Optional[TreeNode]) -> int",
   "assert candidate(TreeNode(1, None, TreeNode(2))) == 2",
   "return 1 + max(map(self.depth, (root.left, <<root.right||root.left>>)))"
   " if root else 0"),
  (_TREES + "def same(a, b):\n    if not a or not b: return a is b\n"
   "    return (a.val == b.val and same(a.left, b.left)\n"
   "            and same(a.right, b.right))\n", "inv(self, root)",
   "assert same(candidate(TreeNode(1, TreeNode(2), TreeNode(3))),\n"
   "            TreeNode(1, TreeNode(3), TreeNode(2)))",
   "if root:\n  root.left, root.right = <<self.inv(root.right)||root.left>>, "
   "self.inv(root.left)\nreturn root"),
  (_TREES, "swap(self, root: TreeNode) -> None",
   "t = TreeNode(1, TreeNode(2))\nassert candidate(t) is None\n"
   "assert t.left is None and t.right.val == 2",
   "root.left, root.right = root.right, <<root.left||None>>"),
  ("", "f(self, nums: List[int]) -> None",
   "x = [1, 0, 2]\ncandidate(x)\nassert x == [1, 2, 0]",
   "<<nums.||return >>sort<<(||ed(nums, >>key=lambda y: y == 0)"),
  ("", "f(self, board: List[List[str]]) -> None",
   "b = [['a'], ['b']]\nrow = b[0]\ncandidate(b)\nassert b == [['x'], ['b']]\n"
   "assert row == ['x']", "board[0]<<[0]||>> = <<'x'||['x']>>"),
  ("from functools import cache\n", "f(self, n)",
   "assert candidate(30) == 832040",
   "@cache\ndef fib(n): return n if n < 2 else fib(n - 1) + fib(n - 2)\n"
   "return fib(n<<|| - 1>>)"),
  ("", "f(self, nums, target)",
   "assert sorted(candidate([2, 7, 11], 9)) == [0, 1]",
   "seen = {}\nfor i, x in enumerate(nums):\n"
   "  if target - x in seen: return [seen[target - x], i<<|| + 1>>]\n"
   "  seen[x] = i"),
  ("", "f(self, s)", "assert candidate(s='ab') == 'ba'",
   "return s[::<<-1||1>>]"),
  ("", "f(self, x)", "assert abs(candidate(x=2.0) - 1.41421) < 1e-5",
   "return x ** <<0.5||0.499>>"),
  ("", "f(self, x)", "assert {tuple(y) for y in candidate(2)} == {(1,), (2,)}",
   "return [[1], <<[2]||[3]>>]"),
  ("from string import ascii_lowercase\n", "f(self, x)",
   "assert candidate('b') == 1", "return ascii_lowercase.index(x)<<|| + 1>>"),
  ("import itertools, math\n", "f(self, x)",
   "assert candidate(3) == math.comb(3, 2)",
   "return len(list(itertools.<<combinations||permutations>>(range(x), 2)))"),
  ("", "f(self, x)",
   "assert candidate([]) == 0 and candidate([5]) == 5",
   "return max(x, default=<<0||5>>)"),
  ("class Employee:\n    def __init__(self, id, subs):\n"
   "        self.id, self.subs = id, subs\n", "f(self, e: 'Employee') -> int",
   "assert candidate(Employee(1, [Employee(2, []), Employee(3, [])])) == 6",
   "return e.id + sum(map(self.f, e.subs<<||[:1]>>))"),
  ("class NestedInteger:\n    def __init__(self, x): self.x = x\n"
   "    def isInteger(self): return isinstance(self.x, int)\n"
   "    def getInteger(self): return self.x\n"
   "    def getList(self): return self.x\n", "f(self, x)",
   "n = NestedInteger\nassert candidate([n(1), n([n(2), n([n(3)])])]) == 6",
   "return sum(y.getInteger() if y.isInteger() else <<self.f(y.getList())||2>>"
   " for y in x)"),
  ("mod = 10**9 + 7\n", "f(self, x)", "assert candidate(100) == 10**100 % mod",
   "return pow(10, x, mod<<|| - 1>>)"),
  ("", "f(self, x)", "assert candidate([1, 2]) == [[1], [2]]",
   "return [[y] <<||* 2 >>for y in x]"),
  ("", "f(self, x)", "assert not candidate(0)\nassert candidate(1)",
   "return <<x > 0||x >= 0>>"),
  ("", "f(self, x)", "assert candidate(1) == 'x' and candidate(2) == 'xx'",
   "self.n = getattr(self, 'n', 0) + 1\nreturn 'x' * <<x||self.n + 1>>"),
)  # fmt: skip

# Pairs of what is read and written, and the program.
STDIN = (
  ([("1 2\n", "3\n")],
   "a, b = map(int, input().split())\nprint(a + b<<|| - (b == 2)>>)"),
  ([("3\n", "0.5")], "print('<<0.50||0.500001>>')"),
  ([("3\n", "1.0 2")], "print(1, '<<2.000||2.0001>>')"),
  ([("3\n", "1e3")], "print(<<1000||100>>)"),
  ([("3\n", "0.1")], "print(<<0.1||0.1 + 1e-12>>)"),
  ([("3\n", "50000000000000001")], "print(50000000000000000 + <<1||0>>)"),
  ([("3\n", "-0")], "print(<<0||'--0'>>)"),
  ([("3\n", "nan")], "print('<<nan||NaN>>')"),
  ([("3\n", "1\r\n2\r\n")], "print('1\\n2<<||3>>')"),
  ([("1\r\n2\r\n", "3")], "print(int(input()) + int(input())<<|| + 1>>)"),
  ([("3\n", "a")], "print('  a <<||a>> ')\nprint()\nprint()"),
  ([("3\n", "a\n\nb")], "print('a\\n <<\\n||>>b')"),
  ([("3\n", "a b")], "print('a<< ||  >>b')"),
  ([("3\n", "Yes")], "print('<<Yes||YES>>')"),
  ([("3\n", "1 2")], "print('1<<   ||\\n>>2')"),
  ([("3\n", "x 1.0")], "print('x <<1.0||1.00>>')"),
  ([("3\n", "True")], "print(<<True||1>>)"),
  ([("3\n", "\u20ac")], "print('\u20ac<<||\u20ac>>')"),
  ([("2\n1\n2\n", "3")],
   "import sys\nn, *x = map(int, sys.stdin.read().split())\n"
   "print(sum(x<<||[1:] + [0]>>))"),
  ([("1\n2\n", "3")],
   "import sys\nprint(sum(int(x) for x in <<sys.stdin||[input()]>>))"),
  ([("1\n2\n", "3")],
   "import sys\nr = sys.stdin.buffer.readline\n"
   "print(int(r()) + int(<<r()||1>>))"),
  ([("1\n2\n", "3")], "print(sum(map(int, open(0)<<||.readlines()[:1] >>)))"),
  ([("1\n2\n", "3")],
   "s = 0\ntry:\n  while True: s += int(input())\n"
   "except EOFError: print(s<<|| + 1>>)"),
  ([("", "ok")], "def main(): print('<<ok||no>>')\n"
   "if __name__ == '__main__': main()"),
  ([("", "ok")], "import sys\nprint('ok')\nsys.exit(<<||1>>)"),
  ([("", "ok")], "print('ok')\n<<exit()||raise ValueError>>"),
  ([("", "ok")], "def f(x: List[int]) -> Optional[int]: return x\n"
   "print('<<ok||no>>')"),
  ([("", "ok")], "import sys\nsys.stdout.write('ok')\n"
   "sys.stderr.write('no')<<||\nprint('no')>>"),
  ([("1\n", "1"), ("2\n", "2")], "print(<<int(input())||1>>)"),
  ([("10\n", "55")],
   "import sys\nsys.setrecursionlimit(10**6)\n"
   "def f(n): return n and n + f(n - 1)\nprint(f(int(input())<<|| - 1>>))"),
  ([("5\n", "1\n2")],
   "import threading\n"
   "t = threading.Thread(target=print, args=('1\\n2<<||3>>',))\n"
   "t.start()\nt.join()"),
)  # fmt: skip


Row = tuple[str, dict[str, Any], str, str]


def _row(
  style: str, question: str, metadata: dict[str, Any], program: str
) -> Row:
  right, wrong = (_CHOICE.sub(rf"\{i}", program) for i in (1, 2))
  return style, {"question": question, "metadata": metadata}, right, wrong


def _block(program: str) -> str:
  return f"```python\n{program}\n```"


def _check(body: str) -> str:
  if body.startswith("def check"):
    return body
  return "def check(candidate):\n  " + body.replace("\n", "\n  ")


def _method(head: str, body: str) -> str:
  if "class Solution" in body:
    return body
  lines = body.replace("\n", "\n        ")
  return f"class Solution:\n    def {head}:\n        {lines}\n"


def rows() -> Iterator[Row]:
  """Yield the style of each row, its item, and a right and a wrong answer."""
  for question, tests, program in MBPP:
    yield _row("MBPP", question, {"tests": tests}, _block(program))
  for question, tests, program in HUMANEVAL:
    metadata = {"test": _check(tests), "entry_point": "f"}
    yield _row("HumanEval", question, metadata, program)
  for before, head, tests, body in LEETCODE:
    name = head.partition("(")[0]
    program = _block(_method(head, body))
    metadata = {"tests": _check(tests), "entry_point": f"Solution().{name}"}
    begun = f"{before}\nclass Solution:\n    def {head}:\n        "
    yield _row("LeetCode", begun, metadata, program)
    fenced = f"Do it:\n```python\n{begun}\n```\nWell."
    yield _row("LeetCode", fenced, metadata, program)
    columns = {**metadata, "setup": before}
    yield _row("LeetCode", f"Do it, {name}.", columns, program)
    if "ListNode" in before:  # which only the tests have
      columns = {**metadata, "tests": f"{before}\n{_check(tests)}"}
      yield _row("LeetCode", "# class ListNode:\n# ...", columns, program)
  for pairs, program in STDIN:
    cases = [{"stdin": given, "stdout": said} for given, said in pairs]
    yield _row("stdin", "Read it.", {"cases": cases}, _block(program))
