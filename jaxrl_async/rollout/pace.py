"""How long the decode steps of a replica take, beside those of the others.

A device or a host can become so slow that its replica still answers and still
generates, and yet holds up the run: the trainer waits for the oldest groups,
and the replica has some of them. What a decode step takes depends on the model,
the device and the lengths, so the only measure of it are the other replicas.
"""

from collections.abc import Iterable
import statistics

# A replica lags if its decode steps take so many times as long. Chips of two
# kinds in one fleet, or long sequences beside short ones, differ by less.
LAG = 20.0
# Periods in which it has to lag. One may have a few steps alone. A period in
# which it mostly waits neither counts nor begins the count again.
_NUM_PERIODS = 2


class Pace:
  """The mean time of a replica's decode steps, period by period.

  Attributes:
    step_s: in the last period in which a step ended; None before there was one.
  """

  def __init__(self, timeout_s: float, now_s: float):
    """Begin the first period.

    Args:
      timeout_s: time in which a replica that lags is found.
      now_s: time by any clock.
    """
    self.step_s: float | None = None
    self._period_s = timeout_s / _NUM_PERIODS
    self._num_lagging = 0
    self._start = self._last = (now_s, 0.0, 0)

  def resume(self, now_s: float) -> None:
    """Go on with the present period, with counters that begin at zero again.

    Args:
      now_s: time by the same clock. The time since `lags` was called last does
        not count, because the replica was not attached.
    """
    (start_s, busy_s, num_steps), last = self._start, self._last
    self._start = (
      now_s - (last[0] - start_s),
      busy_s - last[1],
      num_steps - last[2],
    )
    self._last = (now_s, 0.0, 0)

  def lags(
    self,
    now_s: float,
    busy_s: float,
    num_steps: int,
    others: Iterable["Pace"],
  ) -> bool:
    """Take what a replica has done, and return whether it has lagged too long.

    Args:
      now_s: time by the same clock.
      busy_s: seconds in which it has generated until now.
      num_steps: decode steps that have ended until now.
      others: the paces of the other replicas.
    """
    self._last = (now_s, busy_s, num_steps)
    start_s, busy_before_s, steps_before = self._start
    if now_s - start_s < self._period_s or num_steps == steps_before:
      return False  # a period lasts until a step ends, however long that takes
    self._start = (now_s, busy_s, num_steps)
    busy_s -= busy_before_s
    num_steps -= steps_before
    self.step_s = busy_s / num_steps
    known = [pace.step_s for pace in others if pace.step_s is not None]
    if not known or self.step_s <= LAG * statistics.median(known):
      self._num_lagging = 0
    elif busy_s >= (now_s - start_s) / 2:
      # One that mostly waits for work holds nobody up, however slow it is.
      self._num_lagging += 1
    return self._num_lagging >= _NUM_PERIODS
