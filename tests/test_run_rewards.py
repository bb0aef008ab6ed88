"""A whole run on a source of its own, with rewards that are more than a number.

It is stopped and continued, so that rewards pass through a checkpoint.
"""

import itertools
import json

import metrics_page
import numpy as np
import pytest
import reward_scorers
import test_run

from jaxrl_async.data import source as source_lib
from jaxrl_async.storage import checkpoint
from jaxrl_async.storage import outstanding as outstanding_lib


class Letters:
  """Training asks with small letters, evaluation with capitals."""

  name, params, versions = "letters", {}, {}
  splits = ("train", "eval")

  def check(self):
    pass

  def open(self, split, first_index, *, num_workers):
    alphabet = "ABCDEFGHIJ" if split == "eval" else "abcdefghij"
    return source_lib.IteratorStream(
      {"index": i % 10, "question": alphabet[i % 10]}
      for i in itertools.count(first_index)
    )


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
  """Two steps, a checkpoint, and two more."""
  path = tmp_path_factory.mktemp("letters")
  for num_steps in (2, 4):
    config = test_run.make_config(num_steps=num_steps)
    config.task.template = "{question}\n"
    test_run.start(
      config, path, source=Letters(), scorer=reward_scorers.adds_up
    )
  return path


@pytest.mark.slow
def test_prompts_are_the_sources_in_order_over_both_starts(workdir):
  entries = {e["index"]: e for e in test_run.lines(workdir, "ledger")}
  assert len(entries) >= 16
  for index, entry in entries.items():
    assert entry["prompt_id"] == f"letters/train/{index % 10}"
  stored = json.loads((workdir / "held_out.json").read_text())
  assert [item["question"] for item in stored["items"]] == [*"ABCDEFGH"]


@pytest.mark.slow
def test_named_parts_are_in_the_ledger_and_the_metrics(workdir):
  by_step = {}
  for entry in test_run.lines(workdir, "ledger"):
    parts = entry["reward_parts"]
    assert list(parts) == ["answered", "lines"]
    np.testing.assert_allclose(
      entry["rewards"], np.add(parts["answered"], parts["lines"])
    )
    by_step.setdefault(entry.get("step"), []).append(parts["lines"])
  first, *steps = test_run.lines(workdir, "metrics")
  assert not metrics_page.unexplained(set().union(first, *steps))
  assert first["eval/held_out/parts/answered"] == 1.0
  means = [np.mean(by_step[step]) for step in range(4)]
  assert max(means) > 0, "lines that prove nothing"
  assert np.allclose([s["reward/parts/lines"] for s in steps], means)


@pytest.mark.slow
def test_a_checkpoint_keeps_parts_and_token_scores(workdir):
  directory = workdir / "checkpoints"
  step = checkpoint.latest(directory)
  groups = outstanding_lib.read(directory / str(step))
  finished = [g.group for g in groups if g.status == "finished"]
  assert finished
  for trajectory in (t for group in finished for t in group.trajectories):
    parts = trajectory.reward.parts
    assert trajectory.score == sum(parts.values())
    assert len(trajectory.reward.token_scores) == parts["lines"] * 2
