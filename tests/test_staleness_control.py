"""When the bound on staleness moves, and a run in which it does."""

import dataclasses
import math
import random

import metrics_page
import pytest
import test_run

from jaxrl_async.buffer import staleness_control
from jaxrl_async.config import sections
from jaxrl_async.storage import checkpoint

SECTION = sections.StalenessControlSection(minimum=1, maximum=4, patience=3)
FRESH = staleness_control.Measured(1.0, 0.0, 0.0, 0.0, 0.0, 2)
AT_2 = staleness_control.State(bound=2, streak=0, rest=0)


def bounds(asked, state=AT_2, section=SECTION):
  """The bound after each step."""
  found = []
  for direction in asked:
    state = staleness_control.decide(section, state, direction)
    found.append(state.bound)
  return found


@pytest.mark.parametrize(
  ("changes", "asked", "words"),
  [
    ({}, 0, ""),
    ({"ess": 0.8, "clip_frac": 0.2, "left_out_frac": 0.05}, 0, ""),
    ({"train_wait_frac": 0.1, "rollout_wait_frac": 0.1}, 0, ""),
    ({"ess": 0.79}, -1, "effective sample size 0.79"),
    ({"clip_frac": 0.21}, -1, "21% of the tokens clipped"),
    ({"left_out_frac": 0.06}, -1, "6% of the tokens left out"),
    ({"train_wait_frac": 0.2}, 1, "training waited 20%"),
    ({"train_wait_frac": 0.2, "staleness_max": 3}, 1, "training waited 20%"),
    (
      {"train_wait_frac": 0.2, "rollout_wait_frac": 0.3, "staleness_max": 0},
      1,
      "training waited 20% of the step, generation 30%",
    ),
    # One of the slices is slow, and the bound is not why the other waits.
    ({"train_wait_frac": 0.9, "staleness_max": 1}, 0, ""),
    ({"rollout_wait_frac": 0.9}, 0, ""),
    # What is too old is not made older, whoever waits.
    ({"ess": 0.5, "train_wait_frac": 0.9}, -1, "effective"),
    ({"ess": math.nan, "train_wait_frac": 0.9}, 0, ""),
  ],
)
def test_a_step_asks_for_a_direction(changes, asked, words):
  found = FRESH._replace(**changes)
  direction, reason = staleness_control.direction(SECTION, 2, found)
  assert direction == asked
  assert words in reason and bool(reason) == bool(asked)


def test_the_bound_moves_after_as_many_steps_in_a_row_and_then_rests():
  # After the move from 2 to 3, four steps are not looked at.
  assert bounds([1] * 10) == [2, 2, 3, 3, 3, 3, 3, 3, 3, 4]
  assert bounds([-1] * 7) == [2, 2, 1, 1, 1, 1, 1]
  assert bounds([1, 1, 0, 1, 1, -1, 1, 1, 1]) == [2] * 8 + [3]
  assert bounds([1, -1] * 20) == [2] * 40


def test_the_bound_stays_between_its_limits_and_turns_there_as_late():
  up = bounds([1] * 60)
  assert max(up) == up[-1] == SECTION.maximum
  at_limit = dataclasses.replace(AT_2, bound=SECTION.maximum)
  assert bounds([1] * 9 + [-1] * 3, at_limit) == [4] * 11 + [3]
  rng = random.Random(0)
  found = bounds([rng.choice((-1, -1, 0, 1, 1, 1)) for _ in range(5_000)])
  assert set(found) == {1, 2, 3, 4}
  steps = [abs(b - a) for a, b in zip(found, found[1:], strict=False)]
  assert set(steps) == {0, 1}


def values(**changes):
  return {
    "offpolicy/ess": 0.9,
    "policy/clip_frac": 0.0,
    "offpolicy/left_out_frac": 0.0,
    "time/step_s": 2.0,
    "time/wait_for_rollouts_s": 0.5,
    "rollout/wait_for_admission_s": 0.5,
    "staleness/max": 1,
    **changes,
  }


def make_control(stored=None, section=SECTION):
  notes = []
  control = staleness_control.StalenessControl(section, stored, notes.append)
  return control, notes


def test_a_run_starts_with_the_minimum_and_says_when_the_bound_moves():
  control, notes = make_control()
  assert control.bound == 1
  written = [control.observe(step, values()) for step in range(1, 6)]
  assert [x["staleness/bound"] for x in written] == [1, 1, 1, 1, 2]
  assert [x["staleness/decision"] for x in written] == [0, 0, 0, 0, 1]
  assert {x["staleness/asked"] for x in written} == {1}
  assert notes == [
    "step 5: staleness bound 1 -> 2 (training waited 25% of the step,"
    " generation 25%)"
  ]


@pytest.mark.parametrize("num_before", range(9))
def test_a_continued_control_decides_as_one_that_never_stopped(num_before):
  whole, _ = make_control()
  expected = [whole.observe(step, values()) for step in range(12)]
  before, _ = make_control()
  found = [before.observe(step, values()) for step in range(num_before)]
  after, _ = make_control(before.state())
  found += [after.observe(step, values()) for step in range(num_before, 12)]
  assert found == expected
  assert {x["staleness/bound"] for x in expected} == {1, 2, 3}


def test_a_control_that_is_switched_on_waits_for_the_groups_of_before():
  control = staleness_control.StalenessControl(
    SECTION, None, lambda _: None, oldest=6
  )
  assert control.state() == {"bound": 1, "streak": 0, "rest": 7}


def test_other_limits_move_a_stored_bound_to_the_nearer_one():
  stored = {"bound": 4, "streak": 2, "rest": 0}
  narrow = dataclasses.replace(SECTION, maximum=2)
  control, _ = make_control(stored, narrow)
  assert control.state() == {"bound": 2, "streak": 0, "rest": 5}
  assert make_control(stored)[0].state() == stored


def test_a_loss_that_measures_nothing_is_refused():
  lacking = values()
  del lacking["offpolicy/ess"]
  control, _ = make_control()
  with pytest.raises(sections.ConfigError) as caught:
    control.observe(1, lacking)
  message = str(caught.value)
  assert message.startswith("staleness_control.maximum: ")
  assert "offpolicy/ess" in message and "algorithm.loss" in message


def run_config(num_steps, **control):
  return test_run.make_config(
    num_steps=num_steps,
    algorithm={"max_staleness": 3},
    staleness_control={"maximum": 3, "patience": 1, **control},
    eval={"num_items": 4},
    run={"stall_timeout_s": 600.0, "join_timeout_s": 120.0},
  )


@pytest.mark.slow
def test_the_bound_of_a_run_rises_and_falls_and_survives_a_stop(
  tmp_path, capsys
):
  """Whatever the machine: first every step waits, and then all is too old."""
  rising = {"min_ess": 0.0, "max_left_out_frac": 1.0, "max_wait_frac": 0.0}
  test_run.start(run_config(8, **rising), tmp_path)
  steps = test_run.lines(tmp_path, "metrics")[1:]
  assert not metrics_page.unexplained(set().union(*steps))
  rising_bounds = [line["staleness/bound"] for line in steps]
  assert rising_bounds[:2] == [0, 1]
  assert rising_bounds == sorted(rising_bounds) and rising_bounds[-1] >= 2
  assert "step 2: staleness bound 0 -> 1 (" in capsys.readouterr().err
  stored = checkpoint.host_state(tmp_path / "checkpoints", 8)
  assert stored["staleness_control"]["bound"] == rising_bounds[-1]
  assert stored["max_staleness"] == 3

  falling = {"min_ess": 1.0, "max_left_out_frac": 0.0}
  summary = test_run.start(run_config(20, **falling), tmp_path)
  lines = test_run.lines(tmp_path, "metrics")[9:]
  falling_bounds = [line["staleness/bound"] for line in lines]
  assert falling_bounds[0] <= rising_bounds[-1]
  assert falling_bounds[-1] < rising_bounds[-1]
  # An admission has the bound of a decision that was made before.
  entries = test_run.check_ledger(tmp_path, summary)
  given = {entry["deadline"] - entry["birth"] for entry in entries}
  assert given <= {0, *rising_bounds, *falling_bounds} and len(given) >= 3
  assert all(entry["step"] <= entry["deadline"] for entry in entries)
  assert summary["staleness_max"] <= 3
