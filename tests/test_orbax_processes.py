"""A version that one process publishes and another one adopts."""

import os
import pathlib
import subprocess
import sys

import pytest
import stamped
from test_orbax_channel import _orbax

_READER = """
import pathlib, sys
import jax, numpy as np
from jax.sharding import SingleDeviceSharding
from jaxrl_async.weights import transfer_directory
from jaxrl_async.weights import weight_transfer

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
    [sys.executable, "-c", _READER, str(tmp_path), stamped.INCARNATION],
    stdout=subprocess.PIPE,
    text=True,
    cwd=pathlib.Path(__file__).parent.parent,
    env=os.environ | {"XLA_FLAGS": ""},
  ) as reader:
    try:
      for version in range(3):
        channel.publish(stamped.params(version), version)
        assert reader.stdout.readline() == f"{version}\n"
      assert reader.wait(stamped.DEADLINE_S) == 0
    finally:
      reader.kill()
  channel.close()
