r"""Answers of mathematics: where they are found, and what they equal."""

import random
import re

import pytest

from jaxrl_async.rewards import mathematics


@pytest.mark.parametrize(
  ("text", "answer"),
  [
    (r"so \boxed{3}", "3"),
    (r"\boxed{1}, no: \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
    (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
    (r"\boxed {x^{2}}", "x^{2}"),
    (r"\fbox{5}", "5"),
    (r"\boxed{1} and \boxed{2", "1"),
    ("18 - 9 = 9\n#### 1,234", "1,234"),
    ("#### 3\n#### 4\n", "4"),
    (r"#### 3, or \boxed{4}", "4"),
    ("the answer is 3", None),
    (r"\boxed{}", None),
    ("####", None),
    ("", None),
  ],
)
def test_an_answer_is_the_last_box_or_what_follows_the_hashes(text, answer):
  assert mathematics.answer_of(text) == answer


def boxed_by_search(text):
  """The same by trying every box to its end: quadratic, and plain."""
  found = None
  for match in re.finditer(r"\\(?:boxed|fbox)\s*\{", text):
    depth, start = 1, match.end()
    for end in range(start, len(text)):
      if text[end - 1] == "\\" and text[end] in "{}":
        continue
      depth += {"{": 1, "}": -1}.get(text[end], 0)
      if depth == 0:
        found = text[start:end].strip()
        break
  return found


def test_boxes_may_be_nested_escaped_and_left_open():
  draw = random.Random(0)
  pieces = (r"\boxed{", r"\fbox {", "{", "}", r"\{", r"\}", "a", " ", "\\")
  found = set()
  for _ in range(20_000):
    text = "".join(draw.choices(pieces, k=draw.randrange(12)))
    assert mathematics.boxed(text) == boxed_by_search(text), text
    found.add(mathematics.boxed(text))
  assert len(found) > 100


@pytest.mark.parametrize(
  ("expected", "answer"),
  [
    ("18", "18"),
    ("18", "18.0"),
    ("18", "$18"),
    ("1,234", "1234"),
    ("1234", "1,234"),
    (r"\frac{1}{2}", "0.5"),
    (r"\frac{1}{2}", "1/2"),
    (r"\frac12", r"\dfrac{1}{2}"),
    (r"\frac{3}{2}", r"1\frac{1}{2}"),
    (r"[0, 1)", r"[0,1)"),
    (r"(-\infty, 2) \cup (3, \infty)", r"(-\infty,2)\cup(3,\infty)"),
    (r"\{1, 2, 3\}", r"\{3, 2, 1\}"),
    ("1,-2", "-2, 1"),
    (r"2\sqrt{13}", r"\sqrt{52}"),
    (r"(x+1)^2", r"x^2 + 2x + 1"),
    (r"\text{Evelyn}", "Evelyn"),
    (
      r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}",
      r"\begin{pmatrix}1\\2\end{pmatrix}",
    ),
    ("6 - 5i", "-5i + 6"),
    (r"15\mbox{ cm}^2", "15"),
    ("10\\%", "10"),
  ],
)
def test_other_spellings_of_an_answer_are_right(expected, answer):
  assert mathematics.are_equal(expected, answer)
  assert mathematics.are_equal(expected, expected)


@pytest.mark.parametrize(
  ("expected", "answer"),
  [
    ("18", "19"),
    ("18", "81"),
    ("18", ""),
    ("18", None),
    ("18", "17 or 18"),
    (r"\frac{1}{2}", r"\frac{1}{3}"),
    ("[0, 1)", "[0, 1]"),
    ("(0, 1)", "(1, 0)"),
    (r"\{1, 2\}", r"\{1, 2, 3\}"),
    ("x + 1", "x - 1"),
    (r"\text{Evelyn}", "Even"),
    ("1" * 600, "1" * 600 + "1" * 600),
    ("7", "x"),
    ("7", "\\"),
    ("7", "{" * 50),
    ("7", "\ud800"),
  ],
)
def test_what_is_not_equal_is_wrong(expected, answer):
  assert not mathematics.are_equal(expected, answer)
