"""Whole runs whose books meet numbers that are not finite."""

import itertools
import math

import numpy as np
import pytest
import test_run

from jaxrl_async.storage import checkpoint
from jaxrl_async.training import trainer as trainer_lib

pytestmark = pytest.mark.slow


def start(workdir, num_steps):
  """Synchronous, so that each step has tokens of the current version."""
  return test_run.start(
    test_run.make_config("sync", num_steps=num_steps), workdir
  )


def numbers(value):
  """Every number in what JSON gave."""
  if isinstance(value, dict):
    value = list(value.values())
  if isinstance(value, list):
    return [x for item in value for x in numbers(item)]
  return [value] if isinstance(value, int | float) else []


@pytest.fixture(scope="module")
def with_a_skipped_update(tmp_path_factory):
  """A run whose second train step meets a logprob that is not a number."""
  workdir = tmp_path_factory.mktemp("skipped")
  prepare, count = trainer_lib.Trainer.prepare, itertools.count()

  def poisoned(self, groups):
    if next(count) == 1:
      groups[0].trajectories[0].behavior_logprobs[:] = np.nan
    return prepare(self, groups)

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(trainer_lib.Trainer, "prepare", poisoned)
    return workdir, start(workdir, 3)


def test_a_run_with_a_skipped_update_ends_and_goes_on_with_finite_books(
  with_a_skipped_update,
):
  workdir, summary = with_a_skipped_update
  _, before, skipped, after = test_run.lines(workdir, "metrics")
  assert skipped["train/bad_updates"] >= 1
  assert skipped["offpolicy/mismatch_kl"] is None
  kept = [x["offpolicy/mismatch_kl"] for x in (before, after)]
  entries = test_run.lines(workdir, "ledger")
  assert {e["step"] for e in entries if e["skipped_update"]} == {1}
  assert all(math.isfinite(x) for x in numbers(summary))
  assert summary["mismatch_kl_not_finite"] == 1
  assert summary["mismatch_kl_max"] >= max(kept) > 0

  resumed = start(workdir, 4)
  assert all(math.isfinite(x) for x in numbers(resumed))
  assert resumed["train_steps"] == 4
  for name in ("eval_before", "eval_before_greedy", "warm_start_s"):
    assert resumed[name] == summary[name]
  assert resumed["wall_s"] > summary["wall_s"]
  assert resumed["rl_s"] > summary["rl_s"] > summary["first_step_s"] > 0
  assert resumed["mismatch_kl_not_finite"] == 1
  kept = checkpoint.host_state(workdir / "checkpoints", 4)["metrics"]
  assert all(math.isfinite(x) for x in numbers(kept))
