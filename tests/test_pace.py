"""When a replica counts as far slower than the others."""

import pytest

from jaxrl_async.rollout import pace as pace_lib


def steps(pace, others, step_s, *, periods=4, busy=1.0, start=0):
  """Let a replica generate for some periods of 5 s; return in which it lags."""
  found = []
  busy_s = num_steps = 0.0
  for period in range(start, start + periods):
    busy_s += 5.0 * busy
    num_steps += 5.0 * busy / step_s
    found.append(pace.lags(5.0 * (period + 1), busy_s, int(num_steps), others))
  return found


def make(step_s=None):
  pace = pace_lib.Pace(10.0, 0.0)
  pace.step_s = step_s
  return pace


def test_it_has_to_lag_in_two_periods_in_a_row():
  others = [make(0.01), make(0.02), make(None)]
  assert steps(make(), others, 0.35) == [False, True, True, True]
  assert steps(make(), others, 0.25) == [False] * 4
  pace = make()
  assert not pace.lags(5.0, 5.0, 5, others)
  assert pace.step_s == 1.0
  assert not pace.lags(10.0, 10.0, 505, others)
  assert not pace.lags(15.0, 15.0, 510, others)


def test_it_is_compared_with_others_and_only_while_it_generates():
  assert steps(make(), [], 1.0) == [False] * 4
  assert steps(make(), [make(None)], 1.0) == [False] * 4
  assert steps(make(), [make(0.001)], 1.0, busy=0.4) == [False] * 4
  pace = make()
  # Between two periods that lag it waits, and is as slow as before.
  assert not pace.lags(5.0, 5.0, 5, [make(0.001)])
  assert not pace.lags(10.0, 6.0, 6, [make(0.001)])
  assert pace.lags(15.0, 11.0, 11, [make(0.001)])
  idle = make(0.01)
  assert not idle.lags(5.0, 0.0, 0, [make(0.001)])
  assert idle.step_s == 0.01
  assert not idle.lags(10.0, 0.2, 10, [make(0.001)])
  assert idle.step_s == 0.02, "what it is compared with"


@pytest.mark.parametrize("step_s", [4, 7, 12, 30])
def test_steps_that_are_longer_than_a_period_are_found(step_s):
  pace = make()
  found = [
    now_s
    for now_s in range(1, 100)
    if pace.lags(float(now_s), float(now_s), now_s // step_s, [make(0.1)])
  ]
  assert found[0] <= max(2 * step_s, 10 + step_s)


def test_what_it_says_between_periods_is_not_looked_at():
  pace = make()
  assert not pace.lags(4.0, 4.0, 1, [make(0.001)])
  assert pace.step_s is None


def test_what_was_measured_before_another_attachment_counts():
  pace, others = make(), [make(0.001)]
  found = []
  # It generates for 3 s, is not attached for 100 s, and begins at zero again.
  for now_s in range(0, 721, 103):
    pace.resume(float(now_s))
    found += [
      now_s + second
      for second in range(1, 4)
      if pace.lags(float(now_s + second), float(second), second, others)
    ]
  # The second period of 5 s ends in the fourth attachment.
  assert found[0] == 310
  assert pace.step_s == 1.0
