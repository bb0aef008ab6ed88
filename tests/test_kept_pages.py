"""Pages that are kept between turns: alone, and under a scheduler."""

import collections
import dataclasses

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import jax
import lora_world
import numpy as np
import paged_engine
import pytest
import tiny

from jaxrl_async.config import sections
from jaxrl_async.devices import mesh as mesh_lib
from jaxrl_async.engine import decode_state as decode_state_lib
from jaxrl_async.engine import engine as engine_lib
from jaxrl_async.engine import page_admission
from jaxrl_async.engine import prefill
from jaxrl_async.engine import sampling
from jaxrl_async.engine import scheduler as scheduler_lib
from jaxrl_async.engine import sequence as sequence_lib
from jaxrl_async.models import transformer
from jaxrl_async.reporting import metrics as metrics_lib

KEEP, RECOMPUTE = sections.KvOnAdopt.KEEP, sections.KvOnAdopt.RECOMPUTE
WAIT = sections.KvOnAdopt.WAIT
PAGE = 4
KEPT = {
  "num_pages": 40,
  "page_tokens": PAGE,
  "prefill_chunk": 8,
  "kept_tokens": 160,
}


# -- the pool --------------------------------------------------------------


def given_up(pool, tokens, lineage=0):
  """Takes pages for tokens, and gives them up again."""
  held, _ = pool.take_for(
    np.asarray(tokens), bucket=16, page_tokens=PAGE, lineage=lineage
  )
  pool.release(held.pages)
  return held.pages


def found(pool, tokens, lineage=0):
  return pool.pages_of(np.asarray(tokens), page_tokens=PAGE, lineage=lineage)


def test_whole_pages_are_found_after_their_sequence_has_left():
  pool = page_admission.PagePool(8, max_kept=8)
  pages = given_up(pool, np.arange(10))
  assert found(pool, np.arange(10)) == pages[:2]
  assert found(pool, np.arange(7)) == pages[:1]
  assert found(pool, np.arange(1, 10)) == []
  assert found(pool, np.arange(10), lineage=1) == []
  assert pool.num_free == 8
  pool.forget_names()
  assert found(pool, np.arange(10)) == []


def test_a_longer_bucket_finds_what_a_shorter_one_has_cached():
  pool = page_admission.PagePool(8, max_kept=8)
  pages = given_up(pool, np.arange(9))
  held, new = pool.take_for(
    np.arange(20), bucket=32, page_tokens=PAGE, lineage=0
  )
  assert held.pages[:2] == pages[:2]
  assert new.tolist() == [8, 8, *held.pages[2:], 8, 8, 8]


def test_the_pages_given_up_first_are_taken_first():
  pool = page_admission.PagePool(6, max_kept=6)
  old, new = np.arange(8), np.arange(50, 58)
  given_up(pool, old)
  given_up(pool, new)
  given_up(pool, old)  # used again
  taken = [pool.take() for _ in range(3)]
  assert len(found(pool, old)) == 2
  assert len(found(pool, new)) == 1  # its last page was taken
  pool.release(taken)
  assert pool.num_free == 6


def test_no_more_pages_are_kept_than_the_bound():
  pool = page_admission.PagePool(8, max_kept=3)
  given_up(pool, np.arange(8))
  given_up(pool, np.arange(50, 58))
  assert len(found(pool, np.arange(50, 58))) == 2
  assert len(found(pool, np.arange(8))) == 1
  assert pool.num_free == 8


def test_what_decoding_fills_is_named_after_what_prefill_filled():
  pool = page_admission.PagePool(8, max_kept=8)
  held, _ = pool.take_for(np.arange(6), bucket=16, page_tokens=PAGE, lineage=0)
  held.pages.append(pool.take())
  pool.name_more(held, np.arange(7), page_tokens=PAGE)
  assert found(pool, np.arange(12)) == held.pages[:1]
  pool.name_more(held, np.arange(12), page_tokens=PAGE)
  assert found(pool, np.arange(12)) == held.pages
  # One that writes the same goes on from the pages that have the names.
  other, _ = pool.take_for(np.arange(3), bucket=16, page_tokens=PAGE, lineage=0)
  other.pages += [pool.take() for _ in range(3)]
  pool.name_more(other, np.arange(16), page_tokens=PAGE)
  assert found(pool, np.arange(16)) == [*held.pages, other.pages[3]]
  pool.release(other.pages)
  pool.release(held.pages)
  assert pool.num_free == 8


MOVES = st.tuples(
  st.sampled_from(["begin", "write", "write", "end", "end", "forget"]),
  st.integers(0, 10**6),
)


@given(
  st.lists(MOVES, max_size=60), st.integers(3, 14), st.sampled_from([1, 4, 14])
)
@settings(max_examples=150, deadline=None)
def test_what_is_found_is_what_was_written(moves, num_pages, max_kept):
  """Against a model that says of each page which tokens lead up to its end."""
  pool = page_admission.PagePool(num_pages, max_kept)
  contents = {}
  running = []  # tokens, held, lineage
  for move, number in moves:
    rng = np.random.default_rng(number)
    if move == "begin":
      tokens = rng.integers(0, 2, rng.integers(1, 14))
      lineage = int(rng.integers(2))
      before = pool.pages_of(tokens, page_tokens=2, lineage=lineage)
      for index, page in enumerate(before):
        assert contents[page] == (lineage, *tokens[: 2 * (index + 1)])
      taken = pool.take_for(tokens, bucket=16, page_tokens=2, lineage=lineage)
      if taken is not None:
        held, new = taken
        assert held.pages[: len(before)] == before
        assert (new[: len(before)] == num_pages).all()
        for index, page in enumerate(held.pages):
          upto = (lineage, *tokens[: 2 * (index + 1)])
          if page in new:
            contents[page] = upto
          else:
            assert contents[page] == upto
        running.append([tokens, held, lineage])
    elif move == "write" and running:
      one = running[number % len(running)]
      tokens, held, lineage = one
      grown = np.append(tokens, rng.integers(0, 2, 2))
      need = -(-len(grown) // 2) - len(held.pages)
      if need <= pool.num_free:
        held.pages.extend(pool.take() for _ in range(need))
        for index in range(len(tokens) // 2, len(held.pages)):
          contents[held.pages[index]] = (lineage, *grown[: 2 * (index + 1)])
        one[0] = grown
        pool.name_more(held, grown, page_tokens=2)
    elif move == "end" and running:
      pool.release(running.pop(number % len(running))[1].pages)
    elif move == "forget":
      pool.forget_names()
      for one in running:  # as when weights are adopted
        pool.release(one[1].pages)
      running.clear()
    held = collections.Counter(p for one in running for p in one[1].pages)
    assert pool._holders == held
    assert sorted([*pool._free, *pool._kept, *held]) == list(range(num_pages))
    assert len(pool._kept) <= max_kept
    assert set(pool._kept) <= set(pool._names)
    assert {*pool._named.values()} <= {*pool._kept, *held}
    assert {v: k for k, v in pool._named.items()} == pool._names


# -- under a scheduler, with an engine that checks what it reads -----------

OPERATIONS = st.tuples(
  st.sampled_from(
    ["begin", "begin", "go on", "go on", "step", "step", "adopt", "cancel"]
  ),
  st.integers(0, 10**6),
)


class Conversations:
  """Conversations that are begun, gone on with and cancelled at random."""

  def __init__(self, kv_on_adopt, **sizes):
    self.scheduler = scheduler_lib.Scheduler(
      paged_engine.PagedEngine(dataclasses.replace(tiny.SIZES, **sizes)),
      kv_on_adopt=kv_on_adopt,
      busy=metrics_lib.BusyClock(),
    )
    self.kv_on_adopt = kv_on_adopt
    self.ended, self.num_begun, self.version = [], 0, -1
    # How the caches of the turns before were made, as the coordinator knows.
    self.builds = collections.defaultdict(tuple)
    self.adopt()

  def adopt(self):
    self.version += 1
    params = decode_state_lib.EngineParams(weights={}, version=self.version)
    self.scheduler.adopt(params, self.version)

  def do(self, operation, number):
    rng = np.random.default_rng(number)
    if operation == "begin":
      system = tiny.prompt(int(rng.integers(1, 20)), seed=number % 2)
      self.submit(np.append(system, rng.integers(6, 8, rng.integers(4))), rng)
    elif operation == "go on" and self.ended:
      before = self.ended.pop(number % len(self.ended))
      more = rng.integers(6, 9, rng.integers(6))
      tokens = np.append(before.written(), more)
      if len(tokens) < 32:
        self.submit(tokens, rng, before)
    elif operation == "adopt":
      self.adopt()
    elif operation == "cancel" and self.scheduler.sequences():
      running = self.scheduler.sequences()
      chosen = running[number % len(running)]
      self.scheduler.cancel(chosen.owner)
      if chosen.length > 1:
        self.ended.append(chosen)
    elif operation == "step":
      self.step()

  def submit(self, tokens, rng, before=None):
    sequence = tiny.sequence(
      tokens.astype(np.int32),
      limit=int(rng.integers(len(tokens) + 1, 33)),
      group=self.num_begun,
      deadline=int(rng.integers(4)),
      owner=sequence_lib.Owner("test", self.num_begun),
    )
    self.num_begun += 1
    sequence.adapter = (
      int(rng.integers(2)) if before is None else before.adapter
    )
    if before is not None:
      so_far = before.trajectory()
      builds = self.builds[before.group] + so_far.cache_builds
      self.builds[sequence.group] = builds
      sequence.resume(dataclasses.replace(so_far, cache_builds=builds))
    self.scheduler.submit(sequence)

  def step(self):
    for sequence in self.scheduler.step():
      self.check_sequence(sequence)
      self.ended.append(sequence)

  def check_sequence(self, sequence):
    t = sequence.trajectory()
    oldest = t.behavior_logprobs[t.loss_mask]
    if self.kv_on_adopt is KEEP:
      assert (oldest >= sequence.began).all()
    else:
      np.testing.assert_array_equal(oldest, t.policy_versions[t.loss_mask])

  def check_pages(self):
    admission = self.scheduler._admission
    pool = admission.pool
    held = collections.Counter(
      page for one in admission._held.values() for page in one.pages
    )
    assert pool._holders == held
    assert admission._held.keys() == self.scheduler._entries.keys()
    assert sorted([*pool._free, *pool._kept, *held]) == [*range(pool.num_pages)]
    assert len(pool._kept) <= pool.max_kept
    assert {v: k for k, v in pool._named.items()} == pool._names
    assert set(pool._kept) <= set(pool._names) <= {*pool._kept, *held}


@pytest.mark.parametrize("kv_on_adopt", [KEEP, RECOMPUTE])
@given(
  operations=st.lists(OPERATIONS, min_size=20, max_size=60),
  num_pages=st.integers(8, 30),
  kept_tokens=st.sampled_from([0, 8, 40, 200]),
)
@settings(max_examples=40, deadline=None)
def test_whatever_happens_only_what_was_written_is_read(
  kv_on_adopt, operations, num_pages, kept_tokens
):
  conversations = Conversations(
    kv_on_adopt,
    **KEPT | {"num_pages": num_pages, "kept_tokens": kept_tokens},
  )
  for operation, number in operations:
    conversations.do(operation, number)
    conversations.check_pages()
  for _ in range(400):
    if conversations.scheduler.is_idle:
      break
    conversations.step()
    conversations.check_pages()
  assert conversations.scheduler.is_idle
  assert_nothing_leaks(conversations.scheduler)


# -- under a scheduler -----------------------------------------------------


def first_turns(count=4, length=9, limit=16, **options):
  """Turns that go on until their limit."""
  turns = [
    tiny.sequence(
      tiny.prompt(length, seed=group), limit=limit, group=group, **options
    )
    for group in range(count)
  ]
  for turn in turns:
    turn.settings = sampling.SamplingSettings(ignore_eos=True)
  return turns


def next_turn(sequence, more=3, limit=32):
  """The turn after one that ended, with tokens of the environment between."""
  before = sequence.trajectory()
  tokens = np.concatenate([before.tokens, tiny.prompt(more, seed=77)])
  turn = tiny.sequence(
    tokens.astype(np.int32), limit=limit, group=sequence.group
  )
  turn.settings = sequence.settings
  turn.adapter = sequence.adapter
  turn.resume(before)
  return turn


def cached_of(before, more=3):
  """Tokens that the turn after one finds: whole pages, and then one chunk."""
  bucket = 16 if before.length + more <= 16 else 32
  whole = (before.length - 1) // PAGE * PAGE
  return min(whole, bucket - KEPT["prefill_chunk"])


def write(scheduler, sequences):
  tiny.write_all(scheduler, sequences)
  assert_nothing_leaks(scheduler)
  return sequences


def assert_nothing_leaks(scheduler):
  pool = scheduler._admission.pool
  assert pool.num_free == pool.num_pages
  assert not pool._holders
  assert not scheduler._admission._held


def own_logprobs(sequence, begin=0):
  """Of the tokens that were drawn in a turn, and where these are."""
  t = sequence.trajectory()
  drawn = t.loss_mask & (np.arange(len(t.tokens)) >= begin)
  return t, drawn


def assert_scored(sequences, versions=(0,), model=tiny.MODEL, begins=None):
  """What was drawn has the trainer's logprobs under its version."""
  for i, sequence in enumerate(sequences):
    t, drawn = own_logprobs(sequence, begins[i] if begins else 0)
    assert drawn.any()
    for version in versions:
      (expected,) = tiny.trainer_logprobs(
        tiny.params(version, model), [t.tokens], model=model
      )
      mask = drawn & (t.policy_versions == version)
      np.testing.assert_allclose(
        t.behavior_logprobs[mask], expected[mask], atol=1e-4
      )


def test_the_next_turn_is_cached_but_for_its_last_page_and_equals_a_fresh_one():
  kept, fresh = tiny.ready(**KEPT), tiny.ready()
  turns = write(kept, first_turns())
  assert kept.stats.cached_tokens == 0
  assert kept.stats.prefill_tokens == 4 * 9
  more = [next_turn(turn) for turn in turns]
  again = [next_turn(turn) for turn in turns]
  write(kept, more)
  tiny.write_all(fresh, again)
  for one, other, before in zip(more, again, turns, strict=True):
    assert one.num_cached == cached_of(before)
    assert other.num_cached == 0
    t, expected = one.trajectory(), other.trajectory()
    assert t.tokens.tolist() == expected.tokens.tolist()
    np.testing.assert_allclose(
      t.behavior_logprobs, expected.behavior_logprobs, atol=1e-4
    )
  assert kept.stats.cached_tokens == sum(turn.num_cached for turn in more)
  prompts = sum(turn.length + 3 for turn in turns)
  assert kept.stats.prefill_tokens == 4 * 9 + prompts - kept.stats.cached_tokens
  assert_scored(more)


def test_sequences_that_diverge_within_a_page_share_the_pages_before_it():
  scheduler = tiny.ready(**KEPT)
  system = tiny.prompt(18, seed=5)
  sequences = [
    tiny.sequence(
      np.concatenate([system, tiny.prompt(n, seed=n)]), group=n, limit=32
    )
    for n in (3, 4, 6, 7, 8)
  ]
  write(scheduler, sequences)
  assert_scored(sequences)
  # A call takes two rows. Those after the first call begin with its pages.
  assert [s.num_cached for s in sequences][2:] == [16, 16, 16]


def test_a_pool_too_small_to_keep_anything_loses_nothing():
  scheduler = tiny.ready(**KEPT | {"num_pages": 12})
  turns = write(scheduler, first_turns(limit=28))
  more = write(scheduler, [next_turn(turn, more=1) for turn in turns])
  assert_scored([*turns, *more])
  assert scheduler.stats.preemptions > 0


@pytest.mark.parametrize("most,num_calls", [(1, 1), (2, 2), (16, 4)])
def test_a_long_prompt_waits_for_few_calls_however_small_its_chunks(
  monkeypatch, most, num_calls
):
  monkeypatch.setattr(prefill, "_MOST_CALLS", most)
  scheduler = tiny.ready(calls_in_flight=1, decode_steps_per_call=1, **KEPT)
  running = tiny.long(limit=32)
  scheduler.submit(running)
  scheduler.step()
  late = tiny.sequence(tiny.prompt(30, seed=1), group=9, limit=32)
  scheduler.submit(late)  # four chunks
  waited = 0
  while late.num_cached is None:
    scheduler.step()
    waited += 1
  assert waited == num_calls and running.finish_reason is None
  tiny.finish(scheduler)
  assert_scored([running, late])


def test_cancelled_sequences_leave_their_pages_to_others():
  scheduler = tiny.ready(**KEPT)
  mine = sequence_lib.Owner("test", 0)
  (cancelled,) = first_turns(1, length=14, limit=32, owner=mine)
  scheduler.submit(cancelled)
  scheduler.step()
  scheduler.step()
  assert scheduler.cancel(mine) == 1
  (again,) = write(scheduler, first_turns(1, length=18, limit=32))
  assert_scored([again])
  assert_nothing_leaks(scheduler)
  (turn,) = write(scheduler, [next_turn(cancelled)])
  assert turn.num_cached == cached_of(cancelled) > 8
  assert_scored([turn])


@pytest.mark.parametrize("kv_on_adopt", [RECOMPUTE, WAIT])
def test_no_page_of_older_weights_is_used_again(kv_on_adopt):
  scheduler = tiny.ready(kv_on_adopt=kv_on_adopt, **KEPT)
  turns = write(scheduler, first_turns())
  scheduler.adopt(tiny.engine_params(1, seed=1), 1)
  more = write(scheduler, [next_turn(turn) for turn in turns])
  assert [turn.num_cached for turn in more] == [0] * 4
  assert_scored(more, (1,), begins=[turn.length for turn in turns])


def test_running_sequences_are_rebuilt_and_then_kept():
  scheduler = tiny.ready(kv_on_adopt=RECOMPUTE, **KEPT)
  turns = first_turns(length=12, limit=28)
  for turn in turns:
    scheduler.submit(turn)
  scheduler.step()
  scheduler.adopt(tiny.engine_params(1, seed=1), 1)
  tiny.finish(scheduler)
  assert_scored(turns, (0, 1))
  assert_nothing_leaks(scheduler)
  more = write(scheduler, [next_turn(turn, more=1) for turn in turns])
  assert all(turn.num_cached > 8 for turn in more)
  assert_scored(more, (1,), begins=[turn.length for turn in turns])


def test_a_conversation_goes_on_over_its_old_pages_and_no_other_does():
  scheduler = tiny.ready(kv_on_adopt=KEEP, **KEPT)
  turns = write(scheduler, first_turns())
  scheduler.adopt(tiny.engine_params(1, seed=1), 1)
  others = [
    tiny.sequence(turn.written().copy(), group=100 + turn.group, limit=32)
    for turn in turns
  ]
  write(scheduler, others)
  assert [other.num_cached for other in others] == [0] * 4
  assert_scored(others, (1,))
  more = write(scheduler, [next_turn(turn) for turn in turns])
  for turn, before in zip(more, turns, strict=True):
    assert turn.num_cached == cached_of(before)
    assert turn.began == 0
    assert turn.trajectory().policy_versions[-1] == 1


def test_what_is_kept_of_a_prompt_is_forgotten_if_nothing_was_drawn():
  scheduler = tiny.ready(kv_on_adopt=KEEP, **KEPT)
  # More than there are slots: the last ones wait prefilled.
  sequences = [
    tiny.sequence(tiny.prompt(18, seed=i), group=group, member=2)
    for i, group in enumerate(tiny.LONG_GROUPS[:6])
  ]
  for sequence in sequences:
    scheduler.submit(sequence)
  scheduler.step()
  scheduler.adopt(tiny.engine_params(1, seed=1), 1)
  waiting = [s for s in sequences if s.began < 0]
  assert waiting
  tiny.finish(scheduler)
  assert_scored(waiting, (1,))
  assert_nothing_leaks(scheduler)


def scheduler_of(model, dtype="float32"):
  engine = engine_lib.Engine(
    model,
    dataclasses.replace(tiny.SIZES, **KEPT),
    mesh=mesh_lib.make_mesh(jax.devices()[:1]),
    seed=7,
    end_tokens=tiny.END_TOKENS,
    dtype=dtype,
  )
  scheduler = scheduler_lib.Scheduler(
    engine, kv_on_adopt=RECOMPUTE, busy=metrics_lib.BusyClock()
  )
  weights = jax.tree.map(
    lambda x: x.astype(dtype),
    transformer.unstack(tiny.params(0, model), model.num_layers),
  )
  scheduler.adopt(engine.load_params(weights, 0), 0)
  return scheduler


MODELS = {
  "window": dataclasses.replace(tiny.MODEL, sliding_windows=(6, None)),
  "heads of 16": dataclasses.replace(tiny.MODEL, head_dim=16),
  "heads of 128": dataclasses.replace(tiny.MODEL, head_dim=128),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_every_model_goes_on_from_kept_pages(name):
  model = MODELS[name]
  scheduler = scheduler_of(model)
  turns = write(scheduler, first_turns(limit=20))
  more = write(scheduler, [next_turn(turn) for turn in turns])
  assert all(turn.num_cached >= 8 for turn in more)
  assert_scored([*turns, *more], model=model)


@pytest.mark.slow
def test_the_pages_of_an_adapter_are_for_its_own_sequences():
  scheduler = lora_world.scheduler(**KEPT)
  tokens = tiny.prompt(18)
  for num_cached in (0, 16):
    for number in (2, 1, 0):
      (found,) = write(scheduler, [lora_world.sequence(tokens, number)])
      assert found.num_cached == num_cached
      expected = lora_world.alone(tokens, number)
      np.testing.assert_array_equal(found.tokens, expected.tokens)
      np.testing.assert_allclose(
        found.behavior_logprobs, expected.behavior_logprobs, atol=1e-4
      )


@pytest.mark.slow
def test_kept_pages_of_bfloat16_are_as_exact_as_a_fresh_prefill():
  scheduler = scheduler_of(tiny.MODEL, "bfloat16")
  turns = write(scheduler, first_turns(limit=20))
  more = write(scheduler, [next_turn(turn) for turn in turns])
  assert all(turn.num_cached >= 8 for turn in more)
  fresh = scheduler_of(tiny.MODEL, "bfloat16")
  again = write(fresh, [next_turn(turn) for turn in turns])
  for one, other in zip(more, again, strict=True):
    assert other.num_cached == 0
    t, expected = one.trajectory(), other.trajectory()
    n = min(len(t.tokens), len(expected.tokens))
    same = int(np.argmin([*(t.tokens[:n] == expected.tokens[:n]), False]))
    drawn = t.loss_mask[:same]
    assert drawn[len(turns[0].written()) :].any()
    np.testing.assert_allclose(
      t.behavior_logprobs[:same][drawn],
      expected.behavior_logprobs[:same][drawn],
      atol=2e-2,
    )
