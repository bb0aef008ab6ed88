"""Budgets of thought: where the thoughts of completions are cut.

The episode `budgets` (`rollout.forced_answers`) cuts each completion at some
numbers of tokens and has an answer written after each cut. What says where, and
with which texts, are its parameters, which are read here and nowhere else:

    task.episode = "budgets"
    task.episode_params = {"budgets": [4, 8, 16], "end": "answer: "}

The thought is what stands before the text `end`, or all of a completion without
it. The longest budget, L_max, is `rollout.max_completion_tokens`.
"""

from collections.abc import Sequence
import dataclasses
from typing import Any

from jaxrl_async.config import fields as fields_lib
from jaxrl_async.config import sections

EPISODE = "budgets"
PATH = "task.episode_params"
MAX_BUDGETS = 32  # half of the branches that a member may have
MAX_TOKENS = 8  # of a forced answer, where nothing else is said
_NAMES = "budgets", "end", "suffix", "max_tokens"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Budgets:
  """The parameters of the episode.

  Attributes:
    budgets: where thoughts are cut, in tokens, ascending.
    end: the text with which a thought ends; it may be a special token.
    suffix: what is shown after a cut, before the forced answer.
    max_tokens: the most tokens of a forced answer.
  """

  budgets: tuple[int, ...]
  end: str
  suffix: str
  max_tokens: int


def exponential(lowest: int, longest: int, count: int) -> tuple[int, ...]:
  """Return lowest (longest / lowest)^((i - 1) / count), for i = 1 to count.

  The next one would be `longest`. They are rounded to whole tokens.
  """
  ratio = longest / lowest
  return tuple(round(lowest * ratio ** (i / count)) for i in range(count))


def uniform(longest: int, count: int) -> tuple[int, ...]:
  """Return the numbers that divide `longest` into count + 1 equal parts."""
  return tuple(round(longest * i / (count + 1)) for i in range(1, count + 1))


def of_task(task: sections.TaskSection) -> Budgets | None:
  """Return the budgets of a task; None if its episode is another one.

  Raises:
    ConfigError: a parameter is missing, unknown or wrong.
  """
  if task.episode != EPISODE:
    return None
  params: dict[str, Any] = fields_lib.plain(task)["episode_params"]
  for name in params:
    sections.require(
      name in _NAMES,
      PATH,
      f"{sections.shown(name)} is none of {', '.join(_NAMES)}",
    )
  for name in ("budgets", "end"):
    sections.require(name in params, f"{PATH}.{name}", "missing")
  return of(**params)


def of(
  budgets: Sequence[int],
  end: str,
  suffix: str = "",
  max_tokens: int = MAX_TOKENS,
) -> Budgets:
  """Check parameters and return them; without a suffix it is the end.

  Raises:
    ConfigError: one is wrong.
  """

  def is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)

  sections.require(
    isinstance(budgets, list | tuple)
    and 0 < len(budgets) <= MAX_BUDGETS
    and all(is_count(x) and x >= 0 for x in budgets)
    and list(budgets) == sorted(set(budgets)),
    f"{PATH}.budgets",
    f"{sections.shown(budgets)} are not 1 to {MAX_BUDGETS} ascending numbers of"
    " tokens, each of them once",
  )
  for name, value in (("end", end or None), ("suffix", suffix)):
    sections.require(
      isinstance(value, str),
      f"{PATH}.{name}",
      f"{sections.shown(value)} is no text; use one such as '</think>'",
    )
  sections.require(
    is_count(max_tokens) and max_tokens > 0,
    f"{PATH}.max_tokens",
    f"{sections.shown(max_tokens)} is no number of tokens of an answer",
  )
  return Budgets(
    budgets=tuple(budgets),
    end=end,
    suffix=suffix or end,
    max_tokens=max_tokens,
  )
