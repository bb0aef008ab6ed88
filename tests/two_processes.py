"""One of several processes that train together; prints its losses.

    python two_processes.py PORT NUM_PROCESSES PROCESS SHAPE

XLA_FLAGS gives each process its devices; SHAPE is a MeshShape as JSON.
"""

import json
import sys

import jax
import mesh_world
import numpy as np
import test_train_step

from jaxrl_async.devices import mesh as mesh_lib

port, num_processes, process = map(int, sys.argv[1:4])
jax.config.update("jax_cpu_collectives_implementation", "gloo")
# Longer than a machine that is short of time may stand still.
jax.distributed.initialize(
  f"localhost:{port}", num_processes, process, heartbeat_timeout_seconds=600
)

shape = mesh_lib.MeshShape(**json.loads(sys.argv[4]))
trainer = mesh_world.make_trainer(shape)
steps = mesh_world.train(trainer)
embedding = trainer.state.policy.params["embedding"]
assert not embedding.is_fully_addressable
(group, *_) = test_train_step.groups()
logprobs = trainer.logprobs(group.trajectories)
found = {
  "steps": [{name: x.tolist() for name, x in step.items()} for step in steps],
  "logprobs": np.concatenate(logprobs).tolist(),
}
print(json.dumps(found), flush=True)
