"""Questions that rest: when, for how long, and across restarts."""

import json
import random

import pytest
import test_rows

from jaxrl_async.data import prompts
from jaxrl_async.data import rests as rests_lib
from jaxrl_async.data import rows as rows_lib
from jaxrl_async.data import source as source_lib

TRAIN = source_lib.Split.TRAIN


@pytest.fixture
def stream(tmp_path):
  """Makes streams over the same rows."""
  path = test_rows.write(tmp_path / "a.jsonl", test_rows.sums(range(12)))
  items = rows_lib.Rows(
    dataset=f"jsonl:{path}", eval_percent=10, label="a", seed=1
  )

  def make(rest_after=2, rest_for=3):
    source = test_rows.prompt_source(
      items, rest_after=rest_after, rest_for=rest_for
    )
    return prompts.PromptStream(source, TRAIN)

  make.size = items.num_questions(TRAIN)
  return make


def a_pass(stream, count, hopeless):
  """The prompts of a pass, each of which is scored at once."""
  ids = []
  for _ in range(count):
    prompt_id = stream.next().prompt_id
    stream.record(prompt_id, teaches=prompt_id not in hopeless)
    ids.append(prompt_id)
  return ids


def test_a_question_rests_after_so_many_groups_for_so_many_passes(stream):
  size, tested = stream.size, stream()
  everything = set(a_pass(tested, size, ()))
  assert len(everything) == size
  hopeless = {min(everything), max(everything)}
  # Its record decides, however many other groups are scored in between.
  for _ in range(2):
    assert set(a_pass(tested, size, hopeless)) == everything
  for _ in range(3):
    left = a_pass(tested, size - 2, hopeless)
    assert set(left) == everything - hopeless
  # Then it is tried again, as often as it was at first.
  for _ in range(2):
    assert set(a_pass(tested, size, hopeless)) == everything
  assert set(a_pass(tested, size - 2, hopeless)) == everything - hopeless
  assert tested.metrics()["data/resting"] == 2


def test_one_group_that_teaches_begins_the_count_anew():
  rests = rests_lib.Rests(rest_after=2, rest_for=1)
  for teaches in (False, True, False):
    rests.add("a", teaches=teaches)
    rests.commit()
    assert not rests.sits_out("a")
  rests.add("a", teaches=False)
  assert not rests.sits_out("a")  # not before the next prompt is taken
  rests.commit()
  assert rests.sits_out("a") and not rests.sits_out("a")


def test_none_rests_by_default(stream):
  tested = stream(rest_after=0)
  for _ in range(5):
    ids = a_pass(tested, stream.size, {f"a/train/{i}" for i in range(12)})
    assert len(set(ids)) == stream.size
  assert tested.state().keys() == {"next_index", "num_too_long"}
  assert "data/resting" not in tested.metrics()


def test_all_questions_may_rest_and_come_back(stream):
  tested = stream(rest_after=1, rest_for=9)
  everything = {f"a/train/{i}" for i in range(12)}
  first = a_pass(tested, stream.size, everything)
  again = a_pass(tested, stream.size, everything)
  assert set(first) == set(again)
  # A stream goes on to the pass after the rest, at once.
  assert tested.metrics()["data/epoch"] == 11


@pytest.mark.parametrize("seed", range(3))
def test_a_restored_stream_draws_what_an_uninterrupted_one_draws(stream, seed):
  def drive(tested, rng, count, kill_at=()):
    """Draws while scores arrive late; returns what was drawn."""
    drawn, pending = [], []
    for number in range(count):
      if rng.random() < 0.7:
        tested.is_ready()  # looks ahead, or has looked ahead
      while pending and rng.random() < 0.5:
        tested.record(pending.pop(0), teaches=rng.random() < 0.3)
      if number in kill_at:
        state = json.loads(json.dumps(tested.state()))
        tested = stream()
        tested.restore(state)
      drawn.append(tested.next().prompt_id)
      pending.append(drawn[-1])
    return drawn, tested.state()

  uninterrupted = drive(stream(), random.Random(seed), 80)
  kill_at = {*range(seed, 80, 9), 41}
  assert drive(stream(), random.Random(seed), 80, kill_at) == uninterrupted
  assert uninterrupted[1]["next_index"] > 82  # some were passed over
