"""What the answers to a set of questions say: accuracy, lengths, intervals."""

from collections.abc import Iterable, Mapping, Sequence
import types
from typing import Any, NamedTuple

import numpy as np

from jaxrl_async.algorithms import answer_statistics


class Record(NamedTuple):
  """What is counted of one answer.

  Attributes:
    question: number of the question.
    score: of the reward; None if the answer could not be scored.
    num_tokens: of the completion.
    is_truncated: whether the completion was cut off.
    answer: the extracted answer; None if there is none.
    parts: of the reward, by name.
  """

  question: int
  score: float | None
  num_tokens: int
  is_truncated: bool
  answer: str | None = None
  parts: Mapping[str, float] = types.MappingProxyType({})


def by_question(
  records: Iterable[Record],
  num_questions: int,
  samples: int,
  *,
  solved_score: float,
  parts: Mapping[str, bool] = types.MappingProxyType({}),
) -> dict[str, np.ndarray]:
  """Return each statistic of each question, NaN where it is not known.

  Answers without a score are left out of everything that needs one. A question
  with too few scored answers has no pass@k.

  Args:
    records: of all answers, in any order.
    num_questions: their numbers are less than this.
    samples: answers for each question.
    solved_score: an answer with at least this score is right.
    parts: of rewards, which are statistics too, and whether each is a score, of
      which the share of right ones is taken, and not the mean.

  Returns:
    Arrays of `num_questions` numbers: avg@k, pass@1, pass@2, ..., maj@k,
    score_mean, tokens_mean and frac_truncated.
  """
  found: list[list[Record]] = [[] for _ in range(num_questions)]
  for record in records:
    found[record.question].append(record)
  rows = [
    _of_question(answers, samples, solved_score)
    | {
      name: _of_part([a.parts.get(name) for a in answers], least)
      for name, is_score in parts.items()
      for least in [solved_score if is_score else None]
    }
    for answers in found
  ]
  names = rows[0] if rows else {}
  return {name: np.array([row[name] for row in rows]) for name in names}


def _of_question(
  answers: Sequence[Record], samples: int, solved_score: float
) -> dict[str, float]:
  scored = [(a.answer, a.score) for a in answers if a.score is not None]
  scores = np.array([score for _, score in scored], np.float64)
  right = [score >= solved_score for _, score in scored]
  lengths = np.array([a.num_tokens for a in answers], np.float64)
  truncated = np.array([a.is_truncated for a in answers], np.float64)
  mean = answer_statistics.mean
  values = {f"avg@{samples}": mean(np.array(right, np.float64))}
  for k in answer_statistics.powers_of_two(samples):
    values[f"pass@{k}"] = answer_statistics.pass_at_k(len(right), sum(right), k)
  if samples > 1:
    # An empty answer is none, as in reward/unextracted_frac.
    texts = [text or None for text, _ in scored]
    values[f"maj@{samples}"] = answer_statistics.majority(texts, right)
  return values | {
    "score_mean": mean(scores),
    "tokens_mean": mean(lengths),
    "frac_truncated": mean(truncated),
  }


def _of_part(values: Iterable[float | None], least: float | None) -> float:
  """Return the mean of a part, or the share of values that are large enough."""
  known = np.array([x for x in values if x is not None], np.float64)
  if least is not None:
    known = np.array(known >= least, np.float64)
  return answer_statistics.mean(known)


def means(values: Mapping[str, np.ndarray]) -> dict[str, float]:
  """Return the mean of each statistic over the questions that have it."""
  return {n: answer_statistics.mean(column) for n, column in values.items()}


def with_intervals(
  values: Mapping[str, np.ndarray], seed: int
) -> dict[str, dict[str, float | None]]:
  """Return mean and 95% interval of each statistic, and how many have it.

  What is not known is None, which JSON can hold.
  """
  intervals = answer_statistics.bootstrap_intervals(
    np.stack(list(values.values())), seed=seed
  )
  results = {}
  for (name, column), (low, high) in zip(
    values.items(), intervals, strict=True
  ):
    numbers = {"mean": answer_statistics.mean(column), "low": low, "high": high}
    known = {k: None if np.isnan(x) else float(x) for k, x in numbers.items()}
    results[name] = known | {"num_questions": int((~np.isnan(column)).sum())}
  return results


def by_category(
  values: Mapping[str, np.ndarray], categories: Sequence[str], seed: int
) -> dict[str, dict[str, Any]]:
  """Do what `with_intervals` does for each category, in the order of names."""
  names = np.array(categories, dtype=object)
  return {
    name: with_intervals(
      {n: column[names == name] for n, column in values.items()}, seed
    )
    for name in sorted(set(categories))
  }


def describe(results: Mapping[str, Any]) -> str:
  """Return what an evaluation wrote into its results as tables.

  A table has a line for each statistic. With categories, another one has a line
  for each of them. What is not in the tables is said below them.
  """
  lines = [["", "mean", "95% interval", "questions"]]
  for name, numbers in results["results"].items():
    count = str(numbers["num_questions"])
    lines.append([name, *_shown(name, numbers), count])
  text = _aligned(lines)
  if categories := results.get("by_category"):
    k, shared = results["samples"], results["results"]
    names = f"avg@{k}", f"pass@{k}", f"maj@{k}", "tokens_mean", "frac_truncated"
    columns = [name for name in names if name in shared]
    lines = [["", "questions", *columns]]
    for name, found in categories.items():
      count = max(numbers["num_questions"] for numbers in found.values())
      cells = [" ".join(_shown(n, found[n])).strip() for n in columns]
      lines.append([name, str(count), *cells])
    text += "\n\n" + _aligned(lines)
  if failed := results["failed_scores"]:
    text += (
      f"\n{failed} of {results['answers']} answers could not be scored and do"
      " not count as right or wrong."
    )
  if skipped := results["prompts_too_long"]:
    text += f"\n{skipped} questions are too long and were left out."
  return text


def _shown(name: str, numbers: Mapping[str, Any]) -> tuple[str, str]:
  """Return mean and interval as text."""
  if numbers["mean"] is None:
    return "-", ""
  digits = 1 if "tokens" in name else 3
  mean, low, high = (
    f"{numbers[key]:.{digits}f}" for key in ("mean", "low", "high")
  )
  return mean, f"[{low}, {high}]"


def _aligned(lines: list[list[str]]) -> str:
  """Return lines of cells as text, the first cell of each on the left."""
  widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
  return "\n".join(
    "  ".join(
      [line[0].ljust(widths[0])]
      + [c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True)]
    ).rstrip()
    for line in lines
  )
