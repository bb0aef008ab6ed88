"""Answers as policies write them: odd, other spellings, wrong, and endless.

`wrong_verdicts` and `unguarded` try them on the rewards for mathematics and on
every dataset of reasoning-gym.
"""

from collections.abc import Callable, Iterator
import re
import signal
from typing import Any

import numpy as np

from jaxrl_async import types
from jaxrl_async.rewards import mathematics
from jaxrl_async.rewards import reasoning

# What a policy may write instead of an answer, and what has broken a scorer.
ODD = (
  "",
  " ",
  "NaN",
  "nan + nani",
  "inf",
  "-Infinity",
  "None",
  "null",
  "[]",
  "{}",
  "[[]]",
  "[[0]]",
  "[null]",
  "[[1, 2], [3]]",
  '{"a": 1}',
  '[{"agent": "move"}]',
  "[1, 2",
  "0/1",
  "1/0",
  "-1",
  "0.5.5",
  "1e999",
  "9" * 5_000,
  "9**9**9",
  "1 × x",
  "0 × 0",
  "2 x",
  "1+1j",
  "x",
  "any text at all",
  "The answer is not known.",
  "True or False",
  "yes no",
  "?",
  "-",
  "=",
  "A=,B",
  "1;2;;3",
  "💥 ½ ²",
  "\x00",
  "\ud800",
  "(" * 200,
  "{" * 200,
  "__import__('os').getcwd()",
  "lambda: 0",
  "\\frac{1}{0}",
  "a\n\nb\n1 2\n3",
  "Move disk 1 from Peg 9 to Peg 0",
  "<answer></answer>",
)

# What is no longer right, whatever the right answer is.
AROUND = tuple(
  "{} or 7|{} or not|7 or {}|not {}|{} is wrong|{} # 7|"
  "{}^2|{}!|{}, 7|{}\n7".split("|")
)
# Which compare fewer digits than they have: three, and all that floats have.
_COARSE = ("power_function", "codeio")

# Answers of mathematics in other spellings, by the right one.
RIGHT: dict[str, tuple[str, ...]] = {
  "5": (
    "5 meters",
    "5 m",
    "5\\text{ meters}",
    "5 dollars",
    "5 cookies",
    "5 miles per hour",
    "5 km/h",
    "5\\ \\text{m/s}",
    "5 square feet",
    "5\\text{ ft}^2",
    "5 cm²",
    "$5",
    "5\\$",
    "5 USD",
    "5€",
    "€5",
    "£5",
    "5 percent",
    "5%",
    "x=5",
    "x = 5",
    "5.0",
    "5.00",
    "+5",
    "5 units",
    "\\text{5}",
    "\\mathbf{5}",
    "\\textbf{5}",
    "5 degrees",
    "5°C",
    "5°",
    "5 \\%",
    "10/2",
    "10÷2",
    "\\left(5\\right)",
    "(5)",
    "{5}",
    "５",
    "\\(5\\)",
    "\\[5\\]",
    "$$5$$",
    "5\\quad",
    "≈5",
    "\\approx 5",
    "5.",
    "5,",
    "5\\\\",
    "**5**",
    "*5*",
    "`5`",
    "5\\,",
    "5 \\text{ cats}",
    "5\\mathrm{~kg}",
    "5\\,\\mathrm{kg}",
    "5 kg",
    "5kg",
    "5\\text{ dollars per hour}",
    "5 dollars per hour",
    "\\$5.00",
    "5:",
    "Answer: 5",
    "\\text{Answer: }5",
    "5 people",
    "5 marbles",
    "5 \\text{inches}",
    "5 in",
    "5 in.",
    "5 sq. ft.",
    "5 ft^2",
    "5 m^2",
    "5\\text{ m}^2",
    "5\\operatorname{cm}",
    "5\\textdegree",
    "5^\\circ",
    "5^{\\circ}",
    "5 years old",
    "n=5",
    "\\displaystyle 5",
    "\\color{red}{5}",
    "\\boxed{5}",
    "\\underline{5}",
    "5",
  ),
  "308": (
    "308.",
    "308",
    "308\\\\",
    "3.08e2",
    "3.08\\times10^2",
    "3.08×10²",
    "3.08 \\cdot 10^{2}",
  ),
  "-5": ("−5", "–5", "- 5", "-5.0", "-$5", "-\\$5", "x=-5", "−5 m"),
  "\\sqrt{2}": (
    "√2",
    "√{2}",
    "√(2)",
    "\\sqrt2",
    "2^{1/2}",
    "2^{0.5}",
    "sqrt(2)",
    "\\sqrt 2",
    "1.41421356",
    "2^(1/2)",
  ),
  "2\\sqrt{3}": ("2√3", "√12", "2·√3", "2 × √3", "2*sqrt(3)", "\\sqrt{12}"),
  "x^2": ("x²", "x^{2}", "x*x", "x^2.", "x**2"),
  "x^{10}+y_1": ("x¹⁰+y₁",),
  "1234567": (
    "1\\,234\\,567",
    "1,234,567",
    "1{,}234{,}567",
    "1\\ 234\\ 567",
    "1 234 567",
    "1\u202f234\u202f567",
    "1\xa0234\xa0567",
    "1,\\!234,\\!567",
    "1~234~567",
    "1234567.0",
  ),
  "\\frac{1}{2}": (
    "½",
    "1/2",
    "0.5",
    ".5",
    "\\dfrac{1}{2}",
    "\\tfrac12",
    "50\\%",
    "50%",
    "{1}/{2}",
    "1⁄2",
    "0{.}5",
  ),
  "\\frac{3}{2}": ("1½", "1 1/2", "1\\frac{1}{2}", "1.5", "3/2"),
  "\\pi": ("π", "\\pi.", "1\\pi"),
  "2\\pi r": ("2πr",),
  "\\infty": ("∞",),
  "90": ("90°", "90^\\circ", "90 degrees", "90\\degree"),
  "90^\\circ": (
    "90",
    "90°",
  ),
  "Amy": (
    "amy",
    "\\text{Amy}",
    "Amy.",
    "**Amy**",
    "\\textbf{Amy}",
    "AMY",
    "\\mathrm{Amy}",
    '"Amy"',
  ),
  "\\text{Brian}": (
    "Brian",
    "\\text{ Brian }",
  ),
  "New York": (
    "new york",
    "\\text{New York}",
    "New\\ York",
    "\\text{New} \\text{ York}",
  ),
  "C": (
    "(C)",
    "\\text{C}",
    "C.",
    "C)",
    "\\text{(C)}",
    "\\textbf{(C)}",
    "c",
  ),
  "\\text{(C)}": (
    "C",
    "(C)",
  ),
  "yes": (
    "Yes",
    "\\text{Yes}",
    "yes.",
  ),
  "\\text{east}": ("East",),
  "1.6\\times10^{-19}": (
    "1.6×10⁻¹⁹",
    "1.6e-19",
    "1.6 \\cdot 10^{-19}",
    "1.60\\times10^{-19}",
  ),
  "0.333333": (
    "1/3",
    "\\frac13",
  ),
  "\\frac13": (
    "0.333333",
    "0.3333333333",
  ),
  "3, 5": (
    "\\{3,5\\}",
    "5,3",
    "3 and 5",
    "3 or 5",
    "x=3 \\text{ or } x=5",
    "3\\text{ and }5",
    "{3, 5}",
    "x = 3, 5",
    "x=3, x=5",
    "3; 5",
  ),
  "(3,5)": (
    "(3, 5)",
    "\\left(3,5\\right)",
  ),
  "x \\le 5": (
    "x≤5",
    "x \\leq 5",
    "5 \\ge x",
    "x<=5",
  ),
  "[0,\\infty)": ("[0,∞)",),
  "(-\\infty,2)\\cup(3,\\infty)": ("(−∞,2)∪(3,∞)",),
  "5 meters": (
    "5",
    "5 m",
    "5\\text{ meters}",
  ),
  "15\\text{ cm}^2": (
    "15",
    "15 cm²",
    "15 \\text{ cm}^2",
  ),
  "$18": (
    "18",
    "18 dollars",
    "\\$18",
  ),
  "18\\%": (
    "18",
    "18%",
    "18 percent",
  ),
  "10\\text{ AM}": (
    "10 AM",
    "10\\text{ AM}",
  ),
  "2:30": ("2:30",),
  "x+y": ("y+x",),
  "e^{-x}": (
    "e^{−x}",
    "\\frac{1}{e^x}",
  ),
  "\\begin{pmatrix}1\\\\2\\end{pmatrix}": (
    "\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}",
    "\\begin{bmatrix}1\\\\2\\end{bmatrix}",
  ),
  "i": ("i",),
  "3+4i": (
    "4i+3",
    "3 + 4 i",
  ),
  "11111_2": ("11111_2",),
  "100!": ("100!",),
  "2^{2012}": ("2^{2012}",),
  "\\binom{10}{3}": (
    "120",
    "\\binom{10}{3}",
  ),
  "10^{100}": (
    "10^{100}",
    "10^{99}\\cdot 10",
  ),
}

# Answers that look like the right one.
WRONG: dict[str, tuple[str, ...]] = {
  r"\frac{1}{2}": (
    "½½",
    "2",
    "1/3",
    "0.05",
    r"[\frac{1}{2})+-_1",
    r"\frac{1}{2}+{",
    r"½<\left(\%",
    r"\}½½²",
  ),
  r"\{1, 2\}": (r"\sqrt{\infty}\pi", r"\infty", "1", "2"),
  r"\{1\}": (r"\sqrt{\infty}\pi", "2"),
  r"\pi": (r"\pi}%", r"\pi}e(", "3.14", "p"),
  "5": (
    "6",
    "-5",
    "50",
    "5x",
    "5 or 6",
    "5,6",
    "(5,6)",
    "0.5",
    "5!",
    "5^2",
    "$50",
    "15",
    "-5 m",
    "5/2",
    "x",
    "five hundred",
    "50 meters",
    "5.1",
    "1/5",
    "",
    "\\{5,6\\}",
    "5i",
    "5\\sqrt{2}",
    "5000001e-6",
    "5 + x",
  ),
  "Amy": (
    "May",
    "Mya",
    "A",
    "AmyAmy",
    "Bob",
    "A m",
    "my",
    "Amy and Bob",
  ),
  "Brian": (
    "Brain",
    "Bria",
  ),
  "C": (
    "D",
    "B",
    "A",
    "(D)",
    "CC",
    "c)d",
  ),
  "yes": (
    "no",
    "sye",
  ),
  "1.6\\times10^{-19}": (
    "9.1\\times10^{-31}",
    "1.7\\times10^{-19}",
    "0",
    "1.6\\times10^{-18}",
    "1.6\\times10^{19}",
  ),
  "0.000001": (
    "0.0000011",
    "0",
    "0.000002",
  ),
  "\\frac13": (
    "0.3",
    "0.33",
    "0.3333",
  ),
  "1234567": (
    "1234568",
    "1,234,568",
    "123456",
  ),
  "1000000": (
    "1000001",
    "1e6+1",
  ),
  "0": (
    "0.0000001",
    "1e-9",
    "-1",
  ),
  "x^2": (
    "x^3",
    "x2",
    "2x",
    "x",
  ),
  "\\sqrt{2}": (
    "√3",
    "2",
    "1.41",
    "-√2",
  ),
  "3, 5": (
    "3",
    "5",
    "3,6",
    "3,5,7",
  ),
  "(3,5)": (
    "(5,3)",
    "[3,5]",
  ),
  "90": (
    "9",
    "90.5",
    "0.9",
  ),
  "1\\frac{1}{2}": (
    "\\frac{1}{2}",
    "11/2",
  ),
  "10\\text{ AM}": ("9 AM",),
  "2:30": (
    "3:30",
    "2:15",
  ),
  "18\\%": ("19%",),
  "x+y": (
    "x-y",
    "xy",
  ),
  "abc": (
    "cba",
    "bca",
  ),
  "11111_2": (
    "11110_2",
    "11111_3",
  ),
  "100!": ("99!",),
  "2^{2012}": ("2^{2011}",),
  "e": (
    "i",
    "\\pi",
    "2.7",
  ),
  "15\\text{ cm}^2": (
    "15 000",
    "1.5",
  ),
  "\\text{east}": (
    "west",
    "seat",
    "teas",
  ),
}

# What a text says, where it has several headings, boxes or marks.
SAID = (
  ("#### 308.", "308"),
  ("#### **18**", "18"),
  ("##### 18", "18"),
  ("#### 308 ####", "308"),
  ("#### Answer\n18", "18"),
  ("#### **Final answer:** 18", "18"),
  ("#### Step 1: add\n3 + 5\n#### 8", "8"),
  ("#### 308\n#### Verification\nall is well", "308"),
  ("#### Evelyn", "Evelyn"),
  (r"\boxed 5", "5"),
  (r"so $\boxed 5$.", "5"),
  (r"\boxed{5\\}", "5"),
  (r"\\boxed{5}", "5"),
  (r"\boxed{\boxed{5}}", "5"),
  (r"\boxed{1}, no: \boxed{2}", "2"),
  (r"first \boxed{3}. Then \boxed{4}", "4"),
  (r"$x=\boxed{3}$ or $x=\boxed{5}$", r"\{3, 5\}"),
  (r"\(x_1=\boxed{5}\) and \(x_2=\boxed{3}\)", r"\{3, 5\}"),
  (r"\boxed{1}, \boxed{2}, and \boxed{3}", r"\{1, 2, 3\}"),
  (r"\boxed{3} or \boxed{3}", "3"),
)

# What math-verify does not come back from, or only after minutes.
ENDLESS = (
  "9^{9^{9}}",
  "9^9^9",
  "9**9**9",
  "((9^9)^9)^9",
  r"\left(9^{9}\right)^{9^{9}}",
  r"9^\frac{9^{9^9}}{2}",
  "2^{-9^{9^9}}",
  "2^{100000000}",
  "e^{e^{e^{e^{10}}}}",
  "x^{x^{x^{x^{x^x}}}}",
  "1e999999999",
  "100000000!",
  "(10!)!",
  "10!!!",
  r"\binom{1000000}{500000}",
  r"{1000000 \choose 500000}",
  "\\frac{1}{" * 60 + "2" + "}" * 60,
  "\\sqrt{" * 60 + "2" + "}" * 60,
  "(" * 60 + "2" + ")" * 60,
  "\\sin(" * 20 + "x" + ")" * 20,
  "(x+y+z)^{200}",
  r"\begin{pmatrix}1&1\\1&0\end{pmatrix}^{10000000}",
  r"\sum_{i=1}^{10^9} i^2",
  r"\prod_{i=1}^{1000000} i",
  r"\int e^{x^2}\sin(x^3) dx",
  r"\Gamma(10^9)",
  r"\zeta(10^{10})",
  r"7\bmod 10^{10^{10}}",
  r"\log_{2}(8^{9^{9}})",
  "9^{9^{9}} - 9^{9^{9}} + 5",
)

_LONG_S = 10.0  # of a score, as task.reward_timeout_s
_NUM_ITEMS = 2


def beside(name: str, right: str) -> list[str]:
  """Return answers that are wrong, made of the right one of a dataset."""
  if not right.strip():
    return []
  made = [around.format(right) for around in AROUND]
  # The last digit is another one.
  digits = re.fullmatch(r"(.*\d)(\D*)", right, re.DOTALL)
  if digits and name not in _COARSE:
    head, tail = digits.groups()
    made.append(f"{head[:-1]}{(int(head[-1]) + 1) % 10}{tail}")
  return made


def wrong_verdicts(note: Callable[..., None]) -> int:
  """Return how many verdicts are wrong, and say which."""
  wrong = [
    (expected, answer, score)
    for expected, answer, wanted in _verdicts()
    if (score := _score(expected, answer)) != wanted
  ]
  for item, answer in _questions():
    try:
      score = reasoning.score_answer(item, answer)
    except Exception:  # `unguarded` counts it
      continue
    is_right = answer == item["answer"]
    if (score == 1.0) != is_right:
      wrong.append((item["dataset"], answer, score))
  for one in wrong:
    note("wrong verdict:", *one)
  return len(wrong)


def unguarded(note: Callable[..., None]) -> int:
  """Return how many answers raise or take long, and say which."""
  calls = [("5", answer, lambda a=answer: _score("5", a)) for answer in ENDLESS]
  calls += [
    (item["dataset"], a, lambda i=item, a=a: reasoning.score_answer(i, a))
    for item, a in _questions()
  ]
  count = 0

  def late(*_: object) -> None:
    raise TimeoutError

  signal.signal(signal.SIGALRM, late)
  for name, answer, call in calls:
    signal.setitimer(signal.ITIMER_REAL, _LONG_S)
    try:
      call()
    except Exception as error:
      count += 1
      note("unguarded:", name, answer[:80], repr(error)[:80])
    finally:
      signal.setitimer(signal.ITIMER_REAL, 0.0)
  return count


def _score(expected: str, text: str) -> float:
  said = types.Completion(
    text=text,
    turns=(),
    tokens=np.zeros((1,), np.int32),
    finish_reason=types.FinishReason.EOS,
  )
  return mathematics.score({"answer": expected}, said).score


def _verdicts() -> Iterator[tuple[str, str, float]]:
  """Yield right answers, what is said, and the score that it deserves."""
  for wanted, table in (1.0, RIGHT), (0.0, WRONG):
    for expected, answers in table.items():
      for answer in answers:
        yield expected, f"#### {answer}", wanted
  for text, expected in SAID:
    yield expected, text, 1.0
    yield "7", text, 0.0


def _questions() -> Iterator[tuple[dict[str, Any], str]]:
  """Yield items of every dataset with odd answers, and their own."""
  for name in sorted(set(reasoning.datasets()) - {"composite"}):
    dataset = reasoning.create_dataset(name, {}, seed=6, size=_NUM_ITEMS)
    for i in range(_NUM_ITEMS):
      item = {**dataset[i], "dataset": name, "params": {}}
      own = () if item["answer"] is None else (item["answer"],)
      near = beside(name, own[0]) if own else ()
      for answer in *own, *ODD, *near:
        yield item, answer
