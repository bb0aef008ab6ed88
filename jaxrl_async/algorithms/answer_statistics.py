"""Statistics of questions that were each answered several times.

NaN stands for what a question does not tell, for example because none of its
answers could be scored. Means leave such questions out.
"""

from collections.abc import Sequence

from jaxtyping import Float
import numpy as np

_NUM_RESAMPLES = 2_000


def powers_of_two(most: int) -> list[int]:
  """Return 1, 2, 4, ... up to `most`, and `most` itself."""
  powers = [1 << i for i in range(most.bit_length())]
  return powers if powers[-1] == most else [*powers, most]


def pass_at_k(num_answers: int, num_right: int, k: int) -> float:
  """Estimate the chance that one of k answers is right, without bias.

  With n answers, c of them right (arXiv:2107.03374, eq. 1):

  pass@k = 1 - C(n - c, k) / C(n, k)
         = 1 - prod_{i = n - c + 1 .. n} (1 - k / i)

  Returns:
    The estimate; NaN if there are fewer than k answers.
  """
  if num_answers < k:
    return float("nan")
  if num_answers - num_right < k:
    return 1.0
  numbers = np.arange(num_answers - num_right + 1, num_answers + 1)
  return float(1.0 - np.prod(1.0 - k / numbers))


def majority(answers: Sequence[str | None], is_right: Sequence[bool]) -> float:
  """Return how right the most frequent answer is.

  Without an answer (None) there is no vote. If several answers have the most
  votes, one of them would have to be drawn; the result is the expectation of
  that draw. Answers are told apart by their text. Where the same text was
  scored both right and wrong, its share of right scores counts.

  Returns:
    A number from 0 to 1. It is 0 if nobody voted, and NaN without any answers.
  """
  if not answers:
    return float("nan")
  votes: dict[str, list[bool]] = {}
  for answer, right in zip(answers, is_right, strict=True):
    if answer is not None:
      votes.setdefault(answer, []).append(right)
  if not votes:
    return 0.0
  most = max(map(len, votes.values()))
  winners = [np.mean(found) for found in votes.values() if len(found) == most]
  return float(np.mean(winners))


def mean(values: Float[np.ndarray, "Q"]) -> float:
  """Return the mean over the questions that have a value; NaN without any."""
  known = values[~np.isnan(values)]
  return float(known.mean()) if len(known) else float("nan")


def bootstrap_intervals(
  values: Float[np.ndarray, "S Q"], *, seed: int
) -> Float[np.ndarray, "S 2"]:
  """Return 95% percentile intervals of the means over the questions.

  As many questions are drawn with replacement, 2,000 times, and all statistics
  with the same draws.
  Answers to one question are not independent, so whole questions are drawn.
  """
  num_statistics, num_questions = values.shape
  rng = np.random.default_rng(seed)
  known = ~np.isnan(values)
  filled = np.where(known, values, 0.0)
  means = np.full((_NUM_RESAMPLES, num_statistics), np.nan)
  for row in means:
    questions = rng.integers(num_questions, size=num_questions)
    counts = known[:, questions].sum(1)
    sums = filled[:, questions].sum(1)
    np.divide(sums, counts, out=row, where=counts > 0)
  intervals = np.full((num_statistics, 2), np.nan)
  for i, column in enumerate(means.T):
    found = column[~np.isnan(column)]
    if len(found):
      intervals[i] = np.percentile(found, [2.5, 97.5])
  return intervals
