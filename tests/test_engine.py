"""The device programs: the parity chain, bit-exactness, ends, JetStream."""

import dataclasses
import pathlib

import jax
import numpy as np
import pytest
import tiny

from jaxrl_async.engine import engine as engine_lib
from jaxrl_async.engine import jetstream_api
from jaxrl_async.models import transformer

ROW = tiny.Row(prompt=tiny.prompt(5), group=8, member=2)
OTHERS = [
  tiny.Row(prompt=tiny.prompt(n, seed=1), slot=slot, group=slot, limit=30)
  for slot, n in enumerate((9, 3, 12, 17))
]


@pytest.fixture(scope="module")
def engine():
  return tiny.engine()


@pytest.fixture(scope="module")
def params():
  return tiny.engine_params()


@pytest.fixture(scope="module")
def alone(engine, params):
  """What ROW writes when nothing else is there, in slot 0."""
  (written,), _ = tiny.write(engine, params, [ROW])
  assert len(written.tokens) > 6
  return written


def test_what_the_cache_holds_is_the_same_by_prefill_and_in_the_trainer(
  engine, params
):
  tokens = tiny.prompt(13)
  prefix = tiny.prefill(engine, params, tokens)
  _, (keys, values) = tiny.hidden_states(
    tiny.MODEL, tiny.params(), tiny.packed([tokens], 13), kept=True
  )
  for layer, (k, v) in enumerate(prefix.cache):
    expected = np.transpose(keys[layer, 0], (1, 2, 0))
    np.testing.assert_allclose(k[0, :, :, :13], expected, atol=1e-5)
    expected = np.transpose(values[layer, 0], (1, 0, 2))
    np.testing.assert_allclose(v[0, :, :13], expected, atol=1e-5)


def test_what_the_cache_holds_is_the_same_by_decoding_and_by_prefill(
  engine, params
):
  row = dataclasses.replace(ROW, slot=2)
  (written,), state = tiny.write(engine, params, [row])
  tokens = np.concatenate([row.prompt, written.tokens]).astype(np.int32)
  prefix = tiny.prefill(engine, params, tokens, bucket=32)
  cached = len(tokens) - 1
  for decoded, prefilled in zip(state.cache, prefix.cache, strict=True):
    keys = np.concatenate(decoded[0], axis=-1)
    np.testing.assert_allclose(
      keys[2, :, :, :cached], prefilled[0][0, :, :, :cached], atol=1e-5
    )
    values = np.concatenate(decoded[1], axis=-2)
    np.testing.assert_allclose(
      values[2, :, :cached], prefilled[1][0, :, :cached], atol=1e-5
    )


def test_every_call_takes_over_the_memory_of_the_state_it_is_given(
  engine, params
):
  prefix = tiny.prefill(engine, params, tiny.prompt(5))
  state = engine.init_decode_state()
  for call in (
    lambda state: engine.insert(prefix, state, tiny.insertion(engine, ROW)),
    lambda state: engine.generate(params, state)[0],
    lambda state: engine.release(state, [0]),
  ):
    before, state = state, call(state)
    assert all(x.is_deleted() for x in jax.tree.leaves(before.cache))
  assert not any(x.is_deleted() for x in jax.tree.leaves(prefix))


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_recorded_logprobs_are_those_of_the_trainers_packed_forward(
  engine, params, temperature
):
  rows = [
    tiny.Row(
      prompt=tiny.prompt(n), slot=slot, group=slot, temperature=temperature
    )
    for slot, n in enumerate((2, 5, 11))
  ]
  written, _ = tiny.write(engine, params, rows)
  sequences = [
    np.concatenate([row.prompt, out.tokens])
    for row, out in zip(rows, written, strict=True)
  ]
  sequences = [s[:21] for s in sequences]
  expected = tiny.trainer_logprobs(
    tiny.params(), sequences, temperature=temperature
  )
  for row, out, logprobs in zip(rows, written, expected, strict=True):
    n = len(row.prompt)
    assert len(logprobs) > n
    np.testing.assert_allclose(out.logprobs[: 21 - n], logprobs[n:], atol=1e-4)


@pytest.mark.parametrize(
  "moved",
  [
    {"slot": 1},
    {"slot": 3},
    {"first_call": 2},
    {"slot": 2, "first_call": 3},
  ],
)
def test_what_a_row_writes_is_the_same_bits_wherever_and_whenever(
  engine, params, alone, moved
):
  row = dataclasses.replace(ROW, **moved)
  others = [other for other in OTHERS if other.slot != row.slot]
  (written, *rest), _ = tiny.write(engine, params, [row, *others], num_calls=12)
  assert all(other.tokens for other in rest)
  assert written == alone


def test_a_row_over_an_older_one_is_the_same_bits(engine, params, alone):
  # Longer, and not ended when it is overwritten.
  older = tiny.Row(prompt=tiny.prompt(14), group=9, limit=32)
  row = dataclasses.replace(ROW, first_call=1)
  (_, written), _ = tiny.write(engine, params, [older, row], num_calls=9)
  assert written == alone


def test_the_windows_bucket_changes_no_bit(engine, params, alone):
  row = dataclasses.replace(ROW, limit=16)
  (narrow,), _ = tiny.write(engine, params, [row], num_calls=3, window=16)
  (wide,), _ = tiny.write(engine, params, [row], num_calls=3, window=32)
  assert narrow == wide
  assert narrow.tokens == alone.tokens[: len(narrow.tokens)]


def test_one_step_a_call_writes_the_same_bits_as_four(params, alone):
  engine = tiny.engine(decode_steps_per_call=1)
  (written, *_), _ = tiny.write(engine, params, [ROW, *OTHERS[1:3]])
  assert written == alone


@pytest.mark.parametrize(
  "change",
  [{"group": 9}, {"member": 1}, {"stream": 1}, {"temperature": 1.3}],
)
def test_another_group_member_stream_or_temperature_is_another_draw(
  engine, params, alone, change
):
  row = dataclasses.replace(ROW, **change)
  (written,), _ = tiny.write(engine, params, [row])
  assert written.tokens != alone.tokens


def test_a_row_ends_with_its_first_end_token_or_at_its_limit(engine, params):
  reasons = {"end token": 0, "limit": 0}
  for group in range(0, 24, 4):
    rows = [
      tiny.Row(
        prompt=tiny.prompt(2 + slot), slot=slot, group=group + slot, limit=19
      )
      for slot in range(4)
    ]
    written, state = tiny.write(engine, params, rows)
    assert not np.asarray(state.is_active).any()
    for row, out in zip(rows, written, strict=True):
      assert not set(out.tokens[:-1]) & set(tiny.END_TOKENS)
      length = len(row.prompt) + len(out.tokens)
      if out.tokens[-1] in tiny.END_TOKENS:
        reasons["end token"] += 1
        assert length <= row.limit
      else:
        reasons["limit"] += 1
        assert length == row.limit
  assert min(reasons.values()) > 2


def test_a_shape_no_program_was_made_for_is_refused(engine, params):
  with pytest.raises(ValueError, match="length 7; the buckets"):
    engine.prefill(
      params=params, padded_tokens=np.zeros(7, np.int32), true_length=3
    )
  with pytest.raises(ValueError, match="3 rows"):
    engine.prefill(
      params=params,
      padded_tokens=np.zeros((3, 16), np.int32),
      true_length=np.ones(3, np.int32),
    )
  with pytest.raises(ValueError, match="existing_prefix"):
    engine.prefill(
      params=params,
      existing_prefix=tiny.prefill(engine, params, ROW.prompt),
      padded_tokens=np.zeros(16, np.int32),
      true_length=3,
    )


# -- JetStream -----------------------------------------------------------


def test_the_engine_is_one_of_jetstreams():
  from jetstream.engine import engine_api

  engine = tiny.engine()
  assert isinstance(engine, engine_api.Engine)
  assert engine_lib.Engine.__abstractmethods__ == frozenset()
  assert engine.max_concurrent_decodes == 4
  assert engine.samples_per_slot == 1
  assert engine.max_prefill_length == 32
  assert engine.mesh.devices.size == 1
  assert engine.colocated_cpus is None
  prefix = tiny.prefill(engine, tiny.engine_params(), tiny.prompt(5))
  shardings = engine.get_prefix_destination_sharding()
  assert jax.tree.map(lambda x: x.sharding, prefix) == shardings
  assert engine.get_tokenizer() is not None


def test_jetstreams_calls_give_its_results(engine):
  weights = transformer.unstack(tiny.params(), tiny.MODEL.num_layers)
  params = engine.load_params(weights, version=4)
  prompt = tiny.prompt(6)
  prefix = engine.prefill(
    params=params, padded_tokens=np.pad(prompt, (0, 10)), true_length=6
  )
  state = engine.init_decode_state()
  state = engine.insert(prefix, state, 2)
  tokens = list(prompt)
  recorded = []
  while True:
    state, result = engine.generate(params, state)
    result.copy_to_host_async()
    step = engine.read(result)
    data = result.convert_to_numpy().get_result_at_slot(2)
    assert data.tokens.shape == data.valid.shape == (1, 4)
    valid = data.valid[0].astype(bool)
    tokens += data.tokens[0, valid].tolist()
    recorded += step.logprobs[2, valid].tolist()
    assert data.lengths == [len(tokens)]
    idle = result.convert_to_numpy().get_result_at_slot(1)
    assert not idle.valid.any()
    if not valid.all() or step.has_ended[2]:
      break
  assert len(tokens) == 32 or tokens[-1] in tiny.END_TOKENS
  (expected,) = tiny.trainer_logprobs(tiny.params(), [np.array(tokens)])
  np.testing.assert_allclose(recorded, expected[6:], atol=1e-4)


def test_one_file_alone_imports_jetstream():
  package = pathlib.Path(jetstream_api.__file__).parents[1]
  importing = [
    path.name
    for path in package.rglob("*.py")
    if "from jetstream" in path.read_text()
    or "import jetstream\n" in path.read_text()
    or "import jetstream." in path.read_text()
  ]
  assert importing == ["jetstream_api.py"]
