"""Ray on this machine, in a process of its own.

    python -m jaxrl_async.cluster.local_ray NUM_CPUS

It prints the address, and ends Ray when its standard input ends, which happens
however the process that started it ends. Ray forks, which a process with JAX's
threads must not do, and its processes end with the thread that started them.
"""

import fcntl
import logging
import os
import pathlib
import shutil
import sys
import tempfile

import ray

from jaxrl_async.storage import disk

_OBJECT_STORE_BYTES = 200_000_000
_PREFIX = "ray-"
# A lock on this file says that the directory is in use.
_LOCK = "jaxrl_async.lock"


def remove_leftovers(parent: pathlib.Path) -> None:
  """Remove the directories of processes that were killed."""
  for lock in parent.glob(f"{_PREFIX}*/{_LOCK}"):
    directory = lock.parent
    if directory.lstat().st_uid == os.getuid() and not disk.is_locked(lock):
      shutil.rmtree(directory, ignore_errors=True)


def main() -> None:
  """Start Ray, and wait for the end of standard input."""
  # Names of sockets may have 107 characters, so the path must be short.
  parent = "/tmp" if os.access("/tmp", os.W_OK) else tempfile.gettempdir()
  remove_leftovers(pathlib.Path(parent))
  with (
    tempfile.TemporaryDirectory(prefix=_PREFIX, dir=parent) as directory,
    open(pathlib.Path(directory) / f"{_LOCK}.new", "wb") as lock,
  ):
    fcntl.flock(lock, fcntl.LOCK_EX)
    os.rename(lock.name, pathlib.Path(directory) / _LOCK)
    ray.init(
      _node_ip_address="127.0.0.1",
      # Ray lets all users write there, but they cannot enter what it is in.
      _temp_dir=os.path.join(directory, "ray"),
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
