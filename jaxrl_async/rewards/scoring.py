"""What runs in a reward process: the scores of a group, with deadlines."""

from collections.abc import Callable
import dataclasses
import pickle
import signal
import sys
import traceback
import types
from typing import Any, TypeVar

from jaxrl_async.config import budgets as budgets_lib
from jaxrl_async.config import user_code
from jaxrl_async.rewards import completion as completion_lib
from jaxrl_async.rewards import extraction
from jaxrl_async.rewards import returned as returned_lib
from jaxrl_async.rewards import sandbox as sandbox_lib
from jaxrl_async.rewards import server as server_lib
from jaxrl_async.rewards import term as term_lib
from jaxrl_async.text import tokenizer as tokenizer_lib
from jaxrl_async.types import Completion, Reward

PRELOAD = "jaxrl_async.rewards.preload"

# A scorer may not return to the interpreter, for example from a long loop in C.
# Its process is killed after this many seconds of CPU time past the deadline.
_KILL_GRACE_S = 1.0

Result = TypeVar("Result")
_MAX_MESSAGE, _MAX_TRACEBACK = 1_000, 20_000  # characters
# Without a prefix the whole completion is the answer. A run keeps the answers
# of all outstanding trajectories, for its samples.
_MAX_ANSWER = 1_000


# What may happen to a score: its time was up, its process died, it raised or
# was no reward, it was not finite.
KINDS: tuple[str, ...] = "timeout", "died", "error", "nan"


# No completion is the cause of these.
_OF_GROUP = sandbox_lib.SandboxError, sandbox_lib.TestsError


@dataclasses.dataclass(frozen=True, slots=True)
class RewardFailure:
  """Why a completion, or a whole group, has no score.

  Attributes:
    reason: one line that begins with one of `KINDS` and a colon.
    traceback: traceback of the scorer; "" if its process died.
    is_of_group: whether no completion can be the cause, as where a server is
      down, no sandbox can be made, or the tests of an item are wrong.
  """

  reason: str
  traceback: str = ""
  is_of_group: bool = False

  @property
  def kind(self) -> str:
    """One of `KINDS`."""
    return self.reason.partition(":")[0]


@dataclasses.dataclass(frozen=True, slots=True)
class Scored:
  """What one attempt at one term of a group found.

  Attributes:
    rewards: of each completion, or why it has none.
    answers: those extracted from the completions; see
      `extraction.extract_answer`. The middle of long ones is left out, here and
      in the rewards.
  """

  rewards: list[Reward | RewardFailure]
  answers: list[str | None]


Outcome = Scored | RewardFailure


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attempt:
  """One attempt at one term of the score of a group, or of a part of it.

  Attributes:
    term: number of the term.
    item: of the prompt, which is passed to the scorer.
    group: the trajectories.
  """

  term: int
  item: dict[str, Any]
  group: completion_lib.Unscored


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scorers:
  """What every reward process of a run has to know, whatever it scores.

  Attributes:
    terms: at least one, with different names.
    answer_prefix: prefix of the answer; see `extraction.extract_answer`.
    tokenizer: turns completions into text.
    budgets: where the thoughts of members are cut; None if they are not.
  """

  terms: tuple[term_lib.Term, ...]
  answer_prefix: str
  tokenizer: tokenizer_lib.Tokenizer
  budgets: budgets_lib.Budgets | None = None

  def score(self, attempt: Attempt) -> Outcome:
    """Return the rewards of a group, or a failure that is its own."""
    completions = [
      dataclasses.replace(
        completion,
        answer=extraction.extract_answer(completion.text, self.answer_prefix),
      )
      for completion in completion_lib.of_group(attempt.group, self.tokenizer)
    ]
    rewards = score_group(self.terms[attempt.term], attempt.item, completions)
    if isinstance(rewards, RewardFailure):
      return rewards
    return Scored(
      [
        dataclasses.replace(x, answer=_short(x.answer))
        if isinstance(x, Reward)
        else x
        for x in rewards
      ],
      [_short(completion.answer) for completion in completions],
    )

  def max_attempt_s(self, attempt: Attempt) -> float:
    """Return the sum of the deadlines of its scores, or of its request."""
    return max_group_s(self.terms[attempt.term], len(attempt.group.lengths))


# Of this process, or why it has none.
_scorers: Scorers | user_code.UserCodeError


def begin(pickled: bytes) -> None:
  """Take over the `Scorers` of this process, which is a reward process.

  If a scorer cannot be imported, each attempt raises the error. An error here
  would make the pool start one process after the other.
  """
  global _scorers
  try:
    with user_code.told():
      _scorers = pickle.loads(pickled)
  except user_code.UserCodeError as error:
    _scorers = error


def score(attempt: Attempt) -> Outcome:
  """Return the rewards of a group, or why it has none."""
  if not isinstance(_scorers, Scorers):
    raise _scorers
  return _scorers.score(attempt)


def loaded_modules() -> tuple[bool, bool]:
  """Return whether this process has the preload, and jax.

  Raises:
    UserCodeError: a scorer cannot be imported here.
  """
  if isinstance(_scorers, user_code.UserCodeError):
    raise _scorers
  return PRELOAD in sys.modules, "jax" in sys.modules


def max_group_s(term: term_lib.Term, num_completions: int) -> float:
  """Return the sum of the deadlines of a group's scores, or of its request."""
  is_server = isinstance(term.scorer, server_lib.RewardServer)
  return term.timeout_s * (1 if is_server else num_completions)


class _ScoreTimeout(BaseException):
  """The time of a scorer is up. `except Exception` does not catch it."""


def score_group(
  term: term_lib.Term,
  item: dict[str, Any],
  completions: list[Completion],
) -> list[Reward | RewardFailure] | RewardFailure:
  """Return the reward of each completion, or its failure.

  A failure that no completion has caused is that of the group.
  """
  scorer = term.scorer
  if isinstance(scorer, server_lib.RewardServer):
    found = _before_deadline(
      lambda: scorer.score(item, completions),
      term.timeout_s,
      f"timeout: {scorer.url} took longer than {term.timeout_s:g} s",
    )
    if isinstance(found, RewardFailure):
      return dataclasses.replace(found, is_of_group=True)
    return [
      one if isinstance(one, Reward) else RewardFailure(str(one))
      for one in found
    ]
  rewards = []
  for completion in completions:

    def score(completion: Completion = completion) -> Reward:
      returned = scorer(item, completion)
      return returned_lib.as_reward(returned, len(completion.tokens))

    found = _before_deadline(
      score,
      term.timeout_s,
      f"timeout: a score took longer than {term.timeout_s:g} s",
    )
    if isinstance(found, RewardFailure) and found.is_of_group:
      return found
    rewards.append(found)
  return rewards


def _before_deadline(
  call: Callable[[], Result], timeout_s: float, late: str
) -> Result | RewardFailure:
  """Return what a call returns, or why it failed.

  Args:
    call: user code, or a request to a program of the user.
    timeout_s: after which it is interrupted.
    late: the reason if it was.
  """
  ran_out = False

  def run_out(signum: int, frame: types.FrameType | None) -> None:
    nonlocal ran_out
    ran_out = True
    raise _ScoreTimeout

  signal.signal(signal.SIGALRM, run_out)
  # The signal repeats every second, in case a bare `except` in the scorer
  # catches the first one.
  signal.setitimer(signal.ITIMER_REAL, timeout_s, 1.0)
  # This signal keeps its default action, which ends the process even while it
  # runs C code.
  signal.setitimer(signal.ITIMER_VIRTUAL, timeout_s + _KILL_GRACE_S)
  result: Any = None
  error = None
  try:
    result = call()
  except BaseException as raised:  # user code may also raise SystemExit
    error = raised
  finally:
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
  where = where_raised(error) if error else ""
  if ran_out:
    return RewardFailure(late, where)
  if isinstance(error, returned_lib.NoRewardError):
    return RewardFailure(str(error))
  if error is not None:
    return RewardFailure(
      f"error: {one_line(error)}",
      where,
      is_of_group=isinstance(error, _OF_GROUP),
    )
  return result


def one_line(error: BaseException) -> str:
  """Return an exception as one line, which is in the ledger."""
  message = " ".join(_cut(str(error), _MAX_MESSAGE).split())
  return f"{type(error).__name__}: {message}"


def where_raised(error: BaseException) -> str:
  """Return the traceback of an exception."""
  return _cut("".join(traceback.format_exception(error)), _MAX_TRACEBACK)


def _short(answer: str | None) -> str | None:
  return None if answer is None else _cut(answer, _MAX_ANSWER)


def _cut(text: str, most: int) -> str:
  """Return the beginning and the end of a text that user code has made."""
  if len(text) <= most:
    return text
  return f"{text[: most // 2]} ... {text[-most // 2 :]}"
