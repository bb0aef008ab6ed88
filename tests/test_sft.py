"""The warm start: packing, order, and that it learns."""

import functools

import jax
import numpy as np
import pytest
import tiny

from jaxrl_async.config import sections
from jaxrl_async.data import prompts
from jaxrl_async.devices import mesh as mesh_lib
from jaxrl_async.training import sft
from jaxrl_async.training import train_step

FORWARD = train_step.ForwardSettings(
  model=tiny.MODEL,
  compute_dtype="float32",
  remat=sections.Remat.NONE,
  attention="xla",
  temperature=1.0,
  vocab_chunk=128,
)


def examples(count, seed=0):
  """Counting up: a prompt of one or two tokens, then its successors."""
  rng = np.random.default_rng(seed)
  made = []
  for _ in range(count):
    first, p = rng.integers(1, 80), int(rng.integers(1, 3))
    run = (first + np.arange(p + rng.integers(1, 6))).astype(np.int32)
    made.append(
      prompts.WorkedExample(prompt_tokens=run[:p], completion_tokens=run[p:])
    )
  return made


def test_every_example_is_packed_once_and_only_completions_are_learned():
  made = examples(30)
  rows = sft.pack_examples(made, tokens_per_row=16)
  found = []
  for row in range(len(rows.tokens)):
    ids = rows.segment_ids[row]
    assert ids.any(), "a row without an example"
    for segment in range(1, ids.max() + 1):
      here = ids == segment
      mask = rows.loss_mask[row, here]
      tokens = rows.tokens[row, here]
      assert (np.diff(mask.astype(int)) >= 0).all()
      assert rows.positions[row, here].tolist() == list(range(here.sum()))
      found.append((tuple(tokens[~mask]), tuple(tokens[mask])))
    assert not rows.loss_mask[row, ids == 0].any()
  wanted = [(tuple(e.prompt_tokens), tuple(e.completion_tokens)) for e in made]
  assert sorted(found) == sorted(wanted)


@functools.cache
def warm_start(seed, num_steps=30, initial=None):
  mesh = mesh_lib.make_mesh(jax.devices()[:1])
  losses = []
  params = sft.warm_start(
    sections.WarmStartSection(
      num_steps=num_steps,
      rows_per_batch=4,
      optimizer=sections.OptimizerSection(learning_rate=1e-2),
    ),
    sft.pack_examples(examples(30), tokens_per_row=16),
    params=initial,
    mesh=mesh,
    forward=FORWARD,
    rows_per_microbatch=2,
    max_bad_updates=3,
    seed=seed,
    on_step=lambda step, loss: losses.append((step, loss)),
  )
  return jax.tree.map(np.asarray, params), losses


def test_the_loss_falls():
  _, losses = warm_start(0)
  assert [step for step, _ in losses] == list(range(1, 31))
  first, last = losses[0][1], losses[-1][1]
  assert first == pytest.approx(np.log(tiny.MODEL.vocab_size), abs=1.0)
  assert last < 0.7 * first


def test_the_same_seed_gives_the_same_bits_and_another_one_does_not():
  params, losses = warm_start(0)
  warm_start.cache_clear()
  again, losses_again = warm_start(0)
  assert losses == losses_again
  jax.tree.map(np.testing.assert_array_equal, params, again)
  assert warm_start(1)[1] != losses


def test_updates_that_are_never_finite_end_it():
  bad = jax.tree.map(lambda x: jax.numpy.full_like(x, np.nan), tiny.params())
  with pytest.raises(sft.WarmStartError, match="step 3: 3 updates in a row"):
    warm_start.__wrapped__(0, initial=bad)


@pytest.mark.slow
def test_each_pass_takes_every_row_once():
  rows = sft.pack_examples(examples(30), tokens_per_row=16)
  num_rows = len(rows.tokens)
  seen = []

  def forget(step, loss):
    del step
    seen.append(loss)

  # With a rate of 0 a batch's loss tells which row it was.
  mesh = mesh_lib.make_mesh(jax.devices()[:1])
  sft.warm_start(
    sections.WarmStartSection(
      num_steps=2 * num_rows,
      rows_per_batch=1,
      optimizer=sections.OptimizerSection(learning_rate=0.0),
    ),
    rows,
    params=jax.tree.map(jax.numpy.copy, tiny.params()),
    mesh=mesh,
    forward=FORWARD,
    rows_per_microbatch=1,
    max_bad_updates=3,
    seed=0,
    on_step=forget,
  )
  first, second = seen[:num_rows], seen[num_rows:]
  assert len(set(first)) == num_rows
  assert sorted(first) == sorted(second)
  assert first != second
