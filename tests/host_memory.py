"""Loads or writes a model, and prints what that took of the host's memory.

    python host_memory.py ACTION DIRECTORY [PORT NUM_PROCESSES PROCESS]

ACTION is `load` or `save`. The arrays are split over the devices of all
processes. The devices of a CPU have their arrays in the host's memory too;
`held` is how much of it that is in this process, to be taken off its `growth`.
"""

import json
import pathlib
import sys

import jax
import numpy as np

from jaxrl_async.devices import mesh as mesh_lib
from jaxrl_async.models import hf_config
from jaxrl_async.models import hf_weights
from jaxrl_async.training import train_state

action, directory, *distributed = sys.argv[1:]
if distributed:
  port, num_processes, process = map(int, distributed)
  jax.config.update("jax_cpu_collectives_implementation", "gloo")
  jax.distributed.initialize(
    f"localhost:{port}", num_processes, process, heartbeat_timeout_seconds=600
  )


def memory(name):
  """VmRSS, or VmHWM, the largest that it has been."""
  for line in pathlib.Path("/proc/self/status").read_text().splitlines():
    if line.startswith(f"{name}:"):
      return 1024 * int(line.split()[1])
  raise LookupError(name)


def growth_of(work):
  """What the peak of the memory is above what there was before."""
  pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
  before = memory("VmRSS")
  result = work()
  return result, memory("VmHWM") - before


model = hf_config.model_config(directory)
devices = jax.devices()
mesh = mesh_lib.make_mesh(devices, mesh_lib.MeshShape(fsdp=len(devices)))
shardings = train_state.params_sharding(mesh, mesh_lib.TRAIN_RULES, model)
# The compiler's own code and memory are not what is measured.
here = jax.device_put(np.ones((2, 2), np.float32), jax.local_devices()[0])
jax.block_until_ready(jax.jit(lambda x: (x @ x).cumsum(0).at[1].set(3.0))(here))

(_, params), growth = growth_of(
  lambda: hf_weights.load(directory, shardings=shardings)
)
parts = [x for leaf in jax.tree.leaves(params) for x in leaf.addressable_shards]
held = sum(part.data.nbytes for part in parts)
if action == "save":
  _, growth = growth_of(
    lambda: hf_weights.save(
      f"{directory}.copy",
      model,
      params,
      max_shard_bytes=max(
        x.stat().st_size for x in pathlib.Path(directory).glob("*.safetensors")
      ),
    )
  )
print(json.dumps({"growth": growth, "held": held}), flush=True)
