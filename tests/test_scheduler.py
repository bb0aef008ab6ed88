"""Continuous batching, interruption, and going on from what was recorded."""

import numpy as np
import pytest
import tiny

from jaxrl_async import types
from jaxrl_async.config import sections
from jaxrl_async.engine import sequence as sequence_lib

KEEP, RECOMPUTE = sections.KvOnAdopt.KEEP, sections.KvOnAdopt.RECOMPUTE


def test_every_sequence_is_written_once_and_each_token_is_counted():
  scheduler = tiny.ready()
  sequences = tiny.assorted()
  for sequence in sequences:
    scheduler.submit(sequence)
  assert scheduler.num_free == 4 - len(sequences)
  ended = tiny.finish(scheduler)
  assert sorted(s.group for s in ended) == list(range(len(sequences)))
  assert {id(s) for s in ended} == {id(s) for s in sequences}
  assert scheduler.num_free == 4
  written = 0
  for prompt, sequence in zip(tiny.assorted_prompts(), sequences, strict=True):
    t = sequence.trajectory()
    n = len(prompt)
    np.testing.assert_array_equal(t.tokens[:n], prompt)
    np.testing.assert_array_equal(t.loss_mask, np.arange(len(t.tokens)) >= n)
    assert (t.behavior_logprobs[:n] == 0).all()
    assert (t.policy_versions == np.where(t.loss_mask, 0, -1)).all()
    is_eos = t.tokens[-1] in tiny.END_TOKENS
    assert t.finish_reason == (
      types.FinishReason.EOS if is_eos else types.FinishReason.LENGTH
    )
    assert is_eos or len(t.tokens) == sequence.limit
    written += t.num_completion_tokens
    expected = tiny.trainer_logprobs(tiny.params(), [t.tokens])[0]
    np.testing.assert_allclose(t.behavior_logprobs[n:], expected[n:], atol=1e-4)
  assert {s.finish_reason for s in sequences} == {
    types.FinishReason.EOS,
    types.FinishReason.LENGTH,
  }
  assert scheduler.stats.generated_tokens == written
  assert (
    0 < scheduler.stats.busy_slot_steps <= (scheduler.stats.waiting_slot_steps)
  )


def test_results_do_not_depend_on_the_order_of_submission():
  results = []
  for seed in range(3):
    scheduler = tiny.ready()
    sequences = tiny.assorted()
    order = np.random.default_rng(seed).permutation(len(sequences))
    for i in order:
      scheduler.submit(sequences[i])
      if seed == 2 and i % 3 == 0:
        scheduler.step()
    tiny.finish(scheduler)
    results.append([tiny.record(s) for s in sequences])
  assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("calls_in_flight", [1, 2])
def test_each_cache_names_the_call_that_went_on_from_it(
  calls_in_flight, monkeypatch
):
  scheduler = tiny.ready(calls_in_flight=calls_in_flight)
  engine, calls = scheduler.engine, []
  read = engine.read
  monkeypatch.setattr(
    engine, "read", lambda x: calls.append(read(x)) or calls[-1]
  )
  sequences = tiny.assorted()
  for sequence in sequences:
    scheduler.submit(sequence)
  scheduler.step()
  scheduler.step()
  scheduler.adopt(tiny.engine_params(1, seed=1), 1)
  tiny.finish(scheduler)
  steps = engine.sizes.decode_steps_per_call
  found = []
  for sequence in sequences:
    for build in sequence.cache_builds:
      (number,) = [
        number
        for number, call in enumerate(calls)
        if sequence.behavior_logprobs[build.length]
        in call.logprobs[call.is_valid]
      ]
      found.append((number, build.version))
      assert build.decode_step == number * steps
  numbers = [number for number, _ in found]
  assert len(found) > len(sequences) and len(set(numbers)) > 3
  # Each call has one version.
  assert len(set(found)) == len(set(numbers))


def test_nothing_runs_before_weights_are_adopted():
  scheduler = tiny.scheduler()
  assert scheduler.version == -1
  scheduler.submit(tiny.long())
  with pytest.raises(ValueError, match="adopt weights"):
    scheduler.step()


@pytest.mark.parametrize("limit", [33, 60])
def test_a_sequence_that_does_not_fit_the_cache_is_refused(limit):
  with pytest.raises(ValueError, match="does not fit cache_tokens 32"):
    tiny.ready().submit(tiny.long(limit=limit))


def test_a_sequence_without_room_for_a_token_is_refused():
  with pytest.raises(ValueError, match="leave no room"):
    tiny.ready().submit(tiny.sequence(tiny.prompt(12), limit=12))
  with pytest.raises(ValueError, match="leave no room"):
    tiny.ready().submit(tiny.sequence(tiny.prompt(0), limit=12))


def test_the_longest_prompt_gets_the_one_token_there_is_room_for():
  scheduler = tiny.ready()
  sequence = tiny.sequence(tiny.prompt(31), limit=32)
  tiny.write_all(scheduler, [sequence])
  assert sequence.length == 32
  assert sequence.loss_mask.sum() == 1


def test_members_that_wait_for_a_slot_share_the_groups_prefill():
  # Two groups of three sequences more than there are slots.
  def write(scheduler, is_shared):
    ended = []
    for group in (8, 9):
      for member in range(tiny.SIZES.num_slots + 3):
        scheduler.submit(
          tiny.sequence(tiny.prompt(9 + group), member=member, group=group)
        )
        if not is_shared:
          ended += tiny.finish(scheduler)
    ended += tiny.finish(scheduler)
    return sorted((s.group, s.member, tuple(s.tokens)) for s in ended)

  shared, alone = tiny.ready(), tiny.ready()
  assert write(shared, True) == write(alone, False)
  assert shared.stats.prefill_tokens == 17 + 18
  assert not shared._prefiller._ready
  assert alone.stats.prefill_tokens == (tiny.SIZES.num_slots + 3) * (17 + 18)


def test_members_that_enter_after_an_adoption_are_prefilled_anew():
  scheduler = tiny.ready()
  for member in range(tiny.SIZES.num_slots + 1):
    scheduler.submit(tiny.sequence(tiny.prompt(9), member=member, group=8))
  scheduler.step()
  last = scheduler.sequences()[-1]
  assert last.length == 9
  scheduler.adopt(tiny.engine_params(1, seed=1), 1)
  tiny.finish(scheduler)
  t = last.trajectory()
  assert (t.policy_versions[t.loss_mask] == 1).all()
  (expected,) = tiny.trainer_logprobs(tiny.params(1), [t.tokens])
  np.testing.assert_allclose(
    t.behavior_logprobs[t.loss_mask], expected[t.loss_mask], atol=1e-4
  )


# -- interruption ----------------------------------------------------------


def test_recomputed_sequences_have_the_logprobs_of_each_tokens_version():
  scheduler = tiny.ready(kv_on_adopt=RECOMPUTE)
  sequences = [
    tiny.long(group, length=3 + group % 4) for group in tiny.LONG_GROUPS[:4]
  ]
  for sequence in sequences:
    scheduler.submit(sequence)
  ended, recomputed = [], 0
  for version in (1, 2):
    ended += scheduler.step()
    scheduler.adopt(tiny.engine_params(version, seed=version), version)
    recomputed += sum(s.length for s in scheduler.sequences())
  assert scheduler.version == 2
  ended += tiny.finish(scheduler)
  assert len(ended) == 4
  assert scheduler.stats.recompute_tokens == recomputed > 0
  for sequence in sequences:
    t = sequence.trajectory()
    versions = t.policy_versions[t.loss_mask]
    assert (np.diff(versions) >= 0).all()
    assert versions.tolist() == [
      min(i // 8, 2) for i in range(t.num_completion_tokens)
    ]
    for version in set(versions.tolist()):
      params = tiny.params(version)
      (expected,) = tiny.trainer_logprobs(params, [t.tokens])
      drawn = t.policy_versions == version
      np.testing.assert_allclose(
        t.behavior_logprobs[drawn], expected[drawn], atol=1e-4
      )
  # The versions differ by enough for the above to mean something.
  first, last = (
    tiny.trainer_logprobs(tiny.params(v), [sequences[0].tokens[:20]])[0]
    for v in (0, 2)
  )
  assert np.abs(first - last).max() > 0.1


def test_kept_caches_serve_the_new_weights():
  scheduler = tiny.ready(kv_on_adopt=KEEP)
  sequence = tiny.long()
  scheduler.submit(sequence)
  scheduler.step()
  prefilled = scheduler.stats.prefill_tokens
  scheduler.adopt(tiny.engine_params(1, seed=1), 1)
  tiny.finish(scheduler)
  assert scheduler.stats.prefill_tokens == prefilled
  assert scheduler.stats.recompute_tokens == 0
  assert scheduler.stats.interruptions == 1
  t = sequence.trajectory()
  # One call was read and one on its way.
  assert t.policy_versions[5:13].tolist() == [0] * 8
  assert (t.policy_versions[13:] == 1).all()
  assert t.behavior_logprobs[:13].tolist() == tiny.long_alone().logprobs[:13]
  logprobs = t.behavior_logprobs[13:]
  np.testing.assert_allclose(logprobs, mixed_logprobs(t.tokens)[13:], atol=1e-4)
  fresh = tiny.trainer_logprobs(tiny.params(1), [t.tokens])[0][13:]
  assert np.abs(logprobs - fresh).max() > 1e-2


def mixed_logprobs(tokens, switch=12):
  """A forward in which keys and values before `switch` are of version 0.

  The token at `switch` was drawn but not cached when the weights changed.
  """
  import jax
  from jax import numpy as jnp

  from jaxrl_async.models import transformer
  from jaxrl_async.models.attention import reference

  batch = tiny.packed([tokens], len(tokens))
  old = tiny.hidden_states(
    tiny.MODEL,
    transformer.unstack(tiny.params(), tiny.MODEL.num_layers),
    batch,
    is_stacked=False,
    kept=True,
  )[1]
  mask = reference.packed_mask(jnp.asarray(batch.segment_ids))
  is_old = (jnp.arange(len(tokens)) < switch)[None, :, None, None]

  def attend(layer, query, key, value):
    key = jnp.where(is_old, old[layer][0], key)
    value = jnp.where(is_old, old[layer][1], value)
    return reference.xla_attention(query, key, value, mask), None

  model = transformer.bind(
    tiny.MODEL,
    transformer.unstack(tiny.params(1), tiny.MODEL.num_layers),
    is_stacked=False,
  )
  hidden, _ = model.hidden(
    model.embed(jnp.asarray(batch.tokens), jnp.dtype("float32")),
    jnp.asarray(batch.positions),
    attend,
  )
  logprobs = np.asarray(jax.nn.log_softmax(hidden[0] @ model.head().T))
  return np.pad(logprobs[np.arange(len(tokens) - 1), tokens[1:]], (1, 0))


@pytest.mark.parametrize("kv_on_adopt", [KEEP, RECOMPUTE])
def test_adopting_the_same_weights_changes_versions_alone(kv_on_adopt):
  scheduler = tiny.ready(kv_on_adopt=kv_on_adopt)
  sequence = tiny.long()
  scheduler.submit(sequence)
  for version in (1, 2):
    scheduler.step()
    scheduler.adopt(tiny.engine_params(version), version)
  tiny.finish(scheduler)
  found, expected = tiny.record(sequence), tiny.long_alone()
  versions = [-1] * 5 + [0] * 8 + [1] * 8 + [2] * 3
  assert found == expected._replace(versions=versions, logprobs=found.logprobs)
  if kv_on_adopt is KEEP:
    assert found.logprobs == expected.logprobs
  else:
    np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=1e-4)


# -- cancelling and resuming -----------------------------------------------


def test_a_cancelled_owners_slots_are_free_and_others_are_unaffected():
  scheduler = tiny.ready()
  mine, others = (sequence_lib.Owner("test", n) for n in range(2))
  for group in (0, 1, 5):
    scheduler.submit(tiny.long(group, owner=mine))
  survivor = tiny.long(owner=others)
  scheduler.submit(survivor)
  for group in (9, 10):
    scheduler.submit(tiny.long(group, owner=mine))
  scheduler.step()
  before = scheduler.stats.generated_tokens
  running = sum(s.owner == mine for s in scheduler.sequences())
  assert scheduler.cancel(mine) == running > 3
  assert scheduler.cancel(mine) == 0
  assert scheduler.num_free == 3
  assert scheduler.sequences() == [survivor]
  later = [tiny.long(11), tiny.sequence(tiny.prompt(7), group=30)]
  scheduler.step()
  assert scheduler.stats.generated_tokens == before + 4
  for sequence in later:
    scheduler.submit(sequence)
  ended = tiny.finish(scheduler)
  assert {id(s) for s in ended} == {id(s) for s in (survivor, *later)}
  assert tiny.record(survivor) == tiny.long_alone()
  alone = tiny.ready()
  expected = [tiny.long(11), tiny.sequence(tiny.prompt(7), group=30)]
  tiny.write_all(alone, expected)
  assert [tiny.record(s) for s in later] == [tiny.record(s) for s in expected]


@pytest.mark.parametrize("num_calls", [1, 2, 3])
def test_a_recorded_half_is_continued_with_the_same_tokens(num_calls):
  scheduler = tiny.ready()
  scheduler.submit(tiny.long())
  for _ in range(num_calls):
    assert not scheduler.step()
  (half,) = scheduler.sequences()
  t = half.trajectory()
  assert t.finish_reason is None
  assert t.num_completion_tokens == 4 * num_calls
  continued = tiny.sequence(t.tokens, group=8, member=2)
  continued.resume(t)
  other = tiny.ready()
  other.submit(continued)
  other.submit(tiny.sequence(tiny.prompt(4)))
  tiny.finish(other)
  found, expected = tiny.record(continued), tiny.long_alone()
  assert found == expected._replace(logprobs=found.logprobs)
  np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=1e-4)


def test_a_trajectory_is_a_copy():
  scheduler = tiny.ready()
  sequence = tiny.long()
  scheduler.submit(sequence)
  scheduler.step()
  t = sequence.trajectory()
  length = len(t.tokens)
  tiny.finish(scheduler)
  assert len(t.tokens) == length < sequence.length
  t.tokens[:] = -1
  assert sequence.tokens.min() >= 0


# -- the loop itself -------------------------------------------------------


@pytest.mark.parametrize(
  "sizes", [{}, {"num_pages": 32, "page_tokens": 4, "prefill_chunk": 8}]
)
def test_the_loop_makes_no_eager_jax_call(monkeypatch, sizes):
  """Every operation outside a compiled program goes through EvalTrace."""
  from jax import numpy as jnp
  from jax._src import core

  def work():
    scheduler = tiny.ready(**sizes)
    for sequence in tiny.assorted():
      scheduler.submit(sequence)
    scheduler.step()
    scheduler.adopt(params, 1)
    owner = sequence_lib.Owner("test", 0)
    for sequence in [tiny.long(8, owner=owner), tiny.long(9)]:
      scheduler.submit(sequence)
    scheduler.step()
    scheduler.cancel(owner)
    tiny.finish(scheduler)

  params = tiny.engine_params(1)
  work()  # compiles
  calls = []
  process = core.EvalTrace.process_primitive

  def counted(self, primitive, *args):
    calls.append(primitive.name)
    return process(self, primitive, *args)

  monkeypatch.setattr(core.EvalTrace, "process_primitive", counted)
  work()
  assert not calls
  jnp.zeros(3) + 1
  assert calls
