"""The datasets and scorers of reasoning-gym. No other file imports the library.

The import takes seconds and happens at first use. For the reward processes that
is in the fork server, once, before any of them exists.
"""

from collections.abc import Callable, Mapping
import datetime
import functools
import types
from typing import Any
import warnings

from jaxrl_async.rewards import guards
from jaxrl_async.types import Completion


@functools.cache
def library() -> types.ModuleType:
  """Import reasoning-gym without the warnings of its dependencies."""
  with warnings.catch_warnings():
    # A dependency compares with a literal. Compiling it warns at each start if
    # byte code cannot be cached.
    warnings.filterwarnings(
      "ignore", category=SyntaxWarning, module=".*cellpylib"
    )
    import reasoning_gym
    from reasoning_gym.arithmetic import time_intervals
    import reasoning_gym.factory

  # The library completes a time of day with today's date, in the item's
  # metadata. A fixed date makes the items the same every day.
  parse = functools.partial(
    time_intervals.parser.parse, default=datetime.datetime(2000, 1, 1)
  )
  time_intervals.parser = types.SimpleNamespace(parse=parse)
  return reasoning_gym


def datasets() -> Mapping[str, tuple[type, type]]:
  """Return the class and the settings dataclass of every dataset, by name."""
  return library().factory.DATASETS


def create_dataset(name: str, params: Mapping[str, Any], **sizes: int) -> Any:
  """Build a dataset, whose item i depends only on its seed and i."""
  return library().create_dataset(name, **params, **sizes)


_SCORERS: dict[str, Callable[[str | None, Mapping[str, Any]], float]] = {}


def score(item: Mapping[str, Any], completion: Completion) -> float:
  """Return the dataset's score of a completion's answer, from 0 to 1."""
  return score_answer(item, completion.answer)


def score_answer(item: Mapping[str, Any], answer: str | None) -> float:
  """Return the dataset's score of an answer, from 0 to 1.

  An answer for which the library raises scores 0, unless it raises for the
  right one too. So does an answer that is right in part, where the library
  takes that for all.

  Args:
    item: an item of `questions.QuestionSource`.
    answer: the extracted answer. None means that there is no answer, and scores
      0.
  """
  if answer is None:
    return 0.0
  score = _scorer(item)
  expected = item.get("answer")
  is_expected = answer.strip() == str(expected).strip()
  try:
    if not is_expected and not guards.lets_through(answer, item):
      return 0.0
    found = float(score(guards.without_commas(answer, item), item))
    if found >= 1 and not (is_expected or guards.is_one_value(answer, item)):
      return 0.0
  except Exception:  # it parses what a policy wrote
    if expected is not None:
      score(expected, item)
    return 0.0
  # Not more for NaN than for nothing.
  return found if found >= 0 else 0.0


def _scorer(
  item: Mapping[str, Any],
) -> Callable[[str | None, Mapping[str, Any]], float]:
  # A scorer may depend on the dataset's parameters, so the item holds them.
  key = f"{item['dataset']} {item['params']!r}"
  if key not in _SCORERS:
    dataset = create_dataset(item["dataset"], item["params"], seed=0)
    _SCORERS[key] = dataset.score_answer
  return _SCORERS[key]
