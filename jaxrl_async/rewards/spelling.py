r"""Answers as people and models write them, in LaTeX that math-verify reads.

A verdict must not depend on how a right answer is typed: 90° is 90, `**5**` is
5, √2 is \sqrt{2} and 1\,234\,567 is 1234567. What an answer means is decided
elsewhere.
"""

import functools
import re
import unicodedata

from jaxrl_async.rewards import match

_SUPERSCRIPTS = "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿⁱ", "0123456789+-()ni"
_SUBSCRIPTS = "₀₁₂₃₄₅₆₇₈₉₊₋₍₎", "0123456789+-()"
_GREEK = (
  "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi"
  " omicron pi rho varsigma sigma tau upsilon phi chi psi omega"
).split()
_SYMBOLS = {
  **{chr(ord("α") + i): f"\\{name} " for i, name in enumerate(_GREEK)},
  **dict.fromkeys(match.DASHES, "-"),
  "×": "\\times ",
  "·": "\\cdot ",
  "⋅": "\\cdot ",
  "÷": "/",
  "⁄": "/",
  "∕": "/",
  "∞": "\\infty ",
  "≤": "\\le ",
  "≥": "\\ge ",
  "≠": "\\ne ",
  "±": "\\pm ",
  "∪": "\\cup ",
  "∩": "\\cap ",
  "∅": "\\emptyset ",
  "∈": "\\in ",
  "°": "^\\circ ",
  "√": "\\sqrt ",
  "“": '"',
  "”": '"',
  "’": "'",
  "∛": "\\sqrt[3] ",
  **{sign: f"\\mathbb{{{sign}}}" for sign in "ℕℤℚℝℂ"},  # becomes a letter
  "。": ".",
}
_TO_LATEX = str.maketrans(_SYMBOLS)
_FUNCTION = "(?:arc)?(?:sin|cos|tan)|cot|sec|csc|log|ln|exp"
_TIMES = "(?:hour|hr|minute|min|day|week|month|year|foot|feet|ft|pound|lb)s?"
# What the library does not know, or drops together with a letter.
_COMMANDS = [
  (re.compile(pattern), better)
  for pattern, better in (
    (r"\\varnothing(?![a-zA-Z])", r"\\emptyset "),
    (r"\\colon(?![a-zA-Z])", ":"),
    (r"\\langle(?![a-zA-Z])", "("),
    (r"\\rangle(?![a-zA-Z])", ")"),
    (r"\\log\s*_\s*\{?e\}?(?![a-zA-Z])", r"\\ln "),
    (r"\\(?:mathbf|mathit|vec|hat)\s*\{\s*([a-zA-Z])\s*\}", r" \1"),
    (r"\\(?:mathrm|text|operatorname)\s*\{([ie])\}", r" \1"),
    (rf"\\(?:mathrm|text|operatorname)\s*\{{({_FUNCTION})\}}", r"\\\1 "),
    (r"(?<!\\)\\[,;:! ]\s*(?=\\(?!\\)|[a-zA-Z])", " "),
    # Arguments without braces.
    (
      r"\\[dt]?frac(?![a-zA-Z]\w)\s*(\\[a-zA-Z]+|\w)\s*(\\[a-zA-Z]+|\w)",
      r"\\frac{\1}{\2}",
    ),
    (r"\\[dt]?frac\s*(\\[a-zA-Z]+|\d)\s*(?=\{)", r"\\frac{\1}"),
    (r"\\sqrt(\[\d+\])\s*(\w)", r"\\sqrt\1{\2}"),
    (r"(?<=\d)\s*[xX]\s*(?=10\s*\^)", r"\\times "),
    (r"\*\*", "^"),
    (r"\^\s*(-(?:\d+|[a-zA-Z])(?![\w.]))", r"^{\1}"),
    (r"([\[(][^;,()\[\]]*);(?=[^;,()\[\]]*[\])])", r"\1,"),
    (rf"(?<=\d)( {_TIMES}),? and (?=\d+(?:\.\d+)? {_TIMES}$)", r"\1 "),
    # Names that are typed as words.
    (r"(?<![\\a-zA-Z])pi(?![a-zA-Z])", r"\\pi "),
    (
      rf"(?<![\\a-zA-Z])({_FUNCTION})"
      r"(?=\s*(?:[({\\\d]|[a-z](?![a-zA-Z])))",
      r"\\\1 ",
    ),
  )
]
_NAMES = {
  "infinity": "\\infty",
  "empty set": "\\emptyset",
  "the empty set": "\\emptyset",
  "all real numbers": "\\mathbb{R}",
}
_PERCENT = re.compile(
  r"\s*(?:\\(?:text|mathrm)\s*\{\s*)?(?:percent|pct|percentage)\s*\}?$"
)
_RECURRING = re.compile(r"(\d*)\.(\d*)\\(?:overline|bar|dot)\s*\{?(\d+)\}?")
_LOOSE = re.compile(
  r"\s+(?![0-9a-zA-Z])|(?<![0-9a-zA-Z])\s+|\{(?=\w\})|(?<=\{\w)\}"
)
# A space that only looks narrow, a brace around a comma, between the digits.
_BETWEEN_THOUSANDS = re.compile(
  r"(?<=\d)(?:,?\\[,!;: ]|[~_]|\{,\}|\{\\,\})(?=\d{3}(?!\d))"
)
_SPACED_THOUSANDS = re.compile(r"-?\d{1,3}(?: \d{3})+(?:\.\d+)?")
_SCIENTIFIC = re.compile(r"(-?\d*\.?\d+)[eE]([-+]?\d{1,4})")
_STYLE = re.compile(
  r"\\(?:displaystyle|underline|boldsymbol|bm|pmb"
  r"|(?:text)?color\s*\{\w+\})(?![A-Za-z])"
)
_TEXT = re.compile(
  r"\\(?:text|textbf|textit|textrm|textsf|mathrm|mathbf|mathit|mathsf|mbox|hbox"
  r"|operatorname)\s*\{([^{}]*)\}"
)
_ENDS = re.compile(r"(?:\\\\|\\[,;:! ]|\\q?quad|~|[.,;:]|\s)+$")
_BEGINS = re.compile(
  r"^(?:\\text\s*\{)?\s*(?:the )?(?:final )?answer(?: is)?\s*:?\s*\}?\s*"
  r"|^(?:≈|\\approx|(?:~|\\sim)(?=\s*[-\d.\\$]))\s*",
  re.IGNORECASE,
)
_AROUND = (
  ("**", "**"),
  ("__", "__"),
  ("*", "*"),
  ("`", "`"),
  ('"', '"'),
  ("$$", "$$"),
  ("$", "$"),
  ("\\(", "\\)"),
  ("\\[", "\\]"),
)
_MIXED = re.compile(r"(-?\d+)\s+(\d+)\s*/\s*(\d+)")
_DEGREES = re.compile(r"\s*\^\s*\{?\s*\\circ\s*\}?\s*[CF]?\s*$")
_CURRENCY = re.compile(r"\\?\$|[€£¥]")
# Words after a number. They are its unit, apart from those that are part of it
# or say something about it; short ones may be a product of letters, unless they
# are known.
_SHORT = frozenset(
  "m g s h l j n w v k mm cm dm km in ft yd mi nm mg kg lb lbs oz ml cl dl pt"
  " qt gal ms hr hrs min sec yr yrs hz khz mph kph rpm kw kj kv ma kn pa kpa"
  " atm mol ev db kb mb gb sq cu st nd rd th usd eur gbp rs cal deg rad"
  " μm μs μg".split()
)
_UNIT = re.compile(
  r"(?:(?<=[\d})])|(?<=\\pi))\s*(?:\\ |~)*\s*"
  r"(?P<unit>(?:(?:[^\W\d_]{2,}+|(?<![\d}a-zA-Z])[a-zA-Z]"
  r"|[⺀-힯](?![^\W\d_]))\.?"
  r"(?:\^\{?-?[1-9]\}?)?(?:[/\s~-]|\\ |\\cdot )*+)+)$"
)
_ENDS_IN_TEXT = re.compile(rf"{_TEXT.pattern}(?:\^\{{?-?[1-9]\}}?)?\s*$")
_VARIABLE = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]{1,2}(?![a-zA-Z])")
_NO_UNITS = re.compile(
  r"\b(?:and|or|not|hundred|thousand|million|billion|trillion|dozen|half|base"
  r"|mod|modulo|plus|minus|times|over|squared|cubed|factorial|to|sin|cos|tan"
  r"|cot|sec|csc|log|ln|exp|sqrt|pi|inf|infty|infinity|percent|percentage|pct"
  r"|if|for|when|where|than|more|less|am|pm|i|x|y|z|n|e"
  r"|is|are|was|were|be|has|have|can|may|should|but|because|since|then|only"
  r"|least|most|never|none|maybe|perhaps|wrong|incorrect|too|unless|without"
  r"|fails|seems|looks)\b|a\.m|p\.m|[十百千万萬億亿兆천만억半以或和不至到]",
  re.I,
)
# A difference of letters is none.
_LETTERS = re.compile(r"(?!(?:\w\s*-\s*)+\w$)[^\W\d_]+(?:[\s'-]+[^\W\d_]+)*")
_CHOICE = re.compile(r"(?:(?:option|choice) )?\(?([a-z])\)?")
_LABEL = re.compile(r"\(([A-J])\)(?:\s|\\[ ,;:]|~|\\q?quad)+(?=[\w$\\-])(.+)")
_TIME_OF_DAY = re.compile(r"[\d:.\s]+(?:am|pm|a\.m|p\.m)")


def latex(answer: str) -> str:
  """Return an answer in the LaTeX that the library reads.

  It takes time in proportion to the answer.
  """
  answer = re.sub(r"^(?:minus|negative) (?=[\d.\\])", "-", _plain(answer))
  answer = _RECURRING.sub(_fraction, answer)
  if _LETTERS.fullmatch(_TEXT.sub(r"\1", answer).strip()):
    return answer
  if match := _SCIENTIFIC.fullmatch(answer):
    return rf"{match[1]}\times 10^{{{match[2]}}}"
  if _SPACED_THOUSANDS.fullmatch(answer):
    return answer.replace(" ", "")
  if match := _MIXED.fullmatch(answer):
    return rf"{match[1]}\frac{{{match[2]}}}{{{match[3]}}}"
  answer = _PERCENT.sub(r"\\%", answer)
  # 4 i is a product.
  answer = re.sub(r"(?<=\d)\s+(?=i$)", "", answer)
  return _without_unit(answer)


@functools.lru_cache(maxsize=4_096)
def words(answer: str) -> str | None:
  """Return an answer that has letters only, apart from its spelling.

  None if it is not one. A letter in brackets, as a choice of several, is one;
  a time of day too, whose half of the day a unit would be.
  """
  text = _TEXT.sub(r"\1", _plain(answer)).replace("\\ ", " ").replace("$", "")
  text = " ".join(text.split()).casefold().rstrip(".")
  if choice := _CHOICE.fullmatch(text):
    return choice[1]
  if _TIME_OF_DAY.fullmatch(text):
    return text.replace(" ", "").replace(".", "")
  return text if _LETTERS.fullmatch(text) else None


def tight(latex: str) -> str:
  """Return LaTeX without the spaces and braces that change nothing."""
  return _LOOSE.sub("", latex)


def labelled(answer: str) -> tuple[str, ...]:
  """Return the letter and the value of an answer such as (B) 12.

  Any other answer is returned alone.
  """
  found = _LABEL.fullmatch(_TEXT.sub(r"\1", answer).strip(" $"))
  if found is None or _LABEL.search(found[2]):
    return (answer,)
  return found[1], found[2]


def _plain(answer: str) -> str:
  """Return an answer without markup around it, its symbols as LaTeX."""
  answer = _scripts(_fractions(answer), *_SUPERSCRIPTS, "^")
  answer = _scripts(answer, *_SUBSCRIPTS, "_")
  answer = unicodedata.normalize("NFKC", answer.translate(_TO_LATEX))
  answer = _roots(_STYLE.sub("", answer))
  answer = _BETWEEN_THOUSANDS.sub("", answer)
  answer = answer.replace("\\degree", "^\\circ ")
  answer = answer.replace("\\textdegree", "^\\circ ").replace("{.}", ".")
  answer = _bare(answer)
  for pattern, better in _COMMANDS:
    answer = pattern.sub(better, answer)
  answer = answer.strip()
  return _NAMES.get(answer.casefold(), answer)


def _bare(answer: str) -> str:
  """Drop what stands around an answer, until nothing is left to drop."""
  while True:
    before = answer
    answer = _BEGINS.sub("", _ENDS.sub("", answer.strip()))
    if answer.endswith("\\"):  # of a space
      answer = answer[:-1]
    for left, right in _AROUND:
      inner = answer[len(left) : -len(right)]
      if answer == left + inner + right and inner and left not in inner:
        answer = inner
    whole = _TEXT.fullmatch(answer)
    if whole:
      answer = whole[1]
    if answer == before:
      return answer


def _without_unit(answer: str) -> str:
  """Drop currencies, and the words after a number."""
  answer = _DEGREES.sub("", _CURRENCY.sub("", answer).strip())
  answer = re.sub(r"(?<=\d)\s+\(([^\W\d_]{2}[\w\s/]*)\)$", r" \1", answer)
  found = _UNIT.search(_TEXT.sub(r" \1", answer))
  if found and _is_unit(found, is_text=bool(_ENDS_IN_TEXT.search(answer))):
    answer = _DEGREES.sub("", found.string[: found.start()])
  return _ENDS.sub("", answer)


def _is_unit(found: re.Match[str], *, is_text: bool) -> bool:
  """Return whether words after a number are its unit, and no product.

  Args:
    found: of `_UNIT`.
    is_text: they are marked as text. Others with few letters are variables
      after what has variables: m in (a+b) m, and in m v.
  """
  unit = found["unit"]
  is_glued = found.start() == found.start("unit")
  words = re.findall(r"[^\W\d_]+", unit.replace("\\cdot", ""))
  shortest = min(map(len, words))
  if not is_text and unit.isascii():
    number = found.string[: found.start()].rpartition("=")[2]
    if shortest < 4 and _VARIABLE.search(number):
      return False
    if shortest == 1 and ("\\pi" in number or " " in unit.strip()):
      return False
  return not _NO_UNITS.search(unit) and all(
    len(word) > 2 + is_glued or word.casefold() in _SHORT or word[0] >= "⺀"
    for word in words
  )


def _fraction(match: re.Match[str]) -> str:
  """Return a recurring decimal as a fraction."""
  whole, first, period = match.groups()
  over = int(whole + first + period) - int(whole + first or "0")
  under = "9" * len(period) + "0" * len(first)
  return rf"\frac{{{over}}}{{{under}}}"


def _fractions(answer: str) -> str:
  """Write ½ as a fraction, after a space: 1½ is a mixed number."""

  def fraction(match: re.Match[str]) -> str:
    over, under = unicodedata.normalize("NFKC", match[0]).split("⁄")
    return rf"\frac{{{over}}}{{{under}}}"

  return re.sub("[¼½¾⅐-⅞]", fraction, answer)


def _scripts(answer: str, small: str, large: str, mark: str) -> str:
  table = str.maketrans(small, large)
  return re.sub(
    f"[{small}]+",
    lambda match: f"{mark}{{{match[0].translate(table)}}}",
    answer,
  )


def _roots(answer: str) -> str:
  r"""Write √2, √(2) and \sqrt 2 as \sqrt{2}."""
  answer = re.sub(
    r"\\sqrt\s*\((\d+(?:\.\d+)?|[a-zA-Z])\)", r"\\sqrt{\1}", answer
  )
  return re.sub(
    r"\\sqrt\s+(\d+(?:\.\d+)?|[a-zA-Z]|\\[a-zA-Z]+)", r"\\sqrt{\1}", answer
  )
