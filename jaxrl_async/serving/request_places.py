"""How many requests may wait, and how long a refused one had better wait.

A request takes one place; its choices besides the first are counted apart, so
that a request for one completion finds room however many choices others want.
"""

import collections
import math

_NUM_ENDS = 64  # that the rate of ends is measured over
_RESERVED = 8  # one place in so many is for clients that hold none
_UNKNOWN_S = 1.0  # per choice, while nothing has ended yet


class Places:
  """Counts requests and choices that wait or run.

  Invariant: of n requests there is one choice each in `_num_choices` that the
  bound of requests covers; the other `_num_choices - n`, if there are any, are
  what `max_further_choices` bounds.

  Threads: nothing here is locked; the owner's lock guards it.
  """

  def __init__(self, max_requests: int, max_further_choices: int):
    """Starts empty.

    Args:
      max_requests: at a time. The last eighth of them is for clients that have
        nothing here yet, so that one client does not keep others out.
      max_further_choices: of all requests together, besides one of each.
    """
    self.max_requests = max_requests
    self.max_further_choices = max_further_choices
    self._num_requests: collections.Counter[str] = collections.Counter()
    self._num_choices = 0
    self._ends_s: collections.deque[float] = collections.deque(maxlen=_NUM_ENDS)
    self._promised_s = -math.inf

  def refusal(self, client: str, num_choices: int) -> str | None:
    """Why a request cannot be taken now; None if it can."""
    num_requests = self._num_requests.total()
    most = self.max_requests
    if self._num_requests[client]:
      most -= self.max_requests // _RESERVED
    if num_requests >= most:
      return f"{num_requests} requests are waiting or running; at most {most}"
    further = self._num_further() + num_choices - 1
    if num_choices > 1 and further > self.max_further_choices:
      return (
        f"{self._num_choices} choices are waiting or running, which leaves no"
        f" room for {num_choices} more (n, or a list of prompts)"
      )
    return None

  def take(self, client: str, num_choices: int) -> None:
    """A request was taken."""
    self._num_requests[client] += 1
    self._num_choices += num_choices

  def end_choice(self, now_s: float) -> None:
    """A choice was written to its end."""
    self._num_choices -= 1
    self._ends_s.append(now_s)

  def leave(self, client: str, num_unfinished: int) -> None:
    """A request has ended, with so many choices that were not written."""
    self._num_choices -= num_unfinished
    self._num_requests[client] -= 1
    if not self._num_requests[client]:
      del self._num_requests[client]

  def retry_after_s(self, num_choices: int, now_s: float) -> float:
    """When a refused request would probably be taken.

    That is when enough choices have ended at the rate of the last ones, for
    this request and for those that were refused before it and told to come
    earlier; at the latest when all that is here has been written.
    """
    s_per_choice = _UNKNOWN_S
    if len(self._ends_s) > 1:
      s_per_choice = (now_s - self._ends_s[0]) / (len(self._ends_s) - 1)
    needed = self._num_further() + num_choices - 1 - self.max_further_choices
    if num_choices == 1 or needed <= 0:  # it is requests that are too many
      needed = self._num_choices / max(1, self._num_requests.total())
    self._promised_s = min(
      max(self._promised_s, now_s) + needed * s_per_choice,
      now_s + self._num_choices * s_per_choice,
    )
    return max(1.0, self._promised_s - now_s)

  def _num_further(self) -> int:
    return max(0, self._num_choices - self._num_requests.total())
