r"""The task of benchmarks/papers.py: sums with one operation a line.

The question "7+8-2" has the solution "7+8=15\n15-2=13\n#13": a line for each
operation, and one for the answer, so that a solution that never ends has none.
Partial sums are from 0 to 9, and a small model can learn the ninety
operations. The rows are files of JSON lines, because pairs and labels are made
of them:

    question    the sum
    answer      what comes out
    solution    a worked solution, with the mistakes of a teacher that errs
"""

import json
import pathlib
from typing import Any

import numpy as np

ANSWER_PREFIX = "#"
_HIGHEST = 9  # of the partial sums


def question(rng: np.random.Generator, num_operations: int) -> str:
  """Return a sum whose partial sums stay between 0 and 9."""
  total = int(rng.integers(1, _HIGHEST + 1))
  text = str(total)
  for _ in range(num_operations):
    # Any other partial sum may come next.
    after = int(rng.integers(_HIGHEST))
    after += after >= total
    text += f"{after - total:+d}"
    total = after
  return text


def operations(text: str) -> tuple[int, list[tuple[str, int]]]:
  """Return the first number of a question, and what is done to it."""
  first, *rest = text.replace("+", " +").replace("-", " -").split()
  return int(first), [(x[0], int(x[1:])) for x in rest]


def solution(
  text: str,
  rng: np.random.Generator,
  *,
  corrupted_frac: float = 0.0,
  restated_frac: float = 0.0,
) -> str:
  """Return the lines of a solution, without a line break at the end.

  Args:
    text: the question.
    rng: of mistakes and repetitions.
    corrupted_frac: probability that a result is wrong by 1 to 3. The next line
      goes on with the wrong one.
    restated_frac: probability that a line is written once more.
  """
  total, rest = operations(text)
  lines = []
  for sign, term in rest:
    line = f"{total}{sign}{term}="
    total += term if sign == "+" else -term
    if rng.random() < corrupted_frac:
      total += int(rng.choice((-3, -2, -1, 1, 2, 3)))
    lines.append(f"{line}{total}")
    while rng.random() < restated_frac:
      lines.append(lines[-1])
  return "\n".join([*lines, f"{ANSWER_PREFIX}{total}"])


def write(
  directory: pathlib.Path,
  *,
  seed: int,
  num_train: int,
  num_test: int,
  num_operations: int,
  corrupted_frac: float,
  restated_frac: float,
) -> None:
  """Write DIRECTORY/train.jsonl and test.jsonl, without a common question."""
  rng = np.random.default_rng(seed)
  seen: set[str] = set()
  directory.mkdir(parents=True, exist_ok=True)
  for name, count in (("train", num_train), ("test", num_test)):
    rows = []
    while len(rows) < count:
      text = question(rng, num_operations)
      if text not in seen:
        seen.add(text)
        answer = solution(text, rng).rpartition(ANSWER_PREFIX)[2]
        worked = solution(
          text,
          rng,
          corrupted_frac=corrupted_frac,
          restated_frac=restated_frac,
        )
        rows.append({"question": text, "answer": answer, "solution": worked})
    write_rows(directory / f"{name}.jsonl", rows)


def write_rows(path: pathlib.Path, rows: list[dict[str, Any]]) -> None:
  """Write rows as lines of JSON."""
  path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def read_rows(lines: list[str]) -> list[dict[str, Any]]:
  """Return the rows of lines of JSON."""
  return [json.loads(line) for line in lines]
