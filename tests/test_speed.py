"""Which shapes are fastest, and which slice waits for the other."""

import dataclasses

import jax
import numpy as np
import pytest
import test_assembly
import test_run

from jaxrl_async.assembly import speed
from jaxrl_async.config import sections

ROWS = "train.rows_per_microbatch"
LENGTHS = speed.Lengths(prompt=3, completion=5)


def make_setup(**train):
  return test_assembly.resolved(test_run.make_config(train=train))


def test_completions_have_their_mean_and_no_more_than_twice_of_it():
  drawn = LENGTHS.drawn(10_000, np.random.default_rng(0))
  assert drawn.min() == 1 and drawn.max() == 10
  assert abs(drawn.mean() - 5.5) < 0.1


def test_candidates_differ_from_the_config_in_one_setting():
  setup = make_setup(rows_per_microbatch=4)
  own, *others = speed.candidates(setup)
  assert own == speed.shapes_of(setup.config)
  assert len(others) > 4 and all(others.count(one) == 1 for one in others)
  for shapes in others:
    assert sum(shapes[path] != own[path] for path in own) == 1
    changed = speed.with_shapes(setup, shapes)
    assert speed.shapes_of(changed.config) == shapes
  assert {x[ROWS] for x in others} == {2, 4, 8}
  assert speed.shapes_of(setup.config) == own  # nothing was changed in place


def test_the_best_of_each_setting_are_tried_together(monkeypatch):
  own = speed.shapes_of(make_setup(rows_per_microbatch=4).config)

  def step_s(setup, lengths, *, repeats):
    shapes = speed.shapes_of(setup.config)
    if shapes["model.remat"] is sections.Remat.FULL:
      raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: too much")
    rows = {2: 0.9, 4: 1.0, 8: 1.2}[shapes[ROWS]]
    remat = 0.8 if shapes["model.remat"] is sections.Remat.DOTS else 1.0
    return rows * remat

  monkeypatch.setattr(speed, "train_step_s", step_s)
  rows = list(speed.tried(make_setup(), LENGTHS, repeats=1))
  assert rows[0].shapes == own and rows[0].step_s == 1.0
  best = speed.fastest(rows)
  assert best is rows[-1] and best.step_s == pytest.approx(0.72)
  assert best.flags == (
    "--config.model.remat=dots --config.train.rows_per_microbatch=2"
    " --config.train.attention=auto"
  )
  refused = [row for row in rows if row.step_s is None]
  assert refused and refused[0].as_json()["refused"]


def test_a_config_that_does_not_fit_is_refused(monkeypatch):
  def step_s(setup, lengths, *, repeats):
    raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: too much")

  monkeypatch.setattr(speed, "train_step_s", step_s)
  with pytest.raises(sections.ConfigError, match="^train.rows_per_microbatch"):
    next(speed.tried(make_setup(), LENGTHS, repeats=1))


@pytest.mark.parametrize(
  ("train_s", "rollout_s", "words"),
  [
    (4.0, 1.0, "generation waits for training 75% of the time"),
    (1.0, 2.0, "training waits for generation 50% of the time"),
    (1.0, 1.05, "both slices are busy"),
  ],
)
def test_the_slice_that_needs_less_time_waits(train_s, rollout_s, words):
  assert speed.line(train_s, rollout_s).endswith(words)


def test_shapes_that_the_run_would_refuse_are_no_candidates():
  config = test_run.make_config(train={"rows_per_microbatch": 4})
  config.warm_start.num_steps = 1
  config.warm_start.rows_per_batch = 4
  setup = test_assembly.resolved(config)
  assert {x[ROWS] for x in speed.candidates(setup)} == {2, 4}


@pytest.mark.slow
@pytest.mark.nightly
def test_a_train_step_of_adapters_is_measured():
  config = test_run.make_config()
  config.model.lora.rank = 2
  setup = test_assembly.resolved(config)
  assert 0 < speed.train_step_s(setup, LENGTHS, repeats=1) < 60


@pytest.mark.slow
def test_both_slices_are_measured():
  setup = make_setup()
  assert 0 < speed.train_step_s(setup, LENGTHS, repeats=1) < 60
  once = speed.generation_s(setup, LENGTHS)
  config = dataclasses.replace(
    setup.config,
    algorithm=dataclasses.replace(
      setup.config.algorithm,
      groups_per_step=16 * setup.config.algorithm.groups_per_step,
    ),
  )
  more = speed.generation_s(dataclasses.replace(setup, config=config), LENGTHS)
  assert 0 < once < more < 600
