"""Checkpoints: whole or refused, and the same to the bit."""

import pathlib
import shutil
import tempfile
import threading
import tracemalloc

import disks
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest

from jaxrl_async import types
from jaxrl_async.storage import checkpoint
from jaxrl_async.storage import disk
from jaxrl_async.storage import manifest
from jaxrl_async.storage import outstanding as outstanding_lib


def _sharding(shape: tuple[int, ...], spec: P) -> NamedSharding:
  devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
  names = ("data", "fsdp")[: len(shape)]
  auto = (AxisType.Auto,) * len(shape)
  return NamedSharding(Mesh(devices, names, axis_types=auto), spec)


def _train_state(seed: int = 0):
  """Params and AdamW's state on a (2, 2) mesh, all leaves different."""
  rng = np.random.default_rng(seed)
  params = {
    "kernel": rng.normal(size=(8, 4)).astype(np.float32),
    "scale": rng.normal(size=(8,)).astype(jnp.bfloat16),
  }
  state = {"params": params, "opt_state": optax.adamw(1e-3).init(params)}
  sharding = _sharding((2, 2), P("fsdp"))
  return jax.tree.map(
    lambda x: jax.device_put(x, sharding if x.ndim else _sharding((2, 2), P())),
    state,
  )


def _abstract(state, sharding=None):
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(
      x.shape, x.dtype, sharding=sharding or x.sharding
    ),
    state,
  )


def _trajectory(rng, member, num_tokens, **rest):
  logprobs = rng.normal(size=num_tokens).astype(np.float32)
  return types.Trajectory(
    member=member,
    tokens=rng.integers(0, 99, num_tokens).astype(np.int32),
    loss_mask=rng.integers(0, 2, num_tokens).astype(bool),
    behavior_logprobs=logprobs,
    policy_versions=rng.integers(-1, 5, num_tokens).astype(np.int32),
    **rest,
  )


REWARD = types.Reward(
  score=0.1 + 0.2,
  parts={"format": 1 / 3, "é": -0.0},
  token_scores={12: 2 / 3, 0: -1.0},
)
EOS = types.FinishReason.EOS


def _groups():
  rng = np.random.default_rng(3)
  group = types.RolloutGroup(
    admission=types.Admission(index=7, birth=2, deadline=6),
    prompt=types.Prompt(
      prompt_id="chain_sum/train/12",
      tokens=np.arange(5, dtype=np.int32),
      item={"metadata": {"pair": (1, {2: "é"}), "x": float("nan")}},
    ),
    trajectories=[
      _trajectory(
        rng, 0, 9, finish_reason=EOS, reward=REWARD, writers=(("a", 6),)
      ),
      _trajectory(rng, 1, 0),
      _trajectory(
        rng,
        3,
        7,
        events=(types.Event("result", 1, 0, '["é", {"!tuple": []}]'),),
      ),
    ],
    dropped=(types.Dropped(member=1, num_completion_tokens=9, reason="nan"),),
    times_s={"admitted": 1 / 3},
  )
  return [
    outstanding_lib.OutstandingGroup(status="running", group=group),
  ]


def _assert_same_bits(got, wanted):
  assert got.dtype == wanted.dtype and got.shape == wanted.shape
  assert np.asarray(got).tobytes() == np.asarray(wanted).tobytes()


def _assert_same_groups(got, wanted):
  assert len(got) == len(wanted)
  for one, other in zip(got, wanted, strict=True):
    assert one.status == other.status
    for field in ("admission", "dropped", "times_s"):
      assert getattr(one.group, field) == getattr(other.group, field)
    assert one.group.prompt.prompt_id == other.group.prompt.prompt_id
    assert repr(one.group.prompt.item) == repr(other.group.prompt.item)
    _assert_same_bits(one.group.prompt.tokens, other.group.prompt.tokens)
    pairs = zip(one.group.trajectories, other.group.trajectories, strict=True)
    for mine, theirs in pairs:
      assert mine.member == theirs.member
      assert mine.finish_reason is theirs.finish_reason
      assert mine.events == theirs.events
      assert repr(mine.reward) == repr(theirs.reward)
      _assert_same_bits(mine.tokens, theirs.tokens)
      _assert_same_bits(mine.loss_mask, theirs.loss_mask)
      _assert_same_bits(mine.behavior_logprobs, theirs.behavior_logprobs)
      _assert_same_bits(mine.policy_versions, theirs.policy_versions)


def _restore(directory, step, state):
  return checkpoint.restore(directory, step, _abstract(state))


def test_everything_comes_back_bit_for_bit(tmp_path):
  state, host_state = _train_state(), {"cursor": 12, "t": 0.1, "x": [None, "é"]}
  checkpoint.save(tmp_path, 20, state, host_state, _groups())
  assert checkpoint.latest(tmp_path) == 20
  got, got_host_state, got_groups = _restore(tmp_path, 20, state)
  assert jax.tree.structure(got) == jax.tree.structure(state)
  jax.tree.map(_assert_same_bits, got, state)
  jax.tree.map(lambda x, y: x.sharding == y.sharding or 1 / 0, got, state)
  assert got_host_state == host_state
  _assert_same_groups(got_groups, _groups())


def test_each_shard_is_a_file_of_its_own(tmp_path):
  # TensorStore would hold all that it puts into one file until the end.
  state = _train_state()
  checkpoint.save(tmp_path, 5, state, {}, [])
  files = [
    x for x in (tmp_path / "5" / "train_state").rglob("*") if x.is_file()
  ]
  assert not [file for file in files if "ocdbt" in str(file)]
  assert len(files) > len(jax.tree.leaves(state))


@pytest.mark.parametrize(
  ("shape", "spec"), [((1,), P()), ((8,), P("data")), ((4, 2), P("fsdp"))]
)
def test_a_train_state_loads_onto_other_shardings(tmp_path, shape, spec):
  state = {"params": _train_state()["params"]}
  checkpoint.save(tmp_path, 1, state, {}, [])
  sharding = _sharding(shape, spec)
  got, _, _ = checkpoint.restore(tmp_path, 1, _abstract(state, sharding))
  jax.tree.map(_assert_same_bits, got, state)
  assert all(leaf.sharding == sharding for leaf in jax.tree.leaves(got))


# Strategies give plain values: types may not be built inside of one, because
# the checks of their shapes use `random`.
@st.composite
def _trajectory_fields(draw):
  num_tokens = draw(st.integers(0, 6))

  def array(dtype):
    return draw(hnp.arrays(dtype, num_tokens))

  return dict(
    member=draw(st.integers(0, 15)),
    tokens=array(np.int32),
    loss_mask=array(np.bool_),
    behavior_logprobs=array(np.float32),
    policy_versions=array(np.int32),
    finish_reason=draw(st.none() | st.sampled_from(types.FinishReason)),
    reward=draw(
      st.none()
      | st.fixed_dictionaries(
        {
          "score": st.floats(),
          "parts": st.dictionaries(st.text(max_size=3), st.floats()),
          "token_scores": st.none()
          | st.dictionaries(st.integers(0, 2**31), st.floats()),
        }
      )
    ),
  )


_NUMBERS = st.integers(0, 2**40)
_GROUP_FIELDS = st.fixed_dictionaries(
  {
    "numbers": st.fixed_dictionaries(
      {name: _NUMBERS for name in ("index", "birth", "deadline")}
    ),
    "prompt_id": st.text(max_size=5),
    "prompt_tokens": hnp.arrays(np.int32, st.integers(0, 5)),
    "trajectories": st.lists(_trajectory_fields(), max_size=4),
    "times_s": st.dictionaries(
      st.text(max_size=3), st.floats(0, 1e6), max_size=3
    ),
  }
)


def _build_trajectory(reward, **rest):
  reward = None if reward is None else types.Reward(**reward)
  return types.Trajectory(reward=reward, **rest)


def _build_group(numbers, prompt_id, prompt_tokens, trajectories, **rest):
  return types.RolloutGroup(
    admission=types.Admission(**numbers),
    prompt=types.Prompt(prompt_id=prompt_id, tokens=prompt_tokens, item={}),
    trajectories=[_build_trajectory(**fields) for fields in trajectories],
    **rest,
  )


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(
  all_fields=st.lists(st.tuples(st.text(max_size=5), _GROUP_FIELDS), max_size=4)
)
def test_any_groups_come_back_bit_for_bit(all_fields):
  groups = [
    outstanding_lib.OutstandingGroup(
      status=status, group=_build_group(**fields)
    )
    for status, fields in all_fields
  ]
  with tempfile.TemporaryDirectory() as directory:
    outstanding_lib.write(pathlib.Path(directory), groups)
    got = outstanding_lib.read(pathlib.Path(directory))
  _assert_same_groups(got, groups)


def test_arrays_of_restored_trajectories_can_be_written_to(tmp_path):
  state = {"w": jnp.zeros(1)}
  checkpoint.save(tmp_path, 0, state, {}, _groups())
  _, _, groups = _restore(tmp_path, 0, state)
  first, _, second = groups[0].group.trajectories
  before = second.tokens.copy()
  first.tokens[:] = -5
  _assert_same_bits(second.tokens, before)


def test_no_flipped_bit_is_ever_restored(tmp_path):
  state = _train_state()
  checkpoint.save(tmp_path, 4, state, {"cursor": 1}, _groups())
  rng = np.random.default_rng(0)
  for path in (tmp_path / "4").rglob("*"):
    whole = path.read_bytes() if path.is_file() else b""
    for _ in range(3 if whole else 0):
      flipped = bytearray(whole)
      flipped[rng.integers(len(whole))] ^= 1 << int(rng.integers(8))
      path.write_bytes(flipped)
      with pytest.raises(checkpoint.CheckpointError, match=path.name):
        _restore(tmp_path, 4, state)
    if whole:
      path.write_bytes(whole)
  assert checkpoint.latest(tmp_path) == 4
  _restore(tmp_path, 4, state)


def test_a_crash_while_saving_leaves_the_previous_checkpoint(tmp_path):
  state = _train_state()
  checkpoint.save(tmp_path, 4, state, {"cursor": 1}, _groups())
  checkpoint.save(tmp_path, 8, state, {"cursor": 2}, _groups())
  # As a crash before the manifest and one before the rename leave it.
  (tmp_path / "8").rename(tmp_path / "8.incomplete")
  assert checkpoint.latest(tmp_path) == 4
  (tmp_path / "8.incomplete").rename(tmp_path / "8")
  (tmp_path / "8" / manifest.NAME).unlink()
  assert checkpoint.latest(tmp_path) == 4
  assert _restore(tmp_path, 4, state)[1] == {"cursor": 1}
  checkpoint.save(tmp_path, 8, state, {"cursor": 3}, _groups())
  assert checkpoint.latest(tmp_path) == 8
  assert _restore(tmp_path, 8, state)[1] == {"cursor": 3}


def test_a_save_that_raises_leaves_the_previous_checkpoint(tmp_path):
  state = _train_state()
  checkpoint.save(tmp_path, 4, state, {}, [])
  with pytest.raises(TypeError):
    checkpoint.save(tmp_path, 8, state, {"cursor": object()}, [])
  assert checkpoint.latest(tmp_path) == 4
  checkpoint.save(tmp_path, 8, state, {}, [])
  assert sorted(p.name for p in tmp_path.iterdir()) == ["4", "8"]


def test_a_full_disk_leaves_the_previous_checkpoint_and_no_other(tmp_path):
  state = _train_state()
  checkpoint.save(tmp_path, 4, state, {"cursor": 1}, [])
  with disks.files_of_at_most(1000):
    with pytest.raises(disk.StorageError) as raised:
      checkpoint.save(tmp_path, 8, state, {"cursor": "x" * 2000}, [])
  message = str(raised.value)
  assert f"{tmp_path / '8'}" in message and "make room" in message
  assert [path.name for path in tmp_path.iterdir()] == ["4"]
  assert checkpoint.host_state(tmp_path, 4) == {"cursor": 1}


def test_the_newest_checkpoints_are_kept(tmp_path):
  assert checkpoint.latest(tmp_path) is None
  assert checkpoint.latest(tmp_path / "missing") is None
  state = {"w": jnp.zeros(1)}
  for step in (9, 10, 100):
    checkpoint.save(tmp_path, step, state, {}, [], keep=2)
  assert sorted(p.name for p in tmp_path.iterdir()) == ["10", "100"]
  assert checkpoint.latest(tmp_path) == 100


def test_the_same_step_is_replaced(tmp_path):
  state = {"w": jnp.zeros(1)}
  checkpoint.save(tmp_path, 3, state, {"n": 1}, [])
  checkpoint.save(tmp_path, 3, state, {"n": 2}, [])
  assert _restore(tmp_path, 3, state)[1] == {"n": 2}


@pytest.mark.parametrize("num_renames", [0, 1, 2])
def test_a_crash_while_the_same_step_is_replaced_loses_nothing(
  tmp_path, monkeypatch, num_renames
):
  state = {"w": jnp.zeros(1)}
  checkpoint.save(tmp_path, 3, state, {"n": 1}, [], keep=1)
  rename, count = pathlib.Path.rename, []

  def crash(path, target):
    if len(count) == num_renames:
      raise KeyboardInterrupt
    count.append(path)
    return rename(path, target)

  with monkeypatch.context() as patched:
    patched.setattr(pathlib.Path, "rename", crash)
    try:
      checkpoint.save(tmp_path, 3, state, {"n": 2}, [], keep=1)
    except KeyboardInterrupt:
      assert num_renames < 3
  assert checkpoint.latest(tmp_path) == 3
  assert _restore(tmp_path, 3, state)[1] == {"n": 1 + num_renames // 2}
  checkpoint.save(tmp_path, 3, state, {"n": 3}, [], keep=1)
  assert _restore(tmp_path, 3, state)[1] == {"n": 3}
  assert [path.name for path in tmp_path.iterdir()] == ["3"]


@pytest.mark.parametrize("wrong", ["name", "shape", "dtype"])
def test_another_train_state_is_refused_by_name(tmp_path, wrong):
  state = {"kernel": jnp.zeros((2, 3))}
  checkpoint.save(tmp_path, 0, state, {}, [])
  other = {
    "name": {"bias": jnp.zeros((2, 3))},
    "shape": {"kernel": jnp.zeros((3, 2))},
    "dtype": {"kernel": jnp.zeros((2, 3), jnp.int32)},
  }[wrong]
  with pytest.raises(checkpoint.CheckpointError, match="bias|kernel"):
    _restore(tmp_path, 0, other)


def test_a_renamed_checkpoint_is_refused(tmp_path):
  state = {"w": jnp.zeros(1)}
  checkpoint.save(tmp_path, 3, state, {}, [])
  (tmp_path / "3").rename(tmp_path / "5")
  with pytest.raises(checkpoint.CheckpointError, match="holds step 3"):
    _restore(tmp_path, 5, state)


def test_arrays_of_trajectories_are_written_without_a_copy(tmp_path):
  (outstanding,) = _groups()
  group, rng = outstanding.group, np.random.default_rng(0)
  num_tokens = 28_672  # as in configs/deepseek_1p5b.py
  group.trajectories = [_trajectory(rng, i, num_tokens) for i in range(16)]
  tracemalloc.start()
  try:
    outstanding_lib.write(tmp_path, [outstanding])
    _, peak = tracemalloc.get_traced_memory()
  finally:
    tracemalloc.stop()
  assert (
    sum(x.stat().st_size for x in tmp_path.glob("*.npy")) > 13 * 16 * num_tokens
  )
  assert peak < 1_000_000
  _assert_same_groups(outstanding_lib.read(tmp_path), [outstanding])
  one = group.trajectories[3]
  one.tokens = np.repeat(one.tokens, 2)[::2]  # not contiguous
  outstanding_lib.write(tmp_path, [outstanding])
  _assert_same_groups(outstanding_lib.read(tmp_path), [outstanding])


def test_arrays_that_do_not_align_are_not_saved(tmp_path):
  groups = _groups()
  groups[0].group.trajectories[2].loss_mask = np.ones(3, bool)
  with pytest.raises(outstanding_lib.OutstandingError, match="loss_mask"):
    checkpoint.save(tmp_path, 0, {"w": jnp.zeros(1)}, {}, groups)
  groups = _groups()
  trajectory = groups[0].group.trajectories[2]
  trajectory.tokens = trajectory.tokens.astype(np.int64)
  with pytest.raises(outstanding_lib.OutstandingError, match="tokens mixes"):
    checkpoint.save(tmp_path, 0, {"w": jnp.zeros(1)}, {}, groups)


def test_readers_change_nothing_and_find_what_a_crash_moved_aside(tmp_path):
  state = {"w": jnp.zeros(1)}
  checkpoint.save(tmp_path, 3, state, {"n": 1}, [])
  checkpoint.save(tmp_path, 5, state, {"n": 2}, [])
  (tmp_path / "5").rename(tmp_path / "5.old")
  before = sorted(tmp_path.rglob("*"))
  assert checkpoint.latest(tmp_path) == 5
  assert checkpoint.host_state(tmp_path, 5) == {"n": 2}
  step, found = checkpoint.read_newest(
    tmp_path, lambda step: _restore(tmp_path, step, state)
  )
  assert (step, found[1]) == (5, {"n": 2})
  assert sorted(tmp_path.rglob("*")) == before
  checkpoint.recover(tmp_path)
  assert sorted(p.name for p in tmp_path.iterdir()) == ["3", "5"]


def test_a_checkpoint_is_not_removed_while_it_is_read(tmp_path):
  state = {"w": jnp.zeros(1)}
  checkpoint.save(tmp_path, 1, state, {"n": 1}, [], keep=1)

  def read(step):
    checkpoint.save(tmp_path, 2, state, {}, [], keep=1)
    assert checkpoint.latest(tmp_path) == 2
    return _restore(tmp_path, step, state)[1]

  assert checkpoint.read_newest(tmp_path, read) == (1, {"n": 1})
  checkpoint.save(tmp_path, 3, state, {}, [], keep=1)
  assert [path.name for path in tmp_path.iterdir()] == ["3"]


def test_a_reader_goes_on_to_the_newest_where_the_writer_removes(tmp_path):
  state = {"w": jnp.zeros(1)}
  checkpoint.save(tmp_path, 1, state, {"n": 1}, [])
  seen = []

  def read(step):
    seen.append(step)
    found = _restore(tmp_path, step, state)[1]
    if len(seen) == 1:  # a newer one, as where nothing can be locked
      checkpoint.save(tmp_path, 2, state, {"n": 2}, [], keep=2)
      shutil.rmtree(tmp_path / "1")
    if len(seen) == 2:  # the same step again, and it reads on
      checkpoint.save(tmp_path, 2, state, {"n": 3}, [])
    if len(seen) == 3:  # and now it cannot
      checkpoint.save(tmp_path, 2, state, {"n": 4}, [])
      raise FileNotFoundError
    return found

  assert checkpoint.read_newest(tmp_path, read) == (2, {"n": 4})
  assert seen == [1, 2, 2, 2]

  def fail(step):
    seen.append(step)
    raise FileNotFoundError

  with pytest.raises(FileNotFoundError):  # nothing changed: not tried again
    checkpoint.read_newest(tmp_path, fail)
  assert seen == [1, 2, 2, 2, 2]
  assert checkpoint.read_newest(tmp_path / "none", read) is None


# Where a read has failed, Orbax leaves a coroutine behind.
@pytest.mark.filterwarnings(
  "ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning"
)
@pytest.mark.slow
def test_a_reader_beside_a_writer_never_fails(tmp_path):
  state = _train_state()
  checkpoint.save(tmp_path, 0, state, {"step": 0}, _groups(), keep=1)
  is_over, failures, steps = threading.Event(), [], []

  def read(step):
    got, host_state, _ = _restore(tmp_path, step, state)
    assert host_state == {"step": step}
    return got

  def read_on():
    try:
      while not is_over.is_set():
        step, got = checkpoint.read_newest(tmp_path, read)
        jax.tree.map(_assert_same_bits, got, state)
        steps.append(step)
    except BaseException as error:
      failures.append(error)

  reader = threading.Thread(target=read_on)
  reader.start()
  try:
    for i in range(16):  # each step twice: removed, and replaced
      step = i // 2
      checkpoint.save(tmp_path, step, state, {"step": step}, _groups(), keep=1)
  finally:
    is_over.set()
    reader.join(60)
  assert not reader.is_alive()
  if failures:
    raise failures[0]
  assert steps == sorted(steps) and steps
