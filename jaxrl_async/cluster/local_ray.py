"""Ray on this machine, in a process of its own.

    python -m jaxrl_async.cluster.local_ray NUM_CPUS

It prints the address, and ends Ray when its standard input ends, which happens
however the process that started it ends. Ray forks, which a process with JAX's
threads must not do, and its processes end with the thread that started them.
"""

import logging
import os
import sys
import tempfile

import ray

_OBJECT_STORE_BYTES = 200_000_000


def main() -> None:
  """Start Ray, and wait for the end of standard input."""
  # Names of sockets may have 107 characters, so the path must be short.
  parent = "/tmp" if os.access("/tmp", os.W_OK) else None
  with tempfile.TemporaryDirectory(prefix="ray-", dir=parent) as directory:
    ray.init(
      _node_ip_address="127.0.0.1",
      _temp_dir=directory,
      include_dashboard=False,
      object_store_memory=_OBJECT_STORE_BYTES,
      num_cpus=int(sys.argv[1]),
      logging_level=logging.ERROR,
      log_to_driver=False,
    )
    print(ray.get_runtime_context().gcs_address, flush=True)
    sys.stdin.read()
    ray.shutdown()


if __name__ == "__main__":
  main()
