"""Rows of code in four styles, with programs that are right or subtly wrong.

    MBPP       tests are a list of asserts, and the question is prose
    HumanEval  the question is the beginning of a function, and a completion
               goes on with it; the tests define check(candidate)
    LeetCode   a method of a class Solution, and tests that define
               check(candidate)
    stdin      a program that reads and writes, and cases

`rows` makes a hundred of each, and adds those of `odd_code_rows`. `FAULTY` are
rows whose tests test nothing or are wrong, which a run has to refuse before it
starts.
"""

from collections.abc import Iterator
import dataclasses
import fractions
import json
import textwrap
from typing import Any

import odd_code_rows

_PARAMETERS = (2, 3, 4, 5, 7)
_LISTS = ([], [1], [3, 1, 2], [2, 2, 5, 5, 5], [-4, 0, 7, 7, -4, 10])
_WORDS = ("", "a", "abca", "a bc  d", "level up", "Mississippi")
_NUMBERS = (0, 1, 2, 6, 7, 28, 100)

# A function of x and a constant K: what it does, its body, what makes the body
# right and what makes it wrong, and values of x.
_FUNCTIONS = (
  ("Add {k} to x.", "return x + {}", "{k}", "{k} + (x > 50)", _NUMBERS),
  ("Say whether {k} divides x.", "return {}", "x % {k} == 0",
   "x % {k} == 0 and x > 0", _NUMBERS),
  ("Return the digits of x in base {k}, the last one first.",
   "digits = []\nwhile {}:\n  digits.append(x % {k})\n  x //= {k}\n"
   "return digits", "x", "x > 1", _NUMBERS),
  ("Return x to the power {k} as a complex number, and as text.",
   "return complex(x ** {k}), str({})", "x ** {k}", "x * {k}", _NUMBERS),
  ("Return the fraction x / {k}.",
   "from fractions import Fraction\nreturn Fraction(x, {})", "{k}", "{k} + 1",
   _NUMBERS),
  ("Yield the multiples of {k} up to x.",
   "for i in range(0, {}, {k}):\n  yield i", "x + 1", "x", _NUMBERS),
  ("Return the sum of the elements of x below {k}.",
   "return sum(y for y in x if y {} {k})", "<", "<=",
   (*_LISTS, [2, 3, 4, 5, 7])),
  ("Return x in rotation by {k} to the left.",
   "k = {k} % max(len(x), 1)\nreturn x[{}:] + x[:k]", "k", "k - 1",
   _LISTS),
  ("Return how often each element of x occurs, if more than once.",
   "from collections import Counter\n"
   "return Counter({{y: n for y, n in Counter(x).items() if n {} 1}})",
   ">", ">=", _LISTS),
  ("Return the positions of each element of x, modulo {k}.",
   "from collections import defaultdict\nfound = defaultdict(list)\n"
   "for i, y in enumerate(x{}):\n  found[y].append(i % {k})\nreturn found", "",
   ", 1", _LISTS),
  ("Return the runs of {k} elements of x, the last one being shorter.",
   "return [x[i : i + {k}] for i in range(0, {}, {k})]", "len(x)",
   "len(x) - 1", _LISTS),
  ("Return the smallest and the largest element of x, or None, with {k}.",
   "from collections import namedtuple\n"
   "Ends = namedtuple('Ends', 'low high k')\n"
   "return Ends(min(x), {}, {k}) if x else None", "max(x)", "x[-1]", _LISTS),
  ("Return the set of the elements of x whose rest by {k} is not 0.",
   "return {{y for y in x if {}}}", "y % {k}", "y % {k} > 1", _LISTS),
  ("Return the elements of x times {k} as text.",
   "return map({}, [{k} * y for y in x])", "str", "lambda y: repr(abs(y))",
   _LISTS),
  ("Return the words of x that are longer than {k} - 1.",
   "return [y for y in x.split() if len(y) {} {k} - 1]", ">", ">=",
   (*_WORDS, "  ab  abc  abcd abcdef ")),
  ("Move each letter of x by {k} in the alphabet.",
   "return ''.join(chr((ord(y) - 97 + {k}) % {} + 97) if 'a' <= y <= 'z'"
   " else y for y in x)", "26", "27", (*_WORDS, "xyz")),
  ("Say whether the letters of x are a palindrome, with {k}.",
   "y = [c for c in x{} if c.isalpha()]\nreturn y == y[::-1], {k}", ".lower()",
   "", (*_WORDS, "Level")),
  ("Return the bytes of the first {k} characters of x.",
   "return x[:{}].encode()", "{k}", "{k} - 1", (*_WORDS, "\u20ac and so on")),
  ("Return the longest prefix of x without a character twice, with {k}.",
   "seen = set()\nfor i, y in enumerate(x):\n  if y in seen:\n"
   "    return x[:{}], {k}\n  seen.add(y)\nreturn x, {k}", "i", "i + 1",
   _WORDS),
  ("Return x with every {k}th character left out.",
   "return ''.join(y for i, y in enumerate(x, {}) if i % {k})", "1", "0",
   _WORDS),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Row:
  """A row with completions.

  Attributes:
    style: of the row.
    item: that is scored.
    right: completion with a right program.
    wrong: completion with a wrong one.
  """

  style: str
  item: dict[str, Any]
  right: str
  wrong: str


def _functions() -> Iterator[tuple[str, str, str, Any]]:
  """Yield what a function does, its body, a wrong one, and its arguments."""
  for what, body, right, wrong, values in _FUNCTIONS:
    for k in _PARAMETERS:
      # The body has one place for what is right or wrong, and some for k.
      def filled(part: str, body: str = body, k: int = k) -> str:
        return body.format(part.format(k=k), k=k)

      yield what.format(k=k), filled(right), filled(wrong), values


def _run(body: str, x: Any) -> Any:
  names: dict[str, Any] = {}
  exec(_function(body), names)  # one of the above
  return _plain(names["f"](x))


def _plain(value: Any) -> Any:
  return list(value) if hasattr(value, "__next__") else value


def _function(body: str, head: str = "def f(x):") -> str:
  return f"{head}\n{textwrap.indent(body, '    ')}\n"


def _spelled(program: str, number: int) -> str:
  """Return a completion with a program, as models write them."""
  return (
    f"```python\n{program}```",
    f"Here it is:\n\n```\n{program}```\nIt prints:\n```\n1\n```\n",
    f"```Python\n{program}```\nand then\n```\nf(1)\n```",
    f"1. Write:\n   ```py\n{textwrap.indent(program, '   ')}   ```\n2. Run it.",
  )[number % 4]


def _asserts(values: Any, body: str, name: str) -> Iterator[str]:
  for x in values:
    expected: Any = _run(body, x)
    call = f"{name}({x!r})"
    if isinstance(expected, fractions.Fraction):
      yield f"assert {call} * {expected.denominator} == {expected.numerator}"
      continue
    for plain in (tuple, dict):  # of named tuples, counters and the like
      if isinstance(expected, plain):
        expected = plain(expected)
    if isinstance(expected, list):  # the program may have an iterator
      yield f"assert list({call}) == {expected!r}"
    else:
      yield f"assert {call} == {expected!r}"


def _checks(values: Any, body: str) -> str:
  lines = "\n".join(_asserts(values, body, "candidate"))
  return f"def check(candidate):\n{textwrap.indent(lines, '    ')}\n"


_READS = """import json
{function}
def plain(value):
    if hasattr(value, "__next__"): return list(value)
    if isinstance(value, dict): return list(value.items())
    if isinstance(value, (set, bytes)): return sorted(value)
    return value
print(json.dumps(plain(f(json.loads(input()))), default=str))
exit()
"""


def rows() -> Iterator[Row]:
  """Yield the rows of all styles, and check that wrong programs are wrong."""
  for number, (what, right, wrong, values) in enumerate(_functions()):
    assert any(_run(right, x) != _run(wrong, x) for x in values), (what, wrong)
    yield Row(
      "MBPP",
      {
        "question": f"Write a function f of x. {what}",
        "metadata": {
          "tests": [*_asserts(values, right, "f")],
          "entry_point": None,
          "cases": None,
          "solution": _function(right),
        },
      },
      _spelled(_function(right), number),
      _spelled(_function(wrong), number),
    )
    begun = (
      f'from typing import Any\n\n\ndef f(x: Any) -> Any:\n    """{what}"""\n'
    )
    yield Row(
      "HumanEval",
      {
        "question": begun,
        "metadata": {
          "test": _checks(values, right),
          "entry_point": "f",
          "canonical_solution": textwrap.indent(right, "    ") + "\n",
        },
      },
      *(
        (
          textwrap.indent(body, "    ") + "\n\n\nprint(f(1))\n",
          f"from typing import List\n\n{_function(body)}",
          _spelled(begun + textwrap.indent(body, "    ") + "\n", number),
        )[number % 3]
        for body in (right, wrong)
      ),
    )
    methods = [
      f"class Solution:\n{textwrap.indent(_function(body, head), '    ')}"
      for body in (right, wrong)
      for head in ("def f(self, x: List[int]) -> Optional[int]:",)
    ]
    yield Row(
      "LeetCode",
      {
        "question": f"{what}\n\nclass Solution:\n    def f(self, x):",
        "metadata": {
          "tests": _checks(values, right),
          "entry_point": "Solution().f",
          "solution": methods[0],
        },
      },
      _spelled(methods[0], number),
      _spelled(methods[1], number),
    )
    reads = [_READS.format(function=_function(b)) for b in (right, wrong)]
    yield Row(
      "stdin",
      {
        "question": f"Read x as JSON. {what}",
        "metadata": {
          "cases": [
            {"stdin": json.dumps(x) + "\n", "stdout": _written(right, x)}
            for x in values
          ],
          "tests": None,
        },
      },
      _spelled(reads[0], number),
      _spelled(reads[1], number),
    )
  for style, item, right, wrong in odd_code_rows.rows():
    yield Row(style, item, right, wrong)


def _written(body: str, x: Any) -> str:
  value = _run(body, x)
  if isinstance(value, dict):
    value = list(value.items())
  if isinstance(value, set | bytes):
    value = sorted(value)
  return json.dumps(value, default=str) + "\n"


_ASSERT = "assert f(1) == 2"
_SOLUTION = "def f(x): return x + 1\ndef g(x): return 2"
FAULTY: tuple[dict[str, Any], ...] = (
  {"tests": json.dumps([_ASSERT])},
  {"tests": json.dumps({"inputs": ["1"], "outputs": ["2"]})},
  {"tests": {"inputs": ["1"], "outputs": ["2"]}},
  {"tests": None},
  {"tests": "x = 1"},
  {"tests": "f(1) == 2"},
  {"tests": "def test_f(): return f(1) == 2"},
  {"tests": "def test_f(f): assert f(1) == 2"},
  {"tests": "def check(candidate): assert candidate(1) == 2"},
  {"tests": "import numpy as np\n" + _ASSERT},
  {"tests": "try:\n  f(1)\nexcept Exception:\n  pass"},
  {"tests": "assert f(1) = 2"},
  {"tests": "assert np.allclose(f(1), 2)", "entry_point": "f"},
  {"tests": _ASSERT, "solution": "def f(x): return x"},
  {"tests": _ASSERT, "entry_point": "g"},
  {"cases": []},
  {"cases": [{"input": "1", "output": "2"}]},
  {"cases": [{"stdin": "1", "stdout": "2"}], "tests": _ASSERT},
  {"cases": [{"stdin": "", "stdout": ""}]},
  *(
    {"tests": tests}
    for tests in (
      "assert isclose(f(1), 2)",
      "assert f('a') == Counter('a')",
      "assert np.allclose(f(1), 2)",
      "assert f(1) == approx(2)",
      "def test_f(capsys): assert f(1) == 2",
      f"import pytest\n@pytest.mark.skip\ndef test_f(): {_ASSERT}",
      "import pytest\n@pytest.fixture\ndef one(): return 1\n"
      "def test_f(one): assert f(one) == 2",
      f"import pytest\n@pytest.mark.skipif(True)\ndef test_f(): {_ASSERT}",
      "class TestF:\n  def __init__(self): pass\n"
      "  def test_f(self): assert f(1) == 2",
      "from unittest.mock import patch\n"
      "with patch('builtins.print') as p: f(1)\np.assert_called_once_with(2)",
      "from unittest import mock\nimport time\n"
      f"with mock.patch.object(time, 'time', lambda: 1): {_ASSERT}",
      "from unittest.mock import Mock\nm = Mock()\nf(m)\n"
      "m.assert_called_with(1)",
      f"while True: pass\n{_ASSERT}",
    )
  ),
  {"tests": _ASSERT, "setup": "import numpy"},
  {"tests": _ASSERT, "setup": "def g("},
  {"tests": _ASSERT, "setup": 1},
  *(
    {"tests": f"{_ASSERT}\n{more}", "entry_point": "f", "solution": _SOLUTION}
    for more in ("assert g(1) == 2", "def test_f(capsys): assert f(1) == 2")
  ),
  {
    "tests": "import unittest\nclass T(unittest.TestCase):\n"
    "  def test_f(self): self.assertEqual(f(1), two)\nunittest.main()",
    "entry_point": "f",
  },
)
