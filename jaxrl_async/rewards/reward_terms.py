"""What a config says of rewards, as terms for the reward service."""

from collections.abc import Iterable, Iterator
import contextlib
from typing import Any

from jaxrl_async import types
from jaxrl_async.config import fields as fields_lib
from jaxrl_async.config import sections
from jaxrl_async.rewards import named
from jaxrl_async.rewards import server as server_lib
from jaxrl_async.rewards import term as term_lib

_PATH = "task.rewards"
_NUM_TRIED = 8  # a second or two


def of_task(task: sections.TaskSection) -> list[term_lib.Term]:
  """Return the terms that a config names, and import their modules.

  They are in the order of their names.

  Raises:
    ConfigError: one of them does not exist, or takes other params.
  """
  entries = fields_lib.plain(task)["rewards"]
  if not entries:
    return [of_scorer(task, _scorer("task.reward", task.reward, {}))]
  return [
    term_lib.Term(
      name=name,
      scorer=_scorer(
        f"{_PATH}.{name}", entry["function"], entry.get("params", {})
      ),
      weight=float(entry.get("weight", 1.0)),
      timeout_s=float(entry.get("timeout_s", task.reward_timeout_s)),
      num_retries=entry.get("retries", task.reward_retries),
      fails_as_zero=_fails_as_zero(task),
      sources=tuple(entry.get("sources", ())),
    )
    for name, entry in entries.items()
  ]


def of_scorer(
  task: sections.TaskSection,
  scorer: term_lib.Scorer | server_lib.RewardServer,
) -> term_lib.Term:
  """Return the only term of a reward, with the limits of the task."""
  return term_lib.Term(
    scorer=scorer,
    timeout_s=task.reward_timeout_s,
    num_retries=task.reward_retries,
    fails_as_zero=_fails_as_zero(task),
  )


def _fails_as_zero(task: sections.TaskSection) -> bool:
  return task.on_failed_score is sections.OnFailedScore.ZERO


def _scorer(
  path: str, name: str, params: dict[str, Any]
) -> term_lib.Scorer | server_lib.RewardServer:
  try:
    return named.scorer(name, params)
  except ValueError as error:
    raise sections.ConfigError(f"{path}: {error}") from error


def in_process(terms: list[term_lib.Term]) -> term_lib.Scorer:
  """Return a scorer of the weighted sum, to be called in this process.

  Servers are not asked. With one among the terms, every score is 1.
  """
  functions = [
    (term, term.scorer)
    for term in terms
    if not isinstance(term.scorer, server_lib.RewardServer)
  ]

  def score(item: dict[str, Any], completion: types.Completion) -> float:
    if len(functions) < len(terms):
      return 1.0
    total = 0.0
    for term, scorer in functions:
      if term.scores(item):
        found = scorer(item, completion)
        own = found.score if isinstance(found, types.Reward) else float(found)
        total += term.weight * own
    return total

  return score


def try_out(terms: list[term_lib.Term]) -> list[str]:
  """Check that servers answer, and that programs can be run safely.

  Returns:
    Lines for the user about what was found.

  Raises:
    ConfigError: a server does not answer, or there is no sandbox.
  """
  with _naming_the_field():
    return named.try_out(terms)


def check_prompts(
  terms: list[term_lib.Term], prompts: Iterable[types.Prompt]
) -> None:
  """Check that completions of these prompts can be scored.

  The tests of the first programs are run, on programs that are wrong and on
  the solutions that rows have.

  Raises:
    ConfigError: they lack what a reward needs, such as tests.
  """
  with _naming_the_field():
    for number, prompt in enumerate(prompts):
      named.check_item(
        terms,
        prompt.item,
        prompt.prompt_id,
        is_tried=number < _NUM_TRIED,
      )


@contextlib.contextmanager
def _naming_the_field() -> Iterator[None]:
  try:
    yield
  except named.TrialError as error:
    path = f"{_PATH}.{error.term.name}" if error.term.name else "task.reward"
    raise sections.ConfigError(f"{path}: {error}") from error
