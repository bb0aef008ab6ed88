"""Pairs in rows: where they lie, what is learned of them, on any devices."""

import dataclasses
import functools

import jax
from jax import numpy as jnp
import numpy as np
import preference_world
import pytest
import test_preferences
import tiny

from jaxrl_async.config import sections
from jaxrl_async.config.mesh_shape import MeshShape
from jaxrl_async.training import objectives
from jaxrl_async.training import preference_objectives

WIDTH = 40
IPO = sections.PreferenceLoss.IPO


def packed(count=12, seed=0):
  pairs = preference_world.counting(count, seed)
  return pairs, preference_objectives.pack_pairs(pairs, tokens_per_row=WIDTH)


def segments(rows):
  """(tokens, mask, row, columns) of each segment, row by row."""
  found = []
  for row, ids in enumerate(rows.segment_ids):
    for segment in range(1, ids.max() + 1):
      columns = np.flatnonzero(ids == segment)
      found.append(
        (
          tuple(rows.tokens[row, columns]),
          tuple(rows.loss_mask[row, columns]),
          row,
          columns,
        )
      )
  return found


def test_the_two_of_a_pair_lie_next_to_each_other_in_one_row():
  pairs, rows = packed(30)
  found = segments(rows)
  wanted = {
    (
      tuple(pair.chosen.tokens),
      tuple(pair.chosen.loss_mask),
      tuple(pair.rejected.tokens),
      tuple(pair.rejected.loss_mask),
    )
    for pair in pairs
  }
  got = []
  for chosen, rejected in zip(found[::2], found[1::2], strict=True):
    assert chosen[2] == rejected[2]
    assert chosen[3][-1] + 1 == rejected[3][0]
    for tokens, _, row, columns in (chosen, rejected):
      assert rows.positions[row, columns].tolist() == list(range(len(tokens)))
      assert (rows.segment_start[row, columns] == columns[0]).all()
    got.append((*chosen[:2], *rejected[:2]))
  assert len(got) == 30 and set(got) == wanted
  # Several pairs share a row, and the last row has padding.
  assert len(rows.tokens) < 15
  assert not rows.loss_mask[rows.segment_ids == 0].any()


def test_a_digest_is_of_the_trajectories_and_their_places():
  _, rows = packed(30)
  _, same = packed(30)
  found = preference_objectives.digest(rows, same)
  assert found == preference_objectives.digest(same, rows)
  assert found != preference_objectives.digest(rows)
  for name in ("tokens", "segment_ids", "positions", "loss_mask"):
    array = getattr(rows, name).copy()
    array[-1, 0] = 1 - array[-1, 0] if name != "loss_mask" else ~array[-1, 0]
    other = rows._replace(**{name: array})
    assert found != preference_objectives.digest(other, same)
    assert found != preference_objectives.digest(rows, other)
  turned = jax.tree.map(lambda x: x[::-1], rows)
  assert found != preference_objectives.digest(turned, same)


def microbatch(rows, logprobs, values=None):
  batch = jax.tree.map(jnp.asarray, rows)
  return objectives.Microbatch(
    logprobs=logprobs,
    entropy=jnp.zeros_like(logprobs),
    values=values,
    batch=batch,
    totals=objectives.minibatch_totals(batch),
    policy_version=jnp.int32(0),
    minibatch=jnp.int32(0),
  )


def transcribed(rows, logprobs, reference, section):
  """Loss and measures of the rows in float64, pair by pair."""
  found = segments(rows)
  ratios = []
  for (_, mask, row, columns), sum_ in zip(found, reference, strict=True):
    learned = columns[np.array(mask)]
    ratio = float(np.sum(logprobs[row, learned], dtype=np.float64)) - sum_
    ratios.append(ratio / len(learned) if section.length_normalised else ratio)
  losses, margins = [], []
  for chosen, rejected in zip(ratios[::2], ratios[1::2], strict=True):
    h = chosen - rejected
    margins.append(h)
    if section.loss is IPO:
      losses.append((h - 0.5 / section.beta) ** 2)
    else:
      eps = section.label_smoothing
      losses.append(
        -(1 - eps) * test_preferences.log_sigmoid(section.beta * h)
        - eps * test_preferences.log_sigmoid(-section.beta * h)
      )
  return {
    "loss": np.mean(losses),
    "accuracy": np.mean(np.array(margins) > 0),
    "margin": np.mean(margins),
    "chosen_log_ratio": np.mean(ratios[::2]),
  }


@pytest.mark.parametrize(
  "fields",
  [
    {},
    {"label_smoothing": 0.2, "beta": 0.5},
    {"length_normalised": True, "beta": 3.0},
    {"loss": IPO, "beta": 0.2},
    {"loss": IPO, "beta": 0.2, "length_normalised": True},
  ],
)
def test_the_loss_of_rows_is_that_of_their_pairs(fields):
  _, rows = packed()
  section = preference_world.section_of(**fields)
  rng = np.random.default_rng(1)
  logprobs = -rng.exponential(1.0, rows.tokens.shape).astype(np.float32)
  reference = -rng.exponential(4.0, len(segments(rows)))
  reference = reference.astype(np.float32).astype(np.float64)
  rows = preference_objectives.with_reference(rows, reference.tolist())
  objective = preference_objectives.preference(section)
  wanted = transcribed(rows, logprobs, reference, section)
  assert 0 < wanted["accuracy"] < 1

  def loss(values):
    # Nothing but the loss tokens has an influence.
    values = jnp.where(rows.loss_mask, values, jnp.nan)
    micro = microbatch(rows, values)
    return objective.loss(micro)[0]

  value, gradient = jax.value_and_grad(loss)(jnp.asarray(logprobs))
  assert float(value) == pytest.approx(wanted["loss"], rel=1e-5)
  sums = objective.sums(microbatch(rows, jnp.asarray(logprobs)))
  for name in objective.measured:
    assert float(sums[name]) / 12 == pytest.approx(wanted[name], rel=1e-4)

  # The gradient of some tokens against finite differences in float64.
  assert not np.asarray(gradient)[~rows.loss_mask].any()
  places = np.argwhere(rows.loss_mask)[::9]
  for row, column in places:
    ends = []
    for step in (1e-4, -1e-4):
      moved = logprobs.astype(np.float64)
      moved[row, column] += step
      ends.append(transcribed(rows, moved, reference, section)["loss"])
    slope = (ends[0] - ends[1]) / 2e-4
    assert float(gradient[row, column]) == pytest.approx(
      slope, rel=1e-3, abs=1e-5
    )


def with_own_reference(trainer, rows):
  """Rows with the reference of what a trainer has."""
  sums = trainer.logprob_sums(rows)
  is_first = preference_objectives.is_first_token(rows)
  return preference_objectives.with_reference(rows, sums[is_first].tolist())


@functools.cache
def one_step(shape=None, rows_per_microbatch=4, num_steps=1):
  """Metrics and parameters after steps, from a policy that is no reference."""
  _, rows = packed(16)
  rows = rows._replace(
    **{
      name: np.concatenate([getattr(rows, name)] * 4)[:4]
      for name in rows._fields
      if name != "fields"
    }
  )
  section = preference_world.section_of(num_steps=num_steps)
  objective = preference_objectives.preference(section)
  trainer = preference_world.trainer(
    section,
    rows,
    objective,
    shape=shape,
    rows_per_microbatch=rows_per_microbatch,
  )
  trainer.start(preference_world.placed(tiny.params(seed=1), trainer))
  rows = with_own_reference(trainer, rows)
  trainer.start(preference_world.placed(tiny.params(seed=0), trainer))
  trainer.use(rows)
  metrics = [trainer.step() for _ in range(num_steps)]
  return metrics, jax.tree.map(np.asarray, trainer.state.policy.params)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("shape", "rows_per_microbatch"),
  [
    (MeshShape(data=2, context=2), 2),  # all of it at once
    pytest.param(None, 1, marks=pytest.mark.nightly),
    pytest.param(MeshShape(data=2, context=2), 4, marks=pytest.mark.nightly),
    pytest.param(MeshShape(fsdp=4, context=2), 4, marks=pytest.mark.nightly),
  ],
  ids=str,
)
def test_microbatches_and_devices_change_nothing(shape, rows_per_microbatch):
  (whole,), params = one_step()
  assert whole["grad_norm"] > 0.01
  (found,), moved = one_step(shape, rows_per_microbatch)
  for name, value in whole.items():
    assert found[name] == pytest.approx(value, rel=2e-4, abs=1e-6), name
  # One step of AdamW moves a weight by the learning rate, whatever the size
  # of its gradient, so that rounding may show where that is near 0.
  for one, other in zip(
    jax.tree.leaves(params), jax.tree.leaves(moved), strict=True
  ):
    assert np.mean(np.abs(one - other)) < 2e-4


@pytest.mark.slow
@pytest.mark.parametrize(
  "loss",
  [
    pytest.param(loss, marks=pytest.mark.nightly) if loss is IPO else loss
    for loss in sections.PreferenceLoss
  ],
)
def test_it_learns_what_is_preferred(loss):
  _, rows = packed(60)
  _, others = packed(20, seed=1)
  section = preference_world.section_of(num_steps=25, loss=loss)
  objective = preference_objectives.preference(section)
  trainer = preference_world.trainer(section, rows, objective)
  trainer.start(preference_world.placed(tiny.params(), trainer))
  trainer.use(with_own_reference(trainer, rows))
  held_out = with_own_reference(trainer, others)
  before = trainer.measure(held_out)
  assert before["margin"] == before["accuracy"] == 0
  for _ in range(section.num_steps):
    trainer.step()
  after = trainer.measure(held_out)
  assert after["accuracy"] > 0.7
  assert after["loss"] < 0.7 * before["loss"]


def test_a_row_of_padding_has_no_pairs():
  _, rows = packed()
  empty = jax.tree.map(jnp.zeros_like, rows)
  empty = dataclasses.replace(
    microbatch(empty, jnp.zeros(empty.tokens.shape)),
    batch=empty._replace(
      fields={preference_objectives.REFERENCE: jnp.zeros(empty.tokens.shape)}
    ),
  )
  objective = preference_objectives.preference(preference_world.section_of())
  value, sums = objective.loss(empty)
  assert float(value) == 0 and not any(map(float, sums.values()))
