r"""Answers of mathematics: where they are found, and what they equal."""

import random
import re
import time

import numpy as np
import odd_answers
import pytest

from jaxrl_async import types
from jaxrl_async.rewards import mathematics
from jaxrl_async.rewards import named
from jaxrl_async.rewards import term as term_lib


def score(expected, text):
  said = types.Completion(
    text=text,
    answer=None,
    turns=(),
    tokens=np.zeros((1,), np.int32),
    finish_reason=types.FinishReason.EOS,
  )
  return mathematics.score({"answer": expected}, said)


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
      before = text[start:end]
      if (len(before) - len(before.rstrip("\\"))) % 2:
        continue  # escaped
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
    ("-5", "minus 5"),
    (r"50\%", r"50\,\%"),
    (r"\frac{\pi}{2}", r"\frac\pi2"),
    (r"\frac{\pi}{2}", "pi/2"),
    (r"\frac{a}{b}", r"\dfrac ab"),
    (r"\frac{1}{3}", r"0.\overline{3}"),
    (r"(-\infty,2]", r"x\le 2"),
    (r"1.5\times10^{8}", "1.5x10^8"),
    ("A", "Option A"),
    (r"\textbf{(B) }12", "B"),
    (r"\textbf{(B) }12", "12"),
    (r"\sqrt[3]{2}", "∛2"),
    ("3+4i", r"3+4\,i"),
    (r"e^2", r"\mathrm{e}^2"),
    (r"\ln 2", r"\log_e 2"),
    (r"\sin x", "sin(x)"),
    (r"\emptyset", r"\varnothing"),
    (r"\langle 1,2\rangle", "(1, 2)"),
    ("2ab", "2ba"),
    ("2ab", r"ab\cdot2"),
    ("10\\%", "10"),
    ("5", "2+3=5"),
    (r"\{(1,2),(3,4)\}", "(3,4),(1,2)"),
    (r"\{2,3\}", "2, 3"),
    ("(2,3)", "2, 3"),
    ("(1,2)", "(x,y)=(1,2)"),
    ("p - q", "-q+p"),
    (r"\mathrm{arctan}(2)", r"\arctan 2"),
    (r"1.6\times10^{-19}", "1.6*10^-19"),
    (r"1.6\times10^{-19}", "1.6*10**-19"),
    ("e^{-x}", "e^-x"),
    (r"\mathbb{R}", "ℝ"),
    ("5", "~5"),
    ("5", r"\sim 5"),
    ("5", "5。"),
    ("12", "12 元"),
    ("12", "12个"),
    ("12", "12 Stück"),
    ("12", "12 (meters)"),
    ("12", "12 (cm)"),
    ("12", "12 µm"),
    ("12", "12 red apples"),
    ("12", "12 right angles"),
    ("10000", "10_000"),
    ("[-1,1]", "[-1;1]"),
    (r"(-\infty,1)\cup(2,3)", r"(2;3)\cup(-\infty;1)"),
    (r"e^{i\pi}", "-1"),
    ("i", r"\frac{1+i}{1-i}"),
    ("2 hours 30 minutes", "2 hours and 30 minutes"),
    (r"8\pi \text{ cm}^2", r"8\pi"),
    (r"8\pi", r"8\pi cm"),
    (r"\frac{\pi}{4}", r"\pi/4 radians"),
    (r"x^2", r"x^2 \text{ m}"),
    ("5", "x = 5 m"),
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
    ("2ab", "2"),
    ("2ab", "2cd"),
    ("2 a b", "2 c d"),
    (r"\frac{1}{2}bh", r"\frac{1}{2}xy"),
    (r"\frac{1}{2} m v^2", r"\frac{1}{2}"),
    (r"\frac{1}{2}(a+b) h", r"\frac{1}{2}(a+b)"),
    (r"\pi h", r"\pi"),
    ("x^2 m", "x^2"),
    ("a_1 kg", "a_1"),
    ("x^2 xyz", "x^2"),
    (r"3\mathbf{i}-\mathbf{j}", r"3\mathbf{i}+\mathbf{j}"),
    ("10", "10_2"),
    (r"\textbf{(B) }12", "(C) 12"),
    (r"\textbf{(B) }12", "13"),
    ("7", "\\"),
    ("7", "{" * 50),
    ("7", "\ud800"),
    ("(1,2)", r"\{1,2\}"),
    (r"\{1,2\}", "(1,2)"),
    (r"\{1,2\}", r"\left(1,2\right)"),
    (r"\{1,2,3\}", "(1,2,3)"),
    (r"x\in\{1,2\}", r"x\in(1,2)"),
    ("5", "[5,5]"),
    ("5", "6=5"),
    ("5", "x=6=5"),
    ("10", "10 is wrong"),
    ("10", "10 was wrong"),
    ("10", "10 (wrong)"),
    ("10", "10 at most"),
    ("10", "10 apples too many"),
    ("10", "10 seems small"),
    ("10", "10 but only just"),
    ("12", "12万"),
    ("12", "12以上"),
    ("p - q", "q - p"),
    ("e^{i\\pi}", "1"),
    ("2+3i", "2-3i"),
    ("5", "x5y"),
    ("2 hours 30 minutes", "2 hours and 50 minutes"),
    ("3.14", "3,14"),
    ("1/3", "0.333..."),
  ],
)
def test_what_is_not_equal_is_wrong(expected, answer):
  assert not mathematics.are_equal(expected, answer)


@pytest.mark.parametrize("expected", odd_answers.RIGHT)
def test_however_it_is_typed_a_right_answer_is_right(expected):
  for answer in odd_answers.RIGHT[expected]:
    assert mathematics.are_equal(expected, answer), answer
    assert score(expected, f"So it is $\\boxed{{{answer}}}$.").score, answer


@pytest.mark.parametrize("expected", odd_answers.WRONG)
def test_what_only_looks_like_the_right_answer_is_wrong(expected):
  for answer in odd_answers.WRONG[expected]:
    assert not mathematics.are_equal(expected, answer), answer


@pytest.mark.parametrize(("text", "expected"), odd_answers.SAID)
def test_the_answer_of_a_text_is_found(text, expected):
  assert score(expected, text).score == 1.0
  assert score(text, f"#### {expected}").score == 1.0
  other = "7" if expected != "7" else "8"
  assert score(other, text).score == score(text, f"#### {other}").score == 0.0


def test_one_of_several_solutions_is_not_all():
  gold = r"$x=\boxed{3}$ or $x=\boxed{5}$"
  assert score(gold, r"\boxed{3}").score == score(gold, r"\boxed{5}").score == 0
  assert score("5", gold).score == 0.0


@pytest.mark.parametrize(
  "blank", ["", " ", "####", "#### \n", r"\boxed{}", "$$"]
)
def test_a_blank_answer_of_an_item_is_refused_before_a_run(blank):
  scorer = named.scorer("mathematics", {})
  term = term_lib.Term(scorer=scorer, timeout_s=1.0, num_retries=0)
  with pytest.raises(named.TrialError, match="is blank"):
    named.check_item([term], {"answer": blank}, "row 1")
  named.check_item([term], {"answer": r"\boxed{0}"}, "row 1")


@pytest.mark.parametrize("answer", [*odd_answers.ENDLESS, r"\ln" * 7 + " i"])
def test_what_would_take_for_ever_is_wrong_at_once(answer):
  mathematics.are_equal("1", "2")  # imports the library
  start_s = time.process_time()
  for expected in "5", "x + 1":
    assert not mathematics.are_equal(expected, answer)
  assert time.process_time() - start_s < 1.0
  assert mathematics.are_equal(answer, answer)


def test_a_product_of_letters_is_compared_fast_with_the_imaginary_unit():
  mathematics.are_equal("1", "2")  # imports the library
  start_s = time.process_time()
  assert not mathematics.are_equal("i", "5 " + "ab " * 300 + "!")
  assert time.process_time() - start_s < 4.0


def test_equal_spellings_are_one_answer_for_a_vote():
  spellings = r"\boxed{308.}", "#### **308**", r"\boxed{308\\}", "#### $308$"
  assert {score("1", text).answer for text in spellings} == {"308"}
