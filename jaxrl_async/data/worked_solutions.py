"""Solutions written out step by step, for the warm start.

A solver is named in the config: one of this module, a column of the data, or a
function of one's own. A policy that learned to reason step by step can be
improved by reinforcement learning. Its completions have lengths with a long
tail.
"""

from collections.abc import Callable, Mapping
import functools
from typing import Any

import numpy as np

from jaxrl_async.config import sections
from jaxrl_async.config import user_code
from jaxrl_async.data import columns as columns_lib

# Returns the text of a solution, from an item and what random choices need. A
# solver of a user may return two texts, of which the first is not learned.
Solver = Callable[[Mapping[str, Any], np.random.Generator], Any]
FIELD = "field"
_SETTING = "warm_start.solver"


def chain_sum(
  item: Mapping[str, Any], rng: np.random.Generator, corrupted_frac: float
) -> str:
  r"""Return a sum computed from left to right, with a line per partial sum.

  "4 - 1 - 7 + 7" becomes "4-1=3\n3-7=-4\n-4+7=3". The answer is the text after
  the last "=". With terms of one digit a line has at most 10 characters.

  Args:
    corrupted_frac: probability that a partial sum, the last one included, is
      wrong by 1 to 3 in either direction. Later lines continue with the wrong
      sum.
  """
  first, *rest = item["metadata"]["expression"].split()
  if not rest:
    return f"{first}={first}"
  total = int(first)
  lines = []
  for operator, term in zip(rest[::2], rest[1::2], strict=True):
    step = f"{total}{operator}{term}"
    total += int(term) if operator == "+" else -int(term)
    if rng.random() < corrupted_frac:
      total += int(rng.choice((-3, -2, -1, 1, 2, 3)))
    lines.append(f"{step}={total}")
  return "\n".join(lines)


def number_sorting(
  item: Mapping[str, Any], rng: np.random.Generator, corrupted_frac: float
) -> str:
  r"""Return the numbers of an item in order, as "[18,33,61]".

  Args:
    corrupted_frac: probability that a place has another one of the numbers that
      are left. The next places go on with the rest.
  """
  left = [f"{float(x):g}" for x in item["metadata"]["sorted_numbers"]]
  written = []
  while left:
    is_wrong = len(left) > 1 and rng.random() < corrupted_frac
    written.append(left.pop(int(rng.integers(1, len(left))) if is_wrong else 0))
  return f"[{','.join(written)}]"


def countdown(
  item: Mapping[str, Any], rng: np.random.Generator, corrupted_frac: float
) -> str:
  r"""Return an expression with the numbers of an item, as "8+7-4".

  Args:
    corrupted_frac: probability that an operator is its opposite, + for - and *
      for /, so that the value is another one than the target.
  """
  opposite = {"+": "-", "-": "+", "*": "/", "/": "*"}
  return "".join(
    opposite[x] if x in opposite and rng.random() < corrupted_frac else x
    for x in item["metadata"]["expression"]
    if x != " "
  )


def value_of(item: Mapping[str, Any], name: str) -> Any:
  """Return what an item has in an entry or a column, None if nothing."""
  return item.get("metadata", {}).get(name, item.get(name))


def did_you_mean(item: Mapping[str, Any], name: str) -> str:
  """Return a hint to an entry or a column with a similar name, or ""."""
  known = {*item.get("metadata", {}), *item}
  return sections.did_you_mean(
    name, known - {"index", "metadata", "source", name}
  )


def of_field(
  name: str, item: Mapping[str, Any], rng: np.random.Generator
) -> str:
  """Return the text that the data has in an entry or a column."""
  del rng  # there is one solution
  solution = value_of(item, name)
  if not isinstance(solution, str) or not solution.strip():
    raise LookupError(
      f"an item has no text in {name!r}{did_you_mean(item, name)}"
    )
  return solution


# By name, those that make mistakes on purpose: solvers of datasets of
# reasoning-gym.
SOLVERS = {
  "chain_sum": chain_sum,
  "number_sorting": number_sorting,
  "countdown": countdown,
}
# Learns every turn of the assistant in a chat, and not the last one alone.
MESSAGES = "messages"


def check(name: str, setting: str = _SETTING) -> None:
  """Check the form of a solver's name, without importing anything."""
  place, has_colon, rest = name.partition(":")
  known = (*SOLVERS, MESSAGES)
  if name in known or (has_colon and place and rest):
    return
  hint = "" if has_colon else sections.did_you_mean(name, known)
  raise sections.ConfigError(
    f"{setting}: {sections.shown(name)} is none of {', '.join(known)},"
    f" field:NAME and module:function{hint}"
  )


def check_pair(section: sections.PreferenceSection) -> None:
  """Check the names of the two completions, without importing anything."""
  names = [getattr(section, side) for side in sections.PREFERENCE_SIDES]
  for side, name in zip(sections.PREFERENCE_SIDES, names, strict=True):
    path = f"preference.{side}"
    sections.require(
      name != MESSAGES,
      path,
      f"{sections.shown(name)} names no single answer; use field:reply",
    )
    check(name, path)
  sections.require(
    names[0] != names[1] or names[0] in SOLVERS,
    "preference.rejected",
    f"{sections.shown(names[1])} is preference.chosen too, so that there is"
    " nothing to prefer; name another one",
  )


def find(name: str, corrupted_frac: float, setting: str = _SETTING) -> Solver:
  """Return the solver of a name."""
  check(name, setting)
  if name in SOLVERS:
    return functools.partial(SOLVERS[name], corrupted_frac=corrupted_frac)
  if name == MESSAGES:
    return functools.partial(of_field, columns_lib.REPLY)
  place, _, rest = name.partition(":")
  if place == FIELD:
    return functools.partial(of_field, rest)
  try:
    return user_code.function(name, "it is not module:function")
  except user_code.UserCodeError as error:
    raise sections.ConfigError(f"{setting}: {error}") from error
