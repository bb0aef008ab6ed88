"""What runs in a reward process: the scores of a group, with deadlines."""

from collections.abc import Callable
import dataclasses
import signal
import traceback
import types
from typing import Any, TypeVar

from jaxrl_async.rewards import returned as returned_lib
from jaxrl_async.rewards import server as server_lib
from jaxrl_async.rewards import term as term_lib
from jaxrl_async.types import Completion, Reward

# A scorer may not return to the interpreter, for example from a long loop in C.
# Its process is killed after this many seconds of CPU time past the deadline.
_KILL_GRACE_S = 1.0

Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True, slots=True)
class RewardFailure:
  """Why a group has no scores.

  Attributes:
    reason: one line that starts with "timeout", "error" or "nan".
    traceback: traceback of the scorer; "" if its process died.
  """

  reason: str
  traceback: str = ""


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
) -> list[Reward] | RewardFailure:
  """Return the reward of each completion, or the first failure."""
  scorer = term.scorer
  if isinstance(scorer, server_lib.RewardServer):
    return _before_deadline(
      lambda: scorer.score(item, completions),
      term.timeout_s,
      f"timeout: {scorer.url} took longer than {term.timeout_s:g} s",
    )
  rewards = []
  for completion in completions:

    def score(completion: Completion = completion) -> Reward:
      returned = scorer(item, completion)
      return returned_lib.as_reward(returned, len(completion.tokens))

    reward = _before_deadline(
      score,
      term.timeout_s,
      f"timeout: a score took longer than {term.timeout_s:g} s",
    )
    if isinstance(reward, RewardFailure):
      return reward
    rewards.append(reward)
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
  where = "".join(traceback.format_exception(error)) if error else ""
  if ran_out:
    return RewardFailure(late, where)
  if isinstance(error, returned_lib.NoRewardError):
    return RewardFailure(str(error))
  if error is not None:
    return RewardFailure(f"error: {one_line(error)}", where)
  return result


def one_line(error: BaseException) -> str:
  """Return an exception as one line."""
  message = " ".join(str(error).split())
  return f"{type(error).__name__}: {message}"
