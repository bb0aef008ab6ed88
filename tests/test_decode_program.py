"""What the compiled decode program waits for: nothing, until its call ends.

On a GPU each loop whose number of turns is not known when it is compiled, and
each conditional, waits for the host.
"""

import re

import jax
import numpy as np
import pytest
import tiny

PAGES = {"num_pages": 24, "page_tokens": 4}
CACHES = {"slots": {}, "pages": PAGES, "exact pages": PAGES}


def engine_of(cache):
  exact = {"preemption": tiny.sections.Preemption.EXACT}
  return tiny.engine(**CACHES[cache], **(exact if "exact" in cache else {}))


def lines(engine, *, is_filtered):
  """The loops and the conditionals of a call of `generate`, as compiled."""
  shapes = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype),
    tiny.engine_params().weights,
  )
  (decode,) = (x for x in engine.programs(shapes) if x.name == "decode")
  settings = {**decode.settings, "is_filtered": is_filtered}
  compiled = decode.function.lower(*decode.arguments, **settings).compile()
  found = re.findall(
    r"^.* (while|conditional)\((.*)$", compiled.as_text(), re.M
  )
  return [(kind, "known_trip_count" in rest) for kind, rest in found]


@pytest.mark.parametrize("cache", CACHES)
def test_decoding_loops_a_known_number_of_times_and_branches_nowhere(cache):
  found = lines(engine_of(cache), is_filtered=False)
  assert found
  assert set(found) == {("while", True)}


def test_filters_branch_only_on_whether_a_row_needs_their_search():
  found = lines(engine_of("slots"), is_filtered=True)
  assert found.count(("conditional", False)) == 2
  assert {x for x in found if x[0] == "while"} == {("while", True)}


def test_a_call_comes_to_the_host_in_one_transfer(monkeypatch):
  engine, params = tiny.engine(), tiny.engine_params()
  fetched = []
  convert = np.asarray

  def counted(array, *arguments, **options):
    if isinstance(array, jax.Array):
      fetched.append(array.shape)
    return convert(array, *arguments, **options)

  state = engine.init_decode_state()
  monkeypatch.setattr(np, "asarray", counted)
  state, packed = engine.generate(params, state)
  assert not fetched
  engine.read(packed)
  n = engine.sizes.decode_steps_per_call
  assert fetched == [(engine.sizes.num_slots, 4 * n + 3)]


def test_slots_that_idle_stay_as_they_are():
  """The steps of a call go on when every sequence has ended."""
  engine, params = tiny.engine(), tiny.engine_params()
  row = tiny.Row(prompt=tiny.prompt(5), limit=7)
  (written,), state = tiny.write(engine, params, [row], num_calls=3)
  assert len(written.tokens) == 2
  assert not np.asarray(state.is_active).any()
  assert np.asarray(state.positions)[0] == 6
