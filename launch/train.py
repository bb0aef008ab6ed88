"""Train a policy: warm start, then asynchronous reinforcement learning.

uv run launch/train.py --config=configs/quickstart.py --workdir=/tmp/quickstart

The last line on stdout is the summary. The same command on the same workdir
continues from its newest checkpoint.
"""

import command_line  # isort: skip, first: it sets XLA's environment
import trainer_process  # isort: skip

from collections.abc import Sequence
import gc
import math
import os
import pathlib
from typing import Any

from absl import flags

from jaxrl_async.assembly import config_checks
from jaxrl_async.config import sections
from jaxrl_async.devices import gpus
from jaxrl_async.devices import tpu_chips
from jaxrl_async.devices import xla_flags
from jaxrl_async.processes import world as world_lib
from jaxrl_async.serving import addresses

# Slow imports are made where they are used, after all checks.

_DRY_RUN = flags.DEFINE_bool(
  "dry_run", False, "Print sizes, memory and devices of the run, and exit."
)

_TOPOLOGY = flags.DEFINE_string(
  "topology",
  "",
  "With --dry_run: compile for this TPU slice, such as v5p:4x4x4, or for these"
  " GPUs, such as 8xh200, which need not be present. For other GPUs, such as"
  " gpu:24GB or 8xgpu:80GB, only estimate.",
)

_COMPILE = flags.DEFINE_bool(
  "compile", False, "With --dry_run: compile for the devices of this machine."
)

_SERVE_PORT = flags.DEFINE_integer(
  "serve_port",
  0,
  "Serve the policy during training, on this port of the loopback address; 0"
  " serves nothing. JAXRL_API_KEY may hold a key.",
  0,
  65535,
)

_PROFILE_STEPS = flags.DEFINE_list(
  "profile_steps",
  [],
  "Train steps to write traces of, such as 10,12, into WORKDIR/profile.",
)


def _profile_steps() -> list[int]:
  steps = []
  num_steps = command_line.CONFIG.value.train.num_steps
  for text in _PROFILE_STEPS.value:
    is_step = text.isascii() and text.isdigit() and len(text) < 10
    if not is_step or not 1 <= int(text) <= num_steps:
      raise sections.ConfigError(
        f"profile_steps: {sections.shown(text)} is no train step; use numbers"
        f" from 1 to {num_steps} (train.num_steps)"
      )
    steps.append(int(text))
  return steps


def _check() -> None:
  _profile_steps()
  for flag in (_TOPOLOGY, _COMPILE):
    if flag.value and not _DRY_RUN.value:
      raise sections.ConfigError(
        f"{flag.name}: nothing runs on it; add --dry_run"
      )
  if gpus.is_named(_TOPOLOGY.value):
    named = gpus.parse(_TOPOLOGY.value)
    if _COMPILE.value and not named.kind:
      raise sections.ConfigError(
        "compile: nothing is compiled for a GPU of which only the memory is"
        f" known; use --topology={next(iter(gpus.KINDS))}, or a machine with a"
        " GPU, without --topology"
      )
  elif _TOPOLOGY.value:
    tpu_chips.parse(_TOPOLOGY.value)
  if _DRY_RUN.value:
    return
  command_line.check_workdir()
  trainer_process.check()
  config = command_line.CONFIG.value
  if config.run.exact_resume:
    xla_flags.use(xla_flags.of_same_bits())
  is_apart = config.cluster.kind is sections.ClusterKind.RAY
  if _SERVE_PORT.value and is_apart:
    raise sections.ConfigError(
      "serve_port: clients are served by a replica in this process, and"
      " cluster.kind=ray has none; use launch/serve.py beside the run"
    )
  if _SERVE_PORT.value and trainer_process.leads():
    addresses.check_can_bind("serve_port", "127.0.0.1", _SERVE_PORT.value)


def _devices() -> Sequence[Any]:
  import jax

  from jaxrl_async.devices import topology

  if not _TOPOLOGY.value:
    return jax.devices()
  if gpus.is_named(_TOPOLOGY.value):
    jax.config.update("jax_platforms", "cpu")
  return topology.devices(_TOPOLOGY.value)


def _divide_cpu(mesh: sections.MeshSection) -> None:
  """Have a CPU appear as all devices of a mesh, if it has cores for them.

  Without this, a CPU appears as two devices, one for each slice. There is at
  most one device more than there are cores, because generation often leaves its
  core to training. JAX has not looked for devices yet.
  """
  import jax

  rollout = mesh.rollout_data, mesh.rollout_tensor
  train = (
    *(mesh.train_data, mesh.train_fsdp),
    *(mesh.train_context, mesh.train_tensor),
  )
  count = math.prod(train) + math.prod(rollout)
  cores = len(os.sched_getaffinity(0))
  if min(*train, *rollout) > 0 and 2 < count <= cores + 1:
    jax.config.update("jax_num_cpu_devices", count)


def _dry_run_of_gpus(config: sections.Config) -> None:
  import jax

  from jaxrl_async.assembly import checks
  from jaxrl_async.assembly import dry_run

  named = gpus.parse(_TOPOLOGY.value)
  # JAX has not looked for devices yet.
  jax.config.update("jax_platforms", "cpu")
  jax.config.update("jax_num_cpu_devices", named.count)
  devices = jax.devices()
  config_checks.validate(config, len(devices))
  setup = checks.checked(config, devices, device_bytes=named.memory_bytes)
  print(dry_run.describe(setup))
  print(f"By this estimate it fits on {_TOPOLOGY.value}.")


def _dry_run(config: sections.Config, devices: Sequence[Any]) -> None:
  from jaxrl_async.assembly import checks
  from jaxrl_async.assembly import dry_run
  from jaxrl_async.devices import topology
  from jaxrl_async.planning import aot

  setup = checks.checked(config, devices)
  print(dry_run.describe(setup), flush=True)
  if not (_TOPOLOGY.value or _COMPILE.value):
    print("--compile measures which slice will wait for the other.")
    return
  chip = topology.chip_of(devices[0])
  slices, attention = dry_run.programs(setup)
  print(f"Compiled, of each device; attention: {attention}", flush=True)
  compiled = {}
  for side, programs in slices.items():
    compiled[side] = []
    for program in programs:
      compiled[side].append(aot.compile_program(program))
      print(aot.program_line(compiled[side][-1]), flush=True)
  for side in slices:
    print(aot.slice_line(side, compiled[side], chip))
  if chip is not None and (reason := aot.misfit(compiled, chip)):
    raise sections.ConfigError(f"topology: it does not fit: {reason}")
  if chip is not None:
    print("It fits.")
  if _COMPILE.value:
    print(_waiting(setup))


def _waiting(setup: Any) -> str:
  """Return a line that says which slice waits on these devices."""
  from jaxrl_async.assembly import speed

  lengths = speed.lengths(setup.config)
  line = speed.line(
    speed.train_step_s(setup, lengths), speed.generation_s(setup, lengths)
  )
  return f"With completions of {lengths.completion} tokens on average, {line}."


def _follow(config: sections.Config, world: world_lib.World) -> None:
  import jax

  from jaxrl_async.assembly import device_checks
  from jaxrl_async.assembly import setup as setup_lib
  from jaxrl_async.run import follower

  device_checks.check_repeats(config, jax.devices()[0].platform)
  follower.follow(setup_lib.resolve(config, jax.devices()), world)


def _train(
  config: sections.Config, workdir: pathlib.Path, world: world_lib.World
) -> None:
  # Thousands of groups are under way with many replicas. Looking through them
  # for cycles after every 700 new objects, as is Python's default, takes a
  # quarter of the coordinator's time.
  gc.set_threshold(10_000)

  from jaxrl_async.run import train as train_lib
  from jaxrl_async.serving import front as front_lib

  serving = None
  if _SERVE_PORT.value:
    key = os.environ.get("JAXRL_API_KEY", "").strip() or None
    serving = front_lib.ServeSettings(port=_SERVE_PORT.value, api_key=key)
  summary = train_lib.run(
    config,
    workdir,
    serving=serving,
    profile_steps=_profile_steps(),
    world=world,
    xla_flags=os.environ["XLA_FLAGS"],
  )
  print(summary)


def main(config: sections.Config) -> None:
  """Run the config, or report what a run would need if --dry_run is given."""
  name = _TOPOLOGY.value
  if gpus.is_named(name) and not gpus.parse(name).kind:
    _dry_run_of_gpus(config)
    return
  if _DRY_RUN.value:
    _divide_cpu(config.mesh)
    devices = _devices()
    config_checks.validate(config, len(devices))
    _dry_run(config, devices)
    return
  workdir = command_line.workdir()
  world = trainer_process.begin(config, workdir)
  if world.size == 1:
    _divide_cpu(config.mesh)
  with trainer_process.ending(world):
    config_checks.validate(config, len(_devices()))
    if world.leads:
      _train(config, workdir, world)
    else:
      _follow(config, world)


if __name__ == "__main__":
  command_line.start(main, _check)
