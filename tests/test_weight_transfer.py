import fcntl
import functools
import os
import pathlib
import shutil
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from jaxrl_async import config
from jaxrl_async import manifest
from jaxrl_async import weight_transfer

DEADLINE_S = 60.0
INCARNATION = "now"


def _mesh(first: int, shape: tuple[int, ...], names: tuple[str, ...]) -> Mesh:
  devices = np.array(jax.devices()[first : first + int(np.prod(shape))])
  types = (AxisType.Auto,) * len(shape)
  return Mesh(devices.reshape(shape), names, axis_types=types)


def _train_shardings():
  mesh = _mesh(0, (2, 2), ("fsdp", "tensor"))
  specs = {
    "embedding": P("fsdp", "tensor"),
    "layers": [{"query": P("tensor", "fsdp")}, {"query": P(None, "tensor")}],
    "scale": P(),
  }
  return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)


@functools.partial(jax.jit, out_shardings=_train_shardings())
def _jitted_params(stamp):
  return {
    "embedding": jnp.full((8, 6), stamp, jnp.float32),
    "layers": [
      {"query": jnp.full((4, 8), stamp, jnp.bfloat16)},
      {"query": jnp.full((4, 8), stamp, jnp.bfloat16)},
    ],
    "scale": jnp.full((), stamp, jnp.int32),
  }


def _train_params(stamp: int):
  """Params whose every element says which version they are, on (2, 2)."""
  return _jitted_params(np.int32(stamp))


def _target(first_device: int = 4, num_devices: int = 2):
  """The rollout side's shardings: other devices, another axis."""
  mesh = _mesh(first_device, (num_devices,), ("data",))

  def abstract(leaf):
    spec = P("data") if leaf.ndim and leaf.shape[0] == 8 else P()
    return jax.ShapeDtypeStruct(
      leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec)
    )

  return jax.tree.map(abstract, _train_params(0))


def _orbax(directory, coalesce=True, incarnation=INCARNATION, cls=None):
  cls = cls or weight_transfer.OrbaxChannel
  return cls(directory, incarnation, _target(), coalesce=coalesce)


@pytest.fixture(params=list(config.Channel), ids=lambda kind: kind.value)
def channel(request, tmp_path):
  made = weight_transfer.make_channel(
    request.param,
    directory=tmp_path / "transfer",
    incarnation=INCARNATION,
    target=_target(),
    coalesce=True,
  )
  yield made
  made.close()


def _publish_and_wait(channel, version):
  channel.publish(_train_params(version), version)
  assert channel.wait_for_version(version - 1, DEADLINE_S)


def _assert_all_stamped(params, version):
  for leaf in jax.tree.leaves(params):
    assert (np.asarray(leaf).astype(np.int64) == version).all()


def _join(threads):
  for thread in threads:
    thread.join(DEADLINE_S)
    assert not thread.is_alive()


def test_params_arrive_bit_for_bit_in_the_rollout_shardings(channel):
  rng = np.random.default_rng(0)

  def noise(leaf):
    data = rng.bytes(leaf.size * leaf.dtype.itemsize)
    bits = np.frombuffer(data, leaf.dtype).reshape(leaf.shape)
    return jax.device_put(bits, leaf.sharding)

  # Random bits: NaNs with payloads and subnormal numbers among them.
  params = jax.tree.map(noise, _train_params(0))
  channel.publish(params, 3)
  assert channel.wait_for_version(-1, DEADLINE_S)
  adopted, version = channel.adopt(newer_than=2)
  assert version == 3
  assert jax.tree.structure(adopted) == jax.tree.structure(params)
  triples = zip(
    jax.tree.leaves(adopted),
    jax.tree.leaves(params),
    jax.tree.leaves(_target()),
    strict=True,
  )
  for got, sent, wanted in triples:
    assert got.dtype == sent.dtype
    assert np.asarray(got).tobytes() == np.asarray(sent).tobytes()
    assert got.sharding == wanted.sharding


def test_nothing_is_adopted_before_the_first_and_twice(channel):
  assert channel.newest_version() == -1
  assert channel.adopt(newer_than=-1) is None
  _publish_and_wait(channel, 0)
  assert channel.newest_version() == 0
  assert channel.adopt(newer_than=0) is None
  assert channel.adopt(newer_than=-1) is not None


def test_the_newest_version_is_adopted(channel):
  for version in (4, 5, 9):
    _publish_and_wait(channel, version)
  params, version = channel.adopt(newer_than=4)
  assert version == 9
  _assert_all_stamped(params, 9)


def test_versions_must_increase(channel):
  channel.publish(_train_params(2), 2)
  for version in (2, 1):
    with pytest.raises(weight_transfer.WeightTransferError, match="not newer"):
      channel.publish(_train_params(2), version)


@pytest.mark.parametrize("wrong", ["dtype", "shape", "name"])
def test_params_that_do_not_fit_the_target_are_refused_by_name(channel, wrong):
  params = _train_params(0)
  if wrong == "name":
    params["bias"] = params.pop("scale")
  elif wrong == "dtype":
    params["scale"] = params["scale"].astype(jnp.float32)
  else:
    params["scale"] = params["scale"][None]
  name = "bias" if wrong == "name" else "scale"
  with pytest.raises(weight_transfer.WeightTransferError, match=name):
    channel.publish(params, 0)


def test_a_waiting_engine_wakes_at_publish_and_at_close(channel):
  answers = []

  def wait_twice():
    answers.append(channel.wait_for_version(-1, DEADLINE_S))
    answers.append(channel.wait_for_version(0, DEADLINE_S))

  thread = threading.Thread(target=wait_twice)
  thread.start()
  _publish_and_wait(channel, 0)
  while not answers:
    assert thread.is_alive()
  channel.close()
  _join([thread])
  assert answers == [True, False]


def test_waiting_gives_up_at_its_timeout(channel):
  start = time.monotonic()
  assert not channel.wait_for_version(-1, 0.02)
  assert time.monotonic() - start >= 0.02


def test_nothing_can_be_published_after_close(channel):
  channel.close()
  with pytest.raises(weight_transfer.WeightTransferError, match="closed"):
    channel.publish(_train_params(0), 0)


def test_engines_see_whole_and_increasing_versions_under_load(channel):
  num_versions, failures, adopted = 50, [], {0: [], 1: []}
  done = threading.Event()

  def guarded(function):
    def run():
      try:
        function()
      except BaseException as error:
        failures.append(error)
        done.set()

    return threading.Thread(target=run)

  def train():
    for version in range(num_versions):
      channel.publish(_train_params(version), version)
      if version % 5 == 4:
        assert channel.wait_for_version(version - 1, DEADLINE_S)

  def engine(key):
    newest = -1
    while newest < num_versions - 1:
      if not channel.wait_for_version(newest, DEADLINE_S):
        raise AssertionError(f"nothing newer than {newest}")
      params, version = channel.adopt(newest)
      _assert_all_stamped(params, version)
      adopted[key].append(version)
      newest = version

  def decode():
    step = jax.jit(lambda x: jnp.tanh(x @ x))
    x = jax.device_put(np.ones((300, 300), np.float32), jax.devices()[4])
    while not done.is_set():
      x = step(x)

  workers = [guarded(train)] + [
    guarded(lambda key=key: engine(key)) for key in adopted
  ]
  decoder = guarded(decode)
  for thread in [decoder, *workers]:
    thread.start()
  _join(workers)
  done.set()
  _join([decoder])
  assert not failures, failures
  for versions in adopted.values():
    assert versions == sorted(set(versions))
    assert versions[-1] == num_versions - 1


class _HeldUp(weight_transfer.OrbaxChannel):
  """Is not done with a version before the gate opens; removes nothing."""

  def _remove_old(self):
    assert self.gate.wait(DEADLINE_S)


@pytest.mark.parametrize(
  ("coalesce", "expected"), [(True, ["0", "3"]), (False, ["0", "1", "2", "3"])]
)
def test_versions_coalesce_only_when_they_may(tmp_path, coalesce, expected):
  channel = _orbax(tmp_path, coalesce, cls=_HeldUp)
  channel.gate = threading.Event()
  _publish_and_wait(channel, 0)
  for version in (1, 2, 3):
    channel.publish(_train_params(version), version)
  channel.gate.set()
  assert channel.wait_for_version(2, DEADLINE_S)
  sealed = tmp_path.glob(f"incarnation-{INCARNATION}/[0-9]*/{manifest.NAME}")
  assert sorted(path.parent.name for path in sealed) == expected
  _assert_all_stamped(channel.adopt(-1)[0], 3)
  channel.close()


def test_publish_returns_while_the_save_is_held_up(tmp_path):
  channel = _orbax(tmp_path, cls=_HeldUp)
  channel.gate = threading.Event()
  _publish_and_wait(channel, 0)
  # A publish that waited for the thread would wait for the gate for ever.
  blocked_s = channel.publish(_train_params(1), 1)
  assert 0 < blocked_s < DEADLINE_S / 2
  channel.gate.set()
  channel.close()


def test_another_channel_object_adopts_from_the_directory_alone(tmp_path):
  train_side, rollout_side = _orbax(tmp_path), _orbax(tmp_path)
  assert rollout_side.newest_version() == -1
  train_side.publish(_train_params(1), 1)
  assert rollout_side.wait_for_version(-1, DEADLINE_S)
  params, version = rollout_side.adopt(-1)
  _assert_all_stamped(params, version)
  rollout_side.close()
  assert train_side.adopt(-1)[1] == 1
  train_side.close()


def test_no_flipped_bit_is_ever_adopted(tmp_path):
  channel = _orbax(tmp_path)
  _publish_and_wait(channel, 0)
  rng = np.random.default_rng(1)
  root = tmp_path / f"incarnation-{INCARNATION}" / "0"
  files = [path for path in root.rglob("*") if path.is_file()]
  assert any("/d/" in str(path) for path in files)
  for path in files:
    whole = path.read_bytes()
    for _ in range(3 if whole else 0):
      flipped = bytearray(whole)
      flipped[rng.integers(len(whole))] ^= 1 << int(rng.integers(8))
      path.write_bytes(flipped)
      with pytest.raises(weight_transfer.WeightTransferError, match=path.name):
        channel.adopt(-1)
    path.write_bytes(whole)
  assert channel.adopt(-1)[1] == 0
  channel.close()


def test_a_torn_version_is_not_there(tmp_path):
  channel = _orbax(tmp_path)
  _publish_and_wait(channel, 0)
  root = tmp_path / f"incarnation-{INCARNATION}"
  # As a save that died would leave it: written, not sealed, not announced.
  shutil.copytree(root / "0", root / "1")
  (root / "1" / manifest.NAME).unlink()
  shutil.copytree(root / "1", root / "2.orbax-checkpoint-tmp")
  assert channel.newest_version() == 0
  assert channel.adopt(-1)[1] == 0
  # Announced all the same, it is an error, not a version and not a hang.
  os.symlink("1", root / "link")
  os.replace(root / "link", root / "newest")
  with pytest.raises(weight_transfer.WeightTransferError, match="no manifest"):
    channel.adopt(-1)
  channel.close()


@pytest.mark.parametrize("foreign", ["incarnation", "version"])
def test_a_foreign_version_is_never_adopted(tmp_path, foreign):
  before = _orbax(tmp_path / "before", incarnation="before")
  channel = _orbax(tmp_path / "now")
  _publish_and_wait(before, 7)
  _publish_and_wait(channel, 1)
  assert channel.adopt(1) is None
  root = tmp_path / "now" / f"incarnation-{INCARNATION}"
  if foreign == "incarnation":
    source = tmp_path / "before" / "incarnation-before" / "7"
  else:
    source = root / "1"
  shutil.copytree(source, root / "7")
  os.symlink("7", root / "link")
  os.replace(root / "link", root / "newest")
  with pytest.raises(weight_transfer.WeightTransferError, match="not adopted"):
    channel.adopt(1)
  before.close()
  channel.close()


def test_a_new_start_removes_what_a_killed_one_left(tmp_path):
  killed = _orbax(tmp_path, incarnation="killed")
  _publish_and_wait(killed, 9)
  (tmp_path / "of somebody else").mkdir()
  channel = _orbax(tmp_path)
  assert channel.newest_version() == -1
  assert (tmp_path / "incarnation-killed").exists()
  _publish_and_wait(channel, 2)
  assert not (tmp_path / "incarnation-killed").exists()
  assert channel.adopt(-1)[1] == 2
  channel.close()
  assert [path.name for path in tmp_path.iterdir()] == ["of somebody else"]


def test_two_publishers_of_one_incarnation_are_refused(tmp_path):
  first, second = _orbax(tmp_path), _orbax(tmp_path)
  _publish_and_wait(first, 0)
  with pytest.raises(weight_transfer.WeightTransferError, match="already"):
    second.publish(_train_params(0), 0)
  first.close()


def test_old_versions_go_but_never_one_that_is_read(tmp_path):
  channel = _orbax(tmp_path)
  root = tmp_path / f"incarnation-{INCARNATION}"
  _publish_and_wait(channel, 0)
  with open(root / "0" / manifest.NAME, "rb") as reader:
    fcntl.flock(reader, fcntl.LOCK_SH)
    for version in range(1, 5):
      _publish_and_wait(channel, version)
    # Removal follows the announcement; that of 5 follows those before it.
    assert (root / "0" / manifest.NAME).exists()
  _publish_and_wait(channel, 5)
  _publish_and_wait(channel, 6)
  names = {path.name for path in root.iterdir()}
  assert {"5", "6", "newest"} <= names <= {"4", "5", "6", "newest"}
  channel.close()
  assert not tmp_path.exists()


class _OvertakenWhileReading(weight_transfer.OrbaxChannel):
  """Four newer versions are announced between its lock and its first byte."""

  def _load(self, version):
    if version == 0:
      for newer in range(1, 5):
        _publish_and_wait(self, newer)
    return super()._load(version)


def test_a_version_that_is_overtaken_while_it_is_read_is_read_whole(tmp_path):
  channel = _orbax(tmp_path, cls=_OvertakenWhileReading)
  _publish_and_wait(channel, 0)
  params, version = channel.adopt(-1)
  assert version == 0
  _assert_all_stamped(params, 0)
  channel.close()


class _OvertakenWhileLocking(weight_transfer.OrbaxChannel):
  """Newer versions are announced after its first look at the newest."""

  num_looks = 0
  num_newer = 0

  def adopt(self, newer_than):
    self.num_looks = 0
    return super().adopt(newer_than)

  def newest_version(self):
    newest = super().newest_version()
    self.num_looks += 1
    if self.num_looks == 1 and newest == 0:
      for newer in range(1, self.num_newer + 1):
        _publish_and_wait(self, newer)
    return newest


# By one: it is still there but may go. By three: it is gone.
@pytest.mark.parametrize("num_newer", [1, 3])
def test_a_version_overtaken_before_it_is_locked_gives_way(tmp_path, num_newer):
  channel = _orbax(tmp_path, cls=_OvertakenWhileLocking)
  channel.num_looks, channel.num_newer = 1, num_newer
  _publish_and_wait(channel, 0)
  params, version = channel.adopt(-1)
  assert version == num_newer
  _assert_all_stamped(params, num_newer)
  channel.close()


def test_a_failed_save_surfaces_everywhere_with_its_cause(tmp_path):
  channel = _orbax(tmp_path)
  _publish_and_wait(channel, 0)
  # Something lies where the next version is to be announced.
  obstacle = tmp_path / f"incarnation-{INCARNATION}" / "newest.incomplete"
  obstacle.mkdir()
  channel.publish(_train_params(1), 1)
  for call in (
    lambda: channel.wait_for_version(0, DEADLINE_S),
    lambda: channel.publish(_train_params(2), 2),
    lambda: channel.adopt(-1),
    channel.close,
  ):
    with pytest.raises(weight_transfer.WeightTransferError) as raised:
      call()
    assert str(obstacle) in str(raised.value)
    frames = []
    traceback = raised.value.__cause__.__traceback__
    while traceback is not None:
      frames.append(traceback.tb_frame.f_code.co_name)
      traceback = traceback.tb_next
    assert "_publish_next" in frames
  assert not tmp_path.exists()


def test_close_does_not_wait_for_ever(tmp_path):
  channel = _orbax(tmp_path, cls=_HeldUp)
  channel.gate = threading.Event()
  _publish_and_wait(channel, 0)
  with pytest.raises(weight_transfer.WeightTransferError, match="still saving"):
    channel.close(timeout_s=0.05)
  channel.gate.set()
  channel.close()


def test_direct_shares_memory_on_the_same_device_as_documented():
  params = {"w": jnp.arange(4096, dtype=jnp.float32)}
  target = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
    params,
  )
  channel = weight_transfer.DirectChannel(target)
  channel.publish(params, 0)
  adopted, _ = channel.adopt(-1)
  here = params["w"].unsafe_buffer_pointer()
  assert adopted["w"].unsafe_buffer_pointer() == here


def test_the_run_directory_follows_the_workdir_and_the_space(tmp_path):
  one = weight_transfer.run_directory("", tmp_path / "a", 1)
  assert one == weight_transfer.run_directory("", tmp_path / "a", 1)
  assert one != weight_transfer.run_directory("", tmp_path / "b", 1)
  huge = weight_transfer.run_directory("", tmp_path / "a", 2**60)
  assert huge == tmp_path / "a" / "weight_transfer"
  chosen = weight_transfer.run_directory(str(tmp_path / "c"), tmp_path / "a", 1)
  assert chosen.parent == tmp_path / "c"
  assert not any(tmp_path.iterdir())


_READER = """
import pathlib, sys
import jax, numpy as np
from jax.sharding import SingleDeviceSharding
from jaxrl_async import weight_transfer

here = SingleDeviceSharding(jax.devices()[0])
def leaf(shape, dtype):
  return jax.ShapeDtypeStruct(shape, dtype, sharding=here)
target = {
  "embedding": leaf((8, 6), "float32"),
  "layers": [{"query": leaf((4, 8), "bfloat16")}] * 2,
  "scale": leaf((), "int32"),
}
channel = weight_transfer.OrbaxChannel(
  pathlib.Path(sys.argv[1]), sys.argv[2], target)
version = -1
while version < 2:
  assert channel.wait_for_version(version, 60.0)
  params, version = channel.adopt(version)
  stamps = {float(np.asarray(x).max()) for x in jax.tree.leaves(params)}
  assert stamps == {float(version)}
  print(version, flush=True)
channel.close()
"""


@pytest.mark.slow
def test_an_engine_in_another_process_adopts(tmp_path):
  channel = _orbax(tmp_path, coalesce=False)
  with subprocess.Popen(
    [sys.executable, "-c", _READER, str(tmp_path), INCARNATION],
    stdout=subprocess.PIPE,
    text=True,
    cwd=pathlib.Path(__file__).parent.parent,
    env=os.environ | {"XLA_FLAGS": ""},
  ) as reader:
    try:
      for version in range(3):
        channel.publish(_train_params(version), version)
        assert reader.stdout.readline() == f"{version}\n"
      assert reader.wait(DEADLINE_S) == 0
    finally:
      reader.kill()
  channel.close()
