"""The only file that imports reasoning-gym: its datasets and their scorers.

The import takes seconds, so it happens at first use; in the reward processes
that is in the fork server, once, before any of them exists.
"""

from collections.abc import Callable, Mapping
import datetime
import functools
import types
from typing import Any
import warnings

from jaxrl_async.types import Completion


@functools.cache
def library() -> types.ModuleType:
  """Import reasoning-gym, without the warnings that are not ours."""
  with warnings.catch_warnings():
    # A dependency compares with a literal; compiling it says so each time
    # where byte code cannot be cached.
    warnings.filterwarnings(
      "ignore", category=SyntaxWarning, module=".*cellpylib"
    )
    import reasoning_gym
    from reasoning_gym.arithmetic import time_intervals
    import reasoning_gym.factory

  # It completes a time of the day by today's date, in the item's metadata.
  parse = functools.partial(
    time_intervals.parser.parse, default=datetime.datetime(2000, 1, 1)
  )
  time_intervals.parser = types.SimpleNamespace(parse=parse)
  return reasoning_gym


def datasets() -> Mapping[str, tuple[type, type]]:
  """Return class and settings dataclass of every dataset, by name."""
  return library().factory.DATASETS


def create_dataset(name: str, params: Mapping[str, Any], **sizes: int) -> Any:
  """Build a dataset; its item i is a function of its seed and i."""
  return library().create_dataset(name, **params, **sizes)


_SCORERS: dict[str, Callable[[str | None, Mapping[str, Any]], float]] = {}


def score(item: Mapping[str, Any], completion: Completion) -> float:
  """Score a completion's answer as the dataset that made the item does."""
  return score_answer(item, completion.answer)


def score_answer(item: Mapping[str, Any], answer: str | None) -> float:
  """Score an answer as the dataset that made the item does, from 0 to 1.

  Args:
    item: as `questions.QuestionSource` makes them.
    answer: the extracted answer; None scores 0, as nothing was answered.
  """
  if answer is None:
    return 0.0
  # A scorer may depend on the dataset's parameters, so they travel along.
  key = f"{item['dataset']} {item['params']!r}"
  if key not in _SCORERS:
    dataset = create_dataset(item["dataset"], item["params"], seed=0)
    _SCORERS[key] = dataset.score_answer
  return float(_SCORERS[key](answer, item))
