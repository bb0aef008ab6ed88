"""Flags of a trainer of several processes, and the start of one of them.

A script that trains imports this module for its flags. `begin` connects the
processes, before anything else uses JAX. `ending` makes sure that none of them
is left behind.
"""

from collections.abc import Iterator
import contextlib
import pathlib
import sys
import time
from typing import NoReturn

from absl import flags

from jaxrl_async.cluster import trainer_facts
from jaxrl_async.config import sections
from jaxrl_async.processes import rendezvous
from jaxrl_async.processes import supervisor as supervisor_lib
from jaxrl_async.processes import world as world_lib
from jaxrl_async.storage import disk

_NUM_PROCESSES = flags.DEFINE_integer(
  "num_processes",
  0,
  "Number of processes that train together (cluster.trainer_processes). Left"
  " out, the processes of a TPU slice or of Slurm find each other.",
  0,
)
_PROCESS_ID = flags.DEFINE_integer(
  "process_id",
  0,
  "With --num_processes: number of this process, from 0.",
  0,
)
_COORDINATOR_ADDRESS = flags.DEFINE_string(
  "coordinator_address",
  "",
  "With --num_processes: HOST:PORT of process 0, which all others can reach. It"
  " uses a second port, which it chooses.",
)

# Within which a lost process is noticed, and has ended this one.
_LOST_S = 1.0
_ENDED_S = 20.0


def check() -> None:
  """Check the flags.

  Raises:
    ConfigError: they do not belong together.
  """
  size, rank = _NUM_PROCESSES.value, _PROCESS_ID.value
  if size > 1:
    sections.require(
      rank < size, "process_id", f"{rank} is not one of 0 to {size - 1}"
    )
    rendezvous.parse_address(_COORDINATOR_ADDRESS.value)
  elif _COORDINATOR_ADDRESS.value or rank:
    raise sections.ConfigError(
      "num_processes: missing; --process_id and --coordinator_address are for"
      " one of several processes"
    )


def leads() -> bool:
  """Whether the flags are those of process 0, or of the only one."""
  return _PROCESS_ID.value == 0


def begin(config: sections.Config, workdir: pathlib.Path) -> world_lib.World:
  """Connect this process with the others, and return the world of all.

  Args:
    config: of the run.
    workdir: of the run, which all processes share.

  Raises:
    ConfigError: one line; they do not fit together.
  """
  if max(config.cluster.trainer_processes, _NUM_PROCESSES.value) <= 1:
    return world_lib.alone()
  import jax  # slow, like other imports of a run

  # Programs of several processes on a CPU need it; other platforms ignore it.
  jax.config.update("jax_cpu_collectives_implementation", "gloo")
  # It would take SIGTERM, which asks a run to stop.
  jax.config.update("jax_enable_preemption_service", False)
  timeout_s = config.cluster.start_timeout_s
  if _NUM_PROCESSES.value:
    rank, size = _PROCESS_ID.value, _NUM_PROCESSES.value
    address = _COORDINATOR_ADDRESS.value
  else:
    rank, size, address = _detected(timeout_s)
  trainer_facts.check_size(config, size)
  world = rendezvous.meet(
    rank,
    rendezvous.Invitation(
      size=size,
      address=rendezvous.parse_address(address),
      key=b"",
      timeout_s=timeout_s,
    ),
    trainer_facts.shared(config, workdir),
    trainer_facts.facts(config, workdir),
  )
  if _NUM_PROCESSES.value:
    rendezvous.connect_jax(world, timeout_s)
  sections.require(
    jax.process_index() == rank,
    "process_id",
    f"{rank} is process {jax.process_index()} for JAX; leave --num_processes"
    " out, so that the processes find each other",
  )
  return world


def _detected(timeout_s: float) -> tuple[int, int, str]:
  """Return rank, size and address of processes that JAX finds by itself."""
  import jax
  from jax._src import distributed
  from jax.experimental import multihost_utils
  import numpy as np

  try:
    jax.distributed.initialize(**rendezvous.jax_timeouts(timeout_s))
  except (ValueError, RuntimeError) as error:
    raise sections.ConfigError(
      "num_processes: missing; JAX finds no other processes by itself here"
      f" ({' '.join(str(error).split())})"
    ) from error
  # All processes have reached process 0 there. What a host takes for its own
  # name or address, no other one may know.
  address = distributed.global_state.coordinator_address
  assert address is not None
  host = address.rpartition(":")[0]
  port = np.int32(rendezvous.free_port())
  port = multihost_utils.broadcast_one_to_all(port)
  return jax.process_index(), jax.process_count(), f"{host}:{int(port)}"


@contextlib.contextmanager
def ending(world: world_lib.World) -> Iterator[None]:
  """End the world with the block, and the other processes with this one.

  After a failure, the interpreter is not shut down: it would wait for programs
  in which a process is missing.
  """
  if world.size == 1:
    yield
    return
  import jax

  try:
    yield
  except sections.ConfigError as error:
    _end(world, f"error: {error}", str(error), 1)
  except supervisor_lib.Interrupted as error:
    _end(world, str(error), str(error), 130)
  except supervisor_lib.RunError as error:
    _end(world, f"error: {error}", str(error), error.status)
  except disk.StorageError as error:
    _end(world, f"error: {error}", str(error), 1)
  except BaseException as error:
    # A program fails when one of its processes is gone, which is the reason.
    if world.lost.wait(_LOST_S):
      time.sleep(_ENDED_S)
    sys.excepthook(type(error), error, error.__traceback__)
    _end(world, "", f"{type(error).__name__}: {error}", 1)
  world.close()
  jax.distributed.shutdown()


def _end(
  world: world_lib.World, line: str, failure: str, code: int
) -> NoReturn:
  """Tell the others why this process ends, and end it."""
  world.close(" ".join(failure.split()), code)
  if line:
    print(line, file=sys.stderr)
  sys.stdout.flush()
  sys.stderr.flush()
  supervisor_lib.end_now(code)
