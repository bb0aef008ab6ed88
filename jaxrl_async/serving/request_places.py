"""How many requests may wait, and when a refused one should try again.

A request takes one place. Its choices beyond the first are counted separately,
so that a request for a single completion finds room even if other requests ask
for many choices.
"""

import collections
import math

_NUM_ENDS = 64  # number of finished choices over which their rate is measured
_RESERVED = 8  # one place in eight is reserved for clients that hold none
_UNKNOWN_S = 1.0  # assumed time per choice until choices have finished


class Places:
  """Counts the requests and choices that wait or run.

  Invariant: of n requests, the bound on requests covers one choice each. The
  other `_num_choices - n` choices, if there are any, are bounded by
  `max_further_choices`.

  Threads: nothing here is locked; the owner's lock guards it.
  """

  def __init__(self, max_requests: int, max_further_choices: int):
    """Begin without requests.

    Args:
      max_requests: most requests at a time. The last eighth of them is reserved
        for clients that have none, so that one client cannot keep others out.
      max_further_choices: bound on the choices of all requests together, not
        counting the first of each.
    """
    self.max_requests = max_requests
    self.max_further_choices = max_further_choices
    self._num_requests: collections.Counter[str] = collections.Counter()
    self._num_choices = 0
    self._ends_s: collections.deque[float] = collections.deque(maxlen=_NUM_ENDS)
    self._promised_s = -math.inf

  def refusal(self, client: str, num_choices: int) -> str | None:
    """Return why a request cannot be accepted now, or None if it can."""
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
    """Count an accepted request."""
    self._num_requests[client] += 1
    self._num_choices += num_choices

  def end_choice(self, now_s: float) -> None:
    """Count a choice that is finished."""
    self._num_choices -= 1
    self._ends_s.append(now_s)

  def leave(self, client: str, num_unfinished: int) -> None:
    """Count the end of a request, with this many unfinished choices."""
    self._num_choices -= num_unfinished
    self._num_requests[client] -= 1
    if not self._num_requests[client]:
      del self._num_requests[client]

  def retry_after_s(self, num_choices: int, now_s: float) -> float:
    """Return after how many seconds a refused request should try again.

    At the rate of the last finished choices, enough choices will then have
    ended for this request, and for the refused requests that were told to come
    before it. The result is at most the time in which everything that is here
    now will have finished.
    """
    s_per_choice = _UNKNOWN_S
    if len(self._ends_s) > 1:
      s_per_choice = (now_s - self._ends_s[0]) / (len(self._ends_s) - 1)
    needed = self._num_further() + num_choices - 1 - self.max_further_choices
    # The bound on requests was reached, not the one on choices.
    if num_choices == 1 or needed <= 0:
      needed = self._num_choices / max(1, self._num_requests.total())
    self._promised_s = min(
      max(self._promised_s, now_s) + needed * s_per_choice,
      now_s + self._num_choices * s_per_choice,
    )
    return max(1.0, self._promised_s - now_s)

  def _num_further(self) -> int:
    return max(0, self._num_choices - self._num_requests.total())
