"""Environment variables of Ray, and of the processes of replicas."""

import functools
import os
import secrets

import jax

from jaxrl_async.config import sections
from jaxrl_async.devices import xla_flags

_HOST_DEVICES = "--xla_force_host_platform_device_count"


@functools.cache
def _own_token() -> str:
  """Return the token for Ray on this machine, which Ray reads only once."""
  return secrets.token_hex(32)


def set_for_ray(address: str) -> None:
  """Set the variables that Ray reads when it is imported, starts or connects.

  Args:
    address: of a cluster; "" if Ray is started on this machine.
  """
  os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
  # Below `uv run`, Ray would start every worker with `uv run` too, in a copy of
  # the working directory with an environment of its own.
  os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
  if address:
    # Without a token, whoever reaches the cluster could run programs there.
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    return
  # Nothing listens on any address but the loopback one. (The variable is named
  # after the systems on which this is the default.)
  os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
  # Another user of this machine cannot call it without the token.
  os.environ["RAY_AUTH_MODE"] = "token"
  os.environ["RAY_AUTH_TOKEN"] = _own_token()
  # Processes take longer to start than Ray expects where few cores are free.
  os.environ.setdefault("RAY_worker_register_timeout_seconds", "300")


def of_replicas(config: sections.Config) -> dict[str, str]:
  """Return the variables with which a replica's process works as this one does.

  Args:
    config: of the run. JAX has been set up for it in this process.
  """
  found = {
    "JAX_CPU_ENABLE_ASYNC_DISPATCH": "false",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    # For replicas of several processes; `trainer_process` sets the same.
    "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
    "JAX_ENABLE_PREEMPTION_SERVICE": "false",
  }
  if cache := getattr(jax.config, "jax_compilation_cache_dir", None):
    found["JAX_COMPILATION_CACHE_DIR"] = cache
  if not config.cluster.replica_gpus and not config.cluster.replica_tpu:
    devices = config.mesh.rollout_data * config.mesh.rollout_tensor
    devices //= config.cluster.replica_processes
    found |= {
      "JAX_PLATFORMS": "cpu",
      # A run in the exact mode has set the flag for this process before.
      "XLA_FLAGS": f"{_HOST_DEVICES}={devices}"
      + f" {xla_flags.OWN_PRODUCTS}"
      * (xla_flags.OWN_PRODUCTS in xla_flags.current()),
    }
  elif config.cluster.replica_gpus and config.run.exact_resume:
    found["XLA_FLAGS"] = xla_flags.REPEATS_ON_GPU
  return found
