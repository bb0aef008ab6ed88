"""Makes a code task that a model of 400 thousand parameters can learn.

    uv run benchmarks/code_task.py --output=/tmp/code_task

A question describes an arithmetic function of two numbers in words, such as
"add 3 to a, then multiply by b". The answer is Python source of a function
`f(a, b)`, and unit tests say whether it is right. TRAIN has drafts of which
some are deliberately wrong, so that a policy fine-tuned on them passes only
part of the tests; reinforcement learning has to find out which part.

It writes train.jsonl and test.jsonl. Each row has the columns question, draft,
tests and entry_point, as `task.reward=code` expects them. A column `solution`
would have to be right. The last line is JSON: the number of rows of both files.
"""

from collections.abc import Iterator
import json
import pathlib
import random

from absl import app
from absl import flags

_OUTPUT = flags.DEFINE_string(
  "output", "/tmp/code_task", "Directory to write to."
)
_SEED = flags.DEFINE_integer("seed", 0, "Seed of the order and the mistakes.")
_WRONG = flags.DEFINE_float(
  "wrong", 0.4, "Share of the training drafts that are wrong.", 0.0, 1.0
)
_HELD_OUT = 64  # questions of test.jsonl

# An operation with the operand {y}: in words, and as an operator.
_WORDS = {
  "add {y}": "+",
  "subtract {y}": "-",
  "multiply by {y}": "*",
}
_INPUTS = ((2, 3), (5, 1), (0, 7), (-4, 6), (9, -2))


def _operations() -> Iterator[tuple[str, str, str]]:
  """Yield the start, the operators and the operands of every function."""
  others = ["b", *map(str, range(2, 31))]
  for first in _WORDS:
    for second in _WORDS:
      for y in others:
        for z in others:
          if "b" in (y, z):  # so that the function has two arguments
            yield (
              first.format(y=y),
              second.format(y=z),
              _source(_WORDS[first], y, _WORDS[second], z),
            )


def _source(first: str, y: str, second: str, z: str) -> str:
  return f"def f(a, b):\n  return (a {first} {y}) {second} {z}"


def _expected(source: str) -> list[int]:
  names: dict = {}
  exec(source, names)  # written above
  return [names["f"](a, b) for a, b in _INPUTS]


def _corrupted(source: str, rng: random.Random) -> str:
  """Return the source with one operator replaced by another one."""
  places = [
    i
    for i, c in enumerate(source)
    if c in "+-*" and source[i - 1] == source[i + 1] == " "
  ]
  place = rng.choice(places)
  other = rng.choice([c for c in "+-*" if c != source[place]])
  return source[:place] + other + source[place + 1 :]


def _row(first: str, second: str, source: str, draft: str) -> dict[str, str]:
  tests = [
    f"assert f({a}, {b}) == {value}"
    for (a, b), value in zip(_INPUTS, _expected(source), strict=True)
  ]
  return {
    "question": f"{first}, then {second}",
    "draft": draft,
    "tests": "\n".join(tests),
    "entry_point": "f",
  }


def make(
  directory: pathlib.Path, *, seed: int = 0, wrong: float = 0.4
) -> dict[str, int]:
  """Write both files, and return their numbers of rows.

  Args:
    directory: is created if it does not exist.
    seed: of the order of the questions and of the mistakes.
    wrong: share of the training drafts that are wrong.
  """
  rng = random.Random(seed)
  functions = list(_operations())
  rng.shuffle(functions)
  directory.mkdir(parents=True, exist_ok=True)
  rows: dict[str, list[dict[str, str]]] = {"train": [], "test": []}
  for number, (first, second, source) in enumerate(functions):
    is_test = number < _HELD_OUT
    is_wrong = not is_test and rng.random() < wrong
    draft = _corrupted(source, rng) if is_wrong else source
    split = "test" if is_test else "train"
    rows[split].append(_row(first, second, source, draft))
  for split, of_split in rows.items():
    text = "".join(json.dumps(row) + "\n" for row in of_split)
    (directory / f"{split}.jsonl").write_text(text)
  return {split: len(of_split) for split, of_split in rows.items()}


def main(argv: list[str]) -> None:
  """Write the files of the flags."""
  del argv
  directory = pathlib.Path(_OUTPUT.value)
  print(json.dumps(make(directory, seed=_SEED.value, wrong=_WRONG.value)))


if __name__ == "__main__":
  app.run(main)
