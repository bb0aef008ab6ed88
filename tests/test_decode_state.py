"""What is known of a slot: declared once, copied by every insertion."""

import dataclasses

import jax
from jax import numpy as jnp
import lora_world
import numpy as np
import pytest
import tiny

from jaxrl_async.config import sections
from jaxrl_async.engine import decode_state as decode_state_lib

PAGES = {
  "num_pages": 64,
  "page_tokens": 4,
  "preemption": sections.Preemption.EXACT,
}
FIELDS = [f.name for f in dataclasses.fields(decode_state_lib.SlotSettings)]


@pytest.fixture(scope="module")
def prefix():
  return tiny.prefill(
    lora_world.engine(**PAGES), lora_world.engine_params(), tiny.prompt(5)
  )


@pytest.mark.parametrize("name", FIELDS)
def test_an_insertion_copies_every_field_to_its_slot_alone(prefix, name):
  engine = lora_world.engine(**PAGES)
  state = engine.init_decode_state()
  before = np.asarray(getattr(state.settings, name)).copy()
  insertion = engine.unused_insertion()
  insertion.slots[0] = 2
  row = getattr(insertion.settings, name)
  row[0] = np.arange(3, 3 + row[0].size).reshape(row[0].shape)
  state = engine.insert(prefix, state, insertion)
  after = np.asarray(getattr(state.settings, name))
  np.testing.assert_array_equal(after[2], row[0])
  assert row[0].size and (after[2] != before[2]).any()
  others = [0, 1, 3]
  np.testing.assert_array_equal(after[others], before[others])
  for other in set(FIELDS) - {name}:  # as the unused row has them
    np.testing.assert_array_equal(
      np.asarray(getattr(state.settings, other))[2],
      getattr(insertion.settings, other)[0],
    )


@pytest.mark.parametrize("sizes", [{}, PAGES])
def test_host_and_device_declare_the_same_arrays(sizes):
  engine = lora_world.engine(**sizes)
  on_device = engine.init_decode_state().settings
  on_host = engine.unused_insertion().settings
  for name in FIELDS:
    ours, theirs = getattr(on_host, name), getattr(on_device, name)
    assert ours.dtype == theirs.dtype and ours.shape[1:] == theirs.shape[1:]
    assert len(ours) == engine.sizes.insert_rows
    assert len(theirs) == engine.sizes.num_slots
    if ours.size:
      assert (ours == np.asarray(theirs)[:1]).all()


@pytest.mark.parametrize("has_adapters", [True, False])
def test_the_settings_are_a_tree_of_all_their_fields(has_adapters):
  rows = decode_state_lib.unused_slots(
    jnp.full, 3, tiny.SIZES, 2, has_adapters=has_adapters
  )
  # A model without a stack of adapters has no array for it in its programs.
  assert len(jax.tree.leaves(rows)) == len(FIELDS) - (not has_adapters)
