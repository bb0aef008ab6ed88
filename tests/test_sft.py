"""The warm start: packing, order, and that it learns."""

import functools
import threading

import jax
import numpy as np
import pytest
import tiny

from jaxrl_async.config import sections
from jaxrl_async.data import worked_examples as worked_examples_lib
from jaxrl_async.devices import mesh as mesh_lib
from jaxrl_async.models import transformer
from jaxrl_async.training import example_rows
from jaxrl_async.training import sft
from jaxrl_async.training import train_state
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
    made.append(worked_examples_lib.joined([(run[:p], False), (run[p:], True)]))
  return made


def test_every_example_is_packed_once_and_only_completions_are_learned():
  made = examples(30)
  rows = example_rows.pack_examples(made, tokens_per_row=16)
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
  wanted = [
    (tuple(e.tokens[~e.loss_mask]), tuple(e.tokens[e.loss_mask])) for e in made
  ]
  assert sorted(found) == sorted(wanted)


def make_trainer(section, rows, *, rows_per_microbatch=2, seed=0):
  made = sft.SupervisedTrainer(
    section,
    mesh=mesh_lib.make_mesh(jax.devices()[:1]),
    policy=train_state.ModelSettings(
      model=tiny.MODEL, optimizer=section.optimizer
    ),
    forward=FORWARD,
    rows_per_microbatch=rows_per_microbatch,
    max_bad_updates=3,
    seed=seed,
  )
  made.use(rows)
  return made


def section_of(num_steps, rows_per_batch=4, learning_rate=1e-2):
  return sections.WarmStartSection(
    num_steps=num_steps,
    rows_per_batch=rows_per_batch,
    optimizer=sections.OptimizerSection(learning_rate=learning_rate),
  )


def own_params():
  """Return parameters that a trainer may donate."""
  return jax.tree.map(jax.numpy.copy, tiny.params())


@functools.cache
def warm_start(seed, num_steps=30, initial=None):
  losses = []
  rows = example_rows.pack_examples(examples(30), tokens_per_row=16)
  trainer = make_trainer(section_of(num_steps), rows, seed=seed)
  if initial is None:
    initial = transformer.init_params(tiny.MODEL, jax.random.key(seed))
  trainer.start(initial)
  params = sft.warm_start(
    trainer,
    example_rows.batches([rows], 4, seed),
    num_steps,
    lambda step, loss: losses.append((step, loss)),
  )
  return jax.tree.map(np.asarray, params), losses


@pytest.mark.slow
@pytest.mark.nightly
def test_the_same_seed_gives_the_same_bits_and_another_one_does_not():
  params, losses = warm_start(0)
  warm_start.cache_clear()
  again, losses_again = warm_start(0)
  assert losses == losses_again
  jax.tree.map(np.testing.assert_array_equal, params, again)
  assert warm_start(1)[1] != losses


@pytest.mark.slow
@pytest.mark.nightly
def test_updates_that_are_never_finite_end_it():
  bad = jax.tree.map(lambda x: jax.numpy.full_like(x, np.nan), tiny.params())
  with pytest.raises(sft.WarmStartError, match="^training, step 3: 3 updates"):
    warm_start.__wrapped__(0, initial=bad)


def test_each_pass_takes_every_row_once_in_another_order():
  order = example_rows.row_order([7], 3, seed=0)
  rows = np.concatenate([next(order) for _ in range(7)]).reshape(3, 7)
  assert [sorted(one_pass) for one_pass in rows.tolist()] == [
    list(range(7))
  ] * 3
  assert len(set(map(tuple, rows.tolist()))) == 3


def test_the_first_pass_takes_the_rows_of_each_part_once_and_in_turn():
  sizes = iter([5, 1, 7])
  order = example_rows.row_order(sizes, 3, seed=0)
  first = next(order).tolist()
  assert list(sizes) == [1, 7], "a part was asked for that is not needed yet"
  order = example_rows.row_order([5, 1, 7], 3, seed=0)
  assert next(order).tolist() == first
  rows = np.concatenate([first, *(next(order) for _ in range(12))]).tolist()
  for begin, end in (0, 5), (5, 6), (6, 13):
    assert sorted(rows[begin:end]) == list(range(begin, end))
  assert rows[:5] != list(range(5))
  for begin in 13, 26:
    assert sorted(rows[begin : begin + 13]) == list(range(13))
  assert rows[13:26] != rows[26:39]


def test_rows_are_packed_ahead_in_the_order_of_the_examples():
  made = examples(30)
  parts = [
    *example_rows.packed_ahead(made, tokens_per_row=16, examples_per_part=8)
  ]
  assert len(parts) == 4
  for n, part in enumerate(parts):
    wanted = example_rows.pack_examples(
      made[8 * n : 8 * n + 8], tokens_per_row=16
    )
    jax.tree.map(np.testing.assert_array_equal, part, wanted)


def test_batches_are_the_rows_of_the_parts_in_their_order():
  parts = [
    *example_rows.packed_ahead(
      examples(60), tokens_per_row=16, examples_per_part=8
    )
  ]
  rows = np.concatenate([part.tokens for part in parts])
  masks = np.concatenate([part.loss_mask for part in parts])
  sizes = [len(part.tokens) for part in parts]
  for rows_per_batch in 1, 5, max(sizes) + 1, len(rows) + 1:
    order = example_rows.row_order(sizes, rows_per_batch, seed=3)
    batches = example_rows.batches(iter(parts), rows_per_batch, seed=3)
    for _ in range(3 * len(rows) // rows_per_batch + 3):
      batch, chosen = next(batches), next(order)
      np.testing.assert_array_equal(batch.tokens, rows[chosen])
      np.testing.assert_array_equal(batch.loss_mask, masks[chosen])


def test_examples_are_made_while_others_are_used_and_no_longer_than_that():
  made, closed = [], []
  may_go_on = threading.Event()

  def stream():
    try:
      for example in examples(30):
        if len(made) == 16:
          may_go_on.wait(60)
        made.append(example)
        yield example
    finally:
      closed.append(True)

  parts = example_rows.packed_ahead(
    stream(), tokens_per_row=16, examples_per_part=8
  )
  next(parts)
  next(parts)  # while the third part cannot be made
  assert len(made) == 16
  may_go_on.set()
  parts.close()
  assert len(made) == 24
  del parts
  assert closed


def test_an_example_that_cannot_be_made_ends_it():
  def stream():
    yield from examples(8)
    raise sections.ConfigError("warm_start.solver: none")

  parts = example_rows.packed_ahead(
    stream(), tokens_per_row=16, examples_per_part=8
  )
  next(parts)
  with pytest.raises(sections.ConfigError, match="^warm_start.solver: none"):
    next(parts)


@pytest.mark.slow
@pytest.mark.nightly
def test_a_step_reports_the_loss_of_its_rows_before_the_update():
  rows = example_rows.pack_examples(examples(30), tokens_per_row=16)
  num_rows = len(rows.tokens)
  trainer = make_trainer(
    section_of(2, rows_per_batch=num_rows), rows, rows_per_microbatch=num_rows
  )
  trainer.start(own_params())
  before = trainer.measure(rows)["loss"]
  assert trainer.step()["loss"] == pytest.approx(before, rel=1e-5)
  after = trainer.measure(rows)["loss"]
  assert after < before
  # It is the mean over tokens, however many calls they are spread over.
  smaller = make_trainer(section_of(2, rows_per_batch=4), rows)
  smaller.restore(trainer.state, trainer.position())
  assert smaller.measure(rows)["loss"] == pytest.approx(after, rel=1e-5)


@pytest.mark.slow
@pytest.mark.nightly
def test_a_restored_trainer_makes_the_same_updates():
  rows = example_rows.pack_examples(examples(30), tokens_per_row=16)
  section = section_of(6)
  whole = make_trainer(section, rows)
  whole.start(own_params())
  metrics = []
  for step in range(6):
    if step == 3:
      kept = jax.tree.map(jax.numpy.copy, whole.state), whole.position()
    metrics.append(whole.step())
  again = make_trainer(section, rows)
  again.restore(*kept)
  assert [again.step() for _ in range(3)] == metrics[3:]
  jax.tree.map(np.testing.assert_array_equal, again.state, whole.state)
  assert len({m["learning_rate"] for m in metrics}) == 6  # it decays
